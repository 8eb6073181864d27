"""exact_match: the answer, letter for letter after normalisation."""

from __future__ import annotations

import unicodedata
from dataclasses import dataclass
from typing import Any

from surogate_rl.rewards.extract import Extract, find_answer


@dataclass(frozen=True)
class ExactMatch:
    """1.0 if the completion's answer equals the column ``answer`` (or one of them, if that is a list), else 0.0.

    None where the row has no answer (null). Numbers and booleans in the column are compared as they are written.

    Options:
        extract: where the answer stands in the completion; see `find_answer`.
        ignore_case: compare case-folded.
        ignore_whitespace: compare without any white space; else only the ends are stripped.
        ignore_punctuation: compare without punctuation characters.
    """

    extract: Extract = "auto"
    ignore_case: bool = False
    ignore_whitespace: bool = False
    ignore_punctuation: bool = False

    def __call__(self, completion: str, answer: Any) -> float | None:
        if answer is None:
            return None
        accepted = answer if isinstance(answer, list | tuple) else [answer]
        found = find_answer(completion, self.extract)
        if found is None:
            return 0.0
        return 1.0 if self.normalise(found) in {self.normalise(str(item)) for item in accepted} else 0.0

    def normalise(self, text: str) -> str:
        """Unicode NFC, stripped, and what the options say."""
        text = unicodedata.normalize("NFC", text).strip()
        if self.ignore_case:
            text = text.casefold()
        if self.ignore_punctuation:
            text = "".join(character for character in text if not unicodedata.category(character).startswith("P")).strip()
        if self.ignore_whitespace:
            text = "".join(text.split())
        return text
