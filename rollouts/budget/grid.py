"""Depth: how far an episode has come, in turns or in sampled tokens, on a grid of cells."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from surogate_rl.rollouts.types import DepthUnit as DepthUnit

TOKEN_CELLS = 64
"""Cells of equal width of a grid over tokens, at the most. Caps lie on their edges."""


@dataclass(frozen=True)
class DepthGrid:
    """Cells 1..K; cell k holds the depths in (edges[k - 1], edges[k]].

    Attributes:
        unit: what is counted.
        edges: the depth at which each cell ends, ascending; the last one is the horizon, which no episode passes.
    """

    unit: DepthUnit
    edges: tuple[int, ...]

    @staticmethod
    def of(unit: DepthUnit, horizon: int, cells: int = TOKEN_CELLS, bounds: Sequence[int] = ()) -> DepthGrid:
        """Every turn is a cell of its own; tokens share at most `cells` of equal width.

        Args:
            bounds: depths at which a cell ends whatever their width, so that a cap can lie just there; those past the horizon are ignored.

        Raises:
            ValueError: a horizon of less than one.
        """
        if horizon < 1:
            raise ValueError(f"depth budget: the horizon is {horizon} {unit}, expected at least 1")
        if unit == "turns" or horizon <= cells:
            return DepthGrid(unit, tuple(range(1, horizon + 1)))
        edges = {round(horizon * cell / cells) for cell in range(1, cells + 1)} | {bound for bound in bounds if 1 <= bound < horizon}
        return DepthGrid(unit, tuple(sorted(edges)))

    @property
    def cells(self) -> int:
        return len(self.edges)

    @property
    def horizon(self) -> int:
        return self.edges[-1]

    @property
    def widths(self) -> NDArray[np.float64]:
        """Depth units of each cell, [K]."""
        return np.diff(np.array((0, *self.edges), dtype=np.float64))

    def cell(self, depth: int) -> int:
        """The cell that `depth` lies in, from 1; depths of less than 1 count as 1, those past the horizon as the last."""
        return min(int(np.searchsorted(self.edges, max(depth, 1), side="left")) + 1, self.cells)

    def cells_of(self, depths: Sequence[int]) -> NDArray[np.int64]:
        return np.array([self.cell(depth) for depth in depths], dtype=np.int64)

    def floor(self, depth: int) -> int:
        """The last cell that ends at or before `depth`; 0 if none does."""
        return int(np.searchsorted(self.edges, depth, side="right"))
