"""Real vLLM engines around tiny random models. Starting one takes half a minute, so tests share them.

vLLM lives in an interpreter of its own: the one that SUROGATE_VLLM_PYTHON names, else the repository's .venv-vllm, else this one.
"""

from __future__ import annotations

import asyncio
import importlib.util
import os
import sys
from collections.abc import Callable, Coroutine, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar
from unittest import mock

import numpy as np
import pytest
from transformers import AutoConfig

from surogate_rl import _core
from surogate_rl.data.packing import PackSequence, pack
from surogate_rl.learner import AdapterUse, Compute, Learner, LoraSettings
from surogate_rl.models.load import describe
from surogate_rl.rollouts.engines.stop_strings import StopStrings
from surogate_rl.rollouts.engines.vllm import engine as vllm_engine
from surogate_rl.rollouts.engines.vllm.engine import VllmEngine
from surogate_rl.rollouts.engines.vllm.factory import cpu_environment
from surogate_rl.rollouts.engines.vllm.options import VllmOptions
from surogate_rl.rollouts.types import Completion, GenerateRequest, SamplingParams
from surogate_rl.trainers.event_loop import EventLoop

T = TypeVar("T")
ROOT = Path(__file__).resolve().parents[2]
CONTEXT = 2048
TOGETHER = 16  # sequences that an engine samples at a time
ADAPTER_SCALE = 0.4
VOCAB, VALID = 320, 256  # the model's vocabulary is padded beyond the tokenizer's

LLAMA: dict[str, Any] = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "hidden_act": "silu",
    "max_position_embeddings": CONTEXT,
    "rms_norm_eps": 1e-5,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
    "tie_word_embeddings": False,
    "attention_bias": False,
    "mlp_bias": False,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}
# biases on q, k and v, and a head that is the embedding
QWEN2 = LLAMA | {"model_type": "qwen2", "architectures": ["Qwen2ForCausalLM"], "tie_word_embeddings": True, "hidden_size": 128}
QWEN3 = LLAMA | {"model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"], "tie_word_embeddings": True, "rms_norm_eps": 1e-6}


@pytest.fixture(scope="session")
def vllm_python() -> str:
    named = os.environ.get("SUROGATE_VLLM_PYTHON")
    if named:
        assert Path(named).is_file(), f"SUROGATE_VLLM_PYTHON: there is no {named}"
        return named
    own = ROOT / ".venv-vllm" / "bin" / "python"
    if own.is_file():
        return str(own)
    if importlib.util.find_spec("vllm") is not None:
        return sys.executable
    pytest.skip("no vLLM: make .venv-vllm, or name an interpreter that has it in SUROGATE_VLLM_PYTHON")


@pytest.fixture(scope="session")
def loop() -> Iterator[EventLoop]:
    loop = EventLoop()
    yield loop
    loop.close()


def make_learner(config: dict[str, Any], *, scale: float, lora: LoraSettings | None = None, compute: Compute | None = None) -> Learner:
    """A learner of a random model; large enough weights that positions and layers all matter."""
    _, fields = describe(AutoConfig.for_model(**config), config, "test")
    learner = Learner(_core.ModelSpec(**fields), max_tokens=2 * CONTEXT, threads=1, lora=lora, compute=compute)
    randomise(learner, 0, scale)
    if lora is not None:
        randomise(learner, 1, ADAPTER_SCALE, adapter=True)
    return learner


def randomise(learner: Learner, seed: int, scale: float, *, adapter: bool = False) -> None:
    """Other weights, or another adapter."""
    rng = np.random.default_rng(seed)
    for info in learner.tensors():
        if info.is_adapter == adapter:
            value = scale * rng.standard_normal(info.shape)
            learner.load(info.name, (value + ("norm" in info.name)).astype(np.float32))


