"""Packing: hand-worked layouts, and a brute-force model of first-fit."""

from __future__ import annotations

import numpy as np
import pytest

from surogate_rl.batch import NO_TARGET
from surogate_rl.data.packing import OPEN_BINS, PackSequence, first_fit, pack


def trained(tokens: list[int], **more: object) -> PackSequence:
    return PackSequence(tokens=tokens, mask=[False] + [True] * (len(tokens) - 1), **more)  # type: ignore[arg-type]


def test_two_segments_have_five_targets_and_never_predict_each_other() -> None:
    (batch,) = pack([[trained([1, 2, 3])], [trained([4, 5, 6, 7])]], 16)
    assert batch.tokens.tolist() == [1, 2, 3, 4, 5, 6, 7]
    assert batch.positions.tolist() == [0, 1, 2, 0, 1, 2, 3]
    assert batch.cu_seqlens.tolist() == [0, 3, 7]
    assert batch.targets.tolist() == [2, 3, NO_TARGET, 5, 6, 7, NO_TARGET]
    assert batch.num_trained == 5
    assert batch.mask.tolist() == [True, True, False, True, True, True, False]
    assert (batch.tokens.dtype, batch.positions.dtype, batch.cu_seqlens.dtype, batch.targets.dtype) == (np.int32,) * 4


def test_masked_tokens_are_no_targets() -> None:
    (batch,) = pack([[PackSequence(tokens=[10, 11, 12, 2], mask=[False, False, True, True])]], 8)
    assert batch.targets.tolist() == [NO_TARGET, 12, 2, NO_TARGET]


def test_values_move_to_the_position_that_predicts() -> None:
    a = trained([1, 2, 3], per_token={"behaviour_logp": [0.0, -1.0, -2.0]}, per_sequence={"advantage": 0.5}, id=7)
    b = trained([4, 5], per_token={"behaviour_logp": [9.0, -3.0]}, per_sequence={"advantage": -1.5}, id=2**40)
    (batch,) = pack([[a], [b]], 8)
    assert batch.per_token["behaviour_logp"].tolist() == [-1.0, -2.0, 0.0, -3.0, 0.0]
    assert batch.per_token["behaviour_logp"].dtype == np.float32
    assert batch.per_sequence["advantage"].tolist() == [0.5, -1.5]
    assert batch.ids is not None
    assert batch.ids.tolist() == [7, 2**40]
    assert batch.pair is None


def test_pairs_stay_together_chosen_first() -> None:
    units = [[trained([10 * i] * (i + 2), pair=i, id=2 * i), trained([10 * i + 1] * 3, pair=i, id=2 * i + 1)] for i in range(5)]
    batches = pack(units, 12)
    pairs = [batch.pair.tolist() for batch in batches if batch.pair is not None]
    assert pairs == [[0, 0, 1, 1], [2, 2], [3, 3], [4, 4]]
    for batch in batches:
        assert batch.ids is not None
        assert (batch.ids % 2).tolist() == [0, 1] * (batch.num_sequences // 2)
        assert batch.num_tokens <= 12


@pytest.mark.parametrize("capacity", [8, 13, 64])
def test_first_fit_against_its_definition(capacity: int) -> None:
    lengths = np.random.default_rng(capacity).integers(1, 9, size=300).tolist()
    bins: list[list[int]] = []
    for item, length in enumerate(lengths):
        for members in bins:
            if sum(lengths[m] for m in members) + length <= capacity:
                members.append(item)
                break
        else:
            bins.append([item])
    assert len(bins) <= 300
    if capacity == 64:  # fewer bins than may be open: exactly the textbook's
        assert first_fit(lengths, capacity) == bins
    packed = first_fit(lengths, capacity)
    assert sorted(item for members in packed for item in members) == list(range(300))
    assert all(sum(lengths[m] for m in members) <= capacity for members in packed)
    assert all(members == sorted(members) for members in packed)
    assert [members[0] for members in packed] == sorted(members[0] for members in packed)
    assert packed == first_fit(lengths, capacity)


def test_first_fit_closes_the_fullest_bin_when_many_are_open() -> None:
    # OPEN_BINS + 1 items that share no bin, item 3 the longest: its bin is closed, the others still take more
    lengths = [6] * (OPEN_BINS + 1) + [1, 4]
    lengths[3] = 9
    packed = first_fit(lengths, 10)
    assert packed[3] == [3]
    assert packed[0] == [0, OPEN_BINS + 1]
    assert packed[1] == [1, OPEN_BINS + 2]


def test_time_is_linear() -> None:
    lengths = np.random.default_rng(0).integers(500, 1000, size=100_000).tolist()
    packed = first_fit(lengths, 1024)
    assert sum(map(len, packed)) == 100_000


def test_a_unit_larger_than_a_batch_names_both_sizes() -> None:
    with pytest.raises(ValueError, match=r"unit 1 has 6 tokens, a batch holds 5"):
        pack([[trained([1, 2])], [trained([1, 2, 3]), trained([4, 5, 6])]], 5)


@pytest.mark.parametrize(
    ("unit", "message"),
    [
        ([PackSequence(tokens=[1, 2], mask=[True, True])], "first token is marked as trained"),
        ([PackSequence(tokens=[1, 2], mask=[False])], "mask of shape"),
        ([PackSequence(tokens=[], mask=[])], "unit 0 has no tokens"),
        ([trained([1, 2], per_token={"x": [1.0]})], "x must have a value per token"),
        ([trained([1, 2], per_sequence={"advantage": 1.0}), trained([1, 2])], "carry different values"),
        ([trained([1, 2], pair=1), trained([1, 2])], "one is of a pair"),
    ],
)
def test_bad_sequences_are_refused(unit: list[PackSequence], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        pack([unit], 16)


def test_nothing_packs_to_nothing() -> None:
    assert pack([], 16) == []
