"""How long an engine had work."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace

import pytest

from surogate_rl.rollouts.engines.timed import TimedEngine
from surogate_rl.rollouts.types import Completion, GenerateRequest, SamplingParams

REQUEST = GenerateRequest([1], SamplingParams(max_tokens=1))


def test_seconds_with_work_are_added_up_once_and_without_pauses() -> None:
    time = SimpleNamespace(now=0.0)
    gates: list[asyncio.Event] = []

    class Engine:
        shares_weights = False
        version = 7

        async def generate(self, request: GenerateRequest) -> Completion:
            gates.append(asyncio.Event())
            await gates[-1].wait()
            return Completion([1], [0.0], "stop", [7])

        async def pause(self) -> None: ...
        async def resume(self) -> None: ...

    async def work() -> None:
        engine = TimedEngine(Engine(), now=lambda: time.now)  # type: ignore[arg-type]
        assert (engine.version, engine.shares_weights) == (7, False)
        time.now = 5.0
        assert engine.busy_seconds == 0.0
        first = asyncio.create_task(engine.generate(REQUEST))
        await asyncio.sleep(0)
        time.now = 6.0
        second = asyncio.create_task(engine.generate(REQUEST))
        await asyncio.sleep(0)
        time.now = 8.0
        assert engine.busy_seconds == 3.0  # 5 to 8, although two ran from 6 on
        gates[0].set()
        await first
        time.now = 9.0
        await engine.pause()
        time.now = 20.0
        assert engine.busy_seconds == 4.0
        await engine.resume()
        time.now = 21.0
        second.cancel()
        with pytest.raises(asyncio.CancelledError):
            await second
        time.now = 30.0
        assert engine.busy_seconds == 5.0

    asyncio.run(work())
