"""What is left of an engine whose processes were all killed from outside, the tracker of its shared memory among them. Needs no vLLM."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from surogate_rl.rollouts.engines.vllm.process import EngineProcess

SCRIPT = """
import os, time
from multiprocessing.shared_memory import SharedMemory
memory = SharedMemory(create=True, size=4096)
with open({said!r} + ".part", "w") as file:
    file.write(memory.name)
os.rename({said!r} + ".part", {said!r})
time.sleep(600)
"""


@pytest.fixture
def engine(tmp_path: Path) -> Iterator[tuple[EngineProcess, Path]]:
    """A process that stands where the engine's would, and its named memory."""
    said = tmp_path / "said"
    (tmp_path / "script.py").write_text(SCRIPT.format(said=str(said)))
    python = tmp_path / "python"
    python.write_text(f"#!/bin/sh\nexec {sys.executable} {tmp_path / 'script.py'}\n")
    python.chmod(0o755)
    process = EngineProcess(str(python), server=False, environment={})
    while not said.is_file():
        assert process._process.poll() is None
        time.sleep(0.02)
    memory = Path("/dev/shm") / said.read_text().strip()
    yield process, memory
    process.kill()
    memory.unlink(missing_ok=True)


def kill_all(process: EngineProcess) -> None:
    os.killpg(process.pid, signal.SIGKILL)
    process._process.wait()


def test_memory_that_was_noted_goes_though_nobody_is_left_to_ask(engine: tuple[EngineProcess, Path]) -> None:
    process, memory = engine
    process.note_memory()
    kill_all(process)
    assert memory.exists(), "nobody else removes it"
    process.kill()
    assert not memory.exists()


def test_what_somebody_else_has_made_under_that_name_stays(engine: tuple[EngineProcess, Path]) -> None:
    process, memory = engine
    process.note_memory()
    other = memory.with_name(memory.name + "_other")
    other.write_text("theirs")
    other.rename(memory)
    kill_all(process)
    process.kill()
    assert memory.read_text() == "theirs"
