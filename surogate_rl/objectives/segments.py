"""Sums over the trained positions of a packed batch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
from numpy.typing import NDArray

from surogate_rl.batch import BoolArray, FloatArray, PackedBatch

MAX_LOG_RATIO = 20.0
"""Log-ratios are held below this before `exp`: beyond it float32 heads for infinity, and infinity times a zero gradient is NaN."""


def exp_ratio(log_ratio: torch.Tensor) -> torch.Tensor:
    """exp(log_ratio), held at e^20 (with gradient 0) above log_ratio = 20."""
    return torch.exp(log_ratio.clamp(max=MAX_LOG_RATIO))


def k3(log_ratio: torch.Tensor) -> torch.Tensor:
    """exp(d) - d - 1 with d = log q - log p held below 20: the estimate of KL(p, q) on samples of p, never negative.

    Source: Schulman, "Approximating KL divergence" (2020), estimator k3.
    """
    held = log_ratio.clamp(max=MAX_LOG_RATIO)
    # expm1 rather than exp - 1: near 0 the value is d^2 / 2, which would drown in the rounding of exp.
    return torch.expm1(held) - held


@dataclass(frozen=True)
class Trained:
    """The M positions of a batch that a loss applies to, and their segments. Everything else is never read: what the
    learner says of other positions cannot turn a sum into NaN.

    Attributes:
        rows: int64 [M], positions in the batch.
        segment: int64 [M], segment of each.
        lengths: float64 [S], trained positions of each segment.
    """

    rows: torch.Tensor
    segment: torch.Tensor
    lengths: torch.Tensor

    @staticmethod
    def of(batch: PackedBatch, device: torch.device, *, mask: BoolArray | None = None) -> Trained:
        """`mask`: bool [T], default ``batch.mask``."""
        rows = np.flatnonzero(batch.mask if mask is None else mask)
        segment = batch.segment_of_token()[rows].astype(np.int64)
        lengths = np.bincount(segment, minlength=batch.num_sequences).astype(np.float64)
        as_tensor = partial(torch.as_tensor, device=device)
        return Trained(as_tensor(rows), as_tensor(segment), as_tensor(lengths))

    @property
    def count(self) -> int:
        return int(self.rows.shape[0])

    def take(self, values: torch.Tensor) -> torch.Tensor:
        """float64 [M] of a [T] tensor, differentiable. Everything from here on is float64: T-sized sums cost nothing,
        and in float32 they would depend on how a step is packed."""
        return values[self.rows].double()

    def per_token(self, array: FloatArray) -> torch.Tensor:
        """float64 [M] of a float32 [T] array."""
        return torch.as_tensor(np.ascontiguousarray(array), device=self.rows.device)[self.rows].double()

    def spread(self, values: torch.Tensor) -> torch.Tensor:
        """[M]: of [S] values, each position's segment's."""
        return values[self.segment]

    def sum(self, values: torch.Tensor) -> torch.Tensor:
        """float64 [S]: sums of [M] values by segment, in the order of positions."""
        return torch.zeros_like(self.lengths).index_add(0, self.segment, values)

    def mean(self, values: torch.Tensor) -> torch.Tensor:
        """float64 [S]: means of [M] values by segment, 0 where there is none."""
        return self.sum(values) / self.lengths.clamp(min=1.0)


def field_of(batch: PackedBatch, kind: str, name: str, why: str) -> NDArray[np.float32]:
    """``batch.per_token[name]`` or ``batch.per_sequence[name]``.

    Raises:
        ValueError: the batch has no such array, or of the wrong length.
    """
    fields: Mapping[str, FloatArray] = batch.per_token if kind == "per_token" else batch.per_sequence
    length = batch.num_tokens if kind == "per_token" else batch.num_sequences
    if name not in fields:
        found = ", ".join(sorted(fields)) or "none"
        raise ValueError(f"{why} needs PackedBatch.{kind}[{name!r}], which the batch does not carry (it has: {found})")
    if fields[name].shape != (length,):
        raise ValueError(f"PackedBatch.{kind}[{name!r}]: shape {fields[name].shape}, expected ({length},)")
    return fields[name]


def sequence_weight(batch: PackedBatch, device: torch.device) -> torch.Tensor:
    """float64 [S]: ``per_sequence["weight"]``, 1 where the batch carries none. It multiplies all of a sequence's loss."""
    if "weight" not in batch.per_sequence:
        return torch.ones(batch.num_sequences, dtype=torch.float64, device=device)
    return torch.as_tensor(field_of(batch, "per_sequence", "weight", "a weighted loss"), device=device).double()


def to_metrics(values: Mapping[str, tuple[torch.Tensor, float]]) -> dict[str, tuple[float, float]]:
    """Brings metrics to the host, all at once."""
    if not values:
        return {}
    sums = torch.stack([value.detach().double() for value, _ in values.values()]).tolist()
    return {name: (sums[i], float(weight)) for i, (name, (_, weight)) in enumerate(values.items())}
