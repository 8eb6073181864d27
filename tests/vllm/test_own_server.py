"""A server that the user has started: it outlives its runs, whatever becomes of them, and serves the next one."""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import surogate_rl
from surogate_rl.rollouts.engines.vllm.errors import EngineFailed
from surogate_rl.rollouts.engines.vllm.factory import cpu_environment
from surogate_rl.rollouts.engines.vllm.host.surogate_vllm import guard

from .config import grpo_config
from .groups import children

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(900)]

Server = tuple[subprocess.Popen[bytes], str]


@pytest.fixture(scope="module")
def own_server(vllm_python: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """`surogate-rl vllm-server`, as if installed in the interpreter that has vLLM; the tests of this file share it."""
    folder = tmp_path_factory.mktemp("server")
    environment = dict(os.environ) | cpu_environment(eager=True) | {"SUROGATE_VLLM_TOKEN": "secret"}
    serve = "from surogate_rl.cli import app; app(['vllm-server', '--listen', '127.0.0.1:0'])"
    program = f"import sys; sys.executable = {vllm_python!r}; {serve}"
    command = [sys.executable, "-c", program]
    log = folder / "server.log"
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
        guard.kill(process.pid, "")
        process.wait()


def test_it_serves_one_run_after_another(make_bench: Callable[..., Any], own_server: Server, prompts: list[list[int]]) -> None:
    """Weights travel over the connection; the engine outlives the first run, and the second gets its own weights."""
    process, url = own_server
    with pytest.raises(EngineFailed, match="wrong token"):
        make_bench(base_urls=(url,)).sample([[1]])
    engine: list[int] = []
    for seed in (61, 62):
        bench = make_bench(base_urls=(url,), token="secret")
        bench.randomise(seed)
        assert bench.gap(prompts, bench.sample(prompts)) < 1e-4
        engine = engine or children(process.pid, "EngineCore")
        assert children(process.pid, "EngineCore") == engine
        with pytest.raises(EngineFailed, match="serves another run"):
            make_bench(base_urls=(url,), token="secret", startup_timeout=1.0).sample([[1]])
        bench.close()
        assert process.poll() is None
    other = make_bench(base_urls=(url,), token="secret", valid_vocab=0)
    with pytest.raises(EngineFailed, match="already runs another model or other settings"):
        other.sample([[1]])


def test_a_run_that_ends_in_the_middle_of_an_update_spoils_nothing(
    make_bench: Callable[..., Any], own_server: Server, prompts: list[list[int]]
) -> None:
    process, url = own_server
    bench = make_bench(base_urls=(url,), token="secret")
    bench.sample([[1]])
    engine = children(process.pid, "EngineCore")
    workers = children(process.pid)
    (replica,) = bench.engine.replicas
    size = 64 << 20
    entries = [[f"unknown.{number}.weight", "float32", [size // 4], 0, size, 0] for number in range(100)]  # seconds of checksums

    def reading() -> bool:
        """Whether the worker has the bucket: it is between the start and the end of an update."""
        return any(_maps(number, size) for number in workers)

    async def break_off() -> None:
        await replica.call("bucket", index=0, body=bytes(size))
        task = asyncio.ensure_future(replica.call("update", buckets=[{"index": 0, "entries": entries}], version=9))
        while not reading():
            assert not task.done()
            await asyncio.sleep(0.005)
        replica.kill("cut by the test")
        await asyncio.gather(task, return_exceptions=True)

    bench.run(break_off())
    bench.close()
    after = make_bench(base_urls=(url,), token="secret")
    after.randomise(63)
    assert after.gap(prompts, after.sample(prompts)) < 1e-4
    assert children(process.pid, "EngineCore") == engine, "the same engine"


def _maps(process: int, size: int) -> bool:
    """Whether a process has mapped a bucket of this many bytes."""
    for line in Path(f"/proc/{process}/maps").read_text().splitlines():
        first, _, end = line.split()[0].partition("-")
        if "surogate-bucket" in line and int(end, 16) - int(first, 16) == size:
            return True
    return False


def test_grpo_ahead_of_the_learner_with_evaluation_resumed_on_an_engine_that_is_new(
    own_server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The core of the engine before is killed, as the kernel does when memory runs out, while nobody is connected."""
    process, url = own_server
    for core in children(process.pid, "EngineCore"):
        os.kill(core, signal.SIGKILL)
    monkeypatch.setenv("SUROGATE_VLLM_TOKEN", "secret")
    reward = "def score(completion):\n    return completion.count('1') + 0.1 * len(completion)\n"

    def config(name: str, **rollouts: Any) -> dict[str, Any]:
        made = grpo_config(tmp_path, reward, rollouts)
        changes = {"save_steps": 2, "save_total_limit": None, "output_dir": str(tmp_path / name)}
        return made | changes | {"eval": {"datasets": made["datasets"], "steps": 2}}

    elsewhere = config("run", engine="vllm", max_staleness=1, vllm={"base_url": url})
    run = surogate_rl.grpo(elsewhere)
    native = surogate_rl.grpo(config("native", engine="native") | {"max_steps": 1})
    checked(run.history, [1, 2, 3, 4])
    # greedy completions of the same weights
    evaluations = [line for line in run.history if "eval_reward" in line]
    assert [line["step"] for line in evaluations] == [0, 2, 4]
    for name in ("eval_reward", "eval_completions/mean_length", "eval_num_prompts"):
        assert evaluations[0][name] == pytest.approx(native.history[0][name]), name
    assert evaluations[1]["eval_reward"] != evaluations[0]["eval_reward"]

    shutil.rmtree(tmp_path / "run" / "checkpoints" / "step-00000004")
    shutil.rmtree(tmp_path / "run" / "final")
    resumed = surogate_rl.grpo(elsewhere | {"resume": "auto"})
    assert resumed.steps == 4
    checked(resumed.history, [3, 4])


def checked(history: list[dict[str, float]], steps: list[int]) -> None:
    trained = [line for line in history if "loss" in line]
    assert [line["step"] for line in trained] == steps
    for line in trained:
        assert line["vllm/probe_gap"] < 1e-4
        assert line["rollouts/staleness_max"] <= 1
        assert line["rollouts/dropped_stale"] == 0
        assert line["grad_norm"] > 0
    # nothing had been sampled ahead: the engine has the weights that the learner has begun with, or gone on with
    assert trained[0]["rollouts/staleness_max"] == 0
    assert trained[0]["sampling/sampling_logp_difference/mean"] < 1e-4
