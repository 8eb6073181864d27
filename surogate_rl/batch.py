"""The packed batch: the one thing that crosses from Python to the learner."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
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
        per_sequence: float32 [S] arrays by name (``advantage``, ``weight``...). ``share``: which part of its completion a sequence
            is, by trained tokens, where completions may have several; their shares add up to 1, and they count as one sequence.
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

    def trained_per_sequence(self) -> NDArray[np.int64]:
        """int64 [S]: trained tokens of each segment."""
        return np.bincount(self.segment_of_token()[self.mask], minlength=self.num_sequences).astype(np.int64)

    def pairs(self) -> NDArray[np.int64]:
        """int64 [P, 2]: the segments of each pair, the chosen one first; pairs in the order of their chosen segments.

        Raises:
            ValueError: there are no pair numbers, or a number does not occur exactly twice.
        """
        if self.pair is None:
            raise ValueError("PackedBatch.pair: a preference loss needs pairs, but the batch carries no pair numbers")
        numbers, counts = np.unique(self.pair, return_counts=True)
        if (counts != 2).any():
            worst = int(np.argmax(counts != 2))
            found = f"pair {int(numbers[worst])} has {int(counts[worst])} segment(s)"
            raise ValueError(f"PackedBatch.pair: {found}, expected 2 (chosen, rejected)")
        rows = np.argsort(self.pair, kind="stable").reshape(-1, 2).astype(np.int64)
        return rows[np.argsort(rows[:, 0], kind="stable")]

    def validate(self) -> None:
        """Checks that the arrays fit each other. Costs O(T).

        Raises:
            ValueError: names the array, what it holds and what was expected.
        """
        tokens, sequences = _check_layout(self)
        _check_targets(self)
        for name, array in self.per_token.items():
            _check_array(f"per_token[{name!r}]", array, np.float32, tokens)
            bad = self.mask & ~np.isfinite(array)
            if bad.any():
                row = int(np.argmax(bad))
                raise ValueError(f"PackedBatch.per_token[{name!r}]: {array[row]} at trained position {row}, expected a finite number")
        for name, array in self.per_sequence.items():
            _check_array(f"per_sequence[{name!r}]", array, np.float32, sequences)
            if not np.isfinite(array).all():
                row = int(np.argmax(~np.isfinite(array)))
                raise ValueError(f"PackedBatch.per_sequence[{name!r}]: {array[row]} for segment {row}, expected a finite number")
        if self.pair is not None:
            _check_array("pair", self.pair, np.int32, sequences)
            self.pairs()
        if self.ids is not None:
            _check_array("ids", self.ids, np.int64, sequences)
            if np.unique(self.ids).size != sequences:
                raise ValueError("PackedBatch.ids: a number occurs twice, expected each sequence to have its own")


def _check_array(name: str, array: NDArray[np.generic], dtype: type[np.generic], length: int) -> None:
    if array.ndim != 1 or array.shape[0] != length:
        raise ValueError(f"PackedBatch.{name}: shape {array.shape}, expected ({length},)")
    if array.dtype != np.dtype(dtype):
        raise ValueError(f"PackedBatch.{name}: dtype {array.dtype}, expected {np.dtype(dtype)}")


def _check_layout(batch: PackedBatch) -> tuple[int, int]:
    if batch.tokens.ndim != 1:
        raise ValueError(f"PackedBatch.tokens: shape {batch.tokens.shape}, expected one dimension")
    if batch.cu_seqlens.ndim != 1 or batch.cu_seqlens.shape[0] < 1:
        raise ValueError(f"PackedBatch.cu_seqlens: shape {batch.cu_seqlens.shape}, expected (segments + 1,)")
    tokens, sequences = batch.num_tokens, batch.num_sequences
    _check_array("tokens", batch.tokens, np.int32, tokens)
    _check_array("cu_seqlens", batch.cu_seqlens, np.int32, sequences + 1)
    _check_array("positions", batch.positions, np.int32, tokens)
    _check_array("targets", batch.targets, np.int32, tokens)
    _check_array("mask", batch.mask, np.bool_, tokens)
    if batch.cu_seqlens[0] != 0 or batch.cu_seqlens[-1] != tokens:
        ends = f"{int(batch.cu_seqlens[0])} to {int(batch.cu_seqlens[-1])}"
        raise ValueError(f"PackedBatch.cu_seqlens: runs from {ends}, expected 0 to {tokens}, the number of tokens")
    if (np.diff(batch.cu_seqlens) <= 0).any():
        raise ValueError("PackedBatch.cu_seqlens: must increase strictly (a segment has at least one token)")
    starts = np.repeat(batch.cu_seqlens[:-1], np.diff(batch.cu_seqlens))
    if (batch.positions != np.arange(tokens) - starts).any():
        raise ValueError("PackedBatch.positions: must count from 0 within each segment")
    return tokens, sequences


def _check_targets(batch: PackedBatch) -> None:
    has_target = batch.targets != NO_TARGET
    if (has_target & (batch.targets < 0)).any():
        row = int(np.argmax(has_target & (batch.targets < 0)))
        raise ValueError(f"PackedBatch.targets: {int(batch.targets[row])} at position {row}, expected a token id or {NO_TARGET}")
    if has_target[batch.cu_seqlens[1:] - 1].any():
        raise ValueError("PackedBatch.targets: the last position of a segment has a target, which belongs to another segment")
    rows = np.flatnonzero(has_target)
    wrong = batch.targets[rows] != batch.tokens[rows + 1]
    if wrong.any():
        row = int(rows[np.argmax(wrong)])
        found = f"{int(batch.targets[row])} at position {row}"
        raise ValueError(f"PackedBatch.targets: {found}, but the next token is {int(batch.tokens[row + 1])}")
    if (batch.mask & ~has_target).any():
        raise ValueError(f"PackedBatch.mask: true at position {int(np.argmax(batch.mask & ~has_target))}, which has no target")


@dataclass(frozen=True)
class Totals:
    """What the whole optimiser step holds, over all micro-batches and ranks, known before the first backward.

    Every objective divides by these alone, so that accumulation, packing and the number of ranks never change the result.

    Attributes:
        tokens: trained tokens.
        sequences: sequences that take part (for GRPO: scored completions; masking a truncated one does not lower it
            where TRL's would not).
        pairs: preference pairs.
        chosen_tokens: trained tokens of the chosen sequences of the pairs.
        importance: sum of ``per_token["importance"]`` over the trained tokens; 0 where batches do not carry it.
    """

    tokens: int
    sequences: int
    pairs: int = 0
    chosen_tokens: int = 0
    importance: float = 0.0

    def __add__(self, other: Totals) -> Totals:
        return Totals(
            self.tokens + other.tokens,
            self.sequences + other.sequences,
            self.pairs + other.pairs,
            self.chosen_tokens + other.chosen_tokens,
            self.importance + other.importance,
        )

    @staticmethod
    def of(batches: Iterable[PackedBatch], *, mask_truncated: bool = False) -> Totals:
        """Counts one rank's share of the step; `+` adds the ranks'.

        A sequence takes part if it has a trained token, a pair if either of its sequences has one. Sequences that are parts of one
        completion (``per_sequence["share"]``) count as one together; all of them must be among `batches`.

        Args:
            mask_truncated: leave the tokens of truncated sequences out (``per_sequence["truncated"]``). Such a sequence
                still counts as one, as in TRL: a step with many of them learns less, it does not learn louder.
        """
        total = Totals(0, 0)
        shares = 0.0
        for batch in batches:
            trained = batch.trained_per_sequence()
            tokens = trained
            if mask_truncated:
                if "truncated" not in batch.per_sequence:
                    raise ValueError('mask_truncated_completions needs per_sequence["truncated"] (0 or 1 for each sequence)')
                tokens = np.where(batch.per_sequence["truncated"] > 0, 0, trained)
            pairs = chosen = 0
            if batch.pair is not None:
                rows = batch.pairs()
                pairs = int((trained[rows].sum(axis=1) > 0).sum())
                chosen = int(trained[rows[:, 0]].sum())
            sequences = int((trained > 0).sum())
            if "share" in batch.per_sequence:
                shares += float(batch.per_sequence["share"][trained > 0].sum(dtype=np.float64))
                sequences = 0
            importance = batch.per_token.get("importance")
            weighed = 0.0
            if importance is not None:
                kept = batch.mask & (tokens > 0)[batch.segment_of_token()]
                weighed = float(importance[kept].sum(dtype=np.float64))
            total = total + Totals(int(tokens.sum()), sequences, pairs, chosen, weighed)
        return total + Totals(0, round(shares))
