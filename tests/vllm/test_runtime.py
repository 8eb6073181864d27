"""What the server does around vLLM's engine, with an engine that only keeps vLLM's rules."""

from __future__ import annotations

import asyncio
import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from surogate_rl.rollouts.engines.vllm.host.surogate_vllm import runtime as host_runtime

from .modules import stand_in


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
    stand_in(monkeypatch, parts)
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


class Counting(FakeAsyncLLM):
    """Hands over final outputs, as it is told to; its requests are known to the output processor.

    As vLLM's, its core says that it has stopped when all outputs are sent, whatever the task that handles them has come to.
    """

    def __init__(self) -> None:
        super().__init__()
        self.go_on.set()
        self.states: dict[str, Any] = {}
        self.output_processor = SimpleNamespace(request_states=self.states)
        self.queue: asyncio.Queue[tuple[str, int]] = asyncio.Queue()
        self.engine_core = SimpleNamespace(pause_scheduler_async=self.pause_scheduler, outputs_queue=self.queue)
        self.output_handler = asyncio.ensure_future(self.handle())
        self.late: list[tuple[str, int]] = []  # outputs that the core sends when it is about to stop
        self.ends: dict[str, asyncio.Future[list[int]]] = {}

    async def handle(self) -> None:
        while True:
            output = await self.queue.get()
            await asyncio.sleep(0.05)
            self.sampled(*output)

    async def pause_scheduler(self, **options: Any) -> None:
        self.calls.append(f"pause {options}")
        for output in self.late:
            self.queue.put_nowait(output)

    def sampled(self, number: str, tokens: int) -> None:
        self.states[f"{number}-internal"] = SimpleNamespace(
            external_req_id=number, detokenizer=SimpleNamespace(num_output_tokens=lambda: tokens)
        )

    async def generate(self, prompt: Any, sampling: Any, number: str, lora_request: Any) -> Any:
        assert sampling.output_kind == "final"
        assert sampling.flat_logprobs
        self.ends[number] = asyncio.get_running_loop().create_future()
        tokens = await self.ends[number]
        flat = SimpleNamespace(start_indices=[2 * i for i in range(len(tokens))], token_ids=[], logprobs=[])
        for token in tokens:  # a second entry at each position is not looked at
            flat.token_ids += [token, -1]
            flat.logprobs += [-float(token), 0.0]
        yield SimpleNamespace(outputs=[SimpleNamespace(token_ids=tokens, logprobs=flat, finish_reason="length")])


PARAMS = {"max_tokens": 9, "temperature": 1.0, "top_p": 1.0, "top_k": 0, "min_p": 0.0, "seed": 1, "stop_ids": []}
PAUSED = {"mode": "keep", "clear_cache": True}


def test_of_a_completion_that_comes_as_a_whole_every_token_has_its_version(fake_vllm: None, monkeypatch: pytest.MonkeyPatch) -> None:
    sys.modules["vllm"].__dict__["SamplingParams"] = SimpleNamespace
    kinds = ModuleType("vllm.sampling_params")
    kinds.__dict__["RequestOutputKind"] = SimpleNamespace(DELTA="delta", FINAL_ONLY="final")
    monkeypatch.setitem(sys.modules, kinds.__name__, kinds)

    async def work() -> None:
        engine = Counting()
        runtime = host_runtime.Runtime({}, make=lambda settings: engine)
        await runtime.update([{}], 1)
        assert engine.calls[0] == f"pause {PAUSED}"
        got: dict[int, Any] = {}

        def start(number: int) -> asyncio.Task[str]:
            return asyncio.create_task(runtime.generate([1], PARAMS, lambda *parts: got.__setitem__(number, parts), stream=False))

        first, second = start(0), start(1)
        await asyncio.sleep(0)
        engine.late = [("1", 1), ("1", 2)]  # the second one has nothing yet
        await runtime.update([{}], 2)
        engine.late = [("2", 3)]
        await runtime.update([{}], 3)
        engine.ends["1"].set_result([5, 6, 7, 8])
        engine.ends["2"].set_result([9, 5, 6, 7])
        assert await asyncio.gather(first, second) == ["length", "length"]
        assert got[0] == ([5, 6, 7, 8], [-5.0, -6.0, -7.0, -8.0], [1, 1, 3, 3]), "none was sampled with version 2"
        assert got[1] == ([9, 5, 6, 7], [-9.0, -5.0, -6.0, -7.0], [2, 2, 2, 3])
        assert not runtime._under_way
        engine.output_handler.cancel()

    asyncio.run(asyncio.wait_for(work(), 30))
