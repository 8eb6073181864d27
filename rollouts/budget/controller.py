"""The budget of a run, as the rollout stream and the trainer ask it: see `surogate_rl.rollouts.plan` for when they do."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from surogate_rl.errors import InputError
from surogate_rl.rollouts.budget.credit import (
    CreditKind,
    Outcome,
    Scale,
    past_cap,
    prompt_weights,
    step_credits,
    token_advantages,
    token_importance,
)
from surogate_rl.rollouts.budget.credit import EpisodePlan as DepthPlan
from surogate_rl.rollouts.budget.depth import DepthBudget, DepthSettings, Observed
from surogate_rl.rollouts.budget.grid import DepthUnit
from surogate_rl.rollouts.budget.history import TaskHistory
from surogate_rl.rollouts.budget.width import allocate, efficiency
from surogate_rl.rollouts.manager import Group
from surogate_rl.rollouts.plan import Credit, EpisodePlan, GroupPlan
from surogate_rl.rollouts.seeds import derive_seed
from surogate_rl.rollouts.types import DepthCap, EpisodeLimits, Task


@dataclass(frozen=True)
class WidthSettings:
    """Attributes:
    min, max: completions of a prompt.
    floor: share of the completions that is spread evenly.
    discount: of what a task's earlier visits said, at each visit.
    """

    min: int
    max: int
    floor: float = 0.2
    discount: float = 0.5


@dataclass(frozen=True)
class BudgetSettings:
    """Attributes:
    prompts, completions: of a step: `prompts_per_step` and `num_generations`.
    limits: of an episode without a budget.
    depth, width: None: off.
    unit: of depth.
    credit: of episodes that reach their cap.
    scale: what advantages are divided by.
    baseline: whose mean is the baseline.
    leave_one_out: False multiplies advantages by (n - 1) / n, so that with equal groups and without cuts they are the loss type's own.
    """

    prompts: int
    completions: int
    limits: EpisodeLimits
    seed: int
    depth: DepthSettings | None = None
    width: WidthSettings | None = None
    unit: DepthUnit = "turns"
    credit: CreditKind = "unbiased"
    scale: Scale = "none"
    baseline: Literal["group", "batch"] = "group"
    leave_one_out: bool = False

    @property
    def horizon(self) -> int:
        """Depth units that an episode has without a budget, at the most."""
        if self.unit == "turns":
            if self.limits.max_turns is None:
                raise ValueError("rollouts.budget.depth.unit: turns needs a limit on turns; set one, or unit: tokens")
            return self.limits.max_turns
        if self.limits.max_tokens is not None:
            return self.limits.max_tokens
        turns = self.limits.max_turns or 1
        return min(self.limits.max_completion_length * turns, self.limits.sequence_len)


class AdaptiveBudget:
    """Depth and width budget; either may be off."""

    def __init__(self, settings: BudgetSettings) -> None:
        self.settings = settings
        self.depth = DepthBudget.of(settings.depth, settings.unit, settings.horizon) if settings.depth is not None else None
        self.history = TaskHistory(settings.width.discount) if settings.width is not None else None
        self._plans: dict[int, list[DepthPlan]] = {}  # of groups that have not been observed yet, by number
        self._values: dict[str, float] = {}
        self._tokens = 0  # of the step that was observed last

    # -- plans

    def plan(self, block: int, tasks: Sequence[Task]) -> list[GroupPlan]:
        settings = self.settings
        numbers = [settings.completions] * len(tasks)
        if self.history is not None and settings.width is not None:
            variances = [self.history.posterior(task.index).variance for task in tasks]
            costs = [self.history.cost(task.index) for task in tasks]
            width = settings.width
            numbers = allocate(variances, settings.completions * len(tasks), width.min, width.max, width.floor, costs)
        if self.depth is None:
            return [GroupPlan.plain(number) for number in numbers]
        result = []
        for place, (task, number) in enumerate(zip(tasks, numbers, strict=True)):
            seeds = [derive_seed(settings.seed, block, place, sample, task.index) for sample in range(number)]
            plans = [self.depth.plan(task.index, seed) for seed in seeds]
            self._plans[(block - 1) * settings.prompts + place] = plans
            result.append(GroupPlan(tuple(self._episode_plan(plan) for plan in plans)))
        return result

    def _episode_plan(self, plan: DepthPlan) -> EpisodePlan:
        if plan.cap is None:
            return EpisodePlan()
        return EpisodePlan(replace(self.settings.limits, cap=DepthCap(plan.unit, plan.cap, plan.went_on)))

    # -- credit

    def credit(self, groups: Sequence[Group], rewards: Sequence[Sequence[float | None]]) -> Credit:
        settings = self.settings
        outcomes = [
            [
                Outcome(plan, reward, episode.reached_cap)
                for episode, plan, reward in zip(group.episodes, self._plans_of(group), own, strict=True)
            ]
            for group, own in zip(groups, rewards, strict=True)
        ]
        count = settings.completions * (settings.prompts if settings.baseline == "batch" else 1)
        credits = step_credits(
            outcomes,
            kind=settings.credit,
            baseline=settings.baseline,
            scale=settings.scale,
            factor=1.0 if settings.leave_one_out else (count - 1) / count,
        )
        advantages = [np.array([credit.before for credit in group], dtype=np.float32) for group in credits]
        if self.depth is not None:
            for group, plans, own in zip(groups, map(self._plans_of, groups), credits, strict=True):
                for episode, plan, credit in zip(group.episodes, plans, own, strict=True):
                    if plan.cap is not None:
                        episode.explore, episode.value = plan.explore, plan.value
                    if episode.reached_cap and plan.went_on:
                        episode.advantage_after_cap = credit.after
                    done = 0
                    for segment in episode.segments:
                        past, done = past_cap(segment.sampled, segment.turns, plan, done)
                        segment.advantages = token_advantages(past, credit)
                        segment.importance = token_importance(past, plan, credit)
        weights: list[NDArray[np.float32]] | None = None
        trained = [[credit.trained for credit in group] for group in credits]
        if self.history is not None:
            each = prompt_weights([sum(group) for group in trained], settings.completions)
            weights = [np.where(group, weight, 0.0).astype(np.float32) for group, weight in zip(trained, each, strict=True)]
        return Credit(advantages, weights, _reward_metrics(outcomes))

    def _plans_of(self, group: Group) -> list[DepthPlan]:
        if self.depth is None:
            return [DepthPlan()] * len(group.episodes)
        return self._plans[group.number]

    # -- observation

    def observe(self, groups: Sequence[Group]) -> None:
        episodes = [episode for group in groups for episode in group.episodes]
        self._values = {}
        self._tokens = sum(episode.sampled_tokens for episode in episodes)
        if self.history is not None:
            self._observe_width(self.history, groups)
        if self.depth is not None:
            observed = [
                Observed(
                    group.task.index,
                    plan,
                    episode.depth(plan.unit),
                    episode.reached_cap,
                    episode.reward,
                    episode.sampled_tokens,
                )
                for group in groups
                for episode, plan in zip(group.episodes, self._plans_of(group), strict=True)
            ]
            self._values |= self.depth.metrics(observed)
            self.depth.observe(observed)
            self.forget([group.number for group in groups])

    def forget(self, numbers: Sequence[int]) -> None:
        for number in numbers:
            self._plans.pop(number, None)

    def _observe_width(self, history: TaskHistory, groups: Sequence[Group]) -> None:
        posteriors = [history.posterior(group.task.index) for group in groups]
        numbers = [len(group.episodes) for group in groups]
        costs = [history.cost(group.task.index) for group in groups]
        mean, strength, _ = history.population()
        self._values |= {
            "budget/width/min": float(min(numbers, default=0)),
            "budget/width/max": float(max(numbers, default=0)),
            "budget/width/efficiency": efficiency([p.variance for p in posteriors], numbers, costs) if numbers else 1.0,
            "budget/width/posterior_mean": float(np.mean([p.mean for p in posteriors])) if posteriors else mean,
            "budget/width/posterior_variance": float(np.mean([p.variance for p in posteriors])) if posteriors else 0.0,
            "budget/width/prior_mean": mean,
            "budget/width/prior_strength": strength,
            "budget/width/seen_share": float(np.mean([p.seen > 0 for p in posteriors])) if posteriors else 0.0,
        }
        history.forget()
        for group in groups:
            rewards, weights = [], []
            for episode, plan in zip(group.episodes, self._plans_of(group), strict=True):
                if episode.reward is not None and not episode.cut_by_budget:
                    rewards.append(episode.reward)
                    weights.append(1.0 / plan.explore if episode.reached_cap else 1.0)
            history.add(group.task.index, rewards, weights)
            history.add_cost(group.task.index, [sum(len(s.tokens) for s in episode.segments) for episode in group.episodes])

    def metrics(self, seconds: float) -> dict[str, float]:
        values = dict(self._values)
        if self.depth is not None:
            # what a token that was not sampled would have taken, learning included
            each = seconds / self._tokens if self._tokens else 0.0
            values["budget/depth/saved_seconds"] = values.get("budget/depth/saved_tokens", 0.0) * each
        return values

    # -- checkpoints

    def state(self) -> dict[str, Any]:
        """As JSON."""
        state: dict[str, Any] = {"plans": {str(number): [asdict(plan) for plan in plans] for number, plans in self._plans.items()}}
        if self.depth is not None:
            state["depth"] = {name: values.tolist() for name, values in self.depth.state().items()}
        if self.history is not None:
            state["width"] = {name: values.tolist() for name, values in self.history.state().items()}
        return state

    def restore(self, state: Mapping[str, Any]) -> None:
        """Raises:
        InputError: it is the state of other settings.
        """
        for name, part in (("depth", self.depth), ("width", self.history)):
            if (name in state) != (part is not None):
                raise InputError(other_budget(f"rollouts.budget.{name}", name in state))
        self._plans = {int(number): [DepthPlan(**plan) for plan in plans] for number, plans in state["plans"].items()}
        if self.depth is not None:
            self.depth.restore({name: np.array(values) for name, values in state["depth"].items()})
        if self.history is not None:
            self.history.restore({name: np.array(values) for name, values in state["width"].items()})


def other_budget(key: str, had: bool) -> str:
    """Why a checkpoint of a run that `had` the budget `key`, while this run has not (or the other way round), cannot be gone on from."""
    have, want = ("with", "without") if had else ("without", "with")
    do = "configure it as it was" if had else "remove it"
    return f"resume: the checkpoint is of a run {have} {key}, this run is one {want} it; {do}, or start anew in another output_dir"


def _reward_metrics(outcomes: Sequence[Sequence[Outcome]]) -> dict[str, tuple[float, float]]:
    """As `group_advantages` has them, with the value of going on in place of the reward of a cut episode."""
    groups = [[o.plan.value if o.cut else o.reward for o in group if o.cut or o.reward is not None] for group in outcomes]
    known = [[float(value) for value in group if value is not None] for group in groups]
    flat = [value for group in known for value in group]
    present = [group for group in known if group]
    spread = float(np.std(flat, ddof=1)) if len(flat) > 1 else 0.0
    return {
        "reward": (sum(flat), float(len(flat))),
        "reward_std": (spread, float(len(flat) > 1)),
        "frac_reward_zero_std": (float(sum(min(group) == max(group) for group in present)), float(len(present))),
    }