def make_options(python: str, log: Path, config: dict[str, Any] = LLAMA, **changes: Any) -> VllmOptions:
    arguments = {
        "max_model_len": CONTEXT,
        "max_num_seqs": TOGETHER,
        "kv_cache_memory_bytes": 64 << 20,
        "enforce_eager": True,
        "seed": 0,
        **changes.pop("engine_args", {}),
    }
    options = VllmOptions(
        model_config=config,
        engine_args=arguments,
        dtype="float32",
        valid_vocab=VALID,
        log=log,
        python=python,
        environments=(cpu_environment(eager=True),),
        startup_timeout=600,
        heartbeat=0.5,
        timeout=120,
        probe_tolerance=0.01,
    )
    return replace(options, **changes)


class Bytes:
    """A tokenizer of one id per byte."""

    def decode(self, token_ids: list[int], skip_special_tokens: bool = False, **options: Any) -> str:
        return bytes(token_ids).decode("utf-8", "replace")


class Counting(StopStrings):
    """Knows how many tokens it was shown, and finds its stop string when it is told to."""

    tokens = 0
    found = False

    def feed(self, token: int) -> bool:
        self.tokens += 1
        return super().feed(token) or self.found


class UnderWay:
    """Requests that last: each for as long as the context is, and more of them than are sampled together.

    The engine does not wait for whoever reads, so on a machine that is slow here and quick there it may be at the end before the first
    tokens are seen. A test that has to catch it before that asks whether it has, and else tries again.
    """

    count = TOGETHER + 8

    def __init__(self) -> None:
        self.tasks: list[asyncio.Task[Completion]] = []
        self.seen: list[Counting] = []  # of those that are streamed

    @property
    def tokens(self) -> list[int]:
        return [each.tokens for each in self.seen]

    async def go_on(self, before: list[int]) -> None:
        """Waits until any has more tokens than `before`, or all are at their end."""
        while self.tokens == before and not all(task.done() for task in self.tasks):
            await asyncio.sleep(0.002)

    async def stand_still(self, seconds: float) -> list[int]:
        """Waits until none has had a token for so long; how many each has then."""
        before: list[int] = []
        while before != self.tokens:
            before = self.tokens
            await asyncio.sleep(seconds)
        return before

    async def finish(self) -> list[Completion]:
        """Ends those that are streamed; the others go on to their end."""
        for each in self.seen:
            each.found = True
        return await asyncio.gather(*self.tasks)


NEVER = ("\N{SNOWMAN}\N{COMET}\N{UMBRELLA}",)  # a stop string that random bytes do not spell


class Bench:
    """An engine with its learner, and calls that wait."""

    valid_vocab = VALID

    def __init__(
        self,
        loop: EventLoop,
        config: dict[str, Any],
        options: VllmOptions,
        scale: float = 0.15,
        lora: LoraSettings | None = None,
        compute: Compute | None = None,
    ) -> None:
        self.loop, self.scale = loop, scale
        self.learner = make_learner(config, scale=scale, lora=lora, compute=compute)
        self.engine = VllmEngine(self.learner, options, tokenizer=Bytes())
        self.version = 0
        self.run(self.engine.begin())

    def run(self, work: Coroutine[Any, Any, T], timeout: float = 600) -> T:
        return self.loop.run(asyncio.wait_for(work, timeout))

    def sample(self, prompts: Sequence[Sequence[int]], **params: Any) -> list[Completion]:
        """One completion of each, all at once; seeds count from 0 unless one is given."""

        async def all_of_them() -> list[Completion]:
            requests = [
                GenerateRequest(prompt, SamplingParams(**({"max_tokens": 24, "seed": number} | params)))
                for number, prompt in enumerate(prompts)
            ]
            return await asyncio.gather(*(self.engine.generate(request) for request in requests))

        return self.run(all_of_them())

    async def under_way(self, *, streamed: bool) -> UnderWay:
        """Requests of which some have tokens. Their prompts and seeds are 0, 1, ..."""
        result = UnderWay()

        def counted(*arguments: Any) -> Counting:
            result.seen.append(Counting(*arguments))
            return result.seen[-1]

        with mock.patch.object(vllm_engine, "StopStrings", counted):
            for number in range(UnderWay.count):
                request = GenerateRequest([number], SamplingParams(CONTEXT - 1, seed=number, stop=NEVER if streamed else ()))
                result.tasks.append(asyncio.ensure_future(self.engine.generate(request)))
            if streamed:
                while len(result.seen) < UnderWay.count:
                    await asyncio.sleep(0.002)
                await result.go_on([0] * UnderWay.count)
            else:
                await asyncio.sleep(0.3)
        return result

    def sync(self) -> dict[str, float]:
        self.version += 1
        self.run(self.engine.update_weights(self.learner, self.version))
        return self.engine.take_metrics()

    def gap(
        self, prompts: Sequence[Sequence[int]], completions: Sequence[Completion], temperature: float = 1.0, adapter: AdapterUse = "live"
    ) -> float:
        """Mean absolute difference of the engine's log-probabilities from the learner's."""
        differences = []
        for prompt, completion in zip(prompts, completions, strict=True):
            logps = self.score([*prompt, *completion.tokens], temperature, adapter)[len(prompt) :]
            differences.append(np.abs(np.asarray(completion.logps) - logps))
        return float(np.mean(np.concatenate(differences)))

    def randomise(self, seed: int) -> None:
        """Gives the learner other weights."""
        randomise(self.learner, seed, self.scale)

    def randomise_adapter(self, seed: int) -> None:
        randomise(self.learner, seed, ADAPTER_SCALE, adapter=True)

    def score(self, tokens: Sequence[int], temperature: float = 1.0, adapter: AdapterUse = "live") -> np.ndarray[Any, Any]:
        return score(self.learner, tokens, temperature, adapter)

    def close(self) -> None:
        self.run(self.engine.close())


