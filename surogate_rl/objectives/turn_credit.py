"""Advantages turn by turn: what came after a turn, compared with what came after the same turn of the group's other completions.

Completion i has turns t = 0 .. T_i - 1 with rewards r_it and an outcome O_i (rewards for the whole), which comes with the last turn. The
reward to go of turn t is ``G_it = sum over s >= t of d^(s - t) r_is + d^(T_i - 1 - t) O_i`` with the discount d; with d = 1 G_i0 is the
completion's reward. Of a group of N scored completions, among those that have a turn t,

    A_it = (N - 1) / N * (G_it - mean of the others' G_jt) / scale

Where no other one has a turn t, the others are taken at the last turn that one of them has. The scale is what `scale_rewards` says, of the
G_i0.

The others' rewards say nothing of what this completion did, so that the baseline does not bend the gradient (Williams 1992), and a turn is
not credited with rewards from before it. (N - 1) / N is what comparing with a mean that includes oneself amounts to: with one turn each,
these are exactly `group_advantages`.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from surogate_rl.objectives.advantages import STD_EPSILON, resolve_scale_rewards, standard_deviation

Turns = NDArray[np.float64]

DECIMALS = 9
"""Rewards to go are sums: what differs by rounding alone must not pass for a difference."""


def rewards_to_go(turn_rewards: Sequence[float], outcome: float, discount: float = 1.0) -> list[float]:
    """G_t of every turn (one at least).

    Raises:
        ValueError: there is no turn.
    """
    if not turn_rewards:
        raise ValueError("rewards_to_go: a completion has one turn at least, this one has none")
    values: list[float] = []
    following = outcome
    for place, reward in enumerate(reversed(turn_rewards)):
        following = reward + (following if place == 0 else discount * following)
        values.append(round(following, DECIMALS))
    return values[::-1]


def turn_advantages(
    groups: Sequence[Sequence[Sequence[float] | None]], *, scale_rewards: str | None = None, loss_type: str = "grpo"
) -> list[list[Turns | None]]:
    """Args:
        groups: for each prompt, for each completion: rewards to go by turn, or None: unscored.
        scale_rewards, loss_type: as of `group_advantages`.

    Returns:
        Of the same shape, float64; exactly 0 where all that a turn is compared with are equal to it.
    """
    whole = loss_type == "reinforce_plus_plus"
    scale = resolve_scale_rewards(loss_type, scale_rewards)
    units = [[turns for group in groups for turns in group]] if whole else [list(group) for group in groups]
    first = [np.array([turns[0] for turns in unit if turns is not None], dtype=np.float64) for unit in units]
    spread = standard_deviation(np.concatenate(first)) if scale == "batch" and first else 0.0
    made: list[list[Turns | None]] = []
    for unit, starts in zip(units, first, strict=True):
        divisor = 1.0 if scale == "none" else STD_EPSILON + (spread if scale == "batch" else standard_deviation(starts))
        made.append([None if turns is None else turns / divisor for turns in _centred(unit)])
    if not whole:
        return made
    (flat,) = made
    ends = np.cumsum([len(group) for group in groups])
    return [flat[end - len(group) : end] for group, end in zip(groups, ends, strict=True)]


def _centred(unit: Sequence[Sequence[float] | None]) -> list[Turns | None]:
    scored = [turns for turns in unit if turns is not None]
    count = len(scored)
    # sums and numbers of the rewards to go at each turn, over those that have it
    longest = max((len(turns) for turns in scored), default=0)
    at = [[turns[t] for turns in scored if len(turns) > t] for t in range(longest)]

    def advantage(turns: Sequence[float], t: int) -> float:
        own, place = turns[t], t
        while place > 0 and len(at[place]) < 2:
            place -= 1
        others = len(at[place]) - 1
        if others < 1:
            return 0.0
        baseline = (sum(at[place]) - turns[place]) / others
        if place == t and min(at[t]) == max(at[t]):
            return 0.0
        return (count - 1) / count * (own - baseline)

    return [None if turns is None else np.array([advantage(turns, t) for t in range(len(turns))], dtype=np.float64) for turns in unit]
