"""What an objective is: a differentiable function of per-token statistics."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal, Protocol

import torch

from surogate_rl.batch import PackedBatch, Totals

Unit = Literal["token", "sequence", "pair", "step"]


@dataclass(frozen=True)
class TokenStats:
    """What the learner says of each position of a batch.

    Attributes:
        logp: float32 [T], natural logarithm of the target's probability, requires grad; 0 where there is no target.
        entropy: float32 [T] in nats, or None when the objective did not ask for it.
    """

    logp: torch.Tensor
    entropy: torch.Tensor | None = None


@dataclass(frozen=True)
class Loss:
    """The loss of one micro-batch's share of the step, already divided by `Totals`: shares of all micro-batches and ranks add up.

    Attributes:
        total: float32 scalar that autograd can differentiate with respect to ``stats.logp`` (and ``stats.entropy``).
        metrics: name -> (sum, weight). Sums and weights are added up over micro-batches and ranks; what is shown is sum / weight.
    """

    total: torch.Tensor
    metrics: Mapping[str, tuple[float, float]] = field(default_factory=dict)


class Objective(Protocol):
    """Attributes:
    unit: what must be seen together. Packing never splits one; ``step`` is the whole optimiser step.
    needs_entropy: whether ``stats.entropy`` is wanted.
    """

    unit: Unit
    needs_entropy: bool

    def __call__(self, stats: TokenStats, batch: PackedBatch, totals: Totals) -> Loss: ...
