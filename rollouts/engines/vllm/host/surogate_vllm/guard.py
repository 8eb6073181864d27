"""No process of the engine's tree outlives the run, whatever ends it.

* The engine's main process holds a socket whose other end the run alone has: its lifeline. The kernel closes that end when the run ends,
  by whatever cause; a thread that waits for it then kills the process group, itself included, whatever else the process is busy with.
* Its children (vLLM's engine core, and workers) are killed by the kernel when their parent dies, also by SIGKILL.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import shutil
import signal
import socket
import sys
import threading
from collections.abc import Mapping
from types import MappingProxyType
from typing import NoReturn

FOLDER = "SUROGATE_VLLM_FOLDER"

_PR_SET_PDEATHSIG = 1


def die_with_parent() -> None:
    """Asks the kernel to kill this process when the thread that started it ends (vLLM starts its processes from main threads)."""
    if not sys.platform.startswith("linux"):
        return
    parent = os.getppid()
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:  # it died before the kernel was asked
        os.kill(os.getpid(), signal.SIGKILL)


def watch(lifeline: socket.socket) -> None:
    """Kills the process group when the other end of `lifeline` is closed."""

    def wait() -> None:
        # nothing is ever said on it: any return means that the run has gone
        lifeline.recv(1)
        kill_group()

    threading.Thread(target=wait, name="lifeline", daemon=True).start()


def kill_group() -> NoReturn:
    """Kills the engine's processes at once. The main process leads a group of its own, so this reaches nothing of the run's."""
    if os.getpgrp() == os.getpid():
        kill(os.getpid(), os.environ.get(FOLDER, ""))
    os._exit(1)


def kill(group: int, folder: str, memory: Mapping[str, int] = MappingProxyType({})) -> None:
    """Kills a process group, and removes what the kernel would not: shared memory that has a name, and the folder of sockets and temporary
    files. Python's resource trackers, which unlink what the processes that they watch have left, are spared: they end by themselves.

    Args:
        group: id of the process group; if this process is in it, it does not return.
        memory: that the group is known to have had (see `memory_of`), whoever of it is left to be asked.
    """
    for path, number in (dict(memory) | memory_of(group)).items():
        with contextlib.suppress(OSError):
            if os.stat(path).st_ino == number:  # not what somebody else has made since under that name
                os.unlink(path)
    if folder:
        shutil.rmtree(folder, ignore_errors=True)
    mine = False
    for _ in range(2):  # once more for what had just been started
        for process, tracker in _members(group):
            mine |= process == os.getpid()
            if process != os.getpid():
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.kill(process, signal.SIGCONT if tracker else signal.SIGKILL)
    if mine:
        os.kill(os.getpid(), signal.SIGKILL)


def memory_of(group: int) -> dict[str, int]:
    """The named shared memory that living processes of a group have mapped: path and inode number."""
    found: dict[str, int] = {}
    for path in {path for process, _ in _members(group) for path in _named_memory(process)}:
        with contextlib.suppress(OSError):
            found[path] = os.stat(path).st_ino
    return found


def _members(group: int) -> list[tuple[int, bool]]:
    """Processes of a group, and whether each is a resource tracker."""
    found: list[tuple[int, bool]] = []
    for entry in os.listdir("/proc"):
        if entry.isdigit():
            try:
                with open(f"/proc/{entry}/stat", "rb") as stat:
                    fields = stat.read().rpartition(b")")[2].split()
                if int(fields[2]) == group:
                    with open(f"/proc/{entry}/cmdline", "rb") as command:
                        found.append((int(entry), b"multiprocessing.resource_tracker" in command.read()))
            except (OSError, IndexError, ValueError):
                continue  # it has ended meanwhile
    return found


def _named_memory(process: int) -> set[str]:
    """Paths below /dev/shm that a process has mapped."""
    try:
        with open(f"/proc/{process}/maps", encoding="utf-8", errors="replace") as maps:
            paths = {line.split(maxsplit=5)[5].strip() for line in maps if "/dev/shm/" in line}
    except (OSError, IndexError):
        return set()
    return {path for path in paths if path.startswith("/dev/shm/") and not path.endswith("(deleted)")}
