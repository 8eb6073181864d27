"""Workers as processes: how they start, what they cost, and that none is left."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path
from typing import Any

import psutil
import pytest

from surogate_rl.rewards import load_rewards, worker
from surogate_rl.rollouts.types import Episode, Segment, Task

HELPERS = """
import asyncio, os, sys, time
from surogate_rl.rewards import load_rewards
from surogate_rl.rollouts.types import Episode, Task

def episode(completion, index=0, **columns):
    return Episode(Task(index, None, "Q", columns), 0, 0, completion=completion)

def score(runner, texts):
    episodes = [episode(text, index) for index, text in enumerate(texts)]
    asyncio.run(runner.score(episodes))
    return [one.reward for one in episodes]
"""


def workers_of(pid: int) -> list[psutil.Process]:
    """Live children other than Python's resource tracker, which ends with its parent."""
    found = []
    for child in psutil.Process(pid).children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess):  # it has ended meanwhile
            if child.status() != psutil.STATUS_ZOMBIE and "resource_tracker" not in " ".join(child.cmdline()):
                found.append(child)
    return found


def alive(pid: int) -> bool:
    try:
        return bool(psutil.Process(pid).status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False


def wait_until_gone(pids: list[int], seconds: float = 30) -> list[int]:
    end = time.monotonic() + seconds
    while (left := [pid for pid in pids if alive(pid)]) and time.monotonic() < end:
        time.sleep(0.05)
    return left


def environment() -> dict[str, str]:
    root = str(Path(__file__).parents[2])
    return {**os.environ, "PYTHONPATH": os.pathsep.join([root, os.environ.get("PYTHONPATH", "")])}


def run_script(*command: str, stdin: str | None = None) -> str:
    result = subprocess.run(
        [sys.executable, *command], input=stdin, env=environment(), capture_output=True, text=True, timeout=120, check=False
    )
    assert result.returncode == 0, result.stderr
    return result.stdout.strip()


SCRIPT = HELPERS + textwrap.dedent("""
    print("main")
    offset = 10
    class Counter:
        def __init__(self, start): self.start = start
        def __call__(self, completion): return self.start + helper(completion)
    def helper(text): return offset + len(text)
    counter = Counter(100)
    def closure(n):
        return lambda completion: n
    runner = load_rewards([helper_reward := (lambda completion: helper(completion)), counter, closure(1000)])
    print(score(runner, ["", "abc"]))
    print(sorted(runner.names))
""")


@pytest.mark.parametrize("way", ["unguarded script", "standard input", "command"])
def test_functions_of_main(tmp_path: Path, way: str) -> None:
    """A script without ``if __name__ == "__main__"``, and what has no file, as in a notebook. It is not run again in the workers, and
    ends although the runner was not closed."""
    if way == "unguarded script":
        file = tmp_path / "script.py"
        file.write_text(SCRIPT)
        output = run_script(str(file))
    elif way == "standard input":
        output = run_script("-", stdin=SCRIPT)
    else:
        output = run_script("-c", SCRIPT)
    assert output.splitlines() == ["main", "[1120.0, 1126.0]", "['Counter', 'lambda', 'lambda_2']"]


def test_works_in_threads_and_event_loops(tmp_path: Path) -> None:
    script = HELPERS + textwrap.dedent("""
        import threading
        made = []
        thread = threading.Thread(target=lambda: made.append(load_rewards([lambda completion: 1.0])))
        thread.start(); thread.join()
        time.sleep(0.5)                      # the workers outlive the thread that started them
        runner = made[0]
        assert len(runner.worker_pids()) == 2
        print(score(runner, ["x"]), score(runner, ["y"]))
        runner.close()
        runner.close()
    """)
    assert run_script("-c", script) == "[1.0] [1.0]"


def test_workers_import_little() -> None:
    """Neither torch nor what else the trainer needs, although this process has it."""
    import torch  # noqa: F401

    with load_rewards(["exact_match", "numeric"], workers=1) as runner:
        assert runner._pool is not None
        loaded = asyncio.run(runner._pool.run(worker.loaded_modules, (), 30))
        (pid,) = runner.worker_pids()
        memory = psutil.Process(pid).memory_info().rss
    heavy = {
        "torch",
        "transformers",
        "trl",
        "datasets",
        "numpy",
        "pydantic",
        "surogate_rl.learner",
        "surogate_rl.config",
        "surogate_rl._core",
    }
    assert "surogate_rl.rewards.exact_match" in loaded
    assert heavy & set(loaded) == set()
    assert memory < 80 * 2**20


def test_an_episode_does_not_bring_in_torch() -> None:
    def f(episode: Any) -> float:
        import sys

        return float("torch" in sys.modules) + episode.task.columns["x"] + episode.segments[0].tokens[-1]

    one = Episode(Task(0, None, "Q", {"x": 2}), 0, 0, [Segment([5], [True], [0.0], [0])], completion="c")
    with load_rewards([f]) as runner:
        asyncio.run(runner.score([one]))
    assert one.reward == 7.0


def test_no_process_is_left_after_close() -> None:
    before = {child.pid for child in workers_of(os.getpid())}
    runner = load_rewards([lambda completion: 1.0], workers=3)
    started = {child.pid for child in workers_of(os.getpid())} - before
    assert started == set(runner.worker_pids())
    assert len(started) == 3
    runner.close()
    assert {child.pid for child in workers_of(os.getpid())} - before == set()
    with pytest.raises(RuntimeError, match="the reward workers are closed"):
        asyncio.run(runner.score([Episode(Task(0, None, "", {}), 0, 0)]))


@pytest.mark.parametrize("sent", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
def test_no_process_is_left_when_the_owner_is_killed(tmp_path: Path, sent: signal.Signals) -> None:
    """Not even one that is stuck in C code with the interpreter's lock held, nor what a reward has started."""
    pids = tmp_path / "pids"
    script = HELPERS + textwrap.dedent(f"""
        import re, subprocess
        def f(completion):
            child = subprocess.Popen(["sleep", "1000"])
            with open({str(pids)!r}, "a") as file:
                file.write(f"{{os.getpid()}} {{child.pid}} ")
            re.match("(a+)+$", "a" * 60 + "b")
        runner = load_rewards([f], workers=2)
        score(runner, ["x", "y", "z"])
    """)
    owner = subprocess.Popen([sys.executable, "-c", script], env=environment(), stderr=subprocess.DEVNULL)
    end = time.monotonic() + 60
    while time.monotonic() < end and (not pids.exists() or len(pids.read_text().split()) < 2):
        time.sleep(0.05)
    running = [int(pid) for pid in pids.read_text().split()]
    workers = [child.pid for child in psutil.Process(owner.pid).children(recursive=True)]
    assert set(running) <= set(workers)
    assert len(running) >= 2
    owner.send_signal(sent)
    owner.wait(timeout=30)
    assert wait_until_gone([*running, *workers]) == []


def test_what_a_hanging_reward_started_is_killed_with_it(tmp_path: Path) -> None:
    file = tmp_path / "pid"

    def f(completion: str) -> float:
        import subprocess

        child = subprocess.Popen(["sleep", "1000"])
        with open(file, "w") as out:
            out.write(str(child.pid))
        child.wait()
        return 1.0

    with load_rewards([f]) as runner:
        object.__setattr__(runner._functions[0], "timeout", 3.0)
        one = Episode(Task(0, None, "", {}), 0, 0)
        asyncio.run(runner.score([one]))
        assert one.error == "reward 'f': timeout: no result after 3 s; its worker was killed"
        assert wait_until_gone([int(file.read_text())]) == []


def test_a_file_that_kills_the_workers_is_reported(tmp_path: Path) -> None:
    from surogate_rl.rewards.pool import WorkersUnavailable

    file = tmp_path / "deadly.py"
    file.write_text(f"import os\nif os.getpid() != {os.getpid()}:\n    os._exit(3)\ndef f(completion): return 1\n")
    with pytest.raises(WorkersUnavailable, match="the reward workers die while they start; what they wrote to stderr says why"):
        load_rewards([f"{file}:f"])
    assert [child for child in workers_of(os.getpid()) if "surogate_rl.rewards.pool" in " ".join(child.cmdline())] == []


def test_a_file_that_hangs_the_workers_is_reported(tmp_path: Path) -> None:
    from surogate_rl.rewards.pool import WorkersUnavailable

    file = tmp_path / "stuck.py"
    file.write_text(f"import os, time\nif os.getpid() != {os.getpid()}:\n    time.sleep(1000)\ndef f(completion): return 1\n")
    with pytest.raises(WorkersUnavailable, match="no reward worker became ready within 2 s"):
        load_rewards([f"{file}:f"], start_timeout=2.0)
