from __future__ import annotations

import json
import resource
import shutil
import signal
import weakref
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file

from surogate_rl.checkpoint import CheckpointError, CheckpointStore, LazyArray

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


def test_at_most_one_array_is_in_memory(tmp_path: Path) -> None:
    """Neither when they are written nor when they are read. The format's own reader agrees on what was written."""
    rng = np.random.default_rng(0)
    values = {"a": rng.normal(size=(3, 5)).astype("f4"), "b": np.array([-(2**40)]), "c": rng.normal(size=7), "d": np.zeros((0, 4), "f4")}
    alive: list[weakref.ref[np.ndarray]] = []

    def make(name: str) -> np.ndarray:
        assert all(earlier() is None for earlier in alive)
        made = values[name].copy()
        alive.append(weakref.ref(made))
        return made

    lazy = {name: LazyArray(value.shape, value.dtype, partial(make, name)) for name, value in values.items()}
    path = CheckpointStore(tmp_path, keep=None).save(1, lazy, STATE)
    assert len(alive) == 4
    arrays = CheckpointStore.load(path).arrays
    for found in (load_file(path / "arrays.safetensors"), arrays):
        assert set(found) == set(values)
        for name, value in values.items():
            assert found[name].dtype == value.dtype
            np.testing.assert_array_equal(found[name], value)
    assert arrays["a"] is not arrays["a"]
    assert "e" not in arrays
    wrong = {"w": LazyArray((2,), np.dtype(np.float32), lambda: np.zeros(3, np.float32))}
    with pytest.raises(CheckpointError, match=r"w is float32 \[3\], float32 \[2\] was said; nothing was written"):
        CheckpointStore(tmp_path, keep=None).save(2, wrong, STATE)
    assert [path.name for path in tmp_path.iterdir()] == ["step-00000001"]


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
    with pytest.raises(CheckpointError, match=f"{name} differs from its manifest, it is damaged"):
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


def test_a_write_that_fails_leaves_the_last_good_one_and_nothing_else(tmp_path: Path) -> None:
    """The kernel refuses to write past a size, as a full disk does, in the middle of the arrays."""
    store = CheckpointStore(tmp_path, keep=1)
    store.save(1, ARRAYS, STATE)
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (8192, before[1]))
    try:
        with pytest.raises(CheckpointError, match=r"^checkpoint of step 2: .* cannot be written to: .*earlier checkpoints are untouched$"):
            store.save(2, {"w": np.zeros(100_000, np.float32)}, STATE)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, handler)
    assert [path.name for path in tmp_path.iterdir()] == ["step-00000001"]
    CheckpointStore.load(tmp_path / "step-00000001")


def test_going_back_past_damaged_ones(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path, keep=None)
    assert store.load_newest(lambda text: None) is None
    for step in (1, 2, 3):
        store.save(step, ARRAYS, STATE)
    (tmp_path / "step-00000003" / "manifest.json").write_text("{")
    with (tmp_path / "step-00000002" / "arrays.safetensors").open("r+b") as file:
        file.truncate(20)
    told: list[str] = []
    found = store.load_newest(told.append)
    assert found is not None
    assert found[0] == tmp_path / "step-00000001"
    assert found[1].step == 1
    assert told[0].startswith(f"{tmp_path}/step-00000003: manifest.json is damaged: ")
    assert told[1] == f"{tmp_path}/step-00000002: arrays.safetensors differs from its manifest, it is damaged; going back to the one before"
    (tmp_path / "step-00000001" / "state.json").unlink()
    with pytest.raises(CheckpointError, match=r"step-00000001: state.json is missing$"):
        store.load_newest(told.append)
