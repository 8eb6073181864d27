"""An engine that falls silent, or cannot be kept alive."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest

from surogate_rl.rollouts.engines.vllm.errors import EngineFailed, EngineGone
from surogate_rl.rollouts.types import Completion, GenerateRequest, SamplingParams

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(900)]


@pytest.fixture(scope="module")
def own(open_bench: Callable[..., Any], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """A server of float32, so that samples are the same whatever they are batched with. The last test that asks for it ends it."""
    bench = open_bench(tmp_path_factory.mktemp("own") / "vllm.log", mode="server")
    yield bench
    bench.close()


def test_a_silent_engine_is_replaced_and_gets_its_requests_again(own: Any) -> None:
    """It is stopped, not ended: nothing but the missing sign of life tells."""
    bench = own
    bench.randomise(51)
    bench.sync()
    prompts = [[number] for number in range(4)]
    expected = bench.sample(prompts, max_tokens=100)
    (replica,) = bench.engine.replicas
    patient = replica.options

    async def body() -> tuple[list[Completion], float]:
        requests = [GenerateRequest(prompt, SamplingParams(100, seed=number)) for number, prompt in enumerate(prompts)]
        replica.options = replace(patient, timeout=3.0)
        replica._heart.cancel()  # a sign of life that is waited for already has the timeout of before
        replica._heart = asyncio.create_task(replica._beat(replica._connection))
        os.killpg(replica.pid, signal.SIGSTOP)
        start = time.monotonic()
        tasks = [asyncio.ensure_future(bench.engine.generate(request)) for request in requests]
        while replica.restarts == 0:
            await asyncio.sleep(0.05)
        noticed = time.monotonic() - start
        replica.options = patient
        return await asyncio.gather(*tasks), noticed

    completions, noticed = bench.run(body())
    assert 3.0 < noticed < 30.0, "timeout, heartbeat and some patience"
    assert [c.tokens for c in completions] == [c.tokens for c in expected], "the same weights and seeds"
    assert {version for c in completions for version in c.versions} == {bench.version}
    bench.run(bench.engine.health())


def test_an_engine_that_keeps_ending_stops_the_run_with_its_cause(own: Any) -> None:
    bench = own  # nothing can be asked of it afterwards
    bench.sample([[1]])
    (replica,) = bench.engine.replicas
    replica.restarts = replica.options.max_restarts
    os.killpg(replica.pid, signal.SIGKILL)
    with pytest.raises(EngineFailed, match=r"failed again after 3 restart\(s\)[\s\S]*ended by signal SIGKILL"):
        bench.sample([[1]])
    with pytest.raises((EngineFailed, EngineGone)):
        bench.run(bench.engine.health())
