"""Success by depth, when episodes may also end otherwise (competing risks) and some are cut (censored).

Depth runs over cells k = 1..K. With Y(k) the weight of episodes that are seen to enter cell k, N(k) of those that end in it, and
M(k) the sum of a mark X (1 for a success; or the reward) over those ends,

    h(k) = N(k) / Y(k),  m(k) = M(k) / Y(k),  S(k) = prod_{j <= k} (1 - h(j)),  F_X(k) = sum_{j <= k} S(j - 1) m(j).

F_X is the Aalen-Johansen estimate (Aalen and Johansen 1978) of the mark gathered up to depth k; for X = 1[success] the cumulative incidence
of success. One minus a Kaplan-Meier curve in which other ends count as censored is something else and too large: it says what success
would be if nothing else could end an episode.

Weights. An episode that was cut at cap c and goes on with probability e, drawn independently of its content, counts in cells up to c with
weight 1 and beyond it, if it went on, with weight 1/e (inverse probability of censoring; Robins and Rotnitzky 1992). So laws of episodes
with other caps and other e, or none, may be added up: each cell's weight stands for all that reached it, whatever their caps. All weights
are multiplied by the same factor as steps go by (exponential forgetting).

Variance. The increments of cell k, given who entered it, are draws from one law with mean (h, m); a weighted mean of them has the variance
of one divided by n(k) = Y(k)^2 / sum of squared weights (Kish's effective number), and increments of different cells are uncorrelated. So a
smooth functional with derivatives b(k) by h(k) and a(k) by m(k) has (delta method; for weights of 1 this is the Greenwood-type variance of
Marubini and Valsecchi 1995, Gaynor et al. 1993)

    sum_k (a^2 m2 + 2 a b m + b^2 h - (a m + b h)^2) / n(k),        m2(k) = sum of X^2 over the ends in k / Y(k).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from statistics import NormalDist
from typing import Any

import numpy as np
from numpy.typing import NDArray

Doubles = NDArray[np.float64]

_FIELDS = ("entered", "entered_sq", "ended", "success", "reward", "reward_sq")


class DepthLaw:
    """Weighted counts by depth, from which everything is estimated. What it keeps does not grow with the number of episodes.

    Attributes (float64 [K], index k - 1 for cell k):
        entered, entered_sq: sums of weights, and of their squares, of episodes seen to enter the cell.
        ended, success: of those that end in the cell, and with success.
        reward, reward_sq: sums of weighted rewards, and of weighted squared rewards, of those that end in it.
    """

    def __init__(self, cells: int) -> None:
        self.cells = cells
        self.entered = np.zeros(cells)
        self.entered_sq = np.zeros(cells)
        self.ended = np.zeros(cells)
        self.success = np.zeros(cells)
        self.reward = np.zeros(cells)
        self.reward_sq = np.zeros(cells)

    def forget(self, keep: float) -> None:
        """Multiplies the weights of all that was added by `keep`."""
        for name in _FIELDS:
            getattr(self, name)[:] *= keep * keep if name == "entered_sq" else keep

    def add_end(
        self, cell: int, *, success: bool, reward: float, cap: int | None = None, explore: float = 1.0, weight: float = 1.0
    ) -> None:
        """An episode that ended in `cell`, by itself or by the limits that the task has without a budget.

        Args:
            cap: the cell after which a budget might have cut it; None: there was none. Past it it stands for 1 / `explore` of its kind.
            explore: the probability with which it went on there.
        """
        past = weight / explore
        last = cell if cap is None else min(cell, cap)
        self._enter(0, last, weight)
        self._enter(last, cell, past)
        own = weight if last == cell else past
        at = cell - 1
        self.ended[at] += own
        self.success[at] += own * success
        self.reward[at] += own * reward
        self.reward_sq[at] += own * reward * reward

    def add_cut(self, cap: int, weight: float = 1.0) -> None:
        """An episode that was cut after cell `cap`: it did not end there, and nothing is known of what would have come."""
        self._enter(0, cap, weight)

    def _enter(self, after: int, upto: int, weight: float) -> None:
        self.entered[after:upto] += weight
        self.entered_sq[after:upto] += weight * weight

    def add(self, other: DepthLaw) -> None:
        """Adds another law's counts (of another bucket)."""
        for name in _FIELDS:
            getattr(self, name)[:] += getattr(other, name)

    def estimate(self) -> Incidence:
        return Incidence.of(self)

    def state(self) -> dict[str, Doubles]:
        return {name: getattr(self, name).copy() for name in _FIELDS}

    def restore(self, state: Mapping[str, NDArray[Any]]) -> None:
        """Raises:
        ValueError: the arrays are of another number of cells.
        """
        for name in _FIELDS:
            values = np.asarray(state[name], dtype=np.float64)
            if values.shape != (self.cells,):
                raise ValueError(
                    f"budget: the checkpoint's depths have {values.size} cells, this run's {self.cells}; "
                    "keep the limits on turns and tokens as they were, or start without the checkpoint"
                )
            getattr(self, name)[:] = values


