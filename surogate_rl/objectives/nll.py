"""Next-token cross entropy."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import torch

from surogate_rl.batch import FloatArray, PackedBatch, Totals
from surogate_rl.objectives.base import Loss, TokenStats, Unit
from surogate_rl.objectives.segments import Trained, sequence_weight, to_metrics


@dataclass(frozen=True)
class NegativeLogLikelihood:
    """-sum of the trained tokens' log-probabilities / the step's trained tokens.

    A mean over tokens of the whole step, never a mean of means: unit `token`.
    ``per_sequence["weight"]`` multiplies a sequence's share where the batch carries it; the denominator stays.
    """

    unit: ClassVar[Unit] = "token"
    needs_entropy: ClassVar[bool] = False
    needs_reference: ClassVar[bool] = False
    mask_truncated: ClassVar[bool] = False

    def __call__(self, stats: TokenStats, batch: PackedBatch, totals: Totals) -> Loss:
        trained = Trained.of(batch, stats.logp.device)
        nll = -(trained.take(stats.logp) * trained.spread(sequence_weight(batch, stats.logp.device))).sum()
        return Loss((nll / max(totals.tokens, 1)).float(), to_metrics({"loss": (nll, trained.count)}))

    def known_seeds(self, batch: PackedBatch, totals: Totals) -> FloatArray:
        """float32 [T], d loss / d logp, which depends on no log-probability."""
        weight = sequence_weight(batch, torch.device("cpu")).numpy()
        per_token = weight[batch.segment_of_token()] * batch.mask
        return np.asarray(-per_token / max(totals.tokens, 1), dtype=np.float32)
