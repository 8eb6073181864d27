"""Ending a process tree with all that it holds. Needs no vLLM: the trees are made of plain Python processes."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from surogate_rl.rollouts.engines.vllm.host.surogate_vllm import guard

from .groups import gone, members

HOST = Path(guard.__file__).resolve().parents[1]
PARENT = """
import os, subprocess, sys, time
from multiprocessing.shared_memory import SharedMemory
memory = SharedMemory(create=True, size=4096)   # starts a resource tracker
child = subprocess.Popen([sys.executable, "-c", "import sys; from surogate_vllm import guard; guard.die_with_parent(); print('up', flush=True); import time; time.sleep(600)"], stdout=subprocess.PIPE)
child.stdout.readline()
print(memory.name, flush=True)
time.sleep(600)
"""  # noqa: E501


def start(*arguments: str, **options: object) -> subprocess.Popen[str]:
    environment = dict(os.environ) | {"PYTHONPATH": str(HOST)}
    return subprocess.Popen(  # type: ignore[call-overload, no-any-return]
        [sys.executable, *arguments], stdout=subprocess.PIPE, text=True, env=environment, start_new_session=True, **options
    )


@pytest.fixture
def tree() -> tuple[subprocess.Popen[str], Path]:
    """A leader with a child, a resource tracker, and shared memory that has a name."""
    process = start("-c", PARENT)
    assert process.stdout is not None
    memory = Path("/dev/shm") / process.stdout.readline().strip()
    assert memory.is_file()
    assert len(members(process.pid)) == 3
    return process, memory


@pytest.mark.parametrize("stopped", [False, True])
def test_a_tree_is_ended_with_its_memory_and_files(tree: tuple[subprocess.Popen[str], Path], tmp_path: Path, stopped: bool) -> None:
    process, memory = tree
    folder = tmp_path / "folder"
    folder.mkdir()
    (folder / "socket").touch()
    if stopped:
        os.killpg(process.pid, signal.SIGSTOP)
    guard.kill(process.pid, str(folder))
    assert process.wait(60) == -signal.SIGKILL
    assert not gone(process.pid)
    assert not memory.exists()
    assert not folder.exists()


def test_children_end_with_their_parent_and_the_tracker_cleans_up(tree: tuple[subprocess.Popen[str], Path]) -> None:
    process, memory = tree
    os.kill(process.pid, signal.SIGKILL)
    process.wait(60)
    assert not gone(process.pid)
    assert not memory.exists()


def test_a_lifeline_that_is_closed_ends_the_group_though_python_is_busy() -> None:
    ours, theirs = socket.socketpair()
    script = f"""
import socket
from surogate_vllm import guard
guard.watch(socket.socket(fileno={theirs.fileno()}))
print("up", flush=True)
while True:
    pass
"""
    process = start("-c", script, pass_fds=[theirs.fileno()])
    theirs.close()
    assert process.stdout is not None
    process.stdout.readline()
    assert process.poll() is None
    ours.close()
    assert process.wait(60) == -signal.SIGKILL
