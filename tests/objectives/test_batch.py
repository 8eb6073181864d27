"""What a packed batch must satisfy, and how a step is counted."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from surogate_rl.batch import NO_TARGET, PackedBatch, Totals


def good() -> PackedBatch:
    return PackedBatch(
        tokens=np.array([1, 2, 3, 4, 5, 6, 7], np.int32),
        positions=np.array([0, 1, 2, 0, 1, 2, 3], np.int32),
        cu_seqlens=np.array([0, 3, 7], np.int32),
        targets=np.array([2, 3, NO_TARGET, NO_TARGET, 6, 7, NO_TARGET], np.int32),
        mask=np.array([0, 1, 0, 0, 1, 1, 0], bool),
        per_token={"behaviour_logp": np.zeros(7, np.float32)},
        per_sequence={"truncated": np.array([0, 1], np.float32)},
        pair=np.array([4, 4], np.int32),
        ids=np.array([10, 11], np.int64),
    )


def array(*values: Any, dtype: Any = np.int32) -> np.ndarray:
    return np.array(values, dtype)


def test_a_good_batch() -> None:
    batch = good()
    batch.validate()
    assert (batch.num_tokens, batch.num_sequences, batch.num_trained) == (7, 2, 3)
    assert batch.segment_of_token().tolist() == [0, 0, 0, 1, 1, 1, 1]
    assert batch.trained_per_sequence().tolist() == [1, 2]
    assert batch.pairs().tolist() == [[0, 1]]


def test_an_empty_batch_is_good() -> None:
    empty = np.zeros(0, np.int32)
    batch = PackedBatch(empty, empty, np.zeros(1, np.int32), empty, np.zeros(0, bool))
    batch.validate()
    assert Totals.of([batch]) == Totals(0, 0)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"positions": array(0, 1, 2, 3, 4, 5, 6)}, "positions: must count from 0 within each segment"),
        ({"positions": array(0, 1, 2)}, r"positions: shape \(3,\), expected \(7,\)"),
        ({"tokens": array(1, 2, 3, 4, 5, 6, 7, dtype=np.int64)}, "tokens: dtype int64, expected int32"),
        ({"cu_seqlens": array(0, 3, 6)}, "cu_seqlens: runs from 0 to 6, expected 0 to 7"),
        ({"cu_seqlens": array(0, 0, 7)}, "cu_seqlens: must increase strictly"),
        ({"targets": array(2, 3, 4, NO_TARGET, 6, 7, NO_TARGET)}, "the last position of a segment has a target"),
        ({"targets": array(2, 9, NO_TARGET, NO_TARGET, 6, 7, NO_TARGET)}, "targets: 9 at position 1, but the next token is 3"),
        ({"targets": array(2, -1, NO_TARGET, NO_TARGET, 6, 7, NO_TARGET)}, "targets: -1 at position 1, expected a token id or -100"),
        ({"mask": array(0, 1, 1, 0, 1, 1, 0, dtype=bool)}, "mask: true at position 2, which has no target"),
        ({"per_token": {"x": np.zeros(6, np.float32)}}, r"per_token\['x'\]: shape \(6,\), expected \(7,\)"),
        ({"per_token": {"x": np.zeros(7)}}, r"per_token\['x'\]: dtype float64, expected float32"),
        ({"per_token": {"x": np.full(7, np.nan, np.float32)}}, r"per_token\['x'\]: nan at trained position 1"),
        ({"per_sequence": {"x": np.array([0, np.inf], np.float32)}}, r"per_sequence\['x'\]: inf for segment 1"),
        ({"pair": array(1, 2)}, r"pair: pair 1 has 1 segment\(s\), expected 2"),
        ({"ids": array(3, 3, dtype=np.int64)}, "ids: a number occurs twice"),
    ],
)
def test_what_is_refused(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        replace(good(), **change).validate()


def test_values_outside_the_mask_may_be_anything() -> None:
    values = np.zeros(7, np.float32)
    values[[0, 2, 3, 6]] = np.nan
    replace(good(), per_token={"x": values}).validate()


def test_totals() -> None:
    assert Totals.of([good(), good()]) == Totals(tokens=6, sequences=4, pairs=2, chosen_tokens=2)
    assert Totals.of([good()], mask_truncated=True) == Totals(tokens=1, sequences=2, pairs=1, chosen_tokens=1)
    assert Totals(1, 2, 3, 4) + Totals(10, 20, 30, 40) == Totals(11, 22, 33, 44)
    none = replace(good(), mask=np.zeros(7, bool))
    assert Totals.of([none]) == Totals(0, 0, 0, 0)


def test_pairs_keep_the_chosen_first_wherever_they_lie() -> None:
    batch = PackedBatch(
        tokens=np.ones(4, np.int32),
        positions=np.zeros(4, np.int32),
        cu_seqlens=np.arange(5, dtype=np.int32),
        targets=np.full(4, NO_TARGET, np.int32),
        mask=np.zeros(4, bool),
        pair=np.array([9, 2, 2, 9], np.int32),
    )
    assert batch.pairs().tolist() == [[0, 3], [1, 2]]
    with pytest.raises(ValueError, match="carries no pair numbers"):
        replace(batch, pair=None).pairs()
