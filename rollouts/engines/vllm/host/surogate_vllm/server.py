"""Serves one run at a time over a socket."""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import mmap
import os
import socket
import sys
import traceback
from collections.abc import Coroutine
from functools import partial
from typing import Any

from . import compat, wire
from .runtime import Dead, Rejected, Runtime

GREETING = 10.0  # seconds that a connection has to say who it is
ALIVE = 60.0  # seconds in which an engine core that is kept from an earlier run must answer
_HELLO = 64 << 10  # bytes of a greeting
SETTLING = 300.0  # seconds that an update may go on after its run has gone
_SILENCE = 60  # seconds after which a connection whose other end does not even acknowledge counts as closed
_GONE = (EOFError, OSError, asyncio.IncompleteReadError)  # how a connection ends


class Busy(Exception):
    """Another run has the engine at the moment."""


class Server:
    """Keeps its engine from one run to the next, if the next wants the same one.

    Args:
        token: what a run must show first; empty: nothing (a socket that only the run has).
        own: the run that it serves has started it, on this machine: it may name files (its log, memory that holds weights).
        greeting: seconds that a connection has to say who it is; None: for ever (the run's own socket, which is there before the run is).
    """

    def __init__(self, token: str = "", *, own: bool = False, greeting: float | None = GREETING) -> None:
        self._token = token
        self._greeting = greeting
        self.own = own
        self._runtime: Runtime | None = None
        self._settings: dict[str, Any] = {}
        self._busy = False

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Returns when the run has gone; what it had asked for is dropped, but for an update, which ends as a whole."""
        session = _Session(self, reader, writer)
        try:
            _notice_silence(writer)
            # until it has said who it is nobody is kept waiting for it
            if await session.greet(self._greeting):
                self._busy = True
                try:
                    await session.run()
                finally:
                    self._busy = False
        except _GONE:
            pass
        finally:
            writer.close()

    def greet(self, header: wire.Header) -> dict[str, Any]:
        """
        Raises:
            Rejected: another protocol, or the wrong token.
            Busy: it serves another run.
        """
        if header.get("op") != "hello" or header.get("protocol") != wire.PROTOCOL:
            raise Rejected(f"this engine speaks protocol {wire.PROTOCOL}, the run {header.get('protocol')}; install the same surogate-rl")
        token = header.get("token")
        if self._token and not (isinstance(token, str) and hmac.compare_digest(self._token.encode(), token.encode())):
            raise Rejected("wrong token; set SUROGATE_VLLM_TOKEN to what the server was started with")
        if self._busy:
            raise Busy("this engine serves another run")
        name, version = compat.installed()
        return {"pid": os.getpid(), "vllm": name, "version": version}

    async def start(self, settings: dict[str, Any]) -> Runtime:
        """The engine for a run: the one of before if it lives and is the same, else a new one.

        Raises:
            Rejected: it lives and is another one.
        """
        log = settings.get("log")
        if log and not self.own:
            raise Rejected("a server that the user has started writes no log for a run")
        if self._runtime is not None and not await self._lives(self._runtime):
            dead, self._runtime = self._runtime, None
            dead.close()
        if self._runtime is None:
            if log:
                with open(log, "ab") as file:
                    os.dup2(file.fileno(), 1)
                    os.dup2(file.fileno(), 2)
            self._runtime = Runtime(settings)
            self._settings = settings
        elif settings != self._settings:
            raise Rejected("this engine already runs another model or other settings; start it again for this run")
        return self._runtime

    @staticmethod
    async def _lives(runtime: Runtime) -> bool:
        try:
            async with asyncio.timeout(ALIVE):
                await runtime.ping()
        except (Dead, TimeoutError) as error:
            print(f"the engine of before is replaced: {error or 'it does not answer'}", file=sys.stderr)
            return False
        return True

    async def settle(self, runtime: Runtime) -> None:
        """Waits for what must not be broken off. An engine that does not come to an end with it is given up."""
        if not await runtime.settled(SETTLING) and runtime is self._runtime:
            print("the engine is given up: an update does not end", file=sys.stderr)
            self._runtime = None
            runtime.close()

    def close(self) -> None:
        if self._runtime is not None:
            self._runtime.close()


def _notice_silence(writer: asyncio.StreamWriter) -> None:
    """Has the kernel end a connection whose other machine is gone without a word, which would keep the engine for ever."""
    connection = writer.get_extra_info("socket")
    if connection is None or connection.family not in (socket.AF_INET, socket.AF_INET6):
        return
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in (("KEEPIDLE", _SILENCE // 2), ("KEEPINTVL", _SILENCE // 6), ("KEEPCNT", 3), ("USER_TIMEOUT", 1000 * _SILENCE)):
        if (number := getattr(socket, f"TCP_{option}", None)) is not None:
            connection.setsockopt(socket.IPPROTO_TCP, number, value)


class _Session:
    def __init__(self, server: Server, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._server, self._reader, self._writer = server, reader, writer
        self._runtime: Runtime | None = None
        self._tasks: dict[int, asyncio.Task[None]] = {}
        self._buckets: list[_Memory] = []

    async def greet(self, limit: float | None) -> bool:
        """Whether the other side may go on. It has `limit` seconds and few bytes to show that; one that may not is told why."""
        try:
            async with asyncio.timeout(limit):
                header, _ = await wire.receive(self._reader, max_header=_HELLO, max_body=0)
        except TimeoutError:
            return False
        number = header.get("id")
        try:
            self._send({"id": number, "ok": self._server.greet(header)})
        except Exception as error:
            self._refuse(number, error)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(limit):
                    await self._writer.drain()
            return False
        return True

    async def run(self) -> None:
        try:
            while True:
                header, body = await wire.receive(self._reader)
                number = int(header["id"])
                if header["op"] == "cancel":
                    if task := self._tasks.get(int(header["target"])):
                        task.cancel()
                elif header["op"] == "start":  # on this very task: vLLM wants the main thread to itself
                    await self._answer(number, self._start(header))
                else:
                    task = asyncio.create_task(self._answer(number, self._operation(header, body)))
                    self._tasks[number] = task
                    task.add_done_callback(partial(self._done, number))
        finally:
            tasks = list(self._tasks.values())
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            if self._runtime is not None:
                # an update reads the buckets to its end, and the next run finds no engine in the middle of one
                await self._server.settle(self._runtime)
            for bucket in self._buckets:
                bucket.close()

    def _done(self, number: int, task: asyncio.Task[None]) -> None:
        self._tasks.pop(number, None)

    def _send(self, header: wire.Header) -> None:
        if not self._writer.is_closing():
            self._writer.write(wire.encode(header))

    async def _answer(self, number: int, work: Coroutine[Any, Any, dict[str, Any]]) -> None:
        try:
            self._send({"id": number, "ok": await work})
        except asyncio.CancelledError:
            raise
        except Exception as error:
            self._refuse(number, error)
        await self._writer.drain()

    def _refuse(self, number: Any, error: Exception) -> None:
        kinds = {Rejected: "rejected", compat.UnsupportedVersion: "rejected", Dead: "dead", Busy: "busy"}
        kind = next((kind for its, kind in kinds.items() if isinstance(error, its)), "failed")
        if kind == "failed":
            traceback.print_exception(error, file=sys.stderr)
        self._send({"id": number, "error": {"kind": kind, "message": str(error) or type(error).__name__}})

    async def _start(self, header: wire.Header) -> dict[str, Any]:
        self._runtime = await self._server.start(header["settings"])
        await self._runtime.resume()
        return {"weights": self._runtime.version}

    async def _operation(self, header: wire.Header, body: bytes) -> dict[str, Any]:
        runtime, operation = self._runtime, header["op"]
        if runtime is None:
            raise Rejected(f"{operation} before start")
        if operation == "generate":
            return await self._generate(runtime, header)
        if operation == "ping":
            await runtime.ping()
        elif operation == "pause":
            await runtime.pause()
        elif operation == "resume":
            await runtime.resume()
        elif operation == "bucket":
            self._keep(header["index"], body)
        elif operation == "update":
            return await runtime.update([self._locate(bucket) for bucket in header["buckets"]], header["version"])
        elif operation == "adapter":
            return await runtime.update_adapter(header["config"], body, header["version"])
        elif operation == "layout":
            return {"parameters": await runtime.layout()}
        else:
            raise Rejected(f"unknown operation {operation}")
        return {}

    async def _generate(self, runtime: Runtime, header: wire.Header) -> dict[str, Any]:
        tokens: list[int] = []
        logps: list[float] = []
        versions: list[int] = []
        stream = header["stream"]

        def each(more: list[int], their: list[float], from_version: list[int]) -> None:
            if stream:
                self._send({"id": header["id"], "event": [more, their, from_version]})
            else:
                tokens.extend(more)
                logps.extend(their)
                versions.extend(from_version)

        finish = await runtime.generate(header["prompt"], header["params"], each, stream=stream)
        return {"finish": finish, "tokens": tokens, "logps": logps, "versions": versions}

    def _keep(self, index: int, body: bytes) -> None:
        """A bucket of a run on another machine; memory is kept for the next update."""
        while len(self._buckets) <= index:
            self._buckets.append(_Memory())
        self._buckets[index].fill(body)

    def _locate(self, bucket: dict[str, Any]) -> dict[str, Any]:
        if "path" in bucket or "handle" in bucket:
            if not self._server.own:
                raise Rejected("weights have to be sent to a server that the user has started")
            return bucket
        memory = self._buckets[bucket["index"]]
        return {"path": memory.path, "size": memory.size, "entries": bucket["entries"]}


class _Memory:
    """Anonymous memory that the worker, another process, can map by a path. It goes with the last process that has it."""

    def __init__(self) -> None:
        self._file = os.memfd_create("surogate-bucket")
        self.path = f"/proc/{os.getpid()}/fd/{self._file}"
        self.size = 0

    def fill(self, body: bytes) -> None:
        os.ftruncate(self._file, len(body))
        self.size = len(body)
        with mmap.mmap(self._file, len(body)) as memory:
            memory[:] = body

    def close(self) -> None:
        os.close(self._file)