@dataclass(frozen=True)
class Interval:
    """An estimate with its standard error and confidence limits."""

    value: float
    error: float
    low: float
    high: float


@dataclass(frozen=True)
class Incidence:
    """What a law says. Arrays over depths 0..K are of length K + 1, those over cells of length K (index k - 1).

    Attributes:
        hazard, success_hazard, reward_hazard, reward_sq_hazard: of a cell, given that it is entered.
        survival: share of episodes that go beyond each depth.
        success, reward: gathered up to each depth: the incidence of success, and the expected reward.
        effective: effective number of episodes seen to enter each cell.
    """

    hazard: Doubles
    success_hazard: Doubles
    reward_hazard: Doubles
    reward_sq_hazard: Doubles
    survival: Doubles
    success: Doubles
    reward: Doubles
    effective: Doubles

    @staticmethod
    def of(law: DepthLaw) -> Incidence:
        seen = law.entered > 0
        entered = np.where(seen, law.entered, 1.0)
        hazard, success, reward, square = (
            np.where(seen, values / entered, 0.0) for values in (law.ended, law.success, law.reward, law.reward_sq)
        )
        hazard = np.minimum(hazard, 1.0)  # rounding of forgotten weights
        survival = np.concatenate([[1.0], np.cumprod(1.0 - hazard)])
        return Incidence(
            hazard,
            success,
            reward,
            square,
            survival,
            np.concatenate([[0.0], np.cumsum(survival[:-1] * success)]),
            np.concatenate([[0.0], np.cumsum(survival[:-1] * reward)]),
            np.where(seen, law.entered**2 / np.where(seen, law.entered_sq, 1.0), 0.0),
        )

    @property
    def cells(self) -> int:
        return int(self.hazard.size)

    def success_by(self, depth: int, level: float = 0.95) -> Interval:
        """Incidence of success up to `depth`, with confidence limits on the logit scale."""
        return _interval(float(self.success[depth]), self._variance(*self._up_to(depth, self.success, 1.0)), self._least(depth), level)

    def coverage(self, depth: int, level: float = 0.95) -> Interval:
        """Share of all eventual success that is reached by `depth`. 1 where no success is known of."""
        total = float(self.success[-1])
        if total <= 0:
            return Interval(1.0, math.nan, 0.0, 1.0)
        share = float(self.success[depth]) / total
        mark, end = self._up_to(depth, self.success, 1.0 / total)
        all_mark, all_end = self._up_to(self.cells, self.success, share / total)
        return _interval(share, self._variance(mark - all_mark, end - all_end), self._least(self.cells) * total, level)

    def value(self, depth: int, *, reward: bool = True) -> Interval:
        """Expected reward (or probability of success) of an episode that goes beyond `depth`: the value of going on.

        NaN where no episode does. The limits are those of a mean in [0, 1] if `reward` is false, else plain normal ones.
        """
        left = float(self.survival[depth])
        gathered = self.reward if reward else self.success
        if left <= 0:
            return Interval(math.nan, math.nan, math.nan, math.nan)
        value = float(gathered[-1] - gathered[depth]) / left
        mark = np.where(np.arange(1, self.cells + 1) > depth, self.survival[:-1], 0.0) / left
        end = -np.where(np.arange(1, self.cells + 1) > depth, _ratio(gathered[-1] - gathered[1:], 1.0 - self.hazard), 0.0) / left
        variance = self._variance(mark, end, reward=reward)
        if not reward:
            return _interval(value, variance, self.followed(depth), 0.95)
        error = math.sqrt(variance)
        reach = NormalDist().inv_cdf(0.975) * error
        return Interval(value, error, value - reach, value + reach)

    def followed(self, depth: int) -> float:
        """Effective number of episodes that were seen to go beyond `depth` and would not have been cut before their end."""
        if depth >= self.cells or self.survival[depth] <= 0:
            return 0.0
        # of those that enter a later cell only the share S(k - 1) / S(depth) is left, cut or not: it must not count as lost
        reached = self.survival[depth:-1] / self.survival[depth]
        counts = self.effective[depth:][reached > 0] / reached[reached > 0]
        return float(counts.min()) if counts.size else 0.0

    def values_by_depth(self) -> tuple[Doubles, Doubles]:
        """`value` of every depth 0..K and its variance, at once; 0 where no episode goes on."""
        gathered, left = self.reward, self.survival
        mark, end = left[:-1], -_ratio(gathered[-1] - gathered[1:], 1.0 - self.hazard)
        one = self._spread(mark, end, self.reward_hazard, self.reward_sq_hazard)
        later = np.concatenate([np.cumsum(_ratio(one, self.effective)[::-1])[::-1], [0.0]])
        return _ratio(gathered[-1] - gathered, left), np.maximum(_ratio(later, left * left), 0.0)

    def followed_by_depth(self) -> Doubles:
        """`followed` of every depth 0..K at once."""
        seen = np.where(self.survival[:-1] > 0, _ratio(self.effective, self.survival[:-1]), np.inf)
        least = np.minimum.accumulate(seen[::-1])[::-1]
        return np.concatenate([np.where(np.isfinite(least), least, 0.0), [0.0]]) * self.survival

    def _up_to(self, depth: int, gathered: Doubles, scale: float) -> tuple[Doubles, Doubles]:
        """Derivatives of `scale` x gathered[depth] by the mark hazards and by the hazards of each cell."""
        inside = np.arange(1, self.cells + 1) <= depth
        mark = np.where(inside, self.survival[:-1], 0.0)
        end = -np.where(inside, _ratio(gathered[depth] - gathered[1:], 1.0 - self.hazard), 0.0)
        return mark * scale, end * scale

    def _variance(self, mark: Doubles, end: Doubles, *, reward: bool = False) -> float:
        first = self.reward_hazard if reward else self.success_hazard
        second = self.reward_sq_hazard if reward else self.success_hazard
        return max(float(_ratio(self._spread(mark, end, first, second), self.effective).sum()), 0.0)

    def _spread(self, mark: Doubles, end: Doubles, first: Doubles, second: Doubles) -> Doubles:
        """[K]: variance of one draw's part in a functional with these derivatives by the mark hazard and the hazard of each cell."""
        return mark**2 * second + 2 * mark * end * first + end**2 * self.hazard - (mark * first + end * self.hazard) ** 2

    def _least(self, depth: int) -> float:
        """Effective number behind an estimate that reaches to `depth`: what limits hold on to when no variance can be seen."""
        reached = self.survival[:depth]
        counts = self.effective[:depth][reached > 0] / reached[reached > 0]
        return float(counts.min()) if counts.size else 0.0


