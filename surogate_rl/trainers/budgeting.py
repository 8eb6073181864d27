"""The budget that a configuration asks for."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, cast

from surogate_rl.config.schema import DepthBudgetConfig, GrpoConfig, WidthBudgetConfig
from surogate_rl.errors import InputError
from surogate_rl.objectives.advantages import resolve_scale_rewards
from surogate_rl.rollouts.budget.controller import AdaptiveBudget, BudgetSettings, WidthSettings, other_budget
from surogate_rl.rollouts.budget.credit import Scale
from surogate_rl.rollouts.budget.depth import DepthSettings
from surogate_rl.rollouts.budget.grid import DepthUnit
from surogate_rl.rollouts.plan import Budget
from surogate_rl.rollouts.types import EpisodeLimits

DEFAULT_MOST = 3


def make_budget(config: GrpoConfig, limits: EpisodeLimits) -> AdaptiveBudget | None:
    """None if neither depth nor width has a budget: then nothing at all is different.

    Args:
        limits: of an episode without a budget.
    """
    budget, loss = config.rollouts.budget, config.loss
    if budget.depth is None and budget.width is None:
        return None
    return AdaptiveBudget(
        BudgetSettings(
            prompts=config.rollouts.prompts_per_step,
            completions=config.rollouts.num_generations,
            limits=limits,
            seed=config.seed,
            depth=depth_settings(budget.depth) if budget.depth is not None else None,
            width=width_settings(budget.width, config.rollouts.num_generations) if budget.width is not None else None,
            unit=depth_unit(budget.depth.unit, limits) if budget.depth is not None else "tokens",
            credit=budget.depth.credit if budget.depth is not None else "unbiased",
            scale=scale_of(loss.loss_type, loss.scale_rewards),
            baseline="batch" if loss.loss_type == "reinforce_plus_plus" else "group",
            leave_one_out=loss.loss_type == "rloo",
        )
    )


def scale_of(loss_type: str, scale_rewards: str | None) -> Scale:
    """As `group_advantages` has it: over a batch rloo divides by the deviation of its advantages, the others by that of rewards."""
    scale = resolve_scale_rewards(loss_type, scale_rewards)
    return "advantages" if loss_type == "rloo" and scale == "batch" else scale


def restore_budget(budget: Budget | None, state: Mapping[str, Any] | None) -> None:
    """Goes on from a checkpoint's state; None: its run had no budget.

    The rollouts that a checkpoint's run had planned are of its budget, and what a budget goes by is all that it has seen since the start,
    so it can be neither dropped nor begun halfway.

    Raises:
        InputError: the checkpoint is of a run with another budget, or with one while this has none, or the other way round.
    """
    if (state is None) != (budget is None):
        raise InputError(other_budget("rollouts.budget", state is not None))
    if budget is not None and state is not None:
        budget.restore(state)


def depth_unit(unit: str, limits: EpisodeLimits) -> DepthUnit:
    if unit == "auto":
        return "turns" if (limits.max_turns or 1) > 1 else "tokens"
    return cast(DepthUnit, unit)


def depth_settings(config: DepthBudgetConfig) -> DepthSettings:
    return DepthSettings(
        coverage=config.coverage,
        min=config.min,
        max=config.max,
        explore=None if config.explore == "auto" else config.explore,
        min_explore=config.min_explore,
        memory=config.memory,
        buckets=config.buckets,
        min_episodes=config.min_episodes,
        success_threshold=config.success_threshold,
    )


def width_settings(config: WidthBudgetConfig, completions: int) -> WidthSettings:
    most = config.max if config.max is not None else DEFAULT_MOST * completions
    return WidthSettings(min=config.min, max=most, floor=config.floor, discount=config.discount)
