"""The losses, and which options each of them has. What they compute is in `surogate_rl.objectives`, which needs torch; this does not."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from surogate_rl.config.errors import KeyPath, Problem
from surogate_rl.config.explain import nearest
from surogate_rl.config.schema import Command, LossConfig, PolicyLossConfig, PreferenceLossConfig, SftLossConfig

SFT_LOSSES = ("nll",)
PREFERENCE_LOSSES = ("sigmoid", "ipo", "hinge", "robust", "sigmoid_norm")
POLICY_LOSSES = ("grpo", "dapo", "dr_grpo", "gspo", "cispo", "sapo", "rloo", "reinforce_plus_plus")
LOSS_TYPES: dict[Command, tuple[str, ...]] = {"sft": SFT_LOSSES, "dpo": PREFERENCE_LOSSES, "grpo": POLICY_LOSSES}

SMOOTHED_LOSSES = ("sigmoid", "robust")
CLIPPED_LOSSES = ("grpo", "dapo", "dr_grpo", "gspo", "rloo", "reinforce_plus_plus")
DUAL_CLIP_LOSSES = ("grpo", "dapo", "dr_grpo", "gspo", "reinforce_plus_plus")
SEQUENCE_RATIO_LOSSES = ("gspo", "rloo")
"""One ratio, and so one advantage, for a whole sequence."""

_TYPE: KeyPath = ("loss", "loss_type")
_OWN = "your own objective gets its options from args; move it there"


def is_user_objective(loss_type: str) -> bool:
    """Whether `loss_type` names a function of the user's, as ``path/file.py:fn`` or as an attempt at it."""
    return ":" in loss_type or loss_type.endswith(".py")


def baseline_of(loss_type: str) -> str:
    """What the baseline of a loss's advantages is taken over: group, batch or leave-one-out."""
    return {"rloo": "leave-one-out", "reinforce_plus_plus": "batch"}.get(loss_type, "group")


def scale_rewards_problem(loss_type: str, scale_rewards: str | None) -> str | None:
    """Why a loss cannot scale its advantages so; None if it can."""
    if scale_rewards != "group" or baseline_of(loss_type) == "group":
        return None
    baseline = baseline_of(loss_type)
    return f"scale_rewards: group does not go with loss_type {loss_type}, whose baseline is {baseline}; use batch or none, or leave it out"


def loss_problems(loss: LossConfig) -> Iterator[Problem]:
    """Options that the loss cannot honour. One at its default is never a problem. Whether a user's file is there is not looked at.

    Raises:
        ValueError: the section belongs to no command.
    """
    command: Command
    if isinstance(loss, PolicyLossConfig):
        command, check = "grpo", _policy_problems(loss)
    elif isinstance(loss, PreferenceLossConfig):
        command, check = "dpo", _preference_problems(loss)
    elif isinstance(loss, SftLossConfig):
        command, check = "sft", _sft_problems(loss)
    else:
        raise ValueError(f"loss: {type(loss).__name__} is the section of no command")
    unknown = _type_problem(loss.loss_type, command)
    if unknown is not None:
        yield unknown  # which options it has cannot be said
    else:
        yield from check


def _type_problem(loss_type: str, command: Command) -> Problem | None:
    known = LOSS_TYPES[command]
    if loss_type in known or is_user_objective(loss_type):
        return None
    owner = next((other for other, losses in LOSS_TYPES.items() if loss_type in losses), None)
    close = nearest(loss_type, known)
    if owner is not None:
        what, hint = f"'{loss_type}' is a loss of {owner}, not of {command}", f"choose from {', '.join(known)}"
    else:
        what = f"unknown loss '{loss_type}'"
        hint = f"did you mean '{close}'?" if close else f"choose from {', '.join(known)}, or write path/file.py:function"
    return Problem(f"loss.loss_type: {what}; {hint}", _TYPE)


def _problem(option: str, message: str, *also: str) -> Problem:
    return Problem(f"loss.{option}: {message}", ("loss", option), tuple(("loss", other) for other in also))


def _refuse(loss: SftLossConfig | PreferenceLossConfig | PolicyLossConfig, options: Iterable[str], why: str) -> Iterator[Problem]:
    """Every one of `options` that is not at its default."""
    for option in options:
        value = getattr(loss, option)
        if value != type(loss).model_fields[option].get_default(call_default_factory=True):
            yield _problem(option, f"{value!r} has no effect with loss_type {loss.loss_type}: {why}", "loss_type")


def _arguments(loss: SftLossConfig | PreferenceLossConfig | PolicyLossConfig) -> Iterator[Problem]:
    if loss.args:
        message = f"{loss.loss_type} takes no arguments of its own; they are for an objective of yours (path/file.py:function)"
        yield _problem("args", message, "loss_type")


def _sft_problems(loss: SftLossConfig) -> Iterator[Problem]:
    if not is_user_objective(loss.loss_type):
        yield from _arguments(loss)


