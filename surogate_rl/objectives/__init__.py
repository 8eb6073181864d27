"""Objectives: what to learn, as differentiable functions of the learner's token statistics.

A new built-in one is a small class with ``unit``, ``needs_entropy``, ``needs_reference``, ``mask_truncated`` and
``__call__(stats, batch, totals) -> Loss``, and a line in `make_objective`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from surogate_rl.config.loss import LOSS_TYPES, POLICY_LOSSES, PREFERENCE_LOSSES, is_user_objective
from surogate_rl.objectives.advantages import Advantages, group_advantages, penalise, reference_kl, resolve_scale_rewards
from surogate_rl.objectives.base import LinearObjective, Loss, Objective, TokenStats, Unit, mean_metrics, merge_metrics, totals_of
from surogate_rl.objectives.gradient import Seeds, StepSeeds, concatenate, seeds, split, step_seeds
from surogate_rl.objectives.mismatch import Mismatch, MismatchKind
from surogate_rl.objectives.nll import NegativeLogLikelihood
from surogate_rl.objectives.policy_gradient import CISPO_EPSILON_HIGH, PolicyGradient
from surogate_rl.objectives.preference import Preference
from surogate_rl.objectives.user import ObjectiveError, UserObjective, load_user_objective
from surogate_rl.objectives.validate import validate_loss

if TYPE_CHECKING:
    from surogate_rl.config.schema import LossConfig, PolicyLossConfig

__all__ = [
    "LOSS_TYPES",
    "POLICY_LOSSES",
    "PREFERENCE_LOSSES",
    "Advantages",
    "LinearObjective",
    "Loss",
    "Mismatch",
    "NegativeLogLikelihood",
    "Objective",
    "PolicyGradient",
    "Preference",
    "Seeds",
    "StepSeeds",
    "TokenStats",
    "Unit",
    "UserObjective",
    "concatenate",
    "group_advantages",
    "is_user_objective",
    "load_user_objective",
    "make_objective",
    "mean_metrics",
    "merge_metrics",
    "penalise",
    "reference_kl",
    "resolve_mismatch",
    "resolve_scale_rewards",
    "seeds",
    "split",
    "step_seeds",
    "totals_of",
    "validate_loss",
]

Command = Literal["sft", "dpo", "grpo"]


def make_objective(
    loss: LossConfig,
    *,
    command: Command,
    max_completion_length: int | None = None,
    engine_is_learner: bool = True,
) -> Objective:
    """Builds the objective that a ``loss`` section asks for, checked by `validate_loss`.

    Args:
        command: whose section it is.
        max_completion_length: ``rollouts.max_completion_length``; dr_grpo divides by it.
        engine_is_learner: whether the sampler computes with the learner's own code and weights; decides ``mismatch: auto``.

    Raises:
        ValueError: the section belongs to another command, an option does not go with the loss type, or a user's file
            does not load.
    """
    from surogate_rl.config.schema import PolicyLossConfig, PreferenceLossConfig, SftLossConfig

    expected = {"sft": SftLossConfig, "dpo": PreferenceLossConfig, "grpo": PolicyLossConfig}
    if command not in expected:
        raise ValueError(f"command: {command!r}, expected one of {', '.join(expected)}")
    if not isinstance(loss, expected[command]):
        raise ValueError(f"loss: {type(loss).__name__} is not the section of the command {command}, expected {expected[command].__name__}")
    validate_loss(loss)
    if isinstance(loss, (SftLossConfig, PreferenceLossConfig, PolicyLossConfig)) and is_user_objective(loss.loss_type):
        own = load_user_objective(loss.loss_type, loss.args)
        _check_reference(own, loss)
        return own
    if isinstance(loss, PreferenceLossConfig):
        return Preference(loss.loss_type, loss.beta, loss.label_smoothing, loss.reference_free, loss.rpo_alpha)
    if isinstance(loss, PolicyLossConfig):
        return _policy_gradient(loss, max_completion_length, engine_is_learner)
    return NegativeLogLikelihood()


def _check_reference(own: UserObjective, loss: LossConfig) -> None:
    """What a function asks for is known only once it is loaded."""
    from surogate_rl.config.schema import PolicyLossConfig, SftLossConfig

    if own.needs_reference and isinstance(loss, SftLossConfig):
        raise ObjectiveError(
            f"{own.name}: attribute needs_reference is True, but sft keeps no reference policy; remove the attribute, or use the function "
            "with dpo or grpo"
        )
    if not own.needs_reference and isinstance(loss, PolicyLossConfig) and loss.sync_ref_model:
        raise ObjectiveError(
            f"loss.sync_ref_model: there is no reference to move, since {own.name} does not ask for one; give the function the attribute "
            "needs_reference = True, or set sync_ref_model: false"
        )


def resolve_mismatch(loss: PolicyLossConfig, *, engine_is_learner: bool) -> Mismatch:
    """What ``mismatch: auto`` means: no correction where sampler and learner are one, else truncated weights, by token
    (rloo, which has no token ratios: by sequence)."""
    kind: MismatchKind
    if loss.mismatch != "auto":
        kind = loss.mismatch
    elif engine_is_learner:
        kind = "none"
    else:
        kind = "sequence_truncate" if loss.loss_type == "rloo" else "token_truncate"
    return Mismatch(kind, loss.mismatch_cap, loss.mismatch_floor)


def _policy_gradient(loss: PolicyLossConfig, max_completion_length: int | None, engine_is_learner: bool) -> PolicyGradient:
    epsilon_high = loss.epsilon_high
    if epsilon_high is None:
        epsilon_high = CISPO_EPSILON_HIGH if loss.loss_type == "cispo" else loss.epsilon
    return PolicyGradient(
        loss_type=loss.loss_type,
        epsilon=loss.epsilon,
        epsilon_high=epsilon_high,
        delta=loss.delta,
        beta=loss.beta,
        entropy_coef=loss.entropy_coef,
        sapo_temperature_pos=loss.sapo_temperature_pos,
        sapo_temperature_neg=loss.sapo_temperature_neg,
        mask_truncated=loss.mask_truncated_completions,
        max_completion_length=max_completion_length,
        mismatch=resolve_mismatch(loss, engine_is_learner=engine_is_learner),
    )
