"""What differs between the supported versions of vLLM. Needs none of them: stand-ins have what one version has and another has not."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from surogate_rl.rollouts.engines.vllm.engine import VllmEngine
from surogate_rl.rollouts.engines.vllm.host.surogate_vllm import compat
from surogate_rl.rollouts.engines.vllm.host.surogate_vllm import runtime as host_runtime
from surogate_rl.rollouts.engines.vllm.host.surogate_vllm.layout import Layout
from surogate_rl.rollouts.types import GenerateRequest, SamplingParams

from .conftest import LLAMA, VOCAB, make_learner, make_options
from .modules import stand_in

HEAD = "lm_head.weight"
WHOLE, PADDED, WIDTH = 301, 320, 8  # rows of a vocabulary, of the engine's parameter, and their width


class Calls:
    """Notes what is called, by name, with the arguments."""

    def __init__(self) -> None:
        self.made: list[tuple[str, dict[str, Any]]] = []

    async def finish_026(self) -> None:
        self.made.append(("finish", {}))

    async def finish_027(self, weight_version: str | None = None) -> None:
        self.made.append(("finish", {"weight_version": weight_version}))

    async def pause_generation(self, **options: Any) -> None:
        self.made.append(("generation", options))

    async def pause_scheduler(self, **options: Any) -> None:
        self.made.append(("scheduler", options))


@pytest.mark.parametrize(("version", "expected"), [("026", {}), ("027", {"weight_version": "7"})])
def test_the_version_of_the_weights_is_told_where_it_is_asked_for(version: str, expected: dict[str, str]) -> None:
    calls = Calls()
    engine = SimpleNamespace(finish_weight_update=getattr(calls, f"finish_{version}"))
    asyncio.run(compat.finish_weight_update(engine, 7))
    assert calls.made == [("finish", expected)]


@pytest.mark.parametrize(("private", "name"), [(True, "scheduler"), (False, "generation")])
def test_pausing_does_without_what_is_private_to_vllm(private: bool, name: str) -> None:
    calls = Calls()

    async def work() -> None:
        core = SimpleNamespace(**({"pause_scheduler_async": calls.pause_scheduler, "outputs_queue": asyncio.Queue()} if private else {}))
        await compat.pause(SimpleNamespace(engine_core=core, pause_generation=calls.pause_generation, output_handler=None))

    asyncio.run(work())
    assert calls.made == [(name, {"mode": "keep", "clear_cache": True})]


@pytest.mark.parametrize("base", [ValueError, Exception], ids=["0.26", "later"])
def test_what_vllm_refuses_is_refused_here(base: type[Exception], monkeypatch: pytest.MonkeyPatch) -> None:
    refusal, dead = type("VLLMValidationError", (base,), {}), type("EngineDeadError", (Exception,), {})
    stand_in(monkeypatch, {"vllm.exceptions": {"VLLMValidationError": refusal}, "vllm.v1.engine.exceptions": {"EngineDeadError": dead}})
    for error in (refusal("no"), ValueError("no")):
        with pytest.raises(host_runtime.Rejected, match="no"), host_runtime._errors():
            raise error
    with pytest.raises(host_runtime.Dead, match="gone"), host_runtime._errors():
        raise dead("gone")


@pytest.fixture(scope="module")
def engine() -> VllmEngine:
    """One that would connect to a server, if a request got so far."""
    return VllmEngine(make_learner(LLAMA, scale=0.1), make_options("", None, base_urls=("tcp://127.0.0.1:9",)))  # type: ignore[arg-type]


@pytest.mark.parametrize("wrong", [VOCAB, -1, 1 << 40])
def test_ids_beyond_the_vocabulary_never_reach_vllm(engine: VllmEngine, wrong: int) -> None:
    with pytest.raises(ValueError, match=rf"prompt\[1\]: expected a token id of 0 to {VOCAB - 1}, got {wrong}"):
        asyncio.run(engine.generate(GenerateRequest([5, wrong], SamplingParams(4))))


class Vocabulary(torch.nn.Module):
    """Of two ranks, the part that one holds; in 0.26 it does not know which of them that is."""

    org_vocab_size, tp_size = WHOLE, 2

    def __init__(self, rank: int, *, knows_rank: bool) -> None:
        super().__init__()
        rows = PADDED // self.tp_size
        self.shard_indices = SimpleNamespace(org_vocab_start_index=rank * rows)
        self.weight = torch.nn.Parameter(torch.full((rows, WIDTH), torch.nan), requires_grad=False)
        if knows_rank:
            self.tp_rank = rank

    def load(self, whole: torch.Tensor) -> None:
        first = self.shard_indices.org_vocab_start_index
        part = whole[first : first + len(self.weight)]
        self.weight.data[: len(part)] = part


@pytest.mark.parametrize("knows_rank", [False, True], ids=["0.26", "later"])
@pytest.mark.parametrize("rank", [0, 1])
def test_a_ranks_part_of_the_vocabulary_is_read_back(rank: int, knows_rank: bool) -> None:
    model = torch.nn.Module()
    model.lm_head = Vocabulary(rank, knows_rank=knows_rank)
    layout, whole = Layout(model), torch.randn(WHOLE, WIDTH)
    model.lm_head.load(whole)
    live, expected, packed = layout.read_back(HEAD, HEAD, whole, 0)
    assert not packed
    assert len(live) == (160, 141)[rank], "rows that nothing is loaded into are left out"
    assert torch.equal(live, expected)
    assert live.data_ptr() == model.lm_head.weight.data_ptr(), "it is the parameter itself, where later updates are copied"
    live[-1, -1] += 1
    assert not torch.equal(*layout.read_back(HEAD, HEAD, whole, 0)[:2])


@pytest.mark.parametrize(("sees_through", "name"), [(True, "o_proj.weight"), (False, "o_proj.base_layer.weight")])
def test_vllms_loader_is_given_the_names_that_it_takes(sees_through: bool, name: str) -> None:
    """Of a module that may get adapters."""
    model, wrapper = torch.nn.Module(), torch.nn.Module()
    wrapper.base_layer = torch.nn.Linear(2, 2, bias=False)
    if sees_through:
        wrapper.load_weights = lambda weights: None
    model.o_proj, model.norm = wrapper, torch.nn.LayerNorm(2)
    layout = Layout(model)
    assert layout.loadable("o_proj.weight") == name
    assert layout.loadable("norm.weight") == "norm.weight"
