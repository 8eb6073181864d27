"""Small text games that need no data beyond a seed: to try things out, and to measure with.

In `terse` mode a game says as little as a character per turn, which the smallest models can read.
"""

from __future__ import annotations

import random
import re
from collections import deque

DIRECTIONS = {"up": (0, -1), "down": (0, 1), "left": (-1, 0), "right": (1, 0)}


class NumberGuess:
    """A number from `low` to `high` is to be found; the game says whether it is higher or lower than the last guess.

    The reward is 1 for the guess that hits it. Halving finds it within log2(high - low + 1) turns, rounded up.
    """

    def __init__(self, low: int = 1, high: int = 100, terse: bool = False) -> None:
        if low >= high:
            raise ValueError(f"number_guess: low is {low} and high is {high}, expected low < high")
        self._low, self._high, self._terse = low, high, terse
        self._secret = low

    def reset(self, seed: int) -> str:
        self._secret = random.Random(seed).randint(self._low, self._high)
        return "" if self._terse else f"I think of a number from {self._low} to {self._high}. Guess it; answer with a number only."

    def step(self, action: str) -> tuple[str, float, bool]:
        numbers = re.findall(r"-?\d+", action)
        if not numbers:
            return ("?" if self._terse else "That is no number. Guess again."), 0.0, False
        guess = int(numbers[-1][:12])
        if guess == self._secret:
            return ("=" if self._terse else "Right!"), 1.0, True
        higher = self._secret > guess
        if self._terse:
            return (">" if higher else "<"), 0.0, False
        return f"It is {'higher' if higher else 'lower'} than {guess}. Guess again.", 0.0, False


class HiddenCode:
    """A code of `length` digits from 0 to `digits` - 1 is to be found, as in Bulls and Cows (digits may repeat).

    The game says how many digits are right and in their place, and how many more occur elsewhere. The reward is 1 for the code itself.
    """

    def __init__(self, length: int = 3, digits: int = 6, terse: bool = False) -> None:
        if not (length >= 1 and 2 <= digits <= 10):
            raise ValueError(f"hidden_code: length {length} and digits {digits}, expected length >= 1 and digits from 2 to 10")
        self._length, self._digits, self._terse = length, digits, terse
        self._code = "0" * length

    def reset(self, seed: int) -> str:
        rng = random.Random(seed)
        self._code = "".join(str(rng.randrange(self._digits)) for _ in range(self._length))
        if self._terse:
            return ""
        return (
            f"Find my code of {self._length} digits, each from 0 to {self._digits - 1}; digits may repeat. Answer with a code only. "
            "I tell you how many digits are in their place, and how many are right but elsewhere."
        )

    def step(self, action: str) -> tuple[str, float, bool]:
        found = re.findall(rf"(?<!\d)[0-{self._digits - 1}]{{{self._length}}}(?!\d)", action)
        if not found:
            return ("?" if self._terse else f"That is no code of {self._length} digits. Try again."), 0.0, False
        guess = found[-1]
        placed = sum(a == b for a, b in zip(guess, self._code, strict=True))
        if placed == self._length:
            return ("=" if self._terse else "That is the code!"), 1.0, True
        shared = sum(min(guess.count(digit), self._code.count(digit)) for digit in set(guess))
        if self._terse:
            return f"{placed}{shared - placed}", 0.0, False
        return f"{guess}: {placed} in place, {shared - placed} elsewhere. Try again.", 0.0, False


class KeyDoor:
    """A walk through a room of `size` x `size` squares with walls: fetch the key, then reach the door.

    Each turn is one of up, down, left, right (or its first letter). The reward is `key_reward` for the key and 1 for the door. Rooms are
    drawn until key and door can be reached; `shortest` is the least number of turns.
    """

    def __init__(self, size: int = 4, walls: int = 2, key_reward: float = 0.0, terse: bool = False) -> None:
        if size < 2 or not 0 <= walls <= size * size // 3:
            raise ValueError(f"key_door: size {size} and walls {walls}, expected size >= 2 and at most a third of the squares as walls")
        self._size, self._number, self._key_reward, self._terse = size, walls, key_reward, terse
        self._at = self._key = self._door = (0, 0)
        self._walls: set[tuple[int, int]] = set()
        self._has_key = False
        self.shortest = 0

    def reset(self, seed: int) -> str:
        rng = random.Random(seed)
        squares = [(x, y) for x in range(self._size) for y in range(self._size)]
        while True:
            places = rng.sample(squares, 3 + self._number)
            self._at, self._key, self._door, self._walls = places[0], places[1], places[2], set(places[3:])
            to_key, to_door = self._steps(self._at, self._key), self._steps(self._key, self._door)
            if to_key is not None and to_door is not None:
                break
        self._has_key, self.shortest = False, to_key + to_door
        if self._terse:
            return self._look()
        return (
            f"You are in a room of {self._size} by {self._size} squares. Take the key, then go to the door. "
            f"Each turn answer with one of {', '.join(DIRECTIONS)}. {self._look()}"
        )

    def step(self, action: str) -> tuple[str, float, bool]:
        words = re.findall(r"[a-z]+", action.lower())
        moves = [name for word in words for name in DIRECTIONS if word in (name, name[0])]
        if not moves:
            return ("?" if self._terse else f"I understand {', '.join(DIRECTIONS)} only."), 0.0, False
        dx, dy = DIRECTIONS[moves[-1]]
        there = (self._at[0] + dx, self._at[1] + dy)
        if not self._free(there):
            return ("#" if self._terse else f"There is a wall. {self._look()}"), 0.0, False
        self._at = there
        if there == self._key and not self._has_key:
            self._has_key = True
            return (self._look() if self._terse else f"You take the key. {self._look()}"), self._key_reward, False
        if there == self._door and self._has_key:
            return ("=" if self._terse else "The door opens. You are out!"), 1.0, True
        return self._look(), 0.0, False

    def _look(self) -> str:
        (x, y), goal = self._at, self._door if self._has_key else self._key
        if self._terse:
            return f"{x}{y}{goal[0]}{goal[1]}"
        (kx, ky), (ox, oy) = self._key, self._door
        key = "You have the key." if self._has_key else f"The key is at ({kx}, {ky})."
        return f"You are at ({x}, {y}). {key} The door is at ({ox}, {oy})."

    def _free(self, place: tuple[int, int]) -> bool:
        return 0 <= place[0] < self._size and 0 <= place[1] < self._size and place not in self._walls

    def _steps(self, start: tuple[int, int], end: tuple[int, int]) -> int | None:
        distance = {start: 0}
        waiting = deque([start])
        while waiting:
            here = waiting.popleft()
            if here == end:
                return distance[here]
            for dx, dy in DIRECTIONS.values():
                there = (here[0] + dx, here[1] + dy)
                if self._free(there) and there not in distance:
                    distance[there] = distance[here] + 1
                    waiting.append(there)
        return None


GAMES = {"number_guess": NumberGuess, "hidden_code": HiddenCode, "key_door": KeyDoor}
"""Built in, by name."""
