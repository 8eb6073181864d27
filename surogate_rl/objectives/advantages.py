"""From rewards to advantages.

R is a group's (prompt's) scored rewards, B all scored rewards of the step, std the sample standard deviation (n - 1),
eps = 1e-4:

===================================  ===========================================================
grpo, dapo, dr_grpo, gspo, cispo,    (r - mean R) / (std R + eps)     scale_rewards: group (default)
sapo                                 (r - mean R) / (std B + eps)     batch
                                     r - mean R                       none
rloo                                 a = r - mean of the others in R  none (default)
                                     a / (std of all a + eps)         batch (TRL's normalize_advantages)
reinforce_plus_plus                  (r - mean B) / (std B + eps)     batch (default)
                                     r - mean B                       none
===================================  ===========================================================

A completion without a score takes no part: not in means, not in deviations, and its own advantage is 0. Groups (for
reinforce_plus_plus: steps) whose scored rewards are all equal have advantages of exactly 0, by comparing the rewards, not
by trusting that r - mean r cancels.

Sources: TRL's GRPOTrainer and RLOOTrainer. REINFORCE++ (arXiv:2501.03262) normalises A = r over the global batch,
(A - mean A) / std A; the mean here is over completions, each counting once whatever its length.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, cast, get_args

import numpy as np
from numpy.typing import NDArray

from surogate_rl.batch import BoolArray, FloatArray, PackedBatch
from surogate_rl.config.loss import baseline_of, scale_rewards_problem
from surogate_rl.objectives.segments import field_of

ScaleRewards = Literal["group", "batch", "none"]
STD_EPSILON = 1e-4

_Doubles = NDArray[np.float64]


@dataclass(frozen=True)
class Advantages:
    """Attributes:
    values: float32, one array per prompt, one number per completion; 0 for an unscored one.
    scored: bool, of the same shapes. Train only these: an unscored completion is left out of the step and its totals.
    metrics: name -> (sum, weight): TRL's ``reward``, ``reward_std`` (over the step) and ``frac_reward_zero_std`` (share of
        groups with a score whose scored rewards are all equal; for reinforce_plus_plus the step is the group).
    """

    values: list[FloatArray]
    scored: list[BoolArray]
    metrics: dict[str, tuple[float, float]]


def resolve_scale_rewards(loss_type: str, scale_rewards: str | None) -> ScaleRewards:
    """The default of a loss type where `scale_rewards` is None.

    Raises:
        ValueError: the loss type cannot scale so.
    """
    if scale_rewards is None:
        return cast(ScaleRewards, {"leave-one-out": "none", "batch": "batch", "group": "group"}[baseline_of(loss_type)])
    if scale_rewards not in get_args(ScaleRewards):
        raise ValueError(f"scale_rewards: {scale_rewards!r}, expected one of {', '.join(get_args(ScaleRewards))}")
    if (problem := scale_rewards_problem(loss_type, scale_rewards)) is not None:
        raise ValueError(problem)
    return cast(ScaleRewards, scale_rewards)


def group_advantages(rewards: Sequence[Sequence[float | None]], *, scale_rewards: str | None = None, loss_type: str = "grpo") -> Advantages:
    """Advantages of a step's completions.

    Args:
        rewards: for each prompt its completions' rewards, None where a completion is unscored. Groups may differ in size.
        scale_rewards: see above; None is the loss type's default.
        loss_type: any, a user's own objective included (which gets a group mean baseline).

    Raises:
        ValueError: a group of fewer than two completions (reinforce_plus_plus: of none), or a reward that is not finite.
    """
    scale = resolve_scale_rewards(loss_type, scale_rewards)
    whole_batch = loss_type == "reinforce_plus_plus"
    groups: list[_Doubles] = []
    for prompt, group in enumerate(rewards):
        _check_group(prompt, group, least=1 if whole_batch else 2, loss_type=loss_type)
        groups.append(np.array([math.nan if reward is None else float(reward) for reward in group], dtype=np.float64))
    scored: list[BoolArray] = [~np.isnan(group) for group in groups]
    flat = np.concatenate([group[mask] for group, mask in zip(groups, scored, strict=True)]) if groups else np.empty(0)

    if whole_batch:
        values = [_centred(group, mask, flat) for group, mask in zip(groups, scored, strict=True)]
    elif loss_type == "rloo":
        values = [_leave_one_out(group, mask) for group, mask in zip(groups, scored, strict=True)]
    else:
        values = [_centred(group, mask, group[mask]) for group, mask in zip(groups, scored, strict=True)]

    if scale == "group":
        values = [
            value / (standard_deviation(group[mask]) + STD_EPSILON) for value, group, mask in zip(values, groups, scored, strict=True)
        ]
    elif scale == "batch":
        spread = flat
        if loss_type == "rloo":
            # Of the advantages, as TRL has it. Their mean is 0 group by group, so nothing is taken off it: equal rewards stay at 0.
            spread = np.concatenate([v[m] for v, m in zip(values, scored, strict=True) if m.sum() > 1] or [np.empty(0)])
        values = [value / (standard_deviation(spread) + STD_EPSILON) for value in values]

    units = [flat] if whole_batch else [group[mask] for group, mask in zip(groups, scored, strict=True)]
    units = [unit for unit in units if unit.size > 0]
    metrics = {
        "reward": (float(flat.sum()), float(flat.size)),
        "reward_std": (standard_deviation(flat), float(flat.size > 1)),
        "frac_reward_zero_std": (float(sum(unit.min() == unit.max() for unit in units)), float(len(units))),
    }
    return Advantages([value.astype(np.float32) for value in values], scored, metrics)


def _check_group(prompt: int, group: Sequence[float | None], *, least: int, loss_type: str) -> None:
    if len(group) < least:
        raise ValueError(
            f"rewards: prompt {prompt} has {len(group)} completion(s), but the baseline of loss_type {loss_type} is the group's, "
            "which needs two or more; raise rollouts.num_generations or use loss_type reinforce_plus_plus"
            if least > 1
            else f"rewards: prompt {prompt} has no completion"
        )
    for sample, reward in enumerate(group):
        if reward is not None and not math.isfinite(reward):
            raise ValueError(
                f"rewards: {reward} for completion {sample} of prompt {prompt}, expected a finite number, or None for an unscored one"
            )


def standard_deviation(values: _Doubles) -> float:
    """Sample standard deviation; 0 where it is not defined or all are equal."""
    if values.size < 2 or values.min() == values.max():
        return 0.0
    return float(values.std(ddof=1))


def _centred(group: _Doubles, scored: BoolArray, baseline: _Doubles) -> _Doubles:
    """r - mean of `baseline`, exactly 0 where the baseline's rewards are all equal or fewer than two."""
    if baseline.size < 2 or baseline.min() == baseline.max():
        return np.zeros_like(group)
    return np.where(scored, group - baseline.mean(), 0.0)


