"""Calls into environments with a deadline, in places where they can block nothing but themselves.

Plain functions run on daemon threads, coroutines on an event loop of their own beside the one that engine and deadlines live on. So an
environment that blocks (even one that does so inside ``async def``) loses its own episode when its deadline passes. What hangs cannot be
killed, as it shares this process; its thread or loop is left alone and replaced, and holds up neither the run nor the end of the program.
"""

from __future__ import annotations

import asyncio
import inspect
import logging
import queue
import threading
from collections.abc import Callable, Coroutine
from concurrent.futures import Future
from typing import Any

logger = logging.getLogger("surogate_rl.rollouts")

MOST_THREADS = 64
ANSWERS_WITHIN = 2.0
"""Seconds within which an event loop that nobody blocks answers, even on a busy machine."""


class EnvironmentFailure(Exception):
    """A call into an environment raised, took too long or gave nonsense. The message is the episode's error."""


class EnvironmentCalls:
    """One per run.

    Args:
        timeout: seconds for one call.
        threads: calls of plain functions at a time; the time that one waits for its turn does not count against its deadline.
    """

    def __init__(self, timeout: float, threads: int = MOST_THREADS) -> None:
        self.timeout = timeout
        self._places = asyncio.Semaphore(threads)
        self._threads = _Threads()
        self._loop: _Loop | None = None

    async def __call__(self, what: str, function: Callable[..., Any], *args: Any) -> Any:
        """``function(*args)``, awaited if it is a coroutine function.

        Raises:
            EnvironmentFailure: it raised, or gave no result within the deadline; `what` names the call.
        """
        try:
            async with asyncio.timeout(None) as deadline:
                if inspect.iscoroutinefunction(function):
                    deadline.reschedule(asyncio.get_running_loop().time() + self.timeout)
                    return await self._coroutine(function(*args))
                async with self._places:
                    deadline.reschedule(asyncio.get_running_loop().time() + self.timeout)
                    return await asyncio.wrap_future(self._threads.start(function, args))
        except TimeoutError as error:
            if not deadline.expired():
                raise EnvironmentFailure(f"environment: {what}: {_words(error)}") from error
            await self._look_after_loop()
            raise EnvironmentFailure(f"environment: {what}: no result after {self.timeout:g} s") from None
        except asyncio.CancelledError as error:
            task = asyncio.current_task()
            if task is not None and task.cancelling() > 0:
                raise
            raise EnvironmentFailure(f"environment: {what}: {_words(error)}") from error
        except Exception as error:
            raise EnvironmentFailure(f"environment: {what}: {_words(error)}") from error

    def close(self) -> None:
        self._threads.close()
        if self._loop is not None:
            self._loop.close()

    async def _coroutine(self, work: Coroutine[Any, Any, Any]) -> Any:
        if self._loop is None:
            self._loop = _Loop()
        return await asyncio.wrap_future(self._loop.start(work))

    async def _look_after_loop(self) -> None:
        """Replaces the environments' loop if one of them blocks it."""
        loop = self._loop
        if loop is None:
            return
        try:
            await asyncio.wait_for(asyncio.wrap_future(loop.start(asyncio.sleep(0))), ANSWERS_WITHIN)
        except TimeoutError:
            if self._loop is loop:
                logger.warning("an asynchronous environment blocks its event loop; the episodes on it will be lost to their deadlines")
                self._loop = None


def _words(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}" if str(error) else type(error).__name__


class _Loop:
    """An event loop on a daemon thread."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        threading.Thread(target=self._run, name="surogate-rl-environments", daemon=True).start()

    def _run(self) -> None:
        self._loop.run_forever()
        self._loop.close()

    def start(self, work: Coroutine[Any, Any, Any]) -> Future[Any]:
        return asyncio.run_coroutine_threadsafe(work, self._loop)

    def close(self) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)


class _Threads:
    """Daemon threads that are used again. (Those of concurrent.futures are joined at the end of the program, which would wait for ever.)"""

    def __init__(self) -> None:
        self._work: queue.SimpleQueue[tuple[Future[Any], Callable[..., Any], tuple[Any, ...]] | None] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._idle = 0
        self._threads = 0

    def start(self, function: Callable[..., Any], args: tuple[Any, ...]) -> Future[Any]:
        future: Future[Any] = Future()
        with self._lock:
            if self._idle > 0:
                self._idle -= 1
            else:
                self._threads += 1
                threading.Thread(target=self._run, name=f"surogate-rl-environment-{self._threads}", daemon=True).start()
        self._work.put((future, function, args))
        return future

    def _run(self) -> None:
        while (item := self._work.get()) is not None:
            future, function, args = item
            if future.set_running_or_notify_cancel():
                try:
                    future.set_result(function(*args))
                except BaseException as error:  # SystemExit in an environment is its failure as well
                    future.set_exception(error if isinstance(error, Exception) else RuntimeError(_words(error)))
            with self._lock:
                self._idle += 1

    def close(self) -> None:
        with self._lock:
            for _ in range(self._threads):
                self._work.put(None)
