from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest

from surogate_rl.checkpoint import CheckpointError, CheckpointStore

ARRAYS = {"w": np.arange(6, dtype=np.float32).reshape(2, 3), "count": np.array([7], dtype=np.int64)}
STATE = {"step": 1, "position": [1, 2]}


def test_round_trip_and_rotation(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path / "c", keep=2)
    for step in (1, 2, 10):
        store.save(step, ARRAYS, STATE)
    assert store.steps() == [2, 10]
    newest = store.newest()
    assert newest is not None
    loaded = CheckpointStore.load(newest)
    assert loaded.step == 10
    assert loaded.state == STATE
    assert loaded.arrays.keys() == ARRAYS.keys()
    for name, array in ARRAYS.items():
        np.testing.assert_array_equal(loaded.arrays[name], array)
        assert loaded.arrays[name].dtype == array.dtype


def test_a_half_written_one_is_neither_seen_nor_in_the_way(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path, keep=None)
    (tmp_path / ".partial-step-00000003").mkdir()
    (tmp_path / ".partial-step-00000003" / "arrays.safetensors").write_text("half")
    (tmp_path / "step-00000002").mkdir()
    assert store.newest() is None
    store.save(3, ARRAYS, STATE)
    assert store.steps() == [3]


@pytest.mark.parametrize("name", ["arrays.safetensors", "state.json"])
def test_damage_is_noticed(tmp_path: Path, name: str) -> None:
    path = CheckpointStore(tmp_path, keep=None).save(1, ARRAYS, STATE)
    content = bytearray((path / name).read_bytes())
    content[-2] ^= 1
    (path / name).write_bytes(content)
    with pytest.raises(CheckpointError, match=f"{name} differs from its manifest; the file is damaged"):
        CheckpointStore.load(path)
    (path / name).unlink()
    with pytest.raises(CheckpointError, match=f"{name} is missing"):
        CheckpointStore.load(path)


def test_values_that_are_not_finite_are_never_saved(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path, keep=1)
    store.save(1, ARRAYS, STATE)
    with pytest.raises(CheckpointError, match="w holds values that are not finite; nothing was written"):
        store.save(2, {"w": np.array([1.0, np.nan], np.float32)}, STATE)
    assert store.steps() == [1]


def test_a_full_disk_leaves_the_last_good_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = CheckpointStore(tmp_path, keep=1)
    store.save(1, ARRAYS, STATE)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: shutil._ntuple_diskusage(100, 90, 10))  # type: ignore[attr-defined]
    with pytest.raises(CheckpointError, match="MiB are needed; free some space"):
        store.save(2, ARRAYS, STATE)
    assert store.steps() == [1]
    CheckpointStore.load(tmp_path / "step-00000001")


def test_a_later_format_is_refused(tmp_path: Path) -> None:
    path = CheckpointStore(tmp_path, keep=None).save(1, ARRAYS, STATE)
    manifest = json.loads((path / "manifest.json").read_text())
    (path / "manifest.json").write_text(json.dumps(manifest | {"format": 99}))
    with pytest.raises(CheckpointError, match="format 99, this version reads 1"):
        CheckpointStore.load(path)
