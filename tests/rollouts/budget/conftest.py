"""Episodes of a known law: hazards of success and of other ends by depth, from which everything can be worked out exactly."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest
from numpy.typing import NDArray

Doubles = NDArray[np.float64]


@dataclass(frozen=True)
class Law:
    """Hazards by cell, [K]; in the last one everything ends."""

    success: tuple[float, ...]
    other: tuple[float, ...]

    @property
    def cells(self) -> int:
        return len(self.success)

    @property
    def end_probabilities(self) -> Doubles:
        """[K, 2]: of ending in each cell, with success or otherwise."""
        result, left = np.zeros((self.cells, 2)), 1.0
        for cell, (success, other) in enumerate(zip(self.success, self.other, strict=True)):
            last = cell == self.cells - 1
            result[cell] = left * success, left * (1 - success if last else other)
            left -= result[cell].sum()
        return result

    @property
    def incidence(self) -> Doubles:
        """[K + 1]: probability of success by each depth."""
        return np.concatenate([[0.0], np.cumsum(self.end_probabilities[:, 0])])

    def sample(self, rng: np.random.Generator, count: int) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
        """Cells (from 1) and successes."""
        flat = rng.choice(2 * self.cells, size=count, p=self.end_probabilities.reshape(-1))
        return flat // 2 + 1, flat % 2 == 0


LONG_TAIL = Law(
    success=(0.05, 0.12, 0.15, 0.12, 0.08, 0.06, 0.05, 0.05, 0.04, 0.04, 0.04, 0.04),
    other=(0.02, 0.03, 0.04, 0.05, 0.05, 0.05, 0.05, 0.05, 0.05, 0.05, 0.05, 0.05),
)


@pytest.fixture
def long_tail() -> Law:
    return LONG_TAIL


@pytest.fixture
def make_law() -> type[Law]:
    return Law
