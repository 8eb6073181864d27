"""What a run asks an engine for."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from surogate_rl.config import parse_config
from surogate_rl.learner import Learner
from surogate_rl.models import LoadedModel, load_model
from surogate_rl.rollouts.engines.vllm.factory import vllm_options

TINY = Path(__file__).resolve().parents[2] / "examples" / "quickstart" / "tiny"
Asked = Callable[..., dict[str, Any]]


@pytest.fixture(scope="module")
def model() -> Iterator[tuple[LoadedModel, Learner]]:
    loaded = load_model(str(TINY), init="random", seed=1)
    learner = Learner(loaded.spec, max_tokens=64, threads=1)
    yield loaded, learner
    learner.close()


@pytest.fixture
def asked(model: tuple[LoadedModel, Learner], tmp_path: Path) -> Asked:
    (tmp_path / "rows.jsonl").write_text('{"prompt": "1="}\n')
    loaded, learner = model

    def make(vllm: dict[str, Any], *, free: int, **keys: Any) -> dict[str, Any]:
        config = {
            "model": str(TINY),
            "init": "random",
            "device": "cpu",
            "output_dir": str(tmp_path / "run"),
            "sequence_len": 64,
            "datasets": [{"path": str(tmp_path / "rows.jsonl"), "type": "prompt"}],
            "rewards": ["exact_match"],
            "rollouts": {"engine": "vllm", "max_completion_length": 16, "vllm": vllm},
        }
        checked = parse_config(config | keys, "grpo")
        return vllm_options(checked, loaded, learner, sequences=8, free=free, output_dir=tmp_path).settings()

    return make


def test_a_server_is_asked_for_the_same_engine_by_every_run_of_a_kind(asked: Asked) -> None:
    """It would refuse another one. What is free where the run is says nothing of the server, and seeds belong to completions."""
    server = {"base_url": "tcp://elsewhere:8100"}
    first = asked(server, free=1 << 40, seed=1)
    assert asked(server, free=1 << 21, seed=2) == first
    assert asked(server, free=1 << 40, sequence_len=32) != first


def test_an_engine_that_is_started_here_takes_what_is_free(asked: Asked) -> None:
    here = {"python": "/bin/sh"}
    much, little = (asked(here, free=free)["engine_args"]["kv_cache_memory_bytes"] for free in (1 << 40, 1 << 21))
    assert little < much == asked({"base_url": "tcp://elsewhere:8100"}, free=0)["engine_args"]["kv_cache_memory_bytes"]
