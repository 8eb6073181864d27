"""What is asked for is what is sampled: ids, log-probabilities, stops, seeds."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import numpy as np
import pytest

from surogate_rl.rollouts.engines.native import NativeEngine
from surogate_rl.rollouts.types import Completion, GenerateRequest, SamplingParams

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(900)]


def decode(tokens: list[int]) -> str:
    """As the tokenizer of these engines: an id is a byte."""
    return bytes(tokens).decode("utf-8", "replace")


def same(a: Completion, b: Completion) -> bool:
    return a.tokens == b.tokens and a.finish_reason == b.finish_reason


@pytest.mark.parametrize("temperature", [0.5, 1.0, 1.7])
def test_log_probabilities_are_those_of_the_learner_at_the_temperature(bench: Any, prompts: list[list[int]], temperature: float) -> None:
    completions = bench.sample(prompts, temperature=temperature)
    assert all(len(c.tokens) == len(c.logps) == len(c.versions) == 24 and c.finish_reason == "length" for c in completions)
    assert bench.gap(prompts, completions, temperature) < 1e-4
    assert bench.gap(prompts, completions, temperature + 0.1) > 1e-2, "another temperature would be seen"


def test_ids_beyond_the_tokenizer_are_neither_sampled_nor_counted(bench: Any) -> None:
    # a head of zeros makes all 320 ids equally likely: 256 of them are valid
    head = bench.learner.export("lm_head.weight")
    bench.learner.load("lm_head.weight", 0 * head)
    bench.sync()
    completions = bench.sample([[number] for number in range(16)], max_tokens=100)
    bench.learner.load("lm_head.weight", head)
    bench.sync()
    tokens = np.concatenate([c.tokens for c in completions])
    assert tokens.max() < bench.valid_vocab
    assert len(set(tokens.tolist())) > 240
    logps = np.concatenate([c.logps for c in completions])
    assert logps == pytest.approx(-np.log(bench.valid_vocab), abs=1e-5)


def test_a_seed_decides_the_sample(bench: Any) -> None:
    prompt = [7, 8, 9]
    alone = [bench.sample([prompt], seed=seed)[0] for seed in (3, (1 << 64) - 1)]
    together = bench.sample([prompt] * 6)
    assert same(alone[0], together[3])
    assert len({tuple(c.tokens) for c in [*together, alone[1]]}) == 7


def test_more_prompts_than_a_step_has_room_for(bench: Any) -> None:
    """They have seeds, and a step that computed a prompt in part would have to take back what it drew."""
    rng = np.random.default_rng(8)
    prompts = [rng.integers(0, bench.valid_vocab, size=size).tolist() for size in range(1200, 1212)]
    completions = bench.sample(prompts, max_tokens=4)
    assert bench.gap(prompts, completions) < 1e-4


def test_greedy_is_the_native_engines(bench: Any, prompts: list[list[int]]) -> None:
    native = NativeEngine(bench.learner, max_sequences=4, cache_tokens=2048, valid_vocab=bench.valid_vocab)

    async def of_native() -> list[Completion]:
        params = SamplingParams(max_tokens=24, temperature=0.0)
        found = await asyncio.gather(*(native.generate(GenerateRequest(prompt, params)) for prompt in prompts))
        await native.close()
        return found

    assert [c.tokens for c in bench.sample(prompts, temperature=0.0)] == [c.tokens for c in asyncio.run(of_native())]


def test_only_the_runs_stop_ids_stop(bench: Any) -> None:
    (free,) = bench.sample([[1, 2]], max_tokens=60)
    assert free.finish_reason == "length"
    stop = free.tokens[20]
    first = free.tokens.index(stop)
    (stopped,) = bench.sample([[1, 2]], max_tokens=60, stop_ids=(stop,))
    assert stopped.finish_reason == "stop"
    assert stopped.tokens == free.tokens[: first + 1], "the stop token is kept"
    assert stopped.logps == pytest.approx(free.logps[: first + 1], abs=1e-5)


def test_the_token_that_completes_a_stop_string_is_the_last(bench: Any) -> None:
    (free,) = bench.sample([[65]], max_tokens=200)
    ascii_pair = next(i for i in range(5, 199) if max(free.tokens[i : i + 2]) < 128)
    text = decode(free.tokens[ascii_pair : ascii_pair + 2])
    (stopped,) = bench.sample([[65]], max_tokens=200, stop=(text,))
    assert stopped.finish_reason == "stop"
    whole = decode(stopped.tokens)
    assert whole.endswith(text)
    assert text not in whole[: -len(text)]
    assert stopped.tokens == free.tokens[: len(stopped.tokens)]
    assert len(stopped.tokens) == len(stopped.logps) == len(stopped.versions)


def test_requests_that_cannot_be_served_are_refused(bench: Any) -> None:
    for params, message in (
        ({"stop": ("",)}, "a stop string is empty"),
        ({"seed": -1}, "seed: expected 0 to 2"),
        ({"max_tokens": 0}, "max_tokens"),
    ):
        with pytest.raises(ValueError, match=message):
            bench.sample([[1]], **params)
    with pytest.raises(ValueError, match="9000"):
        bench.sample([[1] * 9000])


def test_a_cancelled_request_frees_its_place(bench: Any) -> None:
    """All sixteen places are taken by requests of 1,000 tokens; another one does not have to wait for them once they are cancelled."""

    async def seconds(cancel: bool) -> float:
        tasks = [asyncio.ensure_future(bench.engine.generate(GenerateRequest([1], SamplingParams(1000, seed=n)))) for n in range(16)]
        await asyncio.sleep(0.5)
        start = time.monotonic()
        if cancel:
            for task in tasks:
                task.cancel()
        await bench.engine.generate(GenerateRequest([1], SamplingParams(2)))
        taken = time.monotonic() - start
        await asyncio.gather(*tasks, return_exceptions=True)
        return taken

    assert bench.run(seconds(cancel=True)) < bench.run(seconds(cancel=False)) / 2