def _preference_problems(loss: PreferenceLossConfig) -> Iterator[Problem]:
    if is_user_objective(loss.loss_type):
        yield from _refuse(loss, ["beta", "label_smoothing", "reference_free", "rpo_alpha"], _OWN)
        return
    yield from _arguments(loss)
    if loss.loss_type not in SMOOTHED_LOSSES:
        why = f"only {' and '.join(SMOOTHED_LOSSES)} smooth labels; remove it or use one of them"
        yield from _refuse(loss, ["label_smoothing"], why)
    if loss.loss_type == "robust" and loss.label_smoothing == 0:
        yield _problem(
            "label_smoothing",
            "0 makes loss_type robust the same as sigmoid; set the share of wrong labels, for example 0.1, or use sigmoid",
            "loss_type",
        )


def _policy_problems(loss: PolicyLossConfig) -> Iterator[Problem]:
    loss_type = loss.loss_type
    if (message := scale_rewards_problem(loss_type, loss.scale_rewards)) is not None:
        yield Problem(f"loss.{message}", ("loss", "scale_rewards"), (_TYPE,))
    if is_user_objective(loss_type):
        yield from _own_problems(loss)
    else:
        yield from _arguments(loss)
        yield from _clipping_problems(loss)
        if loss_type != "sapo":
            yield from _refuse(loss, ["sapo_temperature_pos", "sapo_temperature_neg"], "only sapo has a soft gate; remove it")
        if loss_type == "rloo" and loss.mismatch.startswith("token_"):
            yield _problem(
                "mismatch",
                f"{loss.mismatch} does not go with loss_type rloo, which has one ratio per sequence and none per token; "
                "use sequence_truncate, sequence_mask, geometric_truncate or geometric_mask",
                "loss_type",
            )
    yield from _mismatch_problems(loss)
    yield from _reference_problems(loss)


def _own_problems(loss: PolicyLossConfig) -> Iterator[Problem]:
    own = ["epsilon", "epsilon_high", "delta", "entropy_coef", "sapo_temperature_pos", "sapo_temperature_neg"]
    yield from _refuse(loss, own, _OWN)
    why = "give your function the attribute needs_reference = True to get reference_logp, and the weight in args"
    yield from _refuse(loss, ["beta"], why)
    yield from _refuse(loss, ["mask_truncated_completions"], 'your own objective finds them in batch.per_sequence["truncated"]; remove it')
    if loss.mismatch not in ("auto", "none"):
        why = "your own objective finds behaviour_logp in batch.per_token; use none"
        yield _problem("mismatch", f"{loss.mismatch} has no effect with loss_type {loss.loss_type}: {why}", "loss_type")
    elif loss.mismatch == "auto":
        yield from _refuse(loss, ["mismatch_cap", "mismatch_floor"], _OWN)


def _clipping_problems(loss: PolicyLossConfig) -> Iterator[Problem]:
    loss_type = loss.loss_type
    if loss_type == "cispo":
        yield from _refuse(loss, ["epsilon"], "it caps its weight from above only; set epsilon_high (the cap itself, for example 5)")
        if loss.epsilon_high == 0:
            message = "0 with loss_type cispo caps every weight at 0 and learns nothing; set the cap, for example 5"
            yield _problem("epsilon_high", message, "loss_type")
    elif loss_type not in CLIPPED_LOSSES:
        yield from _refuse(loss, ["epsilon", "epsilon_high"], "its gate is soft; set sapo_temperature_pos and sapo_temperature_neg")
    if loss_type not in DUAL_CLIP_LOSSES:
        yield from _refuse(loss, ["delta"], f"it has no dual clip; remove it or use one of {', '.join(DUAL_CLIP_LOSSES)}")
    elif loss.delta is not None:
        upper = 1 + (loss.epsilon if loss.epsilon_high is None else loss.epsilon_high)
        if loss.delta <= upper:
            message = f"{loss.delta:g} must be greater than 1 + epsilon_high ({upper:g}), or it cuts below the clip; raise it"
            yield _problem("delta", message, "epsilon_high", "epsilon")


def _mismatch_problems(loss: PolicyLossConfig) -> Iterator[Problem]:
    if loss.mismatch == "none":
        why = "mismatch is none; set a kind of correction, or remove it"
        yield from _refuse(loss, ["mismatch_cap", "mismatch_floor"], why)
    if loss.mismatch_floor >= loss.mismatch_cap:
        message = f"{loss.mismatch_floor:g} must be less than mismatch_cap ({loss.mismatch_cap:g}); lower it"
        yield _problem("mismatch_floor", message, "mismatch_cap")


def _reference_problems(loss: PolicyLossConfig) -> Iterator[Problem]:
    if not loss.sync_ref_model:
        why = "sync_ref_model is false; set it to true, or remove this"
        yield from _refuse(loss, ["ref_model_mixup_alpha", "ref_model_sync_steps"], why)
    elif loss.beta == 0 and not is_user_objective(loss.loss_type):  # which asks for a reference itself: see `make_objective`
        message = "there is no reference while loss.beta is 0; set beta above 0 or sync_ref_model: false"
        yield _problem("sync_ref_model", message, "beta")
