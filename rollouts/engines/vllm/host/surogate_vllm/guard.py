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
        clean(os.getpid())
        os.killpg(0, signal.SIGKILL)
    os._exit(1)


def clean(group: int, folder: str | None = None) -> None:
    """Removes what the kernel would not when the group is killed: shared memory that has a name, and the folder of sockets and temporary
    files. The processes keep what they have open.

    Args:
        group: id of the process group.
        folder: default: of this process.
    """
    for path in _named_memory(group):
        with contextlib.suppress(OSError):
            os.unlink(path)
    if folder := folder or os.environ.get(FOLDER):
        shutil.rmtree(folder, ignore_errors=True)


def _named_memory(group: int) -> set[str]:
    found: set[str] = set()
    for entry in os.listdir("/proc") if os.path.isdir("/proc") else []:
        if not entry.isdigit():
            continue
        try:
            with open(f"/proc/{entry}/stat", "rb") as file:
                state = file.read().rpartition(b")")[2].split()
            if int(state[2]) != group:
                continue
            with open(f"/proc/{entry}/maps", encoding="utf-8", errors="replace") as maps:
                found |= {line.split(maxsplit=5)[5].strip() for line in maps if "/dev/shm/" in line}
        except (OSError, IndexError, ValueError):
            continue  # it has ended meanwhile
    return {path for path in found if path.startswith("/dev/shm/") and not path.endswith("(deleted)")}
