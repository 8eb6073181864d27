"""Refuses options that a loss cannot honour, before anything is loaded."""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from typing import TYPE_CHECKING

from surogate_rl.objectives.advantages import resolve_scale_rewards
from surogate_rl.objectives.policy_gradient import CLIPPED_LOSSES, DUAL_CLIP_LOSSES, POLICY_LOSSES
from surogate_rl.objectives.preference import PREFERENCE_LOSSES, SMOOTHED_LOSSES
from surogate_rl.objectives.user import is_user_objective

if TYPE_CHECKING:
    from surogate_rl.config.schema import LossConfig, PolicyLossConfig, PreferenceLossConfig, SftLossConfig

SFT_LOSSES = ("nll",)
_OWN = "your own objective gets its options from args; move it there"
LOSS_TYPES = {"sft": SFT_LOSSES, "dpo": PREFERENCE_LOSSES, "grpo": POLICY_LOSSES}


def validate_loss(config: LossConfig) -> None:
    """Checks a ``loss`` section of any command. An option at its default is never an error.

    Raises:
        ValueError: names the option, the loss type and what to do.
    """
    from surogate_rl.config.schema import PolicyLossConfig, PreferenceLossConfig, SftLossConfig

    if isinstance(config, PolicyLossConfig):
        _validate_policy(config)
    elif isinstance(config, PreferenceLossConfig):
        _validate_preference(config)
    elif isinstance(config, SftLossConfig):
        _validate_sft(config)
    else:
        raise ValueError(f"loss: {type(config).__name__} is the section of no command")


def _check_type(loss_type: str, known: tuple[str, ...]) -> None:
    if loss_type in known or is_user_objective(loss_type):
        return
    for command, others in LOSS_TYPES.items():
        if loss_type in others:
            here = ", ".join(known)
            raise ValueError(f"loss_type: {loss_type} belongs to the command {command}; here it is one of {here}, or path/file.py:fn")
    near = difflib.get_close_matches(loss_type, known, n=1)
    hint = f"; did you mean {near[0]}?" if near else ""
    raise ValueError(f"loss_type: {loss_type!r} is not known, expected one of {', '.join(known)}, or path/file.py:fn{hint}")


def _refuse(config: LossConfig, options: Iterable[str], why: str) -> None:
    """Refuses every one of `options` that is not at its default."""
    for option in options:
        info = type(config).model_fields[option]
        value = getattr(config, option)
        if value != info.get_default(call_default_factory=True):
            raise ValueError(f"{option}: {value!r} has no effect with loss_type {config.loss_type}: {why}")


def _validate_sft(config: SftLossConfig) -> None:
    _check_type(config.loss_type, SFT_LOSSES)
    if not is_user_objective(config.loss_type):
        _refuse(config, ["args"], "args are for an objective of your own; remove them")


def _validate_preference(config: PreferenceLossConfig) -> None:
    loss_type = config.loss_type
    _check_type(loss_type, PREFERENCE_LOSSES)
    if is_user_objective(loss_type):
        _refuse(config, ["beta", "label_smoothing", "reference_free", "rpo_alpha"], _OWN)
        return
    _refuse(config, ["args"], "args are for an objective of your own; remove them")
    if loss_type not in SMOOTHED_LOSSES:
        _refuse(config, ["label_smoothing"], f"only {' and '.join(SMOOTHED_LOSSES)} smooth labels; remove it or use one of them")
    if loss_type == "robust" and config.label_smoothing == 0:
        raise ValueError(
            "label_smoothing: 0 makes loss_type robust the same as sigmoid; set the share of wrong labels, for example 0.1, or use sigmoid"
        )


def _validate_policy(config: PolicyLossConfig) -> None:
    loss_type = config.loss_type
    _check_type(loss_type, POLICY_LOSSES)
    resolve_scale_rewards(loss_type, config.scale_rewards)
    if is_user_objective(loss_type):
        own = ["epsilon", "epsilon_high", "delta", "entropy_coef", "sapo_temperature_pos", "sapo_temperature_neg"]
        _refuse(config, own, _OWN)
        _refuse(config, ["beta"], "give your function the attribute needs_reference = True to get reference_logp, and the weight in args")
        _refuse(config, ["mask_truncated_completions"], 'your own objective finds them in batch.per_sequence["truncated"]; remove it')
        if config.mismatch not in ("auto", "none"):
            raise ValueError(
                f"mismatch: {config.mismatch} has no effect with loss_type {loss_type}: your own objective finds behaviour_logp in "
                "batch.per_token; use none"
            )
    else:
        _refuse(config, ["args"], "args are for an objective of your own; remove them")
        _validate_clipping(config)
        if loss_type != "sapo":
            _refuse(config, ["sapo_temperature_pos", "sapo_temperature_neg"], "only sapo has a soft gate; remove it")
        if loss_type == "rloo" and config.mismatch.startswith("token_"):
            raise ValueError(
                f"mismatch: {config.mismatch} does not go with loss_type rloo, which has one ratio per sequence and none per token; "
                "use sequence_truncate, sequence_mask, geometric_truncate or geometric_mask"
            )
    _validate_mismatch(config)
    _validate_reference(config)


def _validate_clipping(config: PolicyLossConfig) -> None:
    loss_type = config.loss_type
    if loss_type == "cispo":
        _refuse(config, ["epsilon"], "it caps its weight from above only; set epsilon_high (the cap itself, for example 5)")
        if config.epsilon_high == 0:
            raise ValueError("epsilon_high: 0 with loss_type cispo caps every weight at 0 and learns nothing; set the cap, for example 5")
    elif loss_type not in CLIPPED_LOSSES:
        _refuse(config, ["epsilon", "epsilon_high"], "its gate is soft; set sapo_temperature_pos and sapo_temperature_neg")
    if loss_type not in DUAL_CLIP_LOSSES:
        _refuse(config, ["delta"], f"it has no dual clip; remove it or use one of {', '.join(DUAL_CLIP_LOSSES)}")
    if config.delta is not None:
        upper = 1 + (config.epsilon if config.epsilon_high is None else config.epsilon_high)
        if config.delta <= upper:
            raise ValueError(f"delta: {config.delta} must be greater than 1 + epsilon_high = {upper:g}, else it undercuts the clip range")


def _validate_mismatch(config: PolicyLossConfig) -> None:
    if config.mismatch == "none":
        for option in ("mismatch_cap", "mismatch_floor"):
            _refuse(config, [option], "mismatch is none; set a kind of correction, or remove it")
    if config.mismatch_floor >= config.mismatch_cap:
        raise ValueError(f"mismatch_floor: {config.mismatch_floor:g} must be less than mismatch_cap = {config.mismatch_cap:g}")


def _validate_reference(config: PolicyLossConfig) -> None:
    if config.sync_ref_model:
        if config.beta == 0 and not is_user_objective(config.loss_type):
            raise ValueError("sync_ref_model: true has no effect with beta = 0, which keeps no reference; set beta > 0 or remove it")
        return
    _refuse(config, ["ref_model_mixup_alpha", "ref_model_sync_steps"], "sync_ref_model is false; set it to true, or remove this")
