"""Sequences laid end to end into batches of bounded size, in the same way every time."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TypeVar

import numpy as np
from numpy.typing import ArrayLike, NDArray

from surogate_rl.batch import NO_TARGET, BoolArray, FloatArray, IntArray, PackedBatch

D = TypeVar("D", bound=np.generic)

# first-fit looks at this many open bins at the most, so that the time stays linear in the number of units
OPEN_BINS = 128


@dataclass(frozen=True)
class PackSequence:
    """One sequence of n tokens.

    Attributes:
        tokens: [n] ids.
        mask: [n], whether token i is trained, as something to predict; false for the first.
        per_token: by name, [n] values that belong to token i (its behaviour log-probability...).
        per_sequence: by name, one number.
        pair: preference data: sequences with equal numbers form a pair, the chosen one first.
        id: unique within the optimiser step.
    """

    tokens: ArrayLike
    mask: ArrayLike
    per_token: dict[str, ArrayLike] = field(default_factory=dict)
    per_sequence: dict[str, float] = field(default_factory=dict)
    pair: int | None = None
    id: int = 0


def first_fit(lengths: Sequence[int], capacity: int) -> list[list[int]]:
    """Bins of item numbers: each item goes into the first open bin with room for it, else into a new one.

    Items keep their order within a bin, and bins the order of their first items. At most `OPEN_BINS` bins are open; the fullest is closed
    first. The result depends on the arguments alone.

    Raises:
        ValueError: an item longer than `capacity`, or of no length.
    """
    if capacity < 1:
        raise ValueError(f"packing: the capacity must be at least 1 token, it is {capacity}")
    bins: list[list[int]] = []
    open_bins: list[int] = []
    room: list[int] = []
    for item, length in enumerate(lengths):
        if length > capacity:
            raise ValueError(f"packing: unit {item} has {length} tokens, a batch holds {capacity}; make batches larger or the data shorter")
        if length < 1:
            raise ValueError(f"packing: unit {item} has no tokens")
        slot = next((i for i, free in enumerate(room) if free >= length), None)
        if slot is None:
            bins.append([])
            open_bins.append(len(bins) - 1)
            room.append(capacity)
            slot = len(room) - 1
        bins[open_bins[slot]].append(item)
        room[slot] -= length
        if room[slot] == 0 or len(room) > OPEN_BINS:
            full = slot if room[slot] == 0 else room.index(min(room))
            del open_bins[full], room[full]
    return bins


def pack(units: Sequence[Sequence[PackSequence]], max_tokens: int) -> list[PackedBatch]:
    """Packs units, first-fit in their order, into batches of at most `max_tokens` tokens.

    A unit (sequences that must be seen together) is never split. What belongs to token i moves to position i - 1, which predicts it; the
    last position of a sequence predicts nothing, least of all the next one's first token. Only trained tokens are targets.

    Raises:
        ValueError: a unit larger than `max_tokens` (names both), an empty one, arrays of unequal lengths, a trained first token, or
            sequences that do not all have the same arrays.
    """
    arrays = [[_Arrays(sequence) for sequence in unit] for unit in units]
    bins = first_fit([sum(sequence.length for sequence in unit) for unit in arrays], max_tokens)
    return [_batch([sequence for unit in members for sequence in arrays[unit]]) for members in bins]


class _Arrays:
    """A sequence as arrays, shifted to the positions that predict."""

    def __init__(self, sequence: PackSequence) -> None:
        self.sequence = sequence
        self.tokens: IntArray = np.ascontiguousarray(sequence.tokens, dtype=np.int32)
        mask: BoolArray = np.ascontiguousarray(sequence.mask, dtype=np.bool_)
        if self.tokens.ndim != 1 or mask.shape != self.tokens.shape:
            raise ValueError(f"packing: sequence {sequence.id}: tokens of shape {self.tokens.shape} but a mask of shape {mask.shape}")
        if mask.size and mask[0]:
            raise ValueError(f"packing: sequence {sequence.id}: its first token is marked as trained, but nothing predicts it")
        self.length = int(self.tokens.size)
        self.mask = _shifted(mask, np.bool_(False))
        self.targets: IntArray = np.where(self.mask, _shifted(self.tokens, np.int32(NO_TARGET)), np.int32(NO_TARGET)).astype(np.int32)

    def per_token(self, name: str) -> FloatArray:
        values = np.ascontiguousarray(self.sequence.per_token[name], dtype=np.float32)
        if values.shape != self.tokens.shape:
            raise ValueError(
                f"packing: sequence {self.sequence.id}: {name} must have a value per token, shape {self.tokens.shape}, has {values.shape}"
            )
        return _shifted(values, np.float32(0))


def _shifted(values: NDArray[D], last: D) -> NDArray[D]:
    moved = np.empty_like(values)
    moved[:-1] = values[1:]
    moved[-1:] = last
    return moved


def _batch(arrays: Sequence[_Arrays]) -> PackedBatch:
    sequences = [a.sequence for a in arrays]
    first = sequences[0]
    for sequence in sequences:
        for mine, other in ((first.per_token, sequence.per_token), (first.per_sequence, sequence.per_sequence)):
            if set(mine) != set(other):
                raise ValueError(
                    f"packing: sequences {first.id} and {sequence.id} carry different values: {sorted(mine)} against {sorted(other)}"
                )
        if (sequence.pair is None) != (first.pair is None):
            raise ValueError(f"packing: sequences {first.id} and {sequence.id}: one is of a pair, the other is not")
    lengths = [a.length for a in arrays]
    return PackedBatch(
        tokens=np.concatenate([a.tokens for a in arrays]),
        positions=np.concatenate([np.arange(n, dtype=np.int32) for n in lengths]),
        cu_seqlens=np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32),
        targets=np.concatenate([a.targets for a in arrays]),
        mask=np.concatenate([a.mask for a in arrays]),
        per_token={name: np.concatenate([a.per_token(name) for a in arrays]) for name in first.per_token},
        per_sequence={name: np.array([s.per_sequence[name] for s in sequences], dtype=np.float32) for name in first.per_sequence},
        pair=None if first.pair is None else np.array([s.pair for s in sequences], dtype=np.int32),
        ids=np.array([s.id for s in sequences], dtype=np.int64),
    )
