"""Serves one run at a time over a socket."""

from __future__ import annotations

import asyncio
import hmac
import mmap
import os
import sys
import traceback
from collections.abc import Coroutine
from functools import partial
from typing import Any

from . import compat, wire
from .runtime import Dead, Rejected, Runtime


class Server:
    """Keeps its engine from one run to the next, if the next wants the same one.

    Args:
        token: what a run must show first; empty: nothing (a socket that only the run has).
    """

    def __init__(self, token: str = "") -> None:
        self._token = token
        self._runtime: Runtime | None = None
        self._settings: dict[str, Any] = {}
        self._busy = False

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Returns when the run has gone; what it had asked for is dropped."""
        session = _Session(self, reader, writer)
        if self._busy:
            await session.refuse("this engine serves another run")
        else:
            self._busy = True
            try:
                await session.run()
            finally:
                self._busy = False
        writer.close()

    def greet(self, header: wire.Header) -> dict[str, Any]:
        """
        Raises:
            Rejected: another protocol, or the wrong token.
        """
        if header.get("op") != "hello" or header.get("protocol") != wire.PROTOCOL:
            raise Rejected(f"this engine speaks protocol {wire.PROTOCOL}, the run {header.get('protocol')}; install the same surogate-rl")
        if self._token and not hmac.compare_digest(self._token, str(header.get("token"))):
            raise Rejected("wrong token; set SUROGATE_VLLM_TOKEN to what the server was started with")
        name, version = compat.installed()
        return {"pid": os.getpid(), "vllm": name, "version": version}

    def start(self, settings: dict[str, Any]) -> Runtime:
        if self._runtime is None:
            if log := settings.get("log"):
                with open(log, "ab") as file:
                    os.dup2(file.fileno(), 1)
                    os.dup2(file.fileno(), 2)
            self._runtime = Runtime(settings)
            self._settings = settings
        elif settings != self._settings:
            raise Rejected("this engine already runs another model or other settings; start it again for this run")
        return self._runtime

    def close(self) -> None:
        if self._runtime is not None:
            self._runtime.close()


class _Session:
    def __init__(self, server: Server, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._server, self._reader, self._writer = server, reader, writer
        self._runtime: Runtime | None = None
        self._tasks: dict[int, asyncio.Task[None]] = {}
        self._buckets: list[_Memory] = []

    async def run(self) -> None:
        try:
            greeted = False
            while True:
                header, body = await wire.receive(self._reader)
                number = int(header["id"])
                if not greeted:
                    await self._answer(number, self._hello(header))
                    greeted = True
                elif header["op"] == "cancel":
                    if task := self._tasks.get(int(header["target"])):
                        task.cancel()
                elif header["op"] == "start":  # on this very task: vLLM wants the main thread to itself
                    await self._answer(number, self._start(header))
                else:
                    task = asyncio.create_task(self._answer(number, self._operation(header, body)))
                    self._tasks[number] = task
                    task.add_done_callback(partial(self._done, number))
        except (EOFError, ConnectionError, asyncio.IncompleteReadError):
            pass
        finally:
            tasks = list(self._tasks.values())
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            for bucket in self._buckets:
                bucket.close()

    def _done(self, number: int, task: asyncio.Task[None]) -> None:
        self._tasks.pop(number, None)

    async def refuse(self, message: str) -> None:
        try:
            header, _ = await wire.receive(self._reader)
            self._send({"id": header["id"], "error": {"kind": "rejected", "message": message}})
            await self._writer.drain()
        except (EOFError, ConnectionError, asyncio.IncompleteReadError):
            pass

    def _send(self, header: wire.Header) -> None:
        if not self._writer.is_closing():
            self._writer.write(wire.encode(header))

    async def _answer(self, number: int, work: Coroutine[Any, Any, dict[str, Any]]) -> None:
        try:
            self._send({"id": number, "ok": await work})
        except asyncio.CancelledError:
            raise
        except Exception as error:
            kind = (
                "rejected" if isinstance(error, (Rejected, compat.UnsupportedVersion)) else "dead" if isinstance(error, Dead) else "failed"
            )
            if kind == "failed":
                traceback.print_exc(file=sys.stderr)
            self._send({"id": number, "error": {"kind": kind, "message": str(error) or type(error).__name__}})
        await self._writer.drain()

    async def _hello(self, header: wire.Header) -> dict[str, Any]:
        return self._server.greet(header)

    async def _start(self, header: wire.Header) -> dict[str, Any]:
        self._runtime = self._server.start(header["settings"])
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

        finish = await runtime.generate(header["prompt"], header["params"], each)
        return {"finish": finish, "tokens": tokens, "logps": logps, "versions": versions}

    def _keep(self, index: int, body: bytes) -> None:
        """A bucket of a run on another machine; memory is kept for the next update."""
        while len(self._buckets) <= index:
            self._buckets.append(_Memory())
        self._buckets[index].fill(body)

    def _locate(self, bucket: dict[str, Any]) -> dict[str, Any]:
        if "path" in bucket:
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
