"""Calls over the socket to an engine."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable
from typing import Any

from surogate_rl.rollouts.engines.vllm.errors import EngineBusy, EngineFailed, EngineGone
from surogate_rl.rollouts.engines.vllm.host.surogate_vllm import wire

Event = Callable[[list[Any]], None]
Body = bytes | bytearray | memoryview


class Connection:
    """Many calls at a time; lives on one event loop."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader, self._writer = reader, writer
        self._numbers = itertools.count(1)
        self._waiting: dict[int, tuple[asyncio.Future[dict[str, Any]], Event | None]] = {}
        self._gone: EngineGone | None = None
        self.closed = asyncio.Event()
        self._listener = asyncio.create_task(self._listen())

    async def call(
        self, operation: str, *, timeout: float | None = None, body: Body | None = None, event: Event | None = None, **fields: Any
    ) -> dict[str, Any]:
        """One operation and its result. Cancelling the awaiting task cancels the operation there.

        Raises:
            ValueError: the engine refuses it.
            EngineBusy: it serves another run.
            EngineGone: the connection ended, or `timeout` seconds passed without an answer.
            EngineFailed: it went wrong there.
        """
        if self._gone is not None:
            raise EngineGone(str(self._gone))
        number = next(self._numbers)
        answer: asyncio.Future[dict[str, Any]] = asyncio.get_running_loop().create_future()
        self._waiting[number] = (answer, event)
        expiry = asyncio.timeout(timeout)
        try:
            self._writer.write(wire.encode({"id": number, "op": operation, **fields}, len(body) if body is not None else 0))
            if body is not None:
                self._writer.write(body)
            async with expiry:
                await self._writer.drain()
                header = await answer
        except asyncio.CancelledError:
            if self._gone is None:
                self._writer.write(wire.encode({"id": next(self._numbers), "op": "cancel", "target": number}))
            raise
        except EngineGone:
            raise
        except OSError as error:  # also a TimeoutError, which may be the network's own
            if expiry.expired():
                raise EngineGone(f"no answer to {operation} within {timeout:g} s") from None
            raise EngineGone(f"the connection ended ({error or type(error).__name__})") from error
        finally:
            self._waiting.pop(number, None)
        if "error" not in header:
            result: dict[str, Any] = header["ok"]
            return result
        kind, message = header["error"]["kind"], header["error"]["message"]
        if kind == "rejected":
            raise ValueError(message)
        if kind == "busy":
            raise EngineBusy(message)
        if kind == "dead":
            raise EngineGone(message)
        raise EngineFailed(f"vLLM: {message}")

    async def _listen(self) -> None:
        problem = "the engine closed the connection"
        try:
            while True:
                header, _ = await wire.receive(self._reader)
                # bytes that are there already do not suspend the read: a backlog of tokens would keep everybody else waiting
                await asyncio.sleep(0)
                answer, event = self._waiting.get(header["id"], (None, None))
                if answer is None or answer.done():
                    continue
                if "event" in header:
                    if event is not None:
                        event(header["event"])
                else:
                    answer.set_result(header)
        except (EOFError, asyncio.IncompleteReadError):
            pass
        except OSError as error:
            problem = f"the connection ended ({error or type(error).__name__})"
        finally:
            self._end(EngineGone(problem))

    def _end(self, gone: EngineGone) -> None:
        self._gone = self._gone or gone
        self.closed.set()
        for answer, _ in list(self._waiting.values()):
            if not answer.done():
                answer.set_exception(EngineGone(str(self._gone)))

    def abort(self) -> None:
        """Drops the connection at once."""
        self._end(EngineGone("the connection was dropped"))
        self._listener.cancel()
        self._writer.transport.abort()

    async def close(self) -> None:
        self._end(EngineGone("the engine was closed"))
        self._listener.cancel()
        self._writer.close()
