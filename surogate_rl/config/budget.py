"""What rollout budgets cannot go with, and what makes them approximate."""

from __future__ import annotations

from collections.abc import Iterator

from surogate_rl.config.errors import KeyPath, Problem
from surogate_rl.config.loss import SEQUENCE_RATIO_LOSSES, is_user_objective
from surogate_rl.config.schema import DepthBudgetConfig, GrpoConfig, WidthBudgetConfig

_DEPTH: KeyPath = ("rollouts", "budget", "depth")
_WIDTH: KeyPath = ("rollouts", "budget", "width")
_LOSS: KeyPath = ("loss", "loss_type")


def budget_problems(config: GrpoConfig) -> Iterator[Problem]:
    budget = config.rollouts.budget
    if budget.depth is not None:
        yield from _depth_problems(config, budget.depth)
    if budget.width is not None:
        yield from _width_problems(config, budget.width)


def budget_notes(config: GrpoConfig) -> Iterator[Problem]:
    """Settings under which a budget still works, but no longer leaves the expected gradient exactly as it is."""
    depth, width, loss = config.rollouts.budget.depth, config.rollouts.budget.width, config.loss
    if depth is None and width is None:
        return
    where = _DEPTH if depth is not None else _WIDTH
    if depth is not None and depth.credit != "unbiased":
        yield Problem(
            f"rollouts.budget.depth.credit: {depth.credit} bends the gradient of episodes that reach the cap; it is there for comparison, "
            "unbiased does not",
            (*_DEPTH, "credit"),
        )
    if depth is not None and depth.max is not None and depth.max >= _horizon(config, depth)[0]:
        horizon, unit = _horizon(config, depth)
        yield Problem(
            f"rollouts.budget.depth.max: {depth.max} has no effect, episodes have at most {horizon} {unit} anyway", (*_DEPTH, "max")
        )
    if loss.scale_rewards != "none" and not (loss.scale_rewards is None and loss.loss_type == "rloo"):
        scale = loss.scale_rewards or ("batch" if loss.loss_type == "reinforce_plus_plus" else "group")
        yield Problem(
            f"rollouts.budget: with advantages divided by a standard deviation (loss.scale_rewards: {scale}) a budget leaves the expected "
            "gradient as it is only approximately; scale_rewards: none makes it exact",
            where,
            (("loss", "scale_rewards"),),
        )
    if depth is not None and loss.loss_type in ("grpo", "sapo", "dapo", "cispo", "reinforce_plus_plus"):
        divisor = "a completion's own length" if loss.loss_type in ("grpo", "sapo") else "the number of sampled tokens"
        yield Problem(
            f"rollouts.budget.depth: {loss.loss_type} divides by {divisor}, which a cap changes, so that the expected gradient stays as it "
            "is only approximately; loss_type: dr_grpo divides by a constant",
            where,
            (_LOSS,),
        )


def _depth_problems(config: GrpoConfig, depth: DepthBudgetConfig) -> Iterator[Problem]:
    rollouts, loss = config.rollouts, config.loss
    if loss.loss_type in SEQUENCE_RATIO_LOSSES:
        yield Problem(
            f"rollouts.budget.depth: {loss.loss_type} has one advantage for a whole completion, and tokens before and after a cap need "
            "two; use loss_type: dr_grpo",
            _DEPTH,
            (_LOSS,),
        )
    elif is_user_objective(loss.loss_type):
        yield Problem(
            "rollouts.budget.depth: your own objective has one advantage for a whole completion, and tokens before and after a cap need "
            "two; use loss_type: dr_grpo",
            _DEPTH,
            (_LOSS,),
        )
    if rollouts.num_generations == 1 and loss.loss_type != "reinforce_plus_plus":
        return  # a group of one is refused already
    if loss.mask_truncated_completions:
        yield Problem(
            "loss.mask_truncated_completions: would leave out what the depth budget cuts, and with it the credit that makes up for the "
            "cut; remove it, or the depth budget",
            ("loss", "mask_truncated_completions"),
            (_DEPTH,),
        )
    if depth.unit == "turns" and config.environment.name == "single_turn":
        yield Problem(
            "rollouts.budget.depth.unit: single_turn has one turn, there is nothing to cap; set it to tokens or auto",
            (*_DEPTH, "unit"),
            (("environment",),),
        )
    if rollouts.dynamic_sampling.enabled:
        yield Problem(
            "rollouts.budget.depth: dynamic_sampling passes over groups by the rewards of this very visit, among them those of cut "
            "episodes; the credit of a cut is unbiased only if groups are kept whatever their rewards; set dynamic_sampling.enabled: false",
            _DEPTH,
            (("rollouts", "dynamic_sampling", "enabled"),),
        )
    if depth.min is not None and depth.max is not None and depth.min > depth.max:
        yield Problem(
            f"rollouts.budget.depth.min: {depth.min} is more than max ({depth.max}); lower it",
            (*_DEPTH, "min"),
            ((*_DEPTH, "max"),),
        )
    horizon, unit = _horizon(config, depth)
    if depth.min is not None and depth.min >= horizon > 1:
        yield Problem(
            f"rollouts.budget.depth.min: episodes have at most {horizon} {unit} anyway, so that a cap of {depth.min} or more would never "
            "cut one; lower it",
            (*_DEPTH, "min"),
        )


def _horizon(config: GrpoConfig, depth: DepthBudgetConfig) -> tuple[int, str]:
    """Depth of an episode without a budget, at the most (a model with a shorter context has less), and its unit."""
    turns = config.environment.turns
    if depth.unit == "turns" or (depth.unit == "auto" and turns > 1):
        return turns, "turns"
    return min(config.rollouts.max_completion_length * turns, config.sequence_len), "tokens"


def _width_problems(config: GrpoConfig, width: WidthBudgetConfig) -> Iterator[Problem]:
    mean = config.rollouts.num_generations
    if width.min > mean:
        yield Problem(
            f"rollouts.budget.width.min: {width.min} is more than num_generations ({mean}), the mean; lower it or raise num_generations",
            (*_WIDTH, "min"),
            (("rollouts", "num_generations"),),
        )
    if width.max is not None and width.max < mean:
        yield Problem(
            f"rollouts.budget.width.max: {width.max} is less than num_generations ({mean}), the mean; raise it or lower num_generations",
            (*_WIDTH, "max"),
            (("rollouts", "num_generations"),),
        )
    if config.rollouts.prompts_per_step == 1:
        yield Problem(
            "rollouts.budget.width: a step of one prompt has nothing to shift between prompts; raise prompts_per_step or remove this "
            "section",
            _WIDTH,
            (("rollouts", "prompts_per_step"),),
        )
    if config.loss.loss_type == "reinforce_plus_plus":
        yield Problem(
            "rollouts.budget.width: reinforce_plus_plus compares with the whole batch, whose mean would be that of the prompts with most "
            "completions; use another loss or remove this section",
            _WIDTH,
            (_LOSS,),
        )
    if is_user_objective(config.loss.loss_type):
        yield Problem(
            "rollouts.budget.width: your own objective may not weigh completions, as numbers that differ by prompt need; use dr_grpo",
            _WIDTH,
            (_LOSS,),
        )
