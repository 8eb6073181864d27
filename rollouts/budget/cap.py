"""Cap and exploration, chosen together: least variance x cost, under a floor on coverage.

With depth d as the cap, e the probability of going on, b the baseline and V the value of going on, and with the score of a token taken as
one of many uncorrelated ones of equal size, the second moment of an episode's gradient is in proportion to

    M(d, e) = E[T (R - b)^2; T <= d] + d P(T > d) (V - b)^2 + B / e,
    B       = d E[(R - V)^2; T > d] + E[(T - d) (R - V)^2; T > d]

(T the depth at which it ends, R its reward; the first part of B is what V + G/e (R - V) adds to the tokens before the cap, the second the
tokens after it), and its cost to

    C(d, e) = E[min(T, d)] + e E[(T - d)^+].

A step's M and C are sums over buckets. Their product is least where every bucket has the least M + (M / C) C of its own, with the
step's M / C: a fixed point that is iterated to. For given d, e = sqrt(B / ((M / C) E[(T - d)^+])) in closed form.

A cap is admitted only if its coverage F(d) / F(K) is at least the floor even when the success that lies beyond it is as large as the data
may still hide (a limit by Wilson's score with the effective number of episodes that were followed beyond it). With few followed the limit
is high and the cap moves outward, so that more are followed: that, and e > 0, keeps a cap from drifting inward on its own evidence.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from surogate_rl.rollouts.budget.incidence import Incidence, wilson_high

CAUTION = 1.0
"""z of the one-sided limit (84%) that coverage must keep."""


@dataclass(frozen=True)
class CapRule:
    """Attributes (depths are cells):
    coverage: floor of the share of eventual success that the cap must reach.
    least, most: bounds of the cap.
    explore: a fixed probability of going on, or None: chosen.
    least_explore: bound of a chosen one.
    """

    coverage: float
    least: int
    most: int
    explore: float | None
    least_explore: float


@dataclass(frozen=True)
class Choice:
    """Attributes:
    cap: the cell after which episodes are cut; None: none.
    explore: probability with which they go on nevertheless.
    value: expected reward of an episode that goes beyond the cap.
    coverage: estimated share of eventual success reached by the cap.
    """

    cap: int | None
    explore: float
    value: float
    coverage: float


UNCAPPED = Choice(None, 1.0, 0.0, 1.0)


def least_coverage(law: Incidence, caution: float = CAUTION) -> NDArray[np.float64]:
    """[K + 1]: a lower limit of the coverage of each depth."""
    reached, left = law.success, law.survival
    beyond = np.divide(reached[-1] - reached, left, out=np.zeros_like(left), where=left > 0)
    hidden = left * wilson_high(beyond, law.followed_by_depth(), caution)
    total = reached + hidden
    return np.divide(reached, total, out=np.zeros_like(total), where=total > 0)


@dataclass(frozen=True)
class _Candidates:
    """Of one bucket: index 0 is no cap, then one for each admitted cap."""

    caps: NDArray[np.int64]
    fixed_second: NDArray[np.float64]
    explored_second: NDArray[np.float64]
    fixed_cost: NDArray[np.float64]
    explored_cost: NDArray[np.float64]

    def best(self, rate: float, rule: CapRule, must: bool) -> tuple[int, float, float, float]:
        """Index, explore, M and C of the least M + rate x C."""
        if rule.explore is not None:
            explore = np.full(self.caps.size, rule.explore)
        else:
            price = rate * self.explored_cost
            explore = np.sqrt(np.divide(self.explored_second, price, out=np.ones_like(price), where=price > 0))
            explore = np.clip(explore, rule.least_explore, 1.0)
        explore[0] = 1.0
        second = self.fixed_second + self.explored_second / explore
        cost = self.fixed_cost + explore * self.explored_cost
        goal = second + rate * cost
        if must and self.caps.size > 1:
            goal[0] = np.inf
        index = int(np.argmin(goal))
        return index, float(explore[index]), float(second[index]), float(cost[index])


def choose_caps(laws: Sequence[Incidence], weights: Sequence[float], widths: NDArray[np.float64], rule: CapRule) -> list[Choice]:
    """A choice for each bucket.

    Args:
        laws: of the buckets.
        weights: each bucket's share of the episodes.
        widths: depth units of each cell.
    """
    candidates = [_candidates(law, widths, rule) for law in laws]
    must = rule.most < widths.size
    total = float(sum(weights)) or 1.0
    share = [weight / total for weight in weights]
    second = sum(w * float(c.fixed_second[0] + c.explored_second[0]) for w, c in zip(share, candidates, strict=True))
    cost = sum(w * float(c.fixed_cost[0]) for w, c in zip(share, candidates, strict=True))
    best: list[tuple[int, float, float, float]] = []
    least = np.inf
    for _ in range(20):
        rate = second / cost if cost > 0 else 0.0
        found = [candidate.best(rate, rule, must) for candidate in candidates]
        second = sum(w * f[2] for w, f in zip(share, found, strict=True))
        cost = sum(w * f[3] for w, f in zip(share, found, strict=True))
        if best and second * cost >= least * (1 - 1e-9):
            break
        best, least = found, second * cost
    return [_choice(law, c, f[0], f[1]) for law, c, f in zip(laws, candidates, best, strict=True)]


def _choice(law: Incidence, candidates: _Candidates, index: int, explore: float) -> Choice:
    cap = int(candidates.caps[index])
    if cap >= law.cells or explore >= 1:
        return UNCAPPED
    return Choice(cap, explore, law.value(cap).value, law.coverage(cap).value)


def _candidates(law: Incidence, widths: NDArray[np.float64], rule: CapRule) -> _Candidates:
    depth, before = np.cumsum(widths), law.survival[:-1]
    ended, gathered, squared = before * law.hazard, before * law.reward_hazard, before * law.reward_sq_hazard
    ended[-1] += max(1.0 - float(ended.sum()), 0.0)  # nobody seen to end: at the horizon, with nothing
    baseline = float(law.reward[-1])
    around = np.cumsum(depth * (squared - 2 * baseline * gathered + baseline**2 * ended))
    spent = np.cumsum(widths * before)

    caps = np.arange(rule.least, min(rule.most, law.cells - 1) + 1)
    admitted = (least_coverage(law)[caps] >= rule.coverage) | ((caps == rule.most) & (rule.most < law.cells))
    caps = caps[admitted & (law.survival[caps] > 0)]
    left, at = law.survival[caps], depth[caps - 1]
    value, variance = (array[caps] for array in law.values_by_depth())
    # sums over what ends beyond each cap, of (R - V)^2 and of (T - d) (R - V)^2
    sums = [_beyond(mark)[caps] for mark in (squared, gathered, ended)]
    timed = [_beyond(depth * mark)[caps] for mark in (squared, gathered, ended)]
    apart = sums[0] - 2 * value * sums[1] + value**2 * sums[2]
    apart_timed = timed[0] - 2 * value * timed[1] + value**2 * timed[2] - at * apart
    unsure = left * variance  # V is an estimate
    explored = at * (apart + unsure) + apart_timed + (_beyond(depth * ended)[caps] / left - at) * unsure
    return _Candidates(
        np.concatenate([[law.cells], caps]),
        np.concatenate([around[-1:], around[caps - 1] + at * left * (value - baseline) ** 2]),
        np.concatenate([[0.0], np.maximum(explored, 0.0)]),
        np.concatenate([spent[-1:], spent[caps - 1]]),
        np.concatenate([[0.0], spent[-1] - spent[caps - 1]]),
    )


def _beyond(cells: NDArray[np.float64]) -> NDArray[np.float64]:
    """[K + 1]: sums over the cells after each depth."""
    return np.concatenate([np.cumsum(cells[::-1])[::-1], [0.0]])
