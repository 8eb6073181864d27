"""The packed batch: the one thing that crosses from Python to the learner."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

IntArray = NDArray[np.int32]
FloatArray = NDArray[np.float32]
BoolArray = NDArray[np.bool_]

NO_TARGET = -100


@dataclass(frozen=True)
class PackedBatch:
    """Segments laid end to end, never padded. T tokens, S segments (one sequence each).

    Attributes:
        tokens: int32 [T].
        positions: int32 [T], from 0 within each segment.
        cu_seqlens: int32 [S + 1], segment s owns rows ``cu_seqlens[s]:cu_seqlens[s + 1]``.
        targets: int32 [T], the token that position t predicts, ``NO_TARGET`` where there is none. The last position of a
            segment never has one. Log-probabilities exist exactly where there is a target.
        mask: bool [T], where the loss applies; true only where there is a target.
        per_token: float32 [T] arrays by name, aligned with `targets` (``behaviour_logp``, ``proximal_logp``, ``reference_logp``...).
        per_sequence: float32 [S] arrays by name (``advantage``, ``weight``...).
        pair: int32 [S] or None. Preference data: segments with equal numbers form a pair, the chosen one first.
        ids: int64 [S], a number of each sequence that is unique within the optimiser step.
    """

    tokens: IntArray
    positions: IntArray
    cu_seqlens: IntArray
    targets: IntArray
    mask: BoolArray
    per_token: Mapping[str, FloatArray] = field(default_factory=dict)
    per_sequence: Mapping[str, FloatArray] = field(default_factory=dict)
    pair: IntArray | None = None
    ids: NDArray[np.int64] | None = None

    @property
    def num_tokens(self) -> int:
        return int(self.tokens.shape[0])

    @property
    def num_sequences(self) -> int:
        return int(self.cu_seqlens.shape[0]) - 1

    @property
    def num_trained(self) -> int:
        return int(self.mask.sum())

    def segment_of_token(self) -> IntArray:
        """int32 [T]: the segment that each token belongs to."""
        return np.repeat(np.arange(self.num_sequences, dtype=np.int32), np.diff(self.cu_seqlens))


@dataclass(frozen=True)
class Totals:
    """What the whole optimiser step holds, over all micro-batches and ranks, known before the first backward.

    Every objective divides by these alone, so that accumulation, packing and the number of ranks never change the result.

    Attributes:
        tokens: trained tokens.
        sequences: sequences that take part (for GRPO: scored completions; masking a truncated one does not lower it
            where TRL's would not).
        pairs: preference pairs.
    """

    tokens: int
    sequences: int
    pairs: int = 0
