"""Worker processes that can be killed: a pebble pool over processes that start clean.

Python's own start methods do not fit. ``fork`` copies a process full of threads and locks (OpenMP, OpenBLAS, our own pool) and can
deadlock; ``spawn`` imports the user's script again in every worker: slow, large (torch), and an endless loop in a script without
``if __name__ == "__main__"``. `_WorkerProcess` is ``spawn`` without that import. Besides, a worker

* leads a process group of its own, and ending it kills the group at once, with what the reward function started;
* is killed by the kernel when the process that owns it is gone, even if Python code can no longer run in either of them.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import pickle
import queue
import signal
import sys
import threading
import time
import weakref
from collections.abc import Callable
from concurrent.futures import Future
from concurrent.futures.process import BrokenProcessPool
from multiprocessing import context, popen_spawn_posix, process, util
from multiprocessing.reduction import ForkingPickler
from typing import Any

from pebble import ProcessExpired, ProcessPool

from surogate_rl.errors import RunError

logger = logging.getLogger("surogate_rl.rewards")

_BOOT = (
    "import os, pickle, sys; os.setsid(); f = open({fd}, 'rb', closefd=False); sys.path[:] = pickle.load(f); "
    "from surogate_rl.rewards.pool import _main; sys.exit(_main({fd}, f))"
)
_ATTEMPTS = 3


class WorkerTimeout(Exception):
    """The deadline passed; the worker was killed."""


class WorkerDied(Exception):
    """The worker ended in the middle of the work."""


class WorkersUnavailable(RunError):
    """No worker can be had: they die or hang while they start."""


class _Popen(popen_spawn_posix.Popen):
    """Starts ``python -c`` instead of multiprocessing's own command, which would import ``__main__``."""

    _fds: list[int]

    def _launch(self, process_obj: process.BaseProcess) -> None:
        context.set_spawning_popen(self)
        try:
            state = ForkingPickler.dumps(process_obj)
        finally:
            context.set_spawning_popen(None)
        read_end, write_end = os.pipe()  # carries the state; its end of file tells the worker that its owner is gone
        alive, held_by_child = os.pipe()
        try:
            self.finalizer = util.Finalize(self, _close, (alive, write_end))
            self.sentinel = alive
            executable = sys.executable
            flags = util._args_from_interpreter_flags()  # type: ignore[attr-defined]
            command = [executable, *flags, "-c", _BOOT.format(fd=read_end)]
            passed = [*self._fds, read_end, held_by_child]
            self.pid = util.spawnv_passfds(os.fsencode(executable), [os.fsencode(part) for part in command], passed)
            with open(write_end, "wb", closefd=False) as file:
                pickle.dump(list(sys.path), file)
                file.write(state)
        except BrokenPipeError:
            pass  # it died at once; whoever looks at the exit code will see that
        finally:
            os.close(read_end)
            os.close(held_by_child)


def _close(*descriptors: int) -> None:
    for descriptor in descriptors:
        os.close(descriptor)


class _WorkerProcess(process.BaseProcess):
    _start_method = "spawn"

    @staticmethod
    def _Popen(process_obj: process.BaseProcess) -> _Popen:
        return _Popen(process_obj)

    def terminate(self) -> None:
        """Kills the whole group without asking: a worker stuck in C code never sees a polite signal."""
        _kill_group(self.pid)
        super().kill()

    kill = terminate

    @property
    def exitcode(self) -> int | None:
        # To the pool an exit with 0 is no failure, and the task would wait for its deadline; no worker of ours ends unasked.
        code = super().exitcode
        return 256 if code == 0 else code

    def is_alive(self) -> bool:
        alive = super().is_alive()
        if not alive:
            _kill_group(self.pid)  # children that it left behind
        return alive


def _kill_group(pid: int | None) -> None:
    if pid is None:
        return
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, signal.SIGKILL)


class _Context(context.SpawnContext):
    Process = _WorkerProcess  # type: ignore[assignment]


def _main(fd: int, file: Any) -> int:
    """First Python code of ours in a worker: arranges its end, then runs what multiprocessing would run."""
    _die_with_owner(fd)
    for name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"):
        os.environ.setdefault(name, "1")  # the cores belong to the learner, and there are several workers
    try:
        import resource

        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    except (ImportError, ValueError, OSError):
        pass
    current: Any = process.current_process()
    current._inheriting = True
    try:
        worker = pickle.load(file)
    finally:
        del current._inheriting
    return int(worker._bootstrap(parent_sentinel=fd))


def _die_with_owner(fd: int) -> None:
    """Kills this process group when the other end of the pipe `fd` closes.

    Where the kernel can (Linux) it sends SIGKILL itself, which reaches a worker whose interpreter is stuck in C code; a thread that
    waits for the end of file does the same elsewhere. (PR_SET_PDEATHSIG would fire at the end of the thread that started the worker.)
    """
    import fcntl

    try:
        if hasattr(fcntl, "F_SETSIG"):
            fcntl.fcntl(fd, fcntl.F_SETOWN, -os.getpgrp())
            fcntl.fcntl(fd, fcntl.F_SETSIG, signal.SIGKILL)
            fcntl.fcntl(fd, fcntl.F_SETFL, fcntl.fcntl(fd, fcntl.F_GETFL) | os.O_ASYNC)
    except OSError:
        pass

    def wait() -> None:
        import select

        poll = select.poll()
        poll.register(fd, select.POLLHUP)
        while not any(event & (select.POLLHUP | select.POLLERR) for _, event in poll.poll()):
            pass
        os.killpg(os.getpgrp(), signal.SIGKILL)

    threading.Thread(target=wait, name="owner-watch", daemon=True).start()


