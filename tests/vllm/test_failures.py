"""An engine that falls silent, cannot be kept alive, or is served elsewhere."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from surogate_rl.rollouts.engines.vllm.errors import EngineFailed, EngineGone
from surogate_rl.rollouts.types import Completion, GenerateRequest, SamplingParams

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(900)]

HOST = Path(__file__).resolve().parents[2] / "rollouts" / "engines" / "vllm" / "host"


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


@pytest.fixture
def own_server(vllm_python: str, tmp_path: Path) -> Iterator[tuple[subprocess.Popen[bytes], str]]:
    """As `surogate-rl vllm-server` would run in the interpreter that has vLLM."""
    environment = dict(os.environ) | {"PYTHONPATH": str(HOST), "VLLM_WORKER_MULTIPROC_METHOD": "spawn", "TORCHDYNAMO_DISABLE": "1"}
    environment["SUROGATE_VLLM_TOKEN"] = "secret"
    command = [vllm_python, "-m", "surogate_vllm.main", "--listen", "127.0.0.1:0"]
    log = tmp_path / "server.log"
    with log.open("wb") as output:
        process = subprocess.Popen(command, stdout=output, stderr=output, env=environment, start_new_session=True)
    try:
        deadline = time.monotonic() + 300
        while "base_url: " not in (text := log.read_text()):
            assert process.poll() is None, text
            assert time.monotonic() < deadline, text
            time.sleep(0.1)
        yield process, text.split("base_url: ")[1].split()[0]
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def test_a_server_of_the_users_serves_one_run_after_another(
    make_bench: Callable[..., Any], own_server: tuple[subprocess.Popen[bytes], str], prompts: list[list[int]]
) -> None:
    """Weights travel over the connection; the engine outlives the first run, and the second gets its own weights."""
    process, url = own_server
    with pytest.raises(EngineFailed, match="wrong token"):
        make_bench(base_urls=(url,)).sample([[1]])
    for seed in (61, 62):
        bench = make_bench(base_urls=(url,), token="secret")
        bench.randomise(seed)
        assert bench.gap(prompts, bench.sample(prompts)) < 1e-4
        with pytest.raises(EngineFailed, match="serves another run"):
            make_bench(base_urls=(url,), token="secret").sample([[1]])
        bench.close()
        assert process.poll() is None
    other = make_bench(base_urls=(url,), token="secret", valid_vocab=0)
    with pytest.raises(EngineFailed, match="already runs another model or other settings"):
        other.sample([[1]])
