"""Starts the engine's program in an interpreter of its own, and makes sure that it ends with this process."""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import NoReturn

from surogate_rl.rollouts.engines.vllm.errors import EngineFailed
from surogate_rl.rollouts.engines.vllm.host.surogate_vllm import guard

_HOST = Path(__file__).parent / "host"
_MODULE = "surogate_vllm.main"
_TOKEN = "SUROGATE_VLLM_TOKEN"  # where the program looks for its secret
_ENDING = 2.0  # seconds that may pass between the end of a process's sockets and its own, on a busy machine
_TAIL = 30  # lines of the log that an error quotes

# What makes vLLM look into the network, or into the environment of the run
_QUIET = {
    "VLLM_NO_USAGE_STATS": "1",
    "DO_NOT_TRACK": "1",
    "VLLM_LOGGING_LEVEL": "WARNING",
    "HF_HUB_OFFLINE": "1",
    "TRANSFORMERS_OFFLINE": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "VLLM_WORKER_MULTIPROC_METHOD": "spawn",  # forked processes would not ask to die with their parent
    "PYTHONSAFEPATH": "1",
    "PYTHONUNBUFFERED": "1",
}


class EngineProcess:
    """The engine's process tree, a process group of its own.

    It ends with this process whatever ends that: the kernel closes the lifeline, and the tree kills itself. Nothing is inherited that could
    keep a lifeline open by accident (Python's sockets are not passed on unless asked for).

    Args:
        python: the interpreter that has vLLM.
        server: listen on a free port of the loopback device instead of a socket pair.
        environment: variables besides this process's own.

    Raises:
        EngineFailed: the interpreter is not there.
    """

    def __init__(self, python: str, *, server: bool, environment: Mapping[str, str]) -> None:
        self._folder = tempfile.mkdtemp(prefix="surogate-vllm-")
        self._early_log = Path(self._folder) / "start.log"
        self._killed = False
        self.log: Path | None = None  # what it prints once it has been told where to
        self.token = secrets.token_hex(16)  # what a connection must show: others of this machine reach a server's port too
        self._memory: dict[str, int] = {}
        ours, theirs = socket.socketpair()
        self._lifeline = ours
        passed = [theirs]
        arguments = ["--lifeline", str(theirs.fileno())]
        self.connection: socket.socket | None = None
        if server:
            arguments += ["--listen", "127.0.0.1:0"]
        else:
            self.connection, far = socket.socketpair()
            passed.append(far)
            arguments += ["--socket", str(far.fileno())]
        try:
            with self._early_log.open("ab") as output:
                self._process = subprocess.Popen(
                    [python, "-m", _MODULE, *arguments],
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=subprocess.STDOUT,
                    env=self._environment(python, environment),
                    pass_fds=[end.fileno() for end in passed],
                    start_new_session=True,  # Ctrl-C in the terminal reaches the run alone, which then ends the engine
                )
        except OSError as error:
            self._release()
            raise EngineFailed(f"rollouts.vllm.python: {python} cannot be started ({error.strerror or error})") from error
        finally:
            for end in passed:
                end.close()

    def _environment(self, python: str, more: Mapping[str, str]) -> dict[str, str]:
        environment = dict(os.environ)
        # another interpreter's packages are not ours
        inherited = environment.get("PYTHONPATH") if shutil.which(python) == sys.executable else None
        environment |= _QUIET
        environment["PYTHONPATH"] = os.pathsep.join([str(_HOST), *([inherited] if inherited else [])])
        environment[_TOKEN] = self.token
        # everything that vLLM leaves lying about goes into one folder, but for what later runs profit from
        environment.setdefault("TORCHINDUCTOR_CACHE_DIR", os.path.join(tempfile.gettempdir(), f"torchinductor_{os.getuid()}"))
        environment["VLLM_RPC_BASE_PATH"] = environment["TMPDIR"] = environment[guard.FOLDER] = self._folder
        return environment | dict(more)

    @property
    def pid(self) -> int:
        return self._process.pid

    def address(self, timeout: float) -> tuple[str, int]:
        """Where a server listens. Blocks.

        Raises:
            EngineFailed: it ended before it could say so, or took longer than `timeout` seconds.
        """
        self._lifeline.settimeout(timeout)
        said = b""
        try:
            while not said.endswith(b"\n"):
                part = self._lifeline.recv(256)
                if not part:
                    break
                said += part
        except TimeoutError:
            pass
        finally:
            self._lifeline.settimeout(None)
        if not said.endswith(b"\n"):
            raise EngineFailed(f"the vLLM server did not start within {timeout:g} s; {self.describe_end()}")
        host, port = said.decode().split()
        return host, int(port)

    def describe_end(self) -> str:
        """How the process stands, and the end of what it printed."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(_ENDING)
        code = self._process.poll()
        if code is None:
            state = "it is still running"
        elif code < 0:
            state = f"it was ended by signal {signal.Signals(-code).name}"
        else:
            state = f"it ended with exit code {code}"
        logs = [log for log in (self._early_log, self.log) if log is not None and log.is_file()]
        lines = [line for log in logs for line in log.read_text(errors="replace").splitlines()[-_TAIL:]][-_TAIL:]
        if not lines:
            return f"{state} and printed nothing"
        where = f" (all of it in {self.log})" if self.log is not None and self.log.is_file() else ""
        return f"{state}; what it printed last{where}:\n" + "\n".join(f"    {line}" for line in lines)

    def note_memory(self) -> None:
        """Remembers which named memory the tree has by now: if it is killed from outside as a whole, nothing else tells."""
        self._memory |= guard.memory_of(self._process.pid)

    def kill(self) -> None:
        """Ends the whole tree at once and waits for it."""
        if self._killed:
            return
        self._killed = True
        guard.kill(self._process.pid, self._folder, self._memory)
        self._process.wait()
        self._release()

    def _release(self) -> None:
        self._lifeline.close()
        if self.connection is not None:
            self.connection.close()
        shutil.rmtree(self._folder, ignore_errors=True)


def replace_by_server(listen: str) -> NoReturn:
    """Becomes an engine's main process that serves runs at `listen` (``host:port``) until it is stopped."""
    environment = dict(os.environ) | {key: value for key, value in _QUIET.items() if key != "PYTHONSAFEPATH"}
    environment["PYTHONPATH"] = os.pathsep.join([str(_HOST), *filter(None, [environment.get("PYTHONPATH")])])
    os.execve(sys.executable, [sys.executable, "-m", _MODULE, "--listen", listen], environment)
