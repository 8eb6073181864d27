"""What an objective is: a differentiable function of per-token statistics."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Literal, Protocol, runtime_checkable

import torch

from surogate_rl.batch import FloatArray, PackedBatch, Totals

Unit = Literal["token", "sequence", "pair", "step"]
Metrics = Mapping[str, tuple[float, float]]


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
            Of a name that ends in ``/max`` or ``/min`` the sum is an extreme, and the greatest or least one is shown.
    """

    total: torch.Tensor
    metrics: Metrics = field(default_factory=dict)


class Objective(Protocol):
    """Attributes:
    unit: what must be seen together. Packing never splits one; ``step`` is the whole optimiser step.
    needs_entropy: whether ``stats.entropy`` is wanted.
    needs_reference: whether the reference's log-probabilities are wanted (``per_token["reference_logp"]``).
    mask_truncated: whether the tokens of truncated sequences are left out of `Totals.tokens`.
    """

    @property
    def unit(self) -> Unit: ...
    @property
    def needs_entropy(self) -> bool: ...
    @property
    def needs_reference(self) -> bool: ...
    @property
    def mask_truncated(self) -> bool: ...

    def __call__(self, stats: TokenStats, batch: PackedBatch, totals: Totals) -> Loss: ...


@runtime_checkable
class LinearObjective(Protocol):
    """An objective that is linear in logp: its gradient is known before the forward pass, so that one pass of the learner does for both."""

    def known_seeds(self, batch: PackedBatch, totals: Totals) -> FloatArray:
        """float32 [T], d loss / d logp."""
        ...


def totals_of(objective: Objective, batches: Iterable[PackedBatch]) -> Totals:
    """Counts what one rank's micro-batches of a step hold, as this objective counts it. Ranks add theirs with `+`."""
    return Totals.of(batches, mask_truncated=objective.mask_truncated)


def merge_metrics(parts: Iterable[Metrics]) -> dict[str, tuple[float, float]]:
    """Adds up the metrics of micro-batches or ranks. Parts with weight 0 say nothing and are left out."""
    merged: dict[str, tuple[float, float]] = {}
    for part in parts:
        for name, (value, weight) in part.items():
            if weight == 0:
                continue
            if name not in merged:
                merged[name] = (value, weight)
            elif name.endswith("/max"):
                merged[name] = (max(merged[name][0], value), weight)
            elif name.endswith("/min"):
                merged[name] = (min(merged[name][0], value), weight)
            else:
                merged[name] = (merged[name][0] + value, merged[name][1] + weight)
    return merged


def mean_metrics(parts: Iterable[Metrics]) -> dict[str, float]:
    """What is shown: sum / weight over all parts (the extreme for ``/max`` and ``/min``). Names without any weight are left out."""
    return {name: value / weight for name, (value, weight) in merge_metrics(parts).items()}
