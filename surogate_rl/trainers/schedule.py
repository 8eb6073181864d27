"""Learning-rate schedules, as a plain function of the number of updates made so far."""

from __future__ import annotations

import math
from dataclasses import dataclass

from surogate_rl.config.schema import TrainConfig


@dataclass(frozen=True)
class Schedule:
    """Rises linearly from 0 over `warmup` updates, then follows `kind` to 0 at `total` (constant kinds stay at the peak).

    The same curves as transformers' `get_scheduler`. It advances once per applied update: not per micro-batch, not per rank,
    and not for an update that was skipped because its gradient was not finite.
    """

    kind: str
    peak: float
    warmup: int
    total: int

    @classmethod
    def from_config(cls, config: TrainConfig, total_updates: int) -> Schedule:
        warmup = config.warmup_steps or math.ceil(config.warmup_ratio * total_updates)
        kind = config.lr_scheduler_type
        return cls(kind, config.learning_rate, 0 if kind == "constant" else warmup, total_updates)

    def __call__(self, updates: int) -> float:
        """The learning rate of the update that follows `updates` applied ones."""
        if updates < self.warmup:
            return self.peak * updates / self.warmup
        if self.kind in ("constant", "constant_with_warmup"):
            return self.peak
        progress = (updates - self.warmup) / max(1, self.total - self.warmup)
        if self.kind == "linear":
            return self.peak * max(0.0, 1.0 - progress)
        if self.kind == "cosine":
            return self.peak * max(0.0, 0.5 * (1.0 + math.cos(math.pi * progress)))
        raise ValueError(f"lr_scheduler_type: unknown schedule {self.kind!r}; known: linear, cosine, constant, constant_with_warmup")
