"""math: mathematical equality by math-verify."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

from surogate_rl.rewards.extract import after_thinking, last_tag

_DELIMITED = re.compile(r"\$|\\boxed|\\\(|\\\[")
_NUMBER = re.compile(r"[-+]?[0-9][0-9. /]*%?")
_FUNCTIONS = "sqrt|sin|cos|tan|sec|csc|cot|log|exp|arc[a-z]+|a?sinh|a?cosh|a?tanh"
_PROSE = re.compile(rf"(?<![A-Za-z\\{{])(?!(?:{_FUNCTIONS})(?![A-Za-z]))[A-Za-z]{{3,}}")
_PI = re.compile(r"(?<![A-Za-z\\])pi(?![A-Za-z])")
_BACKSLASH_PI = r"\\pi "


@dataclass(frozen=True)
class MathAnswer:
    """1.0 if math-verify finds the completion's answer equal to the column ``answer``, else 0.0.

    The completion's last ``<answer>`` is looked at, else what follows the thinking; there a ``\\boxed`` expression comes first. An answer
    in the completion that cannot be parsed counts as wrong (0.0); a gold answer that cannot be parsed does not apply (None). Parsing or
    comparing for longer than `seconds` is a time-out: unscored, not wrong.

    Options:
        seconds: for parsing, and again for each comparison.
        strict: as in `math_verify.verify`: variables' names matter, and a set is no tuple.
    """

    seconds: int = 5
    strict: bool = True

    def __post_init__(self) -> None:
        if self.seconds < 1:
            raise ValueError(f"seconds is {self.seconds}, expected a whole number from 1")
        try:
            import importlib.util

            found = importlib.util.find_spec("math_verify") is not None
        except (ImportError, ValueError):
            found = False
        if not found:
            raise ImportError("needs the package math-verify: pip install math-verify")

    def load(self) -> None:
        import math_verify  # noqa: F401 (sympy takes its time)

    def __call__(self, completion: str, answer: Any) -> float | None:
        gold = self.parse_gold(answer)
        if not gold:
            return None
        tagged = last_tag(completion, "answer")
        found = self.parse(after_thinking(completion)) if tagged is None else self.parse_answer(tagged)
        return 1.0 if any(self.equal(one, other) for one in gold for other in found) else 0.0

    def parse_gold(self, answer: Any) -> list[Any]:
        """Expressions of the gold answer; empty: there is none, or it cannot be parsed."""
        return [] if answer is None or isinstance(answer, bool) else self.parse_answer(str(answer))

    def parse_answer(self, text: str) -> list[Any]:
        """Expressions of a text that is nothing but an answer. A formula needs no dollar signs here; prose with a number in it gives
        the number; prose without gives nothing."""
        if _DELIMITED.search(text) or _NUMBER.fullmatch(text.strip()) or _PROSE.search(text):
            return self.parse(text)
        return self.parse(f"${_PI.sub(_BACKSLASH_PI, text.strip())}$") or self.parse(text)

    def parse(self, text: str) -> list[Any]:
        from math_verify import ExprExtractionConfig, LatexExtractionConfig, parse
        from math_verify.errors import TimeoutException

        try:
            return list(
                parse(
                    text,
                    extraction_config=[LatexExtractionConfig(boxed_match_priority=0), ExprExtractionConfig()],
                    fallback_mode="no_fallback",
                    parsing_timeout=self.seconds,
                    raise_on_error=True,
                )
            )
        except TimeoutException:
            raise TimeoutError(f"math-verify parsed for more than {self.seconds} s") from None
        except Exception:  # it raises whatever sympy and its LaTeX parser raise on text that is no mathematics
            return []

    def equal(self, gold: Any, found: Any) -> bool:
        from math_verify import verify
        from math_verify.errors import TimeoutException

        try:
            return bool(verify(gold, found, strict=self.strict, timeout_seconds=self.seconds, raise_on_error=True))
        except TimeoutException:
            raise TimeoutError(f"math-verify compared for more than {self.seconds} s") from None
        except Exception:  # expressions that cannot be compared are not equal
            return False
