"""What the server does around vLLM's engine, with an engine that only keeps vLLM's rules."""

from __future__ import annotations

import asyncio
import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from surogate_rl.rollouts.engines.vllm.host.surogate_vllm import runtime as host_runtime


class FakeAsyncLLM:
    """vLLM's rules for updates: what is begun must be finished before the next one may begin. A bucket is loaded once `go_on` is set."""

    def __init__(self) -> None:
        self.active = False
        self.calls: list[str] = []
        self.fail = ""
        self.reached, self.go_on = asyncio.Event(), asyncio.Event()

    async def pause_generation(self, **options: Any) -> None: ...
    async def resume_generation(self) -> None:
        self.calls.append("resume")

    async def start_weight_update(self) -> None:
        self.calls.append("start")
        if self.active:
            raise RuntimeError("start_weight_update called while a weight update is already active.")
        self.active = True

    async def update_weights(self, request: Any) -> None:
        self.calls.append("bucket")
        self.reached.set()
        await self.go_on.wait()
        if self.fail:
            raise RuntimeError(self.fail)

    async def finish_weight_update(self) -> None:
        self.calls.append("finish")
        self.active = False

    async def collective_rpc(self, method: str) -> list[Any]:
        if method == "surogate_abandon":
            self.active = False
            return []
        return [{"problems": [], "tensors": 1, "packed": 0}]


@pytest.fixture
def fake_vllm(monkeypatch: pytest.MonkeyPatch) -> None:
    class EngineDeadError(Exception): ...

    base = "vllm.distributed.weight_transfer.base"
    parts = {base: {"WeightTransferUpdateRequest": SimpleNamespace}, "vllm.v1.engine.exceptions": {"EngineDeadError": EngineDeadError}}
    for name, members in parts.items():
        path = name.split(".")
        for length in range(1, len(path) + 1):
            module = ModuleType(".".join(path[:length]))
            module.__dict__.update(members if length == len(path) else {"__path__": []})
            monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.setattr(host_runtime.compat, "request_errors", lambda: (ValueError,))


def test_an_update_that_is_broken_off_comes_to_its_end(fake_vllm: None) -> None:
    async def work() -> None:
        engine = FakeAsyncLLM()
        runtime = host_runtime.Runtime({}, make=lambda settings: engine)
        first = asyncio.ensure_future(runtime.update([{}, {}], 1))
        await engine.reached.wait()
        first.cancel()
        await asyncio.gather(first, return_exceptions=True)
        assert first.cancelled()
        assert not await runtime.settled(0)
        second = asyncio.ensure_future(runtime.update([{}], 2))
        await asyncio.sleep(0.01)
        assert engine.calls == ["start", "bucket"], "it waits for the first"
        engine.go_on.set()
        assert (await second)["problems"] == []
        assert engine.calls == ["start", "bucket", "bucket", "finish", "resume", "start", "bucket", "finish", "resume"]
        assert await runtime.settled(0)
        assert runtime.version == 2

    asyncio.run(asyncio.wait_for(work(), 30))


def test_after_an_update_that_failed_nothing_runs_until_one_succeeds(fake_vllm: None) -> None:
    async def work() -> None:
        engine = FakeAsyncLLM()
        runtime = host_runtime.Runtime({}, make=lambda settings: engine)
        engine.go_on.set()
        engine.fail = "a worker could not map the memory"
        with pytest.raises(RuntimeError, match="could not map"):
            await runtime.update([{}], 1)
        await runtime.resume()  # as the start of another run does
        assert "resume" not in engine.calls
        engine.fail = ""
        await runtime.update([{}], 1)
        assert engine.calls[-1] == "resume"

    asyncio.run(asyncio.wait_for(work(), 30))
