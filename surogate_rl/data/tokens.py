"""Text into token ids such that cuts between prompt and answer are exact: ids are compared, text is never sliced blindly."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np

from surogate_rl.data.report import DataError, UnusableRow

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


def shared_beginning(a: str, b: str) -> int:
    """Length of the longest common prefix."""
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


class Tokens:
    """A tokenizer with what is needed to cut in token space.

    Tokenising is the slow part, so texts can be encoded in batches beforehand (`prefetch`); `ids` then finds them.
    """

    MAX_CACHED_PIECE = 64
    MAX_PIECES = 20_000

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self.tokenizer = tokenizer
        self._prefetched: dict[str, list[int]] = {}
        self._pieces: dict[str, list[int]] = {}

    # ---- encoding ----

    def prefetch(self, texts: Iterable[str]) -> None:
        """Encodes `texts` together; replaces what was prefetched before."""
        unique = list(dict.fromkeys(texts))
        encoded = self.tokenizer(unique, add_special_tokens=False, verbose=False)["input_ids"] if unique else []
        self._prefetched = dict(zip(unique, encoded, strict=True))

    def ids(self, text: str) -> list[int]:
        """Ids of `text` alone: nothing is added, special tokens in the text are recognised."""
        known = self._prefetched.get(text) or self._pieces.get(text)
        if known is not None:
            return known
        encoded: list[int] = list(self.tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"])
        if len(text) <= self.MAX_CACHED_PIECE and len(self._pieces) < self.MAX_PIECES:
            self._pieces[text] = encoded
        return encoded

    def decode(self, ids: Sequence[int]) -> str:
        text = self.tokenizer.decode(list(ids), skip_special_tokens=False, clean_up_tokenization_spaces=False)
        assert isinstance(text, str)
        return text

    @cached_property
    def eos_id(self) -> int:
        """Raises DataError where the tokenizer has none: what never sees its end never learns to stop."""
        eos = self.tokenizer.eos_token_id
        if not isinstance(eos, int):
            raise DataError("the tokenizer has no eos_token, so that a model would never learn to stop; set eos_token in the tokenizer")
        return eos

    @cached_property
    def special_ids(self) -> frozenset[int]:
        """Ids that stand for control, not for text: the candidates for an end of turn."""
        added = {i for i, token in self.tokenizer.added_tokens_decoder.items() if token.special}
        return frozenset(added | set(self.tokenizer.all_special_ids))

    @cached_property
    def prefix(self) -> tuple[int, ...]:
        """What the tokenizer puts before plain text by itself (BOS). What it puts behind (EOS) is placed by position, not by it."""
        for probe in ("a", "0", "the"):
            bare = self.tokenizer(probe, add_special_tokens=False)["input_ids"]
            full = self.tokenizer(probe)["input_ids"]
            for start in range(len(full) - len(bare) + 1):
                if bare and full[start : start + len(bare)] == bare:
                    return tuple(full[:start])
        return ()

    def plain(self, text: str) -> tuple[tuple[int, ...], str]:
        """(ids to put before, text) of plain text; a BOS that the text already begins with is not put there twice."""
        bos = self.tokenizer.bos_token
        if bos and self.prefix and self.prefix[-1] == self.tokenizer.bos_token_id and text.startswith(bos):
            return self.prefix[:-1], text
        return self.prefix, text

    def is_blank(self, token: int) -> bool:
        return not self.decode([token]).strip()

    # ---- cutting ----

    @cached_property
    def _marks(self) -> tuple[re.Pattern[str], dict[str, int]] | None:
        """Added tokens: they split the text before the tokenizer's model sees it, so that what lies on either side is independent."""
        ids = {token.content: i for i, token in self.tokenizer.added_tokens_decoder.items() if not token.normalized and token.content}
        if not ids:
            return None
        return re.compile("|".join(re.escape(text) for text in sorted(ids, key=len, reverse=True))), ids

    def cuts(self, text: str, ids: Sequence[int], positions: Sequence[int]) -> list[int | None]:
        """For each character position of `text`, the number of tokens of ``ids`` (= `ids(text)`) that spell exactly ``text[:position]``.

        None where ``ids(text[:position])`` is no prefix of `ids`, as where a merge spans the position.
        """
        marks = self._find_marks(text, ids) if positions else []
        return [self._cut(text, ids, position, marks) for position in positions]

    def _find_marks(self, text: str, ids: Sequence[int]) -> list[tuple[int, int]]:
        """(end in characters, number of tokens up to there) of each added token in `text`; empty if text and ids do not agree on them."""
        if self._marks is None:
            return []
        pattern, known = self._marks
        found = [(match.end(), known[match.group()]) for match in pattern.finditer(text)]
        all_ids = np.asarray(ids, dtype=np.int64)
        at = [(int(number) + 1, int(all_ids[number])) for number in np.flatnonzero(np.isin(all_ids, list(known.values())))]
        if [token for _, token in found] != [token for _, token in at]:
            return []
        return [(end, count) for (end, _), (count, _) in zip(found, at, strict=True)]

    def _cut(self, text: str, ids: Sequence[int], position: int, marks: Sequence[tuple[int, int]]) -> int | None:
        if position == len(text):
            return len(ids)
        if position == 0:
            return 0
        # only what follows the last added token needs to be encoded anew: usually "assistant\n", which is cached
        end, count = next(((e, c) for e, c in reversed(marks) if e <= position), (0, 0))
        for start, base in ((end, count), (0, 0)):
            piece = self.ids(text[start:position]) if position > start else []
            stop = base + len(piece)
            if list(ids[base:stop]) == piece and self._mark_free(marks, position, stop):
                return stop
        return None

    @staticmethod
    def _mark_free(marks: Sequence[tuple[int, int]], position: int, stop: int) -> bool:
        """Whether `stop` tokens do not reach past the first mark that ends beyond `position`."""
        following = next((count for end, count in marks if end > position), None)
        return following is None or stop < following

    def join(self, prompt: str, answer: str) -> tuple[list[int], list[int]]:
        """Ids of `prompt` as an engine would be given it, and of `answer` as its continuation.

        Raises:
            UnusableRow: no ids of the answer spell it after these ids of the prompt.
        """
        first = self.ids(prompt)
        whole = self.ids(prompt + answer)
        rest = whole[len(first) :] if whole[: len(first)] == first else self._continuation(prompt, first, whole, answer)
        if not rest:
            raise UnusableRow(f"the answer {answer[:40]!r} has no token of its own")
        return first, rest

    def _continuation(self, prompt: str, first: list[int], whole: list[int], answer: str) -> list[int]:
        spelled = self.decode(whole)
        # tokenizers that put a space before the first word of any text get something to come after
        for anchor in ("", self.tokenizer.eos_token, "\n", ".", prompt[-1]):
            if not isinstance(anchor, str):
                continue
            start, both = self.ids(anchor) if anchor else [], self.ids(anchor + answer)
            if both[: len(start)] == start and self.decode(first + both[len(start) :]) == spelled:
                return both[len(start) :]
        # where decoding does not give the text back (words with spaces between) it can prove nothing about the cut
        if spelled.strip() != (prompt + answer).strip() and self.decode(self.ids(answer)).strip() == answer.strip():
            return self.ids(answer)
        raise UnusableRow(f"the tokenizer merges prompt and answer, and no ids spell the answer {answer[:40]!r} by itself")