class WorkerPool:
    """`workers` processes that run one call each at a time.

    Args:
        initializer, arguments: run in each worker before its first call. Must not raise.
        start_timeout: seconds within which a fresh worker has to answer.
    """

    def __init__(self, workers: int, initializer: Callable[..., None], arguments: tuple[Any, ...], *, start_timeout: float = 120.0) -> None:
        self._workers = workers
        self._initializer = initializer
        self._arguments = arguments
        self._start_timeout = start_timeout
        self._lock = threading.Lock()
        self._closed = False
        self._generation = 0
        self._running: dict[int, float] = {}
        self._calls = 0
        self._progress = time.monotonic()
        self._pool = self._make()
        self._finalizer = weakref.finalize(self, _end, self._pool)

    def _make(self) -> ProcessPool:
        return ProcessPool(max_workers=self._workers, initializer=self._initializer, initargs=self._arguments, context=_Context())

    def pids(self) -> list[int]:
        """Of the workers that there are now."""
        manager = self._pool._pool_manager.worker_manager
        return [worker.pid for worker in tuple(manager.workers.values()) if worker.pid is not None and worker.is_alive()]

    def start(self, function: Callable[..., Any], *args: Any) -> Any:
        """Starts the workers and waits for one to answer ``function(*args)``.

        Raises:
            WorkersUnavailable: none did.
        """
        future, _ = self._submit(function, args, self._start_timeout)
        try:
            return future.result(timeout=self._start_timeout)
        except (TimeoutError, BrokenProcessPool, ProcessExpired) as error:
            self.close()
            raise WorkersUnavailable(
                f"no reward worker became ready within {self._start_timeout:g} s"
                if isinstance(error, TimeoutError)
                else "the reward workers die while they start; what they wrote to stderr says why"
            ) from error

    async def run(self, function: Callable[..., Any], args: tuple[Any, ...], timeout: float) -> Any:
        """``function(*args)`` in a worker. Cancelling the awaiting task kills the work.

        Args:
            timeout: seconds from when a worker takes up the call.

        Raises:
            WorkerTimeout: the deadline passed.
            WorkerDied: the worker ended (exit code in the message).
            WorkersUnavailable: workers cannot be started any more.
            Exception: what pickling the arguments raised.
        """
        for _ in range(_ATTEMPTS):
            try:
                future, generation = self._submit(function, args, timeout)
            except BrokenProcessPool:
                await asyncio.to_thread(self._renew, self._generation)
                continue
            call = self._calls = self._calls + 1
            self._running[call] = timeout
            waiter = asyncio.wrap_future(future)
            try:
                while not (await asyncio.wait({waiter}, timeout=1.0))[0]:
                    if time.monotonic() - self._progress > self._start_timeout + max(self._running.values()):
                        logger.warning("the reward workers have stopped answering; they are replaced")
                        await asyncio.to_thread(self._renew, generation)
                return waiter.result()
            except TimeoutError:
                raise WorkerTimeout(f"no result after {timeout:g} s; its worker was killed") from None
            except ProcessExpired as error:
                raise WorkerDied(f"the worker process died ({_exit_reason(error.exitcode)})") from None
            except BrokenProcessPool:
                await asyncio.to_thread(self._renew, generation)
            except asyncio.CancelledError:
                future.cancel()
                raise
            finally:
                del self._running[call]
                self._progress = time.monotonic()
        raise WorkersUnavailable(f"reward workers were lost {_ATTEMPTS} times while they started or waited for work")

    def _submit(self, function: Callable[..., Any], args: tuple[Any, ...], timeout: float) -> tuple[Future[Any], int]:
        with self._lock:
            if self._closed:
                raise RuntimeError("the reward workers are closed")
            if not self._running:
                self._progress = time.monotonic()
            try:
                return self._pool.schedule(function, args=args, timeout=timeout), self._generation
            except RuntimeError as error:
                raise BrokenProcessPool(str(error)) from error

    def _renew(self, generation: int) -> None:
        """Replaces the pool, unless that has been done since `generation`; what was under way there fails and is run again."""
        with self._lock:
            if self._closed or generation != self._generation:
                return
            self._generation += 1
            old = self._pool
            self._pool = self._make()
            self._pool.active  # noqa: B018 (starts it: here and not on the event loop)
            self._finalizer.detach()
            self._finalizer = weakref.finalize(self, _end, self._pool)
            self._progress = time.monotonic()
        _end(old)

    def close(self) -> None:
        """Kills the workers and waits until they are gone. May be called again."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
        self._finalizer()


def _end(pool: ProcessPool) -> None:
    """Stops a pool; whoever waits for one of its calls gets BrokenProcessPool."""
    pool.stop()  # type: ignore[no-untyped-call]
    pool.join()
    gone = BrokenProcessPool("the reward workers were stopped")
    pool._pool_manager.task_manager.tasks_abort(gone)
    while True:
        try:
            task = pool._context.task_queue.get_nowait()
        except queue.Empty:
            return
        if task is not None and not task.future.done():
            task.future.set_exception(gone)


def _exit_reason(code: int) -> str:
    if code == 256:
        return "it exited with code 0"
    if code < 0:
        try:
            name = signal.Signals(-code).name
        except ValueError:
            name = f"signal {-code}"
        return f"killed by {name}" + (", perhaps for lack of memory" if name == "SIGKILL" else "")
    return f"exit code {code}"
