"""numeric: the answer as a number."""

from __future__ import annotations

import re
from dataclasses import dataclass
from decimal import Decimal, InvalidOperation, localcontext
from typing import Any

from surogate_rl.rewards.extract import Extract, find_answer

# A sign belongs to the number unless it stands between two operands (5-3). Commas group thousands only in threes.
_NUMBER = re.compile(
    r"(?:(?<![0-9A-Za-z.)\]])[-+\u2212])?(?:[0-9]{1,3}(?:,[0-9]{3})+(?![0-9])|[0-9]+)(?:\.[0-9]+)?(?:[eE][-+]?[0-9]{1,4})?"
    r"|(?:(?<![0-9A-Za-z.)\]])[-+\u2212])?(?<![0-9])\.[0-9]+(?:[eE][-+]?[0-9]{1,4})?"
)


def last_number(text: str) -> Decimal | None:
    """The last number written in the text, or None."""
    matches = list(_NUMBER.finditer(text))
    if not matches:
        return None
    try:
        return Decimal(matches[-1].group().replace(",", "").replace("\u2212", "-"))
    except InvalidOperation:
        return None


@dataclass(frozen=True)
class Numeric:
    """1.0 if the completion's last number is near enough to the column ``answer``, else 0.0 (also if there is no number).

    Near enough: |found - answer| <= max(tolerance, relative_tolerance * |answer|), in decimal arithmetic. The answer is a number, or
    text of which the last number counts (``#### 42``); None (does not apply) where it has none.

    Options:
        extract: where in the completion to look; see `find_answer`.
        pattern: regular expression instead: the last number of its last match counts (of group 1 if it has one).
        tolerance, relative_tolerance: see above.
    """

    extract: Extract = "auto"
    pattern: str | None = None
    tolerance: float = 1e-6
    relative_tolerance: float = 0.0

    def __post_init__(self) -> None:
        if not (self.tolerance >= 0 and self.relative_tolerance >= 0):
            raise ValueError(f"tolerances must not be negative: tolerance {self.tolerance}, relative_tolerance {self.relative_tolerance}")
        if self.pattern is not None:
            try:
                re.compile(self.pattern)
            except re.error as error:
                raise ValueError(f"pattern {self.pattern!r} is no regular expression: {error}") from error

    def __call__(self, completion: str, answer: Any) -> float | None:
        gold = None if answer is None or isinstance(answer, bool) else last_number(str(answer))
        if gold is None:
            return None
        found = self.find(completion)
        if found is None:
            return 0.0
        with localcontext() as context:
            context.prec = 60
            context.traps = dict.fromkeys(context.traps, False)
            limit = max(Decimal(self.tolerance), Decimal(self.relative_tolerance) * abs(gold))
            return 1.0 if abs(found - gold) <= limit else 0.0

    def find(self, completion: str) -> Decimal | None:
        """The number that the completion gives as its answer."""
        if self.pattern is None:
            text = find_answer(completion, self.extract)
            return last_number(text) if text is not None else None
        matches = list(re.finditer(self.pattern, completion))
        return last_number(matches[-1].group(1 if matches[-1].re.groups else 0) or "") if matches else None
