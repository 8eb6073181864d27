"""Runs untrusted Python programs, or refuses to.

Protection is by the Linux kernel: namespaces, mounts, resource limits (`sandbox_child` says what they are). It trusts the kernel; against
code that attacks the kernel itself run the whole training in a virtual machine. Where the kernel does not allow it, nothing is run at all.
"""

from __future__ import annotations

import json
import os
import selectors
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

_MEBI = 2**20


class SandboxUnavailable(RuntimeError):
    """The sandbox could not be closed, so nothing was run."""


@dataclass(frozen=True)
class Finished:
    """What became of a program.

    Attributes:
        status: ``exit``: it ended by itself; ``time``: it used up its processor time or the deadline; ``output``: it wrote too much;
            ``killed``: a signal ended it (memory, a crash).
        code: exit code, if `status` is ``exit``.
        stdout, stderr: what it wrote, up to the limit.
        deadline: it was still there at the wall-clock deadline (which may be the machine's fault).
    """

    status: Literal["exit", "time", "output", "killed"]
    code: int
    stdout: str
    stderr: str
    deadline: bool = False


@dataclass(frozen=True)
class Sandbox:
    """Limits of one run.

    Attributes:
        cpu_seconds: processor time.
        wall_seconds: deadline by the clock.
        memory_mb: address space.
        file_mb: of all files together (/tmp is memory).
        processes: and threads.
        output_bytes: standard output and error together.
    """

    cpu_seconds: int = 5
    wall_seconds: float = 30.0
    memory_mb: int = 512
    file_mb: int = 16
    processes: int = 16
    output_bytes: int = _MEBI

    def check(self) -> None:
        """Tries the sandbox.

        Raises:
            SandboxUnavailable: it does not work here.
        """
        result = self.run("print(6 * 7)")
        if result.status != "exit" or result.stdout.strip() != "42":
            raise SandboxUnavailable(f"a trial program in the code sandbox ended with {result}")

    def run(self, program: str, stdin: str = "", files: Mapping[str, str] | None = None) -> Finished:
        """Runs a Python program with the interpreter's own standard library.

        Args:
            files: name -> text, put beside the program.

        Raises:
            SandboxUnavailable: the sandbox could not be closed; nothing was run.
        """
        if sys.platform != "linux":
            raise SandboxUnavailable(f"the code sandbox needs Linux, not {sys.platform}; code is never run outside of it")
        executable = os.path.realpath(getattr(sys, "_base_executable", sys.executable))
        library = os.path.dirname(os.path.realpath(os.__file__))
        paths = [os.path.realpath(path) for path in (sys.base_prefix, sys.base_exec_prefix)] + [library, os.path.dirname(executable)]
        job = {
            "command": [executable, "-I", "-B", "/tmp/main.py"],
            "files": {**(files or {}), "main.py": program},
            "stdin": stdin,
            "interpreter_paths": [path for path in dict.fromkeys(paths) if path != "/"],
            "limits": {
                "cpu_seconds": self.cpu_seconds,
                "memory_bytes": self.memory_mb * _MEBI,
                "file_bytes": self.file_mb * _MEBI,
                "processes": self.processes,
            },
        }
        return self._supervise([executable, "-I", "-S", "-B", str(Path(__file__).with_name("sandbox_child.py"))], json.dumps(job))

    def _supervise(self, command: list[str], job: str) -> Finished:
        status_read, status_write = os.pipe()
        deadline = time.monotonic() + self.wall_seconds
        try:
            process = subprocess.Popen(
                [*command, str(status_write)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                pass_fds=(status_write,),
                env={"LANG": "C.UTF-8"},
            )
        finally:
            os.close(status_write)
        try:
            assert process.stdin is not None
            try:
                process.stdin.write(job.encode())
                process.stdin.close()
            except BrokenPipeError:
                pass  # it failed at once; the status says why
            outputs, status, ended = self._read(process, status_read, deadline)
            if ended is None:
                try:
                    process.wait(timeout=max(0.1, deadline - time.monotonic()))
                except subprocess.TimeoutExpired:
                    ended = "time"
        finally:
            process.kill()  # its first process goes with it, and with that one the kernel ends the rest
            process.wait()
            for stream in (process.stdin, process.stdout, process.stderr):
                if stream is not None and not stream.closed:
                    stream.close()
            os.close(status_read)
        if status != b"ready":
            if ended == "time":
                raise TimeoutError(f"the code sandbox was not set up within {self.wall_seconds:g} s")
            said = status.decode(errors="replace").removeprefix("ready") or outputs[1].decode(errors="replace").strip()
            reason = said or "no reason given"
            raise SandboxUnavailable(f"the code sandbox does not work here ({reason}); code is never run outside of it")
        return self._verdict(process.returncode, ended, outputs)

    def _read(
        self, process: subprocess.Popen[bytes], status_read: int, deadline: float
    ) -> tuple[tuple[bytes, bytes], bytes, Literal["time", "output"] | None]:
        assert process.stdout is not None
        assert process.stderr is not None
        collected = {process.stdout.fileno(): b"", process.stderr.fileno(): b"", status_read: b""}
        names = list(collected)
        ended: Literal["time", "output"] | None = None
        with selectors.DefaultSelector() as selector:
            for descriptor in names:
                selector.register(descriptor, selectors.EVENT_READ)
            while selector.get_map():
                left = deadline - time.monotonic()
                if left <= 0:
                    ended = "time"
                    break
                for key, _ in selector.select(left):
                    data = os.read(key.fd, 65536)
                    collected[key.fd] += data
                    if not data:
                        selector.unregister(key.fd)
                if len(collected[names[0]]) + len(collected[names[1]]) > self.output_bytes:
                    ended = "output"
                    break
        return (collected[names[0]], collected[names[1]]), collected[status_read], ended

    def _verdict(self, code: int, ended: Literal["time", "output"] | None, outputs: tuple[bytes, bytes]) -> Finished:
        stdout, stderr = (output.decode("utf-8", "replace") for output in outputs)
        if ended is not None:
            return Finished(ended, -1, stdout, stderr, deadline=ended == "time")
        if code == 128 + signal.SIGXCPU:
            return Finished("time", -1, stdout, stderr)
        if code < 0 or code > 128:
            return Finished("killed", code, stdout, stderr)
        return Finished("exit", code, stdout, stderr)
