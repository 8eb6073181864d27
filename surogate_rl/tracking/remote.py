"""A tracking service in a process of its own: whatever its client does (hang, raise, leave exit hooks behind), the run does not notice."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import queue
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

logger = logging.getLogger(__name__)

_WAITING_LINES = 10_000
_WORKER = Path(__file__).with_name("worker.py")


class RemoteSink:
    """Sends metrics to ``worker.py`` as JSON lines, from a thread, so that a full pipe never blocks the caller.

    Args:
        service: ``wandb`` or ``tensorboard``.
        options: the worker's first line.
        log_file: takes what the client prints.
    """

    def __init__(self, service: str, options: Mapping[str, Any], log_file: Path) -> None:
        self.service = service
        self.log_file = log_file
        self._queue: queue.Queue[str | None] = queue.Queue(_WAITING_LINES)
        self._dropped = 0
        self._warned = False
        self._process: subprocess.Popen[str] | None = None
        try:
            with log_file.open("a", encoding="utf-8") as log:
                # A session of its own, so that Ctrl-C in the terminal leaves it time to finish; the run's end closes its input.
                self._process = subprocess.Popen(
                    [sys.executable, "-P", str(_WORKER), service],
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=log,
                    text=True,
                    encoding="utf-8",
                    start_new_session=True,
                )
        except OSError as error:
            self._warn(f"cannot be started: {error}")
            return
        self._queue.put_nowait(json.dumps(options, default=str))
        self._writer = threading.Thread(target=self._write, name=f"{service}-writer", daemon=True)
        self._reader = threading.Thread(target=self._read, name=f"{service}-reader", daemon=True)
        self._writer.start()
        self._reader.start()

    def send(self, step: int, metrics: Mapping[str, float | None]) -> None:
        """Returns at once. Lines are dropped, and counted, when the service is too slow."""
        if self._process is None:
            return
        try:
            self._queue.put_nowait(json.dumps({"step": step, "time": time.time(), "metrics": dict(metrics)}))
        except queue.Full:
            self._dropped += 1

    def finish(self) -> None:
        """Tells the worker that nothing more comes; returns at once."""
        try:
            self._queue.put_nowait(None)
        except queue.Full:
            self._dropped += 1

    def join(self, seconds: float) -> float:
        """Waits for the worker, ends it when the time is over, and returns the seconds spent."""
        process = self._process
        if process is None:
            return 0.0
        begin = time.monotonic()
        try:
            process.wait(seconds)
        except subprocess.TimeoutExpired:
            self._warn(f"did not finish within {seconds:.0f} s and was ended")
            self._kill(process)
        self._reader.join(1.0)
        if process.returncode and not self._warned:
            self._warn(f"ended with exit code {process.returncode}")
        if self._dropped:
            logger.warning("report_to: %s was too slow, %d lines were dropped; metrics.jsonl has all of them", self.service, self._dropped)
        self._process = None
        return time.monotonic() - begin

    def _kill(self, process: subprocess.Popen[str]) -> None:
        """The client may have started helpers: the whole session goes."""
        try:
            os.killpg(process.pid, signal.SIGKILL)
        except (ProcessLookupError, PermissionError):
            process.kill()
        process.wait(5.0)

    def _write(self) -> None:
        process = self._process
        assert process is not None
        assert process.stdin is not None
        try:
            while (line := self._queue.get()) is not None:
                process.stdin.write(line + "\n")
                process.stdin.flush()
            process.stdin.close()
        except (OSError, ValueError):
            # The worker is gone; the reader tells why. What is still queued has nowhere to go.
            with contextlib.suppress(OSError):
                process.stdin.close()

    def _read(self) -> None:
        process = self._process
        assert process is not None
        assert process.stdout is not None
        for line in process.stdout:
            self._warn(line.strip())

    def _warn(self, message: str) -> None:
        if not self._warned:
            logger.warning("report_to: %s %s; the run goes on without it (see %s)", self.service, message, self.log_file)
        self._warned = True
