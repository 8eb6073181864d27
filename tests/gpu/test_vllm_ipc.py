"""Weights go from the learner to a real vLLM with CUDA graphs over the GPU's own memory (`transfer: cuda_ipc`)."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

from surogate_rl import _core
from surogate_rl.learner import Compute, LoraSettings
from surogate_rl.rollouts.engines.vllm.device_weights import DeviceSnapshot
from surogate_rl.rollouts.engines.vllm.errors import SyncFailed
from surogate_rl.rollouts.engines.vllm.weights import Snapshot
from surogate_rl.rollouts.types import Completion, GenerateRequest, SamplingParams
from surogate_rl.trainers.event_loop import EventLoop

from ..vllm.conftest import QWEN3, VALID, Bench, make_options, randomise
from ..vllm.conftest import vllm_python as vllm_python  # a fixture
from ..vllm.damage import CASES, Damage, undamaged

pytestmark = [pytest.mark.gpu, pytest.mark.vllm, pytest.mark.timeout(900)]

MODEL = QWEN3 | {"head_dim": 64, "hidden_size": 64, "tie_word_embeddings": True}
BFLOAT16 = Compute(device="cuda", recipe="bfloat16", logits_dtype="float32")
TOLERANCE = 0.02


@pytest.fixture(scope="module")
def loop() -> Iterator[EventLoop]:
    loop = EventLoop()
    yield loop
    loop.close()


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    rng = np.random.default_rng(5)
    return [rng.integers(0, VALID, size=length).tolist() for length in (1, 3, 40, 300)]


@pytest.fixture(scope="module")
def open_bench(loop: EventLoop, vllm_python: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[..., Bench]]:
    """Makes an engine that is closed at the end; keyword arguments change its options."""
    if reason := _core.cuda_unavailable_reason():
        pytest.fail(reason)
    made: list[Bench] = []

    def make(lora: LoraSettings | None = None, **changes: Any) -> Bench:
        options = make_options(
            vllm_python,
            tmp_path_factory.mktemp("engine") / "vllm.log",
            MODEL,
            dtype="bfloat16",
            transfer="cuda_ipc",
            environments=({"CUDA_VISIBLE_DEVICES": os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0]},),
            memory_bytes=6 << 30,
            engine_args={"enforce_eager": False},
            probe_tolerance=0.1,
            **changes,
        )
        made.append(Bench(loop, MODEL, options, scale=0.1, lora=lora, compute=BFLOAT16))
        return made[-1]

    yield make
    for bench in made:
        bench.close()


@pytest.fixture(scope="module")
def bench(open_bench: Callable[..., Bench]) -> Bench:
    return open_bench()


def test_log_probabilities_agree_after_each_of_four_updates(bench: Bench, prompts: list[list[int]]) -> None:
    """The first one through vLLM's loader, the later ones in place, where CUDA graphs look for them."""
    before = bench.sample(prompts)
    for seed in (11, 12, 13, 14):
        bench.randomise(seed)
        assert bench.gap(prompts, before) > 0.1, "the weights have changed enough to be seen"
        metrics = bench.sync()
        print({name: round(value, 4) for name, value in metrics.items()})
        assert metrics["vllm/probe_gap"] < TOLERANCE
        before = bench.sample(prompts)
        assert bench.gap(prompts, before) < TOLERANCE
        assert {version for c in before for version in c.versions} == {bench.version}
    assert isinstance(bench.engine._snapshot, DeviceSnapshot)


@pytest.fixture
def repaired(bench: Bench) -> Iterator[Bench]:
    """The engine as it is before and after a damaged update (for a run, one is the end)."""
    with undamaged(bench):
        yield bench
    for _ in range(2):  # through vLLM's loader, and in place
        assert bench.sync()["vllm/probe_gap"] < TOLERANCE
    bench.run(bench.engine.resume())


@pytest.mark.parametrize(("damage", "message"), CASES.values(), ids=CASES)
def test_a_damaged_update_is_found(repaired: Bench, monkeypatch: pytest.MonkeyPatch, damage: Damage, message: str) -> None:
    fill = Snapshot.fill

    def damaged(self: Snapshot) -> float:
        lost = fill(self)
        damage(self)
        return lost

    repaired.randomise(21)
    monkeypatch.setattr(Snapshot, "fill", damaged)
    with pytest.raises(SyncFailed) as caught:
        repaired.sync()
    assert message in str(caught.value)
    with pytest.raises(SyncFailed):  # nothing is sampled from an engine that has something else
        repaired.sample([[1]])
    monkeypatch.undo()


def test_requests_under_way_go_on_with_the_new_weights(bench: Bench) -> None:
    """Also those that nobody streams: their versions are counted at the update, not seen as tokens come."""
    bench.randomise(31)
    bench.sync()
    old, new = bench.version, bench.version + 1

    async def body() -> list[Completion]:
        requests = [bench.engine.generate(GenerateRequest([number], SamplingParams(2000, seed=number))) for number in range(4)]
        tasks = [asyncio.ensure_future(request) for request in requests]
        await asyncio.sleep(0.2)
        await asyncio.to_thread(bench.randomise, 32)
        await bench.engine.update_weights(bench.learner, new)
        return await asyncio.gather(*tasks)

    completions = bench.run(body())
    bench.version = new
    after = [bench.score([number, *c.tokens])[1:] for number, c in enumerate(completions)]
    bench.randomise(31)
    before = [bench.score([number, *c.tokens])[1:] for number, c in enumerate(completions)]
    bench.randomise(32)
    for completion, by_old, by_new in zip(completions, before, after, strict=True):
        versions = np.asarray(completion.versions)
        assert set(versions.tolist()) == {old, new}
        assert (np.diff(versions) >= 0).all()
        expected = np.where(versions == old, by_old, by_new)
        assert np.abs(np.asarray(completion.logps) - expected).mean() < TOLERANCE


def test_an_engine_that_was_killed_gets_the_same_weights(bench: Bench, prompts: list[list[int]]) -> None:
    bench.randomise(41)
    bench.sync()
    bench.randomise(42)  # the learner goes on; the engine's weights are those of the last update
    (replica,) = bench.engine.replicas
    assert replica.pid is not None
    os.killpg(replica.pid, signal.SIGKILL)
    completions = bench.sample(prompts)
    assert bench.gap(prompts, completions) > 0.1
    bench.randomise(41)
    assert bench.gap(prompts, completions) < TOLERANCE
    for seed in (43, 44):
        bench.randomise(seed)
        assert bench.sync()["vllm/probe_gap"] < TOLERANCE


def test_a_merged_adapter(open_bench: Callable[..., Bench], bench: Bench, prompts: list[list[int]]) -> None:
    bench.close()  # the GPU is for one engine at a time
    merged = open_bench(lora=LoraSettings(rank=4, alpha=8.0), sync="merged")
    for seed in (51, 52, 53):
        randomise(merged.learner, seed, 0.1, adapter=True)
        metrics = merged.sync()
        print({name: round(value, 4) for name, value in metrics.items()})
        assert metrics["vllm/probe_gap"] < 2 * TOLERANCE  # the learner does not round the sum
        assert 0 < metrics["vllm/lost_delta"] < 0.1
        completions = merged.sample(prompts)
        assert merged.gap(prompts, completions) < 2 * TOLERANCE
        assert merged.gap(prompts, completions, adapter="off") > 0.05, "the adapter makes a difference"
