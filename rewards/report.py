"""What the rewards of a step were, by function: means, what failed and why."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from surogate_rl.rewards.worker import Log, Outcome

_KEPT_ERRORS = 3


@dataclass
class FunctionReport:
    """One function since the last report.

    Attributes:
        calls: completions that it was asked about.
        scored: completions with a number.
        not_applicable: completions for which it returned None.
        unscored: completions without a reward by reason: exception, timeout, non_finite, not_a_number, died.
        seconds: spent in the function, summed over calls.
        errors: the first few failures in words.
    """

    calls: int = 0
    scored: int = 0
    not_applicable: int = 0
    unscored: dict[str, int] = field(default_factory=dict)
    seconds: float = 0.0
    errors: list[str] = field(default_factory=list)
    values: list[float] = field(default_factory=list, repr=False)

    @property
    def mean(self) -> float | None:
        """Over scored completions; None if there are none."""
        return math.fsum(self.values) / len(self.values) if self.values else None

    @property
    def std(self) -> float | None:
        """Sample standard deviation (n - 1) over scored completions; None below two, as it has no meaning there."""
        mean = self.mean
        if mean is None or len(self.values) < 2:
            return None
        return math.sqrt(math.fsum((value - mean) ** 2 for value in self.values) / (len(self.values) - 1))

    def add(self, outcome: Outcome) -> bool:
        """Counts one outcome; returns whether it was a failure worth showing (one of the first few)."""
        self.calls += 1
        self.seconds += outcome.seconds
        if outcome.reason is not None:
            self.unscored[outcome.reason] = self.unscored.get(outcome.reason, 0) + 1
            if len(self.errors) < _KEPT_ERRORS and outcome.detail not in self.errors:
                self.errors.append(outcome.detail)
                return True
        elif outcome.value is None:
            self.not_applicable += 1
        else:
            self.scored += 1
            self.values.append(outcome.value)
        return False


@dataclass
class RewardReport:
    """All functions since the last report.

    Attributes:
        functions: by name, in the order of the configuration.
        episodes: completions that were to be scored.
        unscored: completions without a reward: a weighted function failed, or none applied.
        nothing_applied: those of them where no weighted function applied.
        logged: by name what functions gave to TRL's ``log_metric``.
        extras: by column what functions gave to TRL's ``log_extra``: (row's index, sample, value).
    """

    functions: dict[str, FunctionReport] = field(default_factory=dict)
    episodes: int = 0
    unscored: int = 0
    nothing_applied: int = 0
    logged: dict[str, list[float]] = field(default_factory=dict)
    extras: dict[str, list[tuple[int, int, Any]]] = field(default_factory=dict)

    def metrics(self) -> dict[str, float]:
        """For the tracker, under TRL's names where it has them; a mean of nothing is left out, not 0."""
        result: dict[str, float] = {}
        for name, function in self.functions.items():
            for key, value in (("mean", function.mean), ("std", function.std)):
                if value is not None:
                    result[f"rewards/{name}/{key}"] = value
            if function.calls:
                result[f"rewards/{name}/seconds"] = function.seconds / function.calls
                result[f"rewards/{name}/not_applicable"] = float(function.not_applicable)
            for reason, count in function.unscored.items():
                result[f"rewards/{name}/{reason}"] = float(count)
        if self.episodes:
            result["rewards/unscored"] = float(self.unscored)
        for name, values in self.logged.items():
            finite = [value for value in values if math.isfinite(value)]
            if finite:
                result[name] = math.fsum(finite) / len(finite)
        return result

    def add_log(self, log: Log, keys: Sequence[tuple[int, int]]) -> None:
        """Takes over what a function logged about the completions `keys` (row's index, sample)."""
        for name, value in log.metrics:
            self.logged.setdefault(name, []).append(value)
        for column, values in log.extras:
            rows = self.extras.setdefault(column, [])
            rows.extend((row, sample, value) for (row, sample), value in zip(keys, values, strict=False))
