"""Stop strings over a stream of token ids."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

_INCOMPLETE = "\N{REPLACEMENT CHARACTER}"  # what a tokenizer decodes the first bytes of an unfinished character to
_PATIENCE = 8  # tokens after which such bytes are no character that will ever be finished


class Decoder(Protocol):
    """The one thing that a tokenizer is needed for here."""

    def decode(self, token_ids: list[int], skip_special_tokens: bool = False, **options: Any) -> str | list[str]:
        """The text of one sequence of ids (transformers' own returns a list for several)."""
        ...


class StopStrings:
    """Tells which token completes a stop string. Special tokens are text here, so they can be named in a stop string.

    Tokens are decoded together with some of those before them, for a tokenizer may give a token another text at the start (a leading space
    lost) or spread one character over several tokens; only what such a character still lacks is held back.

    Args:
        tokenizer: decodes ids.
        stop: the strings, none of them empty.
    """

    def __init__(self, tokenizer: Decoder, stop: Sequence[str]) -> None:
        self._tokenizer = tokenizer
        self._stop = tuple(stop)
        self._longest = max(len(text) for text in stop)
        self._tokens: list[int] = []
        self._context = 0  # tokens from here up to `_settled` are decoded before the new ones
        self._settled = 0  # tokens up to here are in `_tail`
        self._tail = ""  # the end of the settled text, as much as a stop string may begin in

    def feed(self, token: int) -> bool:
        """True if this token completes a stop string."""
        self._tokens.append(token)
        before = self._decode(self._tokens[self._context : self._settled])
        text = self._decode(self._tokens[self._context :])
        new = text[_common(before, text) :]
        whole = new.rstrip(_INCOMPLETE)
        reached = self._tail + whole
        if any(stop in reached for stop in self._stop):
            return True
        if (whole == new and new) or len(self._tokens) - self._settled >= _PATIENCE:
            self._tail = (self._tail + new)[-(self._longest - 1) :] if self._longest > 1 else ""
            self._context, self._settled = self._settled, len(self._tokens)
        return False

    def _decode(self, tokens: list[int]) -> str:
        return str(self._tokenizer.decode(tokens, skip_special_tokens=False, clean_up_tokenization_spaces=False)) if tokens else ""


def _common(a: str, b: str) -> int:
    """Characters that both begin with."""
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))