def _leave_one_out(group: _Doubles, scored: BoolArray) -> _Doubles:
    own = group[scored]
    if own.size < 2 or own.min() == own.max():
        return np.zeros_like(group)
    return np.where(scored, group - (own.sum() - group) / (own.size - 1), 0.0)


def reference_kl(batch: PackedBatch) -> FloatArray:
    """float32 [S]: k1 estimate of the KL to the reference in nats, summed over each sequence's trained tokens:
    log proximal - log reference (behaviour where there is no proximal).

    Raises:
        ValueError: the batch lacks ``reference_logp`` or the policy's log-probabilities.
    """
    name = "proximal_logp" if "proximal_logp" in batch.per_token else "behaviour_logp"
    difference = field_of(batch, "per_token", name, "the KL to the reference").astype(np.float64)
    difference = difference - field_of(batch, "per_token", "reference_logp", "the KL to the reference")
    return np.bincount(batch.segment_of_token()[batch.mask], weights=difference[batch.mask], minlength=batch.num_sequences).astype(
        np.float32
    )


def penalise(rewards: Sequence[Sequence[float | None]], kl: Sequence[Sequence[float]], beta: float) -> list[list[float | None]]:
    """reward - beta * kl, completion by completion; an unscored one stays unscored. For `PolicyGradient.kl_in_reward`.

    Args:
        kl: of the shapes of `rewards`, `reference_kl` of each completion (summed over its segments).
    """
    return [
        [None if reward is None else float(reward) - beta * float(own) for reward, own in zip(group, kls, strict=True)]
        for group, kls in zip(rewards, kl, strict=True)
    ]
