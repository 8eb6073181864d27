"""A run that cannot start gives back what it has taken by then, also while its exception is still held."""

from __future__ import annotations

import gc
import multiprocessing
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import surogate_rl
from surogate_rl.data import DataError
from surogate_rl.errors import InputError
from surogate_rl.learner import Learner
from surogate_rl.rollouts.engines.native import NativeEngine
from surogate_rl.trainers import sampling

Base = Callable[..., dict[str, Any]]


def left() -> list[str]:
    """Learners that hold memory, threads and worker processes of runs."""
    found = [f"learner {id(thing)}" for thing in gc.get_objects() if type(thing) is Learner and thing._native is not None]
    found += [f"generator {id(thing)}" for thing in gc.get_objects() if type(thing) is NativeEngine and thing._generator is not None]
    found += [thread.name for thread in threading.enumerate() if thread.name in ("native-engine", "surogate-rl-rollouts")]
    return found + [process.name for process in multiprocessing.active_children()]


def settled() -> list[str]:
    deadline = time.monotonic() + 10
    while left() and time.monotonic() < deadline:
        time.sleep(0.05)
    return left()


@pytest.fixture(autouse=True)
def nothing_before() -> None:
    gc.collect()
    assert settled() == []


def evaluated(path: str) -> dict[str, Any]:
    return {"eval": {"datasets": [{"path": path, "type": "prompt"}], "rewards": ["exact_match"]}}


@pytest.mark.parametrize("command", ["sft", "dpo", "grpo"])
def test_held_out_data_that_is_not_there(base: Base, command: str) -> None:
    """Found when the engine, its event loop and the evaluation's reward processes are there already."""
    run = {"sft": surogate_rl.sft, "dpo": surogate_rl.dpo, "grpo": surogate_rl.grpo}[command]
    with pytest.raises(DataError, match=r"nowhere\.jsonl") as held:
        run(base(command, **evaluated("nowhere.jsonl")))
    assert settled() == []
    assert held.value.__traceback__ is not None


@pytest.mark.parametrize("command", ["sft", "dpo"])
def test_training_data_that_is_not_there(base: Base, data: Path, command: str) -> None:
    """The evaluation is made before."""
    run = {"sft": surogate_rl.sft, "dpo": surogate_rl.dpo}[command]
    config = base(command, **evaluated(str(data / "heldout.jsonl")))
    with pytest.raises(DataError, match=r"nowhere\.jsonl"):
        run(config | {"datasets": [{"path": "nowhere.jsonl"}]})
    assert settled() == []


def test_a_checkpoint_that_does_not_fit(base: Base, tmp_path: Path) -> None:
    surogate_rl.sft(base("sft", save_steps=4, output_dir=str(tmp_path / "sft")))
    assert settled() == []
    checkpoint = str(tmp_path / "sft" / "checkpoints" / "step-00000004")
    with pytest.raises(InputError, match="is a checkpoint of 'sft'"):
        surogate_rl.grpo(base("grpo", resume=checkpoint, loss={"beta": 0.1}))
    assert settled() == []


def test_an_engine_that_cannot_be_made(base: Base, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*args: Any, **options: Any) -> Any:
        raise MemoryError("no room for the cache")

    monkeypatch.setattr(sampling, "NativeEngine", fails)
    with pytest.raises(MemoryError, match="no room for the cache"):
        surogate_rl.grpo(base("grpo"))
    assert settled() == []


def test_a_run_that_ends(base: Base, data: Path) -> None:
    for command, run in (("sft", surogate_rl.sft), ("grpo", surogate_rl.grpo)):
        config = base(command, **evaluated(str(data / "heldout.jsonl")))
        run(config | {"output_dir": config["output_dir"] + command})
        assert settled() == []
