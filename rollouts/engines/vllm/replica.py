"""One engine: a process that is started here, or a server elsewhere."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable
from typing import Any

from surogate_rl.rollouts.engines.vllm.address import parse_url
from surogate_rl.rollouts.engines.vllm.connection import Connection
from surogate_rl.rollouts.engines.vllm.errors import EngineFailed, EngineGone, SyncFailed
from surogate_rl.rollouts.engines.vllm.host.surogate_vllm import wire
from surogate_rl.rollouts.engines.vllm.options import VllmOptions
from surogate_rl.rollouts.engines.vllm.process import EngineProcess
from surogate_rl.rollouts.engines.vllm.weights import Snapshot

_SLOWEST = 20e6  # bytes per second of an update that is still waited for
_RETRY = 1.0  # seconds until a server that did not take this run is asked again


class Replica:
    """Starts at once, in the background; `ready` waits for it.

    Args:
        number: among the run's replicas.
        url: of a server that the user has started; None: one is started here.
        process: that has been started for it beforehand.
    """

    def __init__(self, options: VllmOptions, number: int, url: str | None = None, process: EngineProcess | None = None) -> None:
        self.options, self.number, self.url = options, number, url
        self.running = 0  # requests under way
        self.weights = -1  # version that it holds
        self.restarts = 0
        self.start_seconds = 0.0
        self._process = process
        self._connection: Connection | None = None
        self._heart: asyncio.Task[None] | None = None
        self._cause = ""
        self._hindrance = ""  # what has kept a server from taking this run so far
        self._busy = 0  # operations that may keep it from answering a heartbeat
        self._launch()

    @property
    def name(self) -> str:
        return f"the vLLM server {self.url}" if self.url else f"the vLLM engine {self.number}" if self.number else "the vLLM engine"

    @property
    def pid(self) -> int | None:
        return self._process.pid if self._process is not None else None

    def _launch(self) -> None:
        self._launched = time.monotonic()
        if self.url is None and self._process is None:
            options = self.options
            self._process = EngineProcess(options.python, server=options.mode == "server", environment=options.environments[self.number])

    def _settings(self) -> dict[str, Any]:
        settings = self.options.settings()
        if self._process is not None:
            log = self.options.log
            self._process.log = log if self.number == 0 else log.with_name(f"{log.stem}-{self.number}{log.suffix}")
            settings["log"] = str(self._process.log)
        return settings

    async def connect(self, *, again: bool = False) -> None:
        """Returns when it can generate (with weights that are not yet the learner's). A server of the user's that serves another run, or
        that cannot be reached, is waited for.

        Args:
            again: it has been ready before; an end on the way is one more to recover from.

        Raises:
            EngineFailed: it cannot be started, or not within `startup_timeout`.
            EngineGone: it ended meanwhile (with `again`).
        """
        limit = self.options.startup_timeout
        self._hindrance = ""
        try:
            async with asyncio.timeout(limit):
                connection = self._connection = await self._greeted(limit)
                await connection.call("start", settings=self._settings())
            if self._process is not None:
                await asyncio.to_thread(self._process.note_memory)
        except TimeoutError:
            self.kill()
            hindrance = f": {self._hindrance}" if self._hindrance else ""
            message = f"{self.name} was not ready after {limit:g} s (rollouts.vllm.startup_timeout){hindrance}{self._end()}"
            raise EngineFailed(message) from None
        except (EngineGone, EngineFailed) as error:
            if again and isinstance(error, EngineGone):
                self.kill(str(error))
                raise
            end = self._end()
            self.kill()
            raise EngineFailed(f"{self.name} could not be started: {error}{end}") from error
        except ValueError as error:
            self.kill()
            raise EngineFailed(f"{self.name} could not be started: {error}") from error
        except BaseException:  # whoever waited for it has been cancelled
            self.kill()
            raise
        self.start_seconds = time.monotonic() - self._launched
        self._heart = asyncio.create_task(self._beat(connection))

    async def _greeted(self, limit: float) -> Connection:
        """A connection whose other end has let this run in."""
        while True:
            connection = self._connection = await self._open(limit)
            try:
                await connection.call("hello", protocol=wire.PROTOCOL, token=self._token)
                return connection
            except EngineGone as error:  # EngineBusy among them: its last run, maybe this one, may not have gone yet
                if self.url is None:
                    raise
                self._hindrance = str(error)
                connection.abort()
                await asyncio.sleep(_RETRY)

    @property
    def _token(self) -> str:
        return self._process.token if self._process is not None else self.options.token

    async def _open(self, limit: float) -> Connection:
        if self._process is not None and self._process.connection is not None:
            socket, self._process.connection = self._process.connection, None
            return Connection(*await asyncio.open_connection(sock=socket))
        if self._process is not None:
            host, port = await asyncio.to_thread(self._process.address, limit)
        else:
            assert self.url is not None
            host, port = parse_url(self.url)
        while True:
            try:
                return Connection(*await asyncio.open_connection(host, port))
            except OSError as error:
                if self._process is not None:
                    raise EngineFailed(f"{self.name} does not answer at {host}:{port} ({error})") from error
                self._hindrance = f"it does not answer ({error})"
                await asyncio.sleep(_RETRY)  # the user may be starting it again

    def _end(self) -> str:
        return f"; {self._process.describe_end()}" if self._process is not None else ""

    async def call(self, operation: str, *, timeout: float | None = None, **fields: Any) -> dict[str, Any]:
        if self._connection is None:
            raise EngineGone(f"{self.name} is not running")
        try:
            return await self._connection.call(operation, timeout=timeout, **fields)
        except EngineGone as error:
            raise EngineGone(f"{self.name}: {error}") from error

    async def generate(self, prompt: list[int], params: dict[str, Any], event: Callable[[list[Any]], None] | None) -> dict[str, Any]:
        self.running += 1
        try:
            return await self.call("generate", prompt=prompt, params=params, stream=event is not None, event=event)
        finally:
            self.running -= 1

    @property
    def alive(self) -> bool:
        return self._connection is not None and not self._connection.closed.is_set()

    async def update(self, snapshot: Snapshot, version: int) -> dict[str, Any]:
        """Gives it the weights of `snapshot`.

        Raises:
            SyncFailed: it does not have exactly these weights now.
            EngineGone: it ended meanwhile.
        """
        self._busy += 1
        self._timeout = max(self.options.timeout, 60 + snapshot.bytes / _SLOWEST)
        try:
            report: dict[str, Any] | None = None
            if snapshot.adapter is None or self.weights < 0:  # below an adapter the weights stay as they are
                report = _checked(self.name, await self._update_weights(snapshot, version))
            if (adapter := snapshot.adapter) is not None:
                report = await self.call("adapter", timeout=self._timeout, config=adapter.config, body=adapter.tensors, version=version)
                _checked(self.name, report)
        except BaseException:
            self.weights = -1  # whatever it has now
            raise
        finally:
            self._busy -= 1
        assert report is not None
        self.weights = version
        return report

    async def _update_weights(self, snapshot: Snapshot, version: int) -> dict[str, Any]:
        buckets = [bucket.describe() for bucket in snapshot.buckets]
        if self.url is not None:  # maybe another machine: the bytes travel
            for index, bucket in enumerate(snapshot.buckets):
                with memoryview(bucket.memory) as view:
                    await self.call("bucket", timeout=self._timeout, index=index, body=view)
            buckets = [{"index": index, "entries": bucket["entries"]} for index, bucket in enumerate(buckets)]
        return await self.call("update", timeout=self._timeout, buckets=buckets, version=version)

    async def _beat(self, connection: Connection) -> None:
        """Kills an engine that does not answer, so that those who wait for it hear of it."""
        while not connection.closed.is_set():
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self.options.heartbeat):
                    await connection.closed.wait()
                return
            if self._busy:
                continue
            try:
                await connection.call("ping", timeout=self.options.timeout)
            except EngineGone as error:
                if not self._busy:
                    self.kill(str(error))
            except (EngineFailed, ValueError) as error:
                self.kill(str(error))

    def kill(self, cause: str = "") -> None:
        """Ends it at once; everything that waits for it hears EngineGone. A server of the user's is left alone, but for the connection.

        Args:
            cause: what an error shall give as the reason; the first one since it was started counts.
        """
        self.weights = -1
        if cause and not self._cause:
            self._cause = f"{cause}{self._end()}"
        if self._process is not None:
            self._process.kill()
        if self._connection is not None:
            self._connection.abort()

    async def restart(self) -> None:
        """
        Raises:
            EngineFailed: it has been restarted `max_restarts` times, or does not start.
            EngineGone: it ended again on the way.
        """
        cause = self._cause or f"it ended{self._end()}"
        self._cause = ""
        if self._heart is not None:
            self._heart.cancel()
        if self.restarts >= self.options.max_restarts:
            raise EngineFailed(f"{self.name} failed again after {self.restarts} restart(s) (rollouts.vllm.max_restarts): {cause}")
        self.restarts += 1
        self.kill()
        self._connection, self._process = None, None
        self._launch()
        await self.connect(again=True)

    async def close(self) -> None:
        if self._heart is not None:
            self._heart.cancel()
        if self._connection is not None:
            await self._connection.close()
        if self._process is not None:
            await asyncio.to_thread(self._process.kill)  # vLLM's own way to end takes ten seconds and leaves nothing better


def _checked(name: str, report: dict[str, Any]) -> dict[str, Any]:
    if problems := report["problems"]:
        more = f" (and {len(problems) - 5} more)" if problems[5:] else ""
        raise SyncFailed(f"weight sync: {name} does not have the learner's weights: {'; '.join(problems[:5])}{more}")
    return report
