"""However a connection to an engine fails, those who wait for an answer hear that the engine is gone, and why. Needs no vLLM."""

from __future__ import annotations

import asyncio
import errno
from typing import Any

import pytest

from surogate_rl.rollouts.engines.vllm.connection import Connection
from surogate_rl.rollouts.engines.vllm.errors import EngineBusy, EngineGone


class Broken:
    """A socket whose network fails."""

    transport = None

    def __init__(self, *, writing: OSError | None = None, reading: OSError | None = None) -> None:
        self.writing, self.reading = writing, reading

    def write(self, data: bytes) -> None: ...
    async def drain(self) -> None:
        if self.writing is not None:
            raise self.writing

    async def readexactly(self, size: int) -> bytes:
        await asyncio.sleep(0.01)
        if self.reading is not None:
            raise self.reading
        await asyncio.sleep(3600)
        return b""


TIMED_OUT = TimeoutError(errno.ETIMEDOUT, "Connection timed out")
UNREACHABLE = OSError(errno.EHOSTUNREACH, "No route to host")


@pytest.mark.parametrize("timeout", [None, 30.0])
@pytest.mark.parametrize("error", [TIMED_OUT, UNREACHABLE, ConnectionResetError("reset")], ids=["time-out", "unreachable", "reset"])
@pytest.mark.parametrize("where", ["writing", "reading"])
def test_whatever_the_network_does_the_engine_is_gone(where: str, error: OSError, timeout: float | None) -> None:
    async def work() -> None:
        socket: Any = Broken(**{where: error})
        connection = Connection(socket, socket)
        with pytest.raises(EngineGone) as caught:
            await connection.call("ping", timeout=timeout)
        assert str(error) in str(caught.value)
        assert not isinstance(caught.value, EngineBusy)
        connection._listener.cancel()

    asyncio.run(asyncio.wait_for(work(), 30))


def test_no_answer_in_time_names_the_time() -> None:
    async def work() -> None:
        socket: Any = Broken()
        connection = Connection(socket, socket)
        with pytest.raises(EngineGone, match=r"no answer to ping within 0.05 s"):
            await connection.call("ping", timeout=0.05)
        connection._listener.cancel()

    asyncio.run(asyncio.wait_for(work(), 30))