def score(learner: Learner, tokens: Sequence[int], temperature: float = 1.0, adapter: AdapterUse = "live") -> np.ndarray[Any, Any]:
    """The learner's log-probability of each token but the first (whose is 0)."""
    (batch,) = pack([[PackSequence(tokens=tokens, mask=[False, *[True] * (len(tokens) - 1)])]], learner.max_tokens)
    logp = learner.score(batch, temperature=temperature, valid_vocab=VALID, adapter=adapter).logp
    return np.concatenate([[0.0], logp[: len(tokens) - 1]])


@pytest.fixture(scope="session")
def prompts() -> list[list[int]]:
    rng = np.random.default_rng(5)
    return [rng.integers(0, VALID, size=length).tolist() for length in (1, 3, 40, 300)]


@pytest.fixture(scope="session")
def benches(vllm_python: str, loop: EventLoop, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[str], Bench]]:
    """By name: ``colocate`` (Llama, float32) and ``server`` (Qwen2, bfloat16). Both start with the first that is asked for."""
    folder = tmp_path_factory.mktemp("engines")
    made = {
        "colocate": Bench(loop, LLAMA, make_options(vllm_python, folder / "colocate.log")),
        "server": Bench(
            loop,
            QWEN2,
            make_options(vllm_python, folder / "server.log", QWEN2, mode="server", dtype="bfloat16", probe_tolerance=0.1),
            scale=0.1,
        ),
    }
    yield made.__getitem__
    for bench in made.values():
        bench.close()


@pytest.fixture
def bench(benches: Callable[[str], Bench]) -> Bench:
    return benches("colocate")


@pytest.fixture
def server(benches: Callable[[str], Bench]) -> Bench:
    return benches("server")


@pytest.fixture(scope="session")
def open_bench(loop: EventLoop, vllm_python: str) -> Callable[..., Bench]:
    """Makes one more engine for the float32 Llama, which the caller closes: its log, and keyword arguments that change its options."""

    def make(log: Path, **changes: Any) -> Bench:
        return Bench(loop, LLAMA, make_options(vllm_python, log, **changes))

    return make


@pytest.fixture
def make_bench(open_bench: Callable[..., Bench], tmp_path: Path) -> Iterator[Callable[..., Bench]]:
    """Makes one more engine for the float32 Llama; keyword arguments change its options."""
    made: list[Bench] = []

    def make(**changes: Any) -> Bench:
        made.append(open_bench(tmp_path / "vllm.log", **changes))
        return made[-1]

    yield make
    for bench in made:
        bench.close()
