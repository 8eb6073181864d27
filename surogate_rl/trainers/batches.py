"""Which rows make up which step: a function of the seed and the step alone, so that a resumed run goes on exactly."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from surogate_rl.config.schema import TrainConfig


@dataclass(frozen=True)
class StepOrder:
    """Rows of each step. An epoch is every row once, in an order of its own; its last step takes what is left (`wrap`: is filled up
    with the first rows of the next epoch's order).

    Args:
        rows: how many there are.
        per_step: rows of one step.
        seed: of the shuffling.
        wrap: whether every step has `per_step` rows.
    """

    rows: int
    per_step: int
    seed: int
    wrap: bool = False

    @property
    def steps_per_epoch(self) -> int:
        return math.ceil(self.rows / self.per_step)

    def total_steps(self, config: TrainConfig) -> int:
        return config.max_steps if config.max_steps > 0 else math.ceil(config.num_train_epochs * self.steps_per_epoch)

    def epoch(self, step: int) -> float:
        """Epochs done after `step` steps."""
        return step * self.per_step / self.rows if self.wrap else step / self.steps_per_epoch

    def __call__(self, step: int) -> list[int]:
        """Row numbers of step `step`, counted from 1."""
        if self.wrap:
            first = (step - 1) * self.per_step
            return [self.row(i) for i in range(first, first + self.per_step)]
        epoch, within = divmod(step - 1, self.steps_per_epoch)
        return [int(i) for i in self._permutation(epoch)[within * self.per_step : (within + 1) * self.per_step]]

    def row(self, position: int) -> int:
        """Row number at `position`, from 0 over all epochs: the steps of `wrap` laid end to end."""
        epoch, within = divmod(position, self.rows)
        return int(self._permutation(epoch)[within])

    def _permutation(self, epoch: int) -> NDArray[np.int64]:
        return _permutation(self.rows, self.seed, epoch)


@lru_cache(maxsize=4)
def _permutation(rows: int, seed: int, epoch: int) -> NDArray[np.int64]:
    return np.random.default_rng([seed, epoch]).permutation(rows)
