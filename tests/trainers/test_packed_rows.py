"""Which examples share a pack of SFT data."""

from __future__ import annotations

import numpy as np

from surogate_rl.trainers.sft import packed_rows


def test_every_example_is_in_one_pack_that_holds_it() -> None:
    lengths = np.random.default_rng(3).integers(1, 60, 500).tolist()
    rows = packed_rows(lengths, 128, seed=0)
    assert sorted(i for row in rows for i in row) == list(range(500))
    assert max(sum(lengths[i] for i in row) for row in rows) <= 128


def test_the_order_is_the_seeds() -> None:
    lengths = [10] * 100
    assert packed_rows(lengths, 40, seed=1) == packed_rows(lengths, 40, seed=1)
    assert packed_rows(lengths, 40, seed=1) != packed_rows(lengths, 40, seed=2)


def test_a_sorted_file_does_not_sort_the_packs() -> None:
    """Two topics, one after the other: by chance 1 of 8 packs of four examples is of one topic; in the file's order nearly all would be."""
    rows = packed_rows([10] * 4000, 40, seed=0)
    pure = np.mean([len({i < 2000 for i in row}) == 1 for row in rows])
    assert abs(pure - 1 / 8) < 4 * np.sqrt(1 / 8 * 7 / 8 / len(rows))
