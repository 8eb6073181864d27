"""Which rows make up which step: a function of the seed and the step alone, so that a resumed run goes on exactly."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from surogate_rl.config.schema import TrainConfig
from surogate_rl.errors import InputError

SUPERVISED_STEP = "per_device_train_batch_size x gradient_accumulation_steps"


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

    def state(self) -> dict[str, int]:
        """All that the order hangs on, for a checkpoint."""
        return {"rows": self.rows, "per_step": self.per_step, "seed": self.seed}

    def require_same(self, saved: Mapping[str, Any], per_step: str | None) -> None:
        """For going on in the order that a checkpoint was taken in, whose `state` is `saved`.

        Args:
            per_step: what the configuration calls the rows of a step; None: their number may have changed, because the run knows by
                itself how far it is in the data.

        Raises:
            InputError: the order is another one, so that going on would repeat some rows and pass over others.
        """
        otherwise = "or start anew in another output_dir"
        if saved["rows"] != self.rows:
            raise InputError(
                f"resume: the checkpoint was taken over {saved['rows']} rows of training data, there are {self.rows} now; "
                f"restore the data and the settings that shape it, {otherwise}"
            )
        damage = "so that some rows would be repeated and others passed over"
        if saved["seed"] != self.seed:
            raise InputError(
                f"resume: the checkpoint's rows are in the order of seed {saved['seed']}, those of seed {self.seed} are in another one, "
                f"{damage}; set seed: {saved['seed']}, {otherwise}"
            )
        if per_step is not None and saved["per_step"] != self.per_step:
            raise InputError(
                f"resume: a step took {saved['per_step']} rows when the checkpoint was taken and would take {self.per_step} now "
                f"({per_step}), {damage}; set that back to {saved['per_step']}, {otherwise}"
            )

    def row(self, position: int) -> int:
        """Row number at `position`, from 0 over all epochs: the steps of `wrap` laid end to end."""
        epoch, within = divmod(position, self.rows)
        return int(self._permutation(epoch)[within])

    def _permutation(self, epoch: int) -> NDArray[np.int64]:
        return _permutation(self.rows, self.seed, epoch)


@lru_cache(maxsize=4)
def _permutation(rows: int, seed: int, epoch: int) -> NDArray[np.int64]:
    return np.random.default_rng([seed, epoch]).permutation(rows)
