"""Calls into environments with a deadline, in places where they can block nothing but themselves.

Plain functions run on daemon threads, coroutines on an event loop of their own beside the one that engine and deadlines live on. So an
environment that blocks (even one that does so inside ``async def``) loses its own episode when its deadline passes. What hangs cannot be
killed, as it shares this process; it is left alone, keeps its thread (and its place among those that may run at a time) until it returns,
and holds up neither the others nor the end of the program. How many may hang at the same time is bounded, or an environment that hangs
again and again would fill the process with threads: at the bound the run ends and says so.
"""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import logging
import queue
import threading
from collections.abc import Callable, Coroutine
from concurrent.futures import Future
from typing import Any

from surogate_rl.errors import RunError

logger = logging.getLogger("surogate_rl.rollouts")

MOST_THREADS = 64
MOST_TOLD = 3
"""Calls that hang of which the log tells one by one; the metric counts them all."""
ANSWERS_WITHIN = 2.0
"""Seconds within which an event loop that nobody blocks answers, even on a busy machine."""


class EnvironmentFailure(Exception):
    """A call into an environment raised, took too long or gave nonsense. The message is the episode's error."""


class EnvironmentCalls:
    """One per run.

    Args:
        timeout: seconds for one call.
        threads: calls of plain functions at a time; the time that one waits for its turn does not count against its deadline.
        most_hung: calls that may hang at the same time; None: half of `threads`, so that the others go on.
        name: of the environment, for messages.
    """

    def __init__(self, timeout: float, threads: int = MOST_THREADS, most_hung: int | None = None, name: str = "") -> None:
        self.timeout = timeout
        self._label = f"environment {name}".strip()
        self.hung = 0  # calls that are past their deadline and have not returned; of an event loop that is blocked, one for all
        self._most_hung = max(1, threads // 2) if most_hung is None else most_hung
        self._told = 0
        self._places = asyncio.Semaphore(threads)
        self._threads = _Threads()
        self._loop: _Loop | None = None

    async def __call__(self, what: str, function: Callable[..., Any], *args: Any) -> Any:
        """``function(*args)``, awaited if it is a coroutine function.

        Raises:
            EnvironmentFailure: it raised, or gave no result within the deadline; `what` names the call.
            RunError: as many calls hang as may.
        """
        self._refuse_more(what)
        work: Future[Any] | None = None
        try:
            async with asyncio.timeout(None) as deadline:
                if inspect.iscoroutinefunction(function):
                    deadline.reschedule(asyncio.get_running_loop().time() + self.timeout)
                    return await self._coroutine(function(*args))
                await self._places.acquire()
                try:
                    work = self._threads.start(function, args)
                except BaseException:
                    self._places.release()
                    raise
                _when_done(work, self._places.release)
                deadline.reschedule(asyncio.get_running_loop().time() + self.timeout)
                return await asyncio.wrap_future(work)
        except TimeoutError as error:
            if not deadline.expired():
                raise EnvironmentFailure(f"environment: {what}: {_words(error)}") from error
            if work is not None:
                self._hangs(what, work)
            else:
                await self._look_after_loop(what)
            self._refuse_more(what)
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

    async def _look_after_loop(self, what: str) -> None:
        """Replaces the environments' loop if one of them blocks it."""
        loop = self._loop
        if loop is None:
            return
        answer = loop.start(asyncio.sleep(0))
        try:
            await asyncio.wait_for(asyncio.shield(asyncio.wrap_future(answer)), ANSWERS_WITHIN)
        except TimeoutError:
            if self._loop is loop:
                logger.warning("an asynchronous environment blocks its event loop; the episodes on it will be lost to their deadlines")
                self._loop = None
                self._hangs(what, answer)
                # by then every call on it has come to its deadline
                answer.add_done_callback(lambda _: loop.close(after=self.timeout))

    def _hangs(self, what: str, work: Future[Any]) -> None:
        """Counts a call, which is past its deadline, until `work` is done."""
        if work.done():
            return
        self.hung += 1
        _when_done(work, self._returned)
        if self._told < MOST_TOLD:
            self._told += 1
            last = "; further ones are only counted (episodes/hung_calls)" if self._told == MOST_TOLD else ""
            logger.warning(
                "%s: %s gave no result within %g s and still runs; its thread cannot be ended (%d of at most %d)%s",
                self._label,
                what,
                self.timeout,
                self.hung,
                self._most_hung,
                last,
            )

    def _returned(self) -> None:
        self.hung -= 1

    def _refuse_more(self, what: str) -> None:
        if self.hung >= self._most_hung:
            raise RunError(
                f"{self._label}: {self.hung} calls hang, the last one noticed at {what}: each gave no result within "
                f"{self.timeout:g} s (environment.timeout) and still runs on a thread of this process, which cannot be ended. Give what "
                "the environment waits for (a network, a lock, another process) a time limit of its own, or raise environment.timeout if "
                "it is only slow"
            )


def _when_done(work: Future[Any], then: Callable[[], Any]) -> None:
    """Calls ``then()`` on the running event loop once `work` is done, if that loop is still there."""
    loop = asyncio.get_running_loop()

    def done(_: Future[Any]) -> None:
        with contextlib.suppress(RuntimeError):  # the loop is closed
            loop.call_soon_threadsafe(then)

    work.add_done_callback(done)


def _words(error: BaseException) -> str:
    try:
        text = str(error)
    except Exception:  # a class of the user's
        text = ""
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


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

    def close(self, after: float = 0.0) -> None:
        """Ends it, `after` seconds from now if it does not hang."""
        self._loop.call_soon_threadsafe(self._loop.call_later, after, self._loop.stop)


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
                threading.Thread(target=self._run, name=f"surogate-rl-environment-{self._threads + 1}", daemon=True).start()
                self._threads += 1
        self._work.put((future, function, args))
        return future

    def _run(self) -> None:
        while (item := self._work.get()) is not None:
            future, function, args = item
            result, failure = None, None
            wanted = future.set_running_or_notify_cancel()
            if wanted:
                try:
                    result = function(*args)
                except BaseException as error:
                    # SystemExit in an environment is its failure as well, and StopIteration is none that a future can hold
                    kept = isinstance(error, Exception) and not isinstance(error, StopIteration)
                    failure = error if kept else RuntimeError(_words(error))
            with self._lock:  # before anybody hears of it and starts the next call
                self._idle += 1
            if failure is not None:
                future.set_exception(failure)
            elif wanted:
                future.set_result(result)
            del item, future, function, args, result, failure

    def close(self) -> None:
        with self._lock:
            for _ in range(self._threads):
                self._work.put(None)
