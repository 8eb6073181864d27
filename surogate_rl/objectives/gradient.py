"""From log-probabilities to their gradient: where numpy meets autograd."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from surogate_rl.batch import FloatArray, PackedBatch, Totals
from surogate_rl.objectives.base import Objective, TokenStats, merge_metrics


class Seeds(NamedTuple):
    """What an objective says of one batch.

    Attributes:
        loss: the batch's share of the step's loss.
        dlogp: float32 [T], d loss / d logp; 0 outside the mask.
        dentropy: float32 [T], d loss / d entropy, or None where the loss does not depend on it.
        metrics: name -> (sum, weight).
    """

    loss: float
    dlogp: FloatArray
    dentropy: FloatArray | None
    metrics: dict[str, tuple[float, float]]

    @property
    def finite(self) -> bool:
        """Whether loss and gradients are; if not, the step must be skipped on all ranks."""
        arrays = [self.dlogp] if self.dentropy is None else [self.dlogp, self.dentropy]
        return math.isfinite(self.loss) and all(bool(np.isfinite(array).all()) for array in arrays)


def seeds(objective: Objective, logp: FloatArray, entropy: FloatArray | None, batch: PackedBatch, totals: Totals) -> Seeds:
    """Differentiates an objective.

    Args:
        logp, entropy: float32 [T], what the learner returned for the batch; copied.

    Returns:
        Numbers that are not finite are returned as they are (see `Seeds.finite`), not raised: skipping is the trainer's decision.

    Raises:
        ValueError: a shape does not fit, or the objective wants entropy that is not there.
    """
    leaf = _leaf("logp", logp, batch)
    entropy_leaf = None
    if objective.needs_entropy:
        if entropy is None:
            raise ValueError("the objective needs the entropy of each position, but none was given")
        entropy_leaf = _leaf("entropy", entropy, batch)
    with torch.enable_grad():
        loss = objective(TokenStats(leaf, entropy_leaf), batch, totals)
        if loss.total.requires_grad:
            torch.autograd.backward(loss.total)
    return Seeds(
        float(loss.total.detach()),
        _gradient(leaf, batch),
        None if entropy_leaf is None or entropy_leaf.grad is None else _gradient(entropy_leaf, batch),
        dict(loss.metrics),
    )


@dataclass(frozen=True)
class StepSeeds:
    """What an objective says of all of a rank's micro-batches of a step.

    Attributes:
        loss: their sum.
        dlogp, dentropy: one array per micro-batch.
        metrics: name -> (sum, weight), merged.
    """

    loss: float
    dlogp: list[FloatArray]
    dentropy: list[FloatArray | None]
    metrics: dict[str, tuple[float, float]]
    finite: bool


def step_seeds(
    objective: Objective,
    logps: Sequence[FloatArray],
    entropies: Sequence[FloatArray | None],
    batches: Sequence[PackedBatch],
    totals: Totals,
) -> StepSeeds:
    """`seeds` over the micro-batches of a step, which an objective of unit `step` sees as one batch."""
    if objective.unit == "step" and len(batches) > 1:
        whole = concatenate(batches)
        has_entropy = [entropy for entropy in entropies if entropy is not None]
        entropy = np.concatenate(has_entropy) if len(has_entropy) == len(batches) else None
        joint = seeds(objective, np.concatenate(logps), entropy, whole, totals)
        dentropy: list[FloatArray | None] = [None] * len(batches)
        if joint.dentropy is not None:
            dentropy = list(split(joint.dentropy, batches))
        return StepSeeds(joint.loss, split(joint.dlogp, batches), dentropy, merge_metrics([joint.metrics]), joint.finite)
    parts = [seeds(objective, logp, entropy, batch, totals) for logp, entropy, batch in zip(logps, entropies, batches, strict=True)]
    return StepSeeds(
        math.fsum(part.loss for part in parts) if all(math.isfinite(part.loss) for part in parts) else math.nan,
        [part.dlogp for part in parts],
        [part.dentropy for part in parts],
        merge_metrics(part.metrics for part in parts),
        all(part.finite for part in parts),
    )


def concatenate(batches: Sequence[PackedBatch]) -> PackedBatch:
    """One batch of several. Pair numbers are given anew, since each micro-batch may count its own; ids are kept.

    Raises:
        ValueError: there is no batch, or they do not carry the same arrays.
    """
    if not batches:
        raise ValueError("concatenate: there is no batch, expected one or more")
    first = batches[0]
    for index, batch in enumerate(batches):
        for kind in ("per_token", "per_sequence"):
            names, expected = set(getattr(batch, kind)), set(getattr(first, kind))
            if names != expected:
                raise ValueError(f"concatenate: {kind} of batch {index} holds {sorted(names)}, that of batch 0 {sorted(expected)}")
        for kind in ("pair", "ids"):
            if (getattr(batch, kind) is None) != (getattr(first, kind) is None):
                raise ValueError(f"concatenate: only some of the batches have {kind}")
    offsets = np.cumsum([0] + [batch.num_tokens for batch in batches])
    ends = [batch.cu_seqlens[1:] + offset for batch, offset in zip(batches, offsets, strict=False)]
    return PackedBatch(
        tokens=np.concatenate([batch.tokens for batch in batches]),
        positions=np.concatenate([batch.positions for batch in batches]),
        cu_seqlens=np.concatenate([np.zeros(1, np.int64), *ends]).astype(np.int32),
        targets=np.concatenate([batch.targets for batch in batches]),
        mask=np.concatenate([batch.mask for batch in batches]),
        per_token={name: np.concatenate([batch.per_token[name] for batch in batches]) for name in first.per_token},
        per_sequence={name: np.concatenate([batch.per_sequence[name] for batch in batches]) for name in first.per_sequence},
        pair=_join_pairs(batches),
        ids=None if first.ids is None else np.concatenate([batch.ids for batch in batches if batch.ids is not None]),
    )


def split(array: FloatArray, batches: Sequence[PackedBatch]) -> list[FloatArray]:
    """Cuts a [T] array of ``concatenate(batches)`` into one per batch (copies)."""
    ends = np.cumsum([batch.num_tokens for batch in batches])
    if array.shape != (int(ends[-1]),):
        raise ValueError(f"split: shape {array.shape}, expected ({int(ends[-1])},), the tokens of all batches")
    return [part.copy() for part in np.split(array, ends[:-1])]


def _join_pairs(batches: Sequence[PackedBatch]) -> NDArray[np.int32] | None:
    joined: list[NDArray[np.int32]] = []
    count = 0
    for batch in batches:
        if batch.pair is None:
            return None
        numbers, own = np.unique(batch.pair, return_inverse=True)
        joined.append((own + count).astype(np.int32))
        count += numbers.size
    return np.concatenate(joined)


def _leaf(name: str, values: FloatArray, batch: PackedBatch) -> torch.Tensor:
    if values.shape != (batch.num_tokens,):
        raise ValueError(f"{name}: shape {values.shape}, expected ({batch.num_tokens},), one number for each token of the batch")
    return torch.from_numpy(np.array(values, dtype=np.float32)).requires_grad_()


def _gradient(leaf: torch.Tensor, batch: PackedBatch) -> FloatArray:
    """Where the mask is false there is nothing to train: a user's objective that sums over all positions does not change that."""
    gradient = np.zeros(batch.num_tokens, np.float32) if leaf.grad is None else leaf.grad.numpy()
    return np.where(batch.mask, gradient, np.float32(0)).astype(np.float32)
