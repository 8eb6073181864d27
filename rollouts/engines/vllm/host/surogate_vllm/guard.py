"""No process of the engine's tree outlives the run, whatever ends it.

* The engine's main process holds a socket whose other end the run alone has: its lifeline. The kernel closes that end when the run ends,
  by whatever cause; a thread that waits for it then kills the process group, itself included, whatever else the process is busy with.
* Its children (vLLM's engine core, and workers) are killed by the kernel when their parent dies, also by SIGKILL.
"""

from __future__ import annotations

import ctypes
import os
import shutil
import signal
import socket
import sys
import threading
from typing import NoReturn

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
    if folder := os.environ.get("SUROGATE_VLLM_FOLDER"):  # of sockets, which the kernel does not remove
        shutil.rmtree(folder, ignore_errors=True)
    if os.getpgrp() == os.getpid():
        os.killpg(0, signal.SIGKILL)
    os._exit(1)
