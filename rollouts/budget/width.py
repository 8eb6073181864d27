"""How many completions each prompt of a step gets, under a fixed sum.

The gradient of a step is the mean over prompts of each prompt's own estimate, whose variance is s^2 / n with s^2 the variance of its
rewards, and whose cost is n x c with c the tokens of one of its completions. Variance times cost of the step is least for n in
proportion to s / sqrt(c) (Neyman's allocation with unequal costs; Cochran, "Sampling Techniques", section 5.5): prompts that still
teach tend to be those that take long, and s alone would make a step dearer than it makes it better. s^2 and c are not known; what past
visits say of them stands for them. Numbers are fixed before any of the visit's rewards, so that they bend nothing: a prompt's
leave-one-out estimate is unbiased whatever its number, and a weight of (mean n) / n makes every prompt count the same.

(To look at some of the visit's rewards first and then decide who gets more is another matter: a prompt whose first rewards are all 0
would be left, although just the rare success among them carries its gradient.)
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray


def shares(variances: Sequence[float], floor: float, costs: Sequence[float] | None = None) -> NDArray[np.float64]:
    """Shares of the step's completions, which add up to 1: `floor` of them is spread evenly, the rest in proportion to the roots of
    expected variance / cost. All equal where no variance is expected at all.

    Args:
        costs: expected tokens of one completion of each prompt, above 0; None: the same for all.
    """
    squares = np.maximum(np.asarray(variances, dtype=np.float64), 0.0)
    roots = np.sqrt(squares if costs is None else squares / np.asarray(costs, dtype=np.float64))
    even = np.full(roots.size, 1.0 / roots.size)
    return even if roots.sum() <= 0 else floor * even + (1 - floor) * roots / roots.sum()


def allocate(
    variances: Sequence[float], total: int, least: int, most: int, floor: float, costs: Sequence[float] | None = None
) -> list[int]:
    """Numbers of completions, each in [`least`, `most`], that add up to `total` exactly; as near to `shares` as the bounds allow.

    Raises:
        ValueError: the bounds do not allow the sum.
    """
    count = len(variances)
    if not count * least <= total <= count * most:
        raise ValueError(f"width budget: {total} completions for {count} prompts do not fit between min {least} and max {most} for each")
    wanted = _bounded(shares(variances, floor, costs), total, least, most)
    # largest remainders; ties go to the earlier prompt
    numbers = np.floor(wanted + 1e-9).astype(np.int64)
    order = np.argsort(-(wanted - numbers), kind="stable")
    for place in order[: total - int(numbers.sum())]:
        numbers[place] += 1
    return [int(number) for number in numbers]


def _bounded(share: NDArray[np.float64], total: int, least: int, most: int) -> NDArray[np.float64]:
    """The numbers c x share held between the bounds, with c such that they add up to `total`."""
    low, high = 0.0, 1.0
    while np.clip(high * share, least, most).sum() < total and high < 1e12:
        high *= 2
    for _ in range(200):
        middle = (low + high) / 2
        if np.clip(middle * share, least, most).sum() < total:
            low = middle
        else:
            high = middle
    wanted = np.clip(high * share, least, most)
    free = (wanted > least) & (wanted < most)
    if free.any():  # takes up what bisection left
        wanted[free] += (total - wanted.sum()) / free.sum()
    elif not math.isclose(wanted.sum(), total):
        room = most - wanted if wanted.sum() < total else least - wanted
        wanted += room * ((total - wanted.sum()) / room.sum())
    return np.asarray(np.clip(wanted, least, most))


def efficiency(variances: Sequence[float], numbers: Sequence[int], costs: Sequence[float] | None = None) -> float:
    """Expected variance x cost of the step under equal numbers over that under `numbers`: 1.3 says that as good a step would otherwise
    take 1.3 times the tokens (the completions, where all cost the same)."""
    values, own = np.asarray(variances, dtype=np.float64), np.asarray(numbers, dtype=np.float64)
    each = np.ones_like(values) if costs is None else np.asarray(costs, dtype=np.float64)
    chosen = float((values / own).sum() * (each * own).sum())
    return float(values.sum() * each.sum()) / chosen if chosen > 0 else 1.0
