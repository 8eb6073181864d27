"""regex: the completion matches a pattern."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class Regex:
    """1.0 if the completion matches, else 0.0.

    Options:
        pattern: a regular expression of Python's `re`.
        match: ``search``: anywhere; ``match``: from the start; ``fullmatch``: from start to end.
        ignore_case, multiline, dotall: the flags of `re`. dotall is on, as completions have several lines.
    """

    pattern: str
    match: Literal["search", "match", "fullmatch"] = "search"
    ignore_case: bool = False
    multiline: bool = False
    dotall: bool = True

    def __post_init__(self) -> None:
        try:
            self._compile()
        except re.error as error:
            raise ValueError(f"pattern {self.pattern!r} is no regular expression: {error}") from error

    def _compile(self) -> re.Pattern[str]:
        flags = (re.IGNORECASE if self.ignore_case else 0) | (re.MULTILINE if self.multiline else 0) | (re.DOTALL if self.dotall else 0)
        return re.compile(self.pattern, flags)  # `re` keeps compiled patterns

    def __call__(self, completion: str) -> float:
        return 1.0 if getattr(self._compile(), self.match)(completion) is not None else 0.0
