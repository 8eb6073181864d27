"""Games of the benchmark: find a letter; key in a code."""

from __future__ import annotations

import random

ALPHABET = "abcdefghijklmnopqrstuvwxyz"


class Letters:
    """A letter among the first `letters` of the alphabet is to be found. Halving finds it within log2(letters) turns, rounded up.

    Each turn is one letter; the answer is what is left, as first and last letter, or ``??`` for something that is no letter. The reward is
    1 for the letter itself.
    """

    def __init__(self) -> None:
        self._secret = self.low = self.high = 0

    def reset(self, seed: int, letters: int) -> str:
        self._secret = random.Random(seed).randrange(letters)
        self.low, self.high = 0, letters - 1
        return self._left()

    def step(self, action: str) -> tuple[str, float, bool]:
        guess = ALPHABET.find(action) if len(action) == 1 else -1
        if guess < 0:
            return "??", 0.0, False
        if guess == self._secret:
            return "==", 1.0, True
        if guess < self._secret:
            self.low = max(self.low, guess + 1)
        else:
            self.high = min(self.high, guess - 1)
        return self._left(), 0.0, False

    def _left(self) -> str:
        return ALPHABET[self.low] + ALPHABET[self.high]


class Keypad:
    """A door opens when the digits of a code are keyed in from the least to the greatest, one in each turn.

    The keypad shows only that a key was pressed. After a wrong key the door stays shut, whatever follows; nothing says so. The reward is 1
    for the open door.
    """

    def __init__(self) -> None:
        self._wanted = self._pressed = ""

    def reset(self, code: str) -> str:
        self._wanted, self._pressed = "".join(sorted(code)), ""
        return ""

    def step(self, action: str) -> tuple[str, float, bool]:
        self._pressed += action if len(action) == 1 else "?"
        if self._pressed == self._wanted:
            return "=", 1.0, True
        return ".", 0.0, False
