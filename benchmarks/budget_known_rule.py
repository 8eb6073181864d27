"""The peer of the depth budget: the known coverage rule, as plainly as it is described.

The cap of a step is an exponential moving average (0.3) of the 0.8 quantile of the depths at which episodes succeeded; every eighth step is
a probe without a cap, as are the first two. Cut episodes are scored as they stand.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from surogate_rl.objectives import group_advantages
from surogate_rl.rollouts.manager import Group
from surogate_rl.rollouts.plan import Credit, EpisodePlan, GroupPlan
from surogate_rl.rollouts.types import DepthCap, DepthUnit, EpisodeLimits, Task

QUANTILE, RATE, PROBE_EVERY, WARM_UP = 0.8, 0.3, 8, 2


class KnownRule:
    """A budget as `surogate_rl.rollouts.plan.Budget` has it."""

    def __init__(self, limits: EpisodeLimits, unit: DepthUnit, completions: int, loss_type: str, scale_rewards: str | None) -> None:
        self._limits, self._unit, self._completions = limits, unit, completions
        self._loss_type, self._scale = loss_type, scale_rewards
        self._horizon = limits.max_turns if unit == "turns" else limits.max_completion_length
        self._average: float | None = None
        self._cap = self._horizon

    def plan(self, block: int, tasks: Sequence[Task]) -> list[GroupPlan]:
        probe = block <= WARM_UP or block % PROBE_EVERY == 0 or self._average is None
        assert self._horizon is not None
        self._cap = self._horizon if probe else max(1, min(self._horizon, math.ceil(self._average or 0)))
        if self._cap >= self._horizon:
            return [GroupPlan.plain(self._completions)] * len(tasks)
        limits = replace(self._limits, cap=DepthCap(self._unit, self._cap, goes_on=False))
        return [GroupPlan((EpisodePlan(limits),) * self._completions)] * len(tasks)

    def credit(self, groups: Sequence[Group], rewards: Sequence[Sequence[float | None]]) -> Credit:
        result = group_advantages(rewards, scale_rewards=self._scale, loss_type=self._loss_type)
        return Credit(result.values, metrics=result.metrics)

    def observe(self, groups: Sequence[Group]) -> None:
        depths = [
            episode.turns if self._unit == "turns" else episode.sampled_tokens
            for group in groups
            for episode in group.episodes
            if episode.reward is not None and episode.reward >= 0.5
        ]
        if depths:
            quantile = float(np.quantile(depths, QUANTILE))
            self._average = quantile if self._average is None else (1 - RATE) * self._average + RATE * quantile

    def forget(self, numbers: Sequence[int]) -> None:
        """Keeps nothing by group."""

    def metrics(self, seconds: float) -> dict[str, float]:
        return {"known_rule/cap": float(self._cap or 0)}

    def state(self) -> dict[str, Any]:
        return {"average": self._average}

    def restore(self, state: Mapping[str, Any]) -> None:
        self._average = state["average"]