def _ratio(above: Doubles, below: Doubles) -> Doubles:
    """above / below, 0 where below is 0 (nothing is left to differ there)."""
    return np.divide(above, below, out=np.zeros_like(above), where=below > 0)


def _interval(value: float, variance: float, count: float, level: float) -> Interval:
    """Limits on the logit scale; where the variance degenerates (0 or 1), Wilson's with the effective number `count`."""
    z = NormalDist().inv_cdf(0.5 + level / 2)
    error = math.sqrt(variance)
    if 0 < value < 1 and variance > 0:
        centre, reach = math.log(value / (1 - value)), z * error / (value * (1 - value))
        return Interval(value, error, _expit(centre - reach), _expit(centre + reach))
    low, high = wilson(value, count, z)
    return Interval(value, error, low, high)


def wilson(share: float, count: float, z: float) -> tuple[float, float]:
    """Wilson's score limits of a share seen in `count` (effective) draws; (0, 1) without any."""
    if count <= 0:
        return 0.0, 1.0
    share = min(max(share, 0.0), 1.0)
    centre = (share + z * z / (2 * count)) / (1 + z * z / count)
    reach = z / (1 + z * z / count) * math.sqrt(share * (1 - share) / count + z * z / (4 * count * count))
    return max(0.0, centre - reach), min(1.0, centre + reach)


def wilson_high(share: Doubles, count: Doubles, z: float) -> Doubles:
    """The upper limits of `wilson` for arrays."""
    share, known = np.clip(share, 0.0, 1.0), np.maximum(count, 1e-12)
    centre = share + z * z / (2 * known)
    reach = z * np.sqrt(share * (1 - share) / known + z * z / (4 * known * known))
    return np.asarray(np.minimum((centre + reach) / (1 + z * z / known), 1.0))


def _expit(x: float) -> float:
    return 1 / (1 + math.exp(-x)) if x >= 0 else math.exp(x) / (1 + math.exp(x))
