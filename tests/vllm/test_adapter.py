"""`sync: adapter` on two real engines: the adapter travels alone, into vLLM's own LoRA."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Callable, Coroutine, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from transformers import AutoConfig

from surogate_rl import _core
from surogate_rl.data.packing import PackSequence, pack
from surogate_rl.learner import Learner, LoraSettings
from surogate_rl.models.load import describe
from surogate_rl.rollouts.engines.vllm.engine import VllmEngine
from surogate_rl.rollouts.engines.vllm.errors import SyncFailed
from surogate_rl.rollouts.engines.vllm.factory import cpu_environment, lora_rank
from surogate_rl.rollouts.engines.vllm.host.surogate_vllm import guard
from surogate_rl.rollouts.engines.vllm.options import VllmOptions
from surogate_rl.rollouts.engines.vllm.replica import Replica
from surogate_rl.rollouts.engines.vllm.weights import Adapter
from surogate_rl.rollouts.types import Completion, GenerateRequest, SamplingParams
from surogate_rl.trainers.event_loop import EventLoop

# two engines of their own, a minute: with `make test PYTEST_ARGS="-m slow"`
pytestmark = [pytest.mark.vllm, pytest.mark.slow, pytest.mark.timeout(900)]

CONTEXT, VOCAB = 128, 320
QWEN3: dict[str, Any] = {
    "model_type": "qwen3",
    "architectures": ["Qwen3ForCausalLM"],
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "hidden_act": "silu",
    "max_position_embeddings": CONTEXT,
    "rms_norm_eps": 1e-6,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
    "tie_word_embeddings": True,
    "attention_bias": False,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}
PROMPTS = [[number, 7, 100 + number] for number in range(8)]


class Pair:
    """Two engines of one run, and its learner."""

    def __init__(self, loop: EventLoop, python: str, log: Path) -> None:
        self._loop = loop
        _, fields = describe(AutoConfig.for_model(**QWEN3), QWEN3, "test")
        lora = LoraSettings(rank=3, alpha=9.0, targets=("q_proj", "v_proj", "o_proj", "up_proj", "down_proj"))
        self.learner = Learner(_core.ModelSpec(**fields), max_tokens=2 * CONTEXT, threads=1, lora=lora)
        for seed, adapter in enumerate((False, True)):
            self.randomise(seed, adapter=adapter)
        arguments = {"max_model_len": CONTEXT, "max_num_seqs": 8, "kv_cache_memory_bytes": 32 << 20, "enforce_eager": True, "seed": 0}
        options = VllmOptions(
            model_config=QWEN3,
            engine_args=arguments | {"enable_lora": True, "max_lora_rank": lora_rank(3), "max_loras": 1},
            dtype="float32",
            valid_vocab=0,
            log=log,
            python=python,
            mode="server",
            environments=(cpu_environment(eager=True),) * 2,
            sync="adapter",
            probe_tolerance=0.01,
        )
        self.engine = VllmEngine(self.learner, options)
        self.run(self.engine.begin())

    def run(self, work: Coroutine[Any, Any, Any]) -> Any:
        return self._loop.run(asyncio.wait_for(work, 600))

    def randomise(self, seed: int, *, adapter: bool) -> None:
        """Other weights, or another adapter."""
        rng = np.random.default_rng(seed)
        for info in self.learner.tensors():
            if info.is_adapter == adapter:
                value = (0.4 if adapter else 0.15) * rng.standard_normal(info.shape)
                self.learner.load(info.name, (value + ("norm" in info.name)).astype(np.float32))

    def sync(self, version: int) -> dict[str, float]:
        self.run(self.engine.update_weights(self.learner, version))
        return self.engine.take_metrics()

    def sample(self) -> list[Completion]:
        async def all_of_them() -> list[Completion]:
            requests = [GenerateRequest(prompt, SamplingParams(max_tokens=30, seed=number)) for number, prompt in enumerate(PROMPTS)]
            return await asyncio.gather(*(self.engine.generate(request) for request in requests))

        completions: list[Completion] = self.run(all_of_them())
        return completions

    def gap(self, completions: Sequence[Completion], adapter: Any = "live") -> float:
        """Mean absolute difference of the engines' log-probabilities from the learner's."""
        differences = []
        for prompt, completion in zip(PROMPTS, completions, strict=True):
            tokens = [*prompt, *completion.tokens]
            (batch,) = pack([[PackSequence(tokens=tokens, mask=[False, *[True] * (len(tokens) - 1)])]], self.learner.max_tokens)
            logp = self.learner.score(batch, adapter=adapter).logp[len(prompt) - 1 : len(tokens) - 1]
            differences.append(np.abs(np.asarray(completion.logps) - logp))
        return float(np.mean(np.concatenate(differences)))


@pytest.fixture(scope="module")
def pair(loop: EventLoop, vllm_python: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    pair = Pair(loop, vllm_python, tmp_path_factory.mktemp("adapter") / "vllm.log")
    yield pair
    pair.run(pair.engine.close())


def test_the_weights_travel_once_and_then_the_adapter_alone(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    sent: list[tuple[int, str]] = []
    call = Replica.call

    async def noted(self: Replica, operation: str, **fields: Any) -> Any:
        sent.append((self.number, operation))
        return await call(self, operation, **fields)

    monkeypatch.setattr(Replica, "call", noted)
    assert pair.sync(1)["vllm/probe_gap"] < 1e-4
    assert {(number, operation) for number in (0, 1) for operation in ("update", "adapter")} < set(sent)
    for version in (2, 3):
        before = pair.sample()
        assert pair.gap(before) < 1e-4
        assert pair.gap(before, "off") > 0.1, "the adapter makes a difference"
        assert {used for used, operation in sent if operation == "generate"} == {0, 1}
        pair.randomise(10 + version, adapter=True)
        assert pair.gap(before) > 0.1, "so does another one"
        sent.clear()
        assert pair.sync(version)["vllm/probe_gap"] < 1e-4
        assert not [operation for _, operation in sent if operation == "update"]
        completions = pair.sample()
        assert pair.gap(completions) < 1e-4
        assert {v for completion in completions for v in completion.versions} == {version}


Damage = Callable[[dict[str, Any]], None]


def other_values(tensors: dict[str, Any]) -> None:
    name = next(name for name in tensors if "up_proj" in name and "lora_B" in name)
    tensors[name] = tensors[name][::-1].copy()


def left_out(tensors: dict[str, Any]) -> None:
    for name in [name for name in tensors if "layers.1.mlp.down_proj" in name]:
        del tensors[name]


@pytest.mark.parametrize("damage", [other_values, left_out])
def test_an_adapter_that_is_not_the_learners_is_found(pair: Pair, monkeypatch: pytest.MonkeyPatch, damage: Damage) -> None:
    from safetensors.numpy import load, save

    fill = Adapter.fill

    def damaged(self: Adapter) -> None:
        fill(self)
        tensors = load(self.tensors)
        damage(tensors)
        self.tensors = save(tensors)

    monkeypatch.setattr(Adapter, "fill", damaged)
    with pytest.raises(SyncFailed, match="not its log-probabilities"):
        pair.sync(4)
    monkeypatch.undo()
    pair.engine._failure = None  # for a run it is the end
    assert pair.sync(5)["vllm/probe_gap"] < 1e-4


def test_what_an_engine_leaves_that_is_killed_as_a_whole(pair: Pair) -> None:
    """Last of all: it ends the engines."""
    pair.sync(6)
    groups = [replica.pid for replica in pair.engine.replicas]
    memory = [path for group in groups if group is not None for path in guard.memory_of(group)]
    assert memory
    for group in groups:
        assert group is not None
        os.killpg(group, signal.SIGKILL)
    pair.run(pair.engine.close())
    assert not [path for path in memory if Path(path).exists()]
