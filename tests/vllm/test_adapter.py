"""`sync: adapter` on two real engines: the adapter travels alone, into vLLM's own LoRA."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from surogate_rl.learner import LoraSettings
from surogate_rl.rollouts.engines.vllm.errors import SyncFailed
from surogate_rl.rollouts.engines.vllm.factory import cpu_environment, lora_rank
from surogate_rl.rollouts.engines.vllm.host.surogate_vllm import guard
from surogate_rl.rollouts.engines.vllm.replica import Replica
from surogate_rl.rollouts.engines.vllm.weights import Adapter
from surogate_rl.trainers.event_loop import EventLoop

from .conftest import QWEN3, Bench, make_options

# two engines of their own, a minute: with `make test PYTEST_ARGS="-m slow"`
pytestmark = [pytest.mark.vllm, pytest.mark.slow, pytest.mark.timeout(900)]

PROMPTS = [[number, 7, 100 + number] for number in range(8)]


@pytest.fixture(scope="module")
def pair(loop: EventLoop, vllm_python: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Bench]:
    """Two engines of one run."""
    options = make_options(
        vllm_python,
        tmp_path_factory.mktemp("adapter") / "vllm.log",
        QWEN3,
        mode="server",
        environments=(cpu_environment(eager=True),) * 2,
        sync="adapter",
        engine_args={"enable_lora": True, "max_lora_rank": lora_rank(3), "max_loras": 1},
    )
    lora = LoraSettings(rank=3, alpha=9.0, targets=("q_proj", "v_proj", "o_proj", "up_proj", "down_proj"))
    pair = Bench(loop, QWEN3, options, lora=lora)
    yield pair
    pair.close()


def test_the_weights_travel_once_and_then_the_adapter_alone(pair: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    sent: list[tuple[int, str]] = []
    call = Replica.call

    async def noted(self: Replica, operation: str, **fields: Any) -> Any:
        sent.append((self.number, operation))
        return await call(self, operation, **fields)

    monkeypatch.setattr(Replica, "call", noted)
    assert pair.sync()["vllm/probe_gap"] < 1e-4
    assert {(number, operation) for number in (0, 1) for operation in ("update", "adapter")} < set(sent)
    for version in (2, 3):
        before = pair.sample(PROMPTS, max_tokens=30)
        assert pair.gap(PROMPTS, before) < 1e-4
        assert pair.gap(PROMPTS, before, adapter="off") > 0.1, "the adapter makes a difference"
        assert {used for used, operation in sent if operation == "generate"} == {0, 1}
        pair.randomise_adapter(10 + version)
        assert pair.gap(PROMPTS, before) > 0.1, "so does another one"
        sent.clear()
        assert pair.sync()["vllm/probe_gap"] < 1e-4
        assert not [operation for _, operation in sent if operation == "update"]
        completions = pair.sample(PROMPTS, max_tokens=30)
        assert pair.gap(PROMPTS, completions) < 1e-4
        assert {v for completion in completions for v in completion.versions} == {version}


Damage = Callable[[dict[str, Any]], None]


def other_values(tensors: dict[str, Any]) -> None:
    name = next(name for name in tensors if "up_proj" in name and "lora_B" in name)
    tensors[name] = tensors[name][::-1].copy()


def left_out(tensors: dict[str, Any]) -> None:
    for name in [name for name in tensors if "layers.1.mlp.down_proj" in name]:
        del tensors[name]


@pytest.mark.parametrize("damage", [other_values, left_out])
def test_an_adapter_that_is_not_the_learners_is_found(pair: Bench, monkeypatch: pytest.MonkeyPatch, damage: Damage) -> None:
    from safetensors.numpy import load, save

    fill = Adapter.fill

    def damaged(self: Adapter) -> None:
        fill(self)
        tensors = load(self.tensors)
        damage(tensors)
        self.tensors = save(tensors)

    monkeypatch.setattr(Adapter, "fill", damaged)
    with pytest.raises(SyncFailed, match="not its log-probabilities"):
        pair.sync()
    monkeypatch.undo()
    pair.engine._failure = None  # for a run it is the end
    assert pair.sync()["vllm/probe_gap"] < 1e-4


def test_what_an_engine_leaves_that_is_killed_as_a_whole(pair: Bench) -> None:
    """Last of all: it ends the engines."""
    pair.sync()
    groups = [replica.pid for replica in pair.engine.replicas]
    memory = [path for group in groups if group is not None for path in guard.memory_of(group)]
    assert memory
    for group in groups:
        assert group is not None
        os.killpg(group, signal.SIGKILL)
    pair.close()
    assert not [path for path in memory if Path(path).exists()]
