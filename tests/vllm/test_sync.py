"""After an update the engine has exactly the learner's weights; anything else is found, and named."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

from surogate_rl.rollouts.engines.vllm.errors import SyncFailed
from surogate_rl.rollouts.engines.vllm.weights import Snapshot
from surogate_rl.rollouts.types import Completion, GenerateRequest, SamplingParams

from .damage import CASES, HEAD_BIT, Damage, undamaged

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(900)]

TRIES = 5  # to catch requests under way


@pytest.mark.parametrize(("name", "tolerance"), [("colocate", 1e-4), ("server", 0.02)])
def test_log_probabilities_agree_after_each_of_three_updates(
    benches: Callable[[str], Any], prompts: list[list[int]], name: str, tolerance: float
) -> None:
    bench = benches(name)
    before = bench.sample(prompts)
    for seed in (11, 12, 13):
        bench.randomise(seed)
        assert bench.gap(prompts, before) > 0.3, "the weights have changed enough to be seen"
        metrics = bench.sync()
        assert metrics["vllm/probe_gap"] < tolerance
        completions = bench.sample(prompts)
        assert bench.gap(prompts, completions) < tolerance
        assert {version for c in completions for version in c.versions} == {bench.version}
        before = completions


def test_prompts_that_were_cached_are_computed_anew(bench: Any) -> None:
    prompt = list(range(200)) * 2
    bench.sample([prompt] * 4)
    bench.randomise(21)
    bench.sync()
    completions = bench.sample([prompt] * 4)
    assert bench.gap([prompt] * 4, completions) < 1e-4


@pytest.mark.parametrize("streamed", [True, False])
def test_requests_under_way_go_on_with_the_new_weights(bench: Any, streamed: bool) -> None:
    """Every token says which weights it was sampled with, and has their log-probability given all tokens before it."""

    async def body(new: int) -> list[Completion]:
        requests = await bench.under_way(streamed=streamed)
        await bench.engine.update_weights(bench.learner, new)
        await requests.go_on(requests.tokens)
        return await requests.finish()

    for _ in range(TRIES):
        bench.randomise(31)
        bench.sync()
        old, new = bench.version, bench.version + 1
        bench.randomise(32)  # the engine has weights of its own
        completions = bench.run(body(new))
        bench.version = new
        caught = [number for number, completion in enumerate(completions) if {old, new} <= set(completion.versions)]
        if caught:
            break
    assert caught
    assert {version for completion in completions for version in completion.versions} == {old, new}
    chosen = {number: completions[number] for number in caught[:4]}
    after = {number: bench.score([number, *c.tokens])[1:] for number, c in chosen.items()}
    bench.randomise(31)
    before = {number: bench.score([number, *c.tokens])[1:] for number, c in chosen.items()}
    bench.randomise(32)
    for number, completion in chosen.items():
        versions = np.asarray(completion.versions)
        assert (np.diff(versions) >= 0).all()
        expected = np.where(versions == old, before[number], after[number])
        assert np.abs(np.asarray(completion.logps) - expected).max() < 1e-3


def test_pause_holds_requests_and_resume_lets_them_go_on(bench: Any) -> None:
    async def body() -> tuple[list[int], list[Completion]]:
        requests = await bench.under_way(streamed=True)
        await bench.engine.pause()
        held = asyncio.ensure_future(bench.engine.generate(GenerateRequest([6], SamplingParams(2))))
        before = await requests.stand_still(1.5)
        assert not held.done()
        await bench.engine.resume()
        await requests.go_on(before)
        completions = await requests.finish()
        await held
        return before, completions

    for _ in range(TRIES):
        before, completions = bench.run(body())
        caught = [number for number, c in enumerate(completions) if 0 < before[number] < len(c.tokens)]
        if caught:
            break
    assert caught
    number = caught[0]
    tokens = completions[number].tokens
    (undisturbed,) = bench.sample([[number]], seed=number, max_tokens=len(tokens))
    assert tokens == undisturbed.tokens


@pytest.fixture
def repaired(bench: Any) -> Iterator[Any]:
    """The engine as it is before and after a damaged update (for a run, one is the end)."""
    with undamaged(bench):
        yield bench
    bench.sync()
    bench.run(bench.engine.resume())


@pytest.mark.parametrize(("damage", "message"), [*CASES.values(), HEAD_BIT], ids=[*CASES, "head-bit"])
def test_a_damaged_update_is_found(repaired: Any, monkeypatch: pytest.MonkeyPatch, damage: Damage, message: str) -> None:
    fill = Snapshot.fill

    def damaged(self: Snapshot) -> float:
        lost = fill(self)
        damage(self)
        return lost

    monkeypatch.setattr(Snapshot, "fill", damaged)
    with pytest.raises(SyncFailed) as caught:
        repaired.sync()
    assert message in str(caught.value)
    with pytest.raises(SyncFailed):  # nothing is sampled from an engine that has something else
        repaired.sample([[1]])
    monkeypatch.undo()


def test_an_update_that_the_engine_did_not_apply_is_found(repaired: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The bytes arrive, but the engine goes on with what it had: checksums of what arrived would not show it."""
    call = type(repaired.engine.replicas[0]).call

    async def without_update(self, operation, **fields):  # type: ignore[no-untyped-def]
        if operation == "update":
            return {"problems": [], "tensors": 0, "packed": 0, "seconds": {"pause": 0.0, "load": 0.0, "verify": 0.0}}
        return await call(self, operation, **fields)

    repaired.randomise(41)
    monkeypatch.setattr(type(repaired.engine.replicas[0]), "call", without_update)
    with pytest.raises(SyncFailed, match="not its log-probabilities"):
        repaired.sync()
    monkeypatch.undo()
