"""device, gpus, recipe and the number formats, with and without a GPU."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest

from surogate_rl.config import Command, ConfigError, ConfigWarning, devices, load_config, parse_config, resolve, vllm

MINIMAL: dict[str, Any] = {"model": "m", "output_dir": "out", "datasets": ["rows.jsonl"]}
BASES: dict[Command, dict[str, Any]] = {"sft": MINIMAL, "dpo": MINIMAL, "grpo": {**MINIMAL, "rewards": ["exact_match"]}}
SAMPLED_EVAL = {"datasets": ["held.jsonl"], "rewards": ["exact_match"]}
NO_VLLM = "vLLM is not installed"
MISSING = "this build has no CUDA back-end; build it, or use device: cpu"


def with_gpu(monkeypatch: pytest.MonkeyPatch, reason: str = "", no_vllm: str = NO_VLLM) -> None:
    """As on a machine with a GPU (`reason`: why it cannot be used), and with vLLM (`no_vllm`: why it cannot)."""
    for module in (devices, resolve):
        monkeypatch.setattr(module, "cuda_unavailable_reason", lambda: reason)
    for module in (devices, vllm):
        monkeypatch.setattr(module, "vllm_missing_reason", lambda section: no_vllm)


def lines_of(command: Command, keys: dict[str, Any]) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        parse_config({**BASES[command], **keys}, command)
    return caught.value.lines


@pytest.mark.parametrize(
    ("command", "keys", "gpu", "expected"),
    [
        ("sft", {}, False, ("cpu", "float32", "float32", 0)),
        ("sft", {}, True, ("cuda", "bfloat16", "bfloat16", 1)),
        ("dpo", {"device": "cuda", "gpus": 1}, True, ("cuda", "bfloat16", "bfloat16", 1)),
        ("dpo", {"recipe": "float32"}, True, ("cuda", "float32", "float32", 1)),
        ("sft", {"logits_dtype": "float32"}, True, ("cuda", "bfloat16", "float32", 1)),
        ("sft", {"device": "cpu"}, True, ("cpu", "float32", "float32", 0)),
        ("sft", {"gpus": 0}, True, ("cpu", "float32", "float32", 0)),
        ("grpo", {}, False, ("cpu", "float32", "float32", 0)),
    ],
)
def test_resolved(
    monkeypatch: pytest.MonkeyPatch, command: Command, keys: dict[str, Any], gpu: bool, expected: tuple[str, str, str, int]
) -> None:
    with_gpu(monkeypatch, "" if gpu else MISSING)
    config = parse_config({**BASES[command], **keys}, command)
    assert (config.device, config.recipe, config.logits_dtype, config.gpus) == expected
    assert parse_config(config, command) == config


@pytest.mark.parametrize(
    ("command", "keys", "message"),
    [
        ("sft", {"gpus": 0, "device": "cuda"}, "gpus: 0 leaves no GPU to device: cuda; set gpus: 1 or remove the key"),
        ("sft", {"gpus": 2}, "gpus: 2 asked for, but several GPUs are not there yet; set gpus: 1 or remove the key"),
        (
            "sft",
            {"recipe": "float32", "optimizer_state_dtype": "bfloat16"},
            "optimizer_state_dtype: bfloat16 goes with recipe: bfloat16 on a GPU only; remove this key",
        ),
        (
            "grpo",
            {"device": "cuda", "rollouts": {"engine": "native"}},
            "rollouts.engine: native samples on the cpu only; with device: cuda set it to vllm (or auto), or set device: cpu",
        ),
        (
            "grpo",
            {"device": "cuda"},
            f"rollouts.engine: device: cuda samples with vLLM, but {NO_VLLM}",
        ),
        (
            "dpo",
            {"device": "cuda", "eval": SAMPLED_EVAL},
            "eval.rewards: completions are sampled by the native engine, on the cpu only; set device: cpu, "
            "or remove eval.rewards to measure the held-out loss",
        ),
        (
            "grpo",
            {"gpus": 1},
            "gpus: 1 asked for, but the native engine samples this run's completions on the cpu; set gpus: 0 or remove the key",
        ),
    ],
)
def test_refused_with_a_gpu(monkeypatch: pytest.MonkeyPatch, command: Command, keys: dict[str, Any], message: str) -> None:
    with_gpu(monkeypatch)
    assert lines_of(command, keys) == [message]


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"device": "cuda"}, f"device: cuda was asked for, but {MISSING}"),
        ({"gpus": 1}, f"gpus: 1 asked for, but {MISSING}; set gpus: 0 or remove the key"),
        ({"recipe": "bfloat16"}, "recipe: bfloat16 needs a GPU, the CPU computes in float32; set recipe: float32"),
        ({"gradient_dtype": "bfloat16"}, "gradient_dtype: bfloat16 goes with recipe: bfloat16 on a GPU only; remove this key"),
    ],
)
def test_refused_without_a_gpu(monkeypatch: pytest.MonkeyPatch, keys: dict[str, Any], message: str) -> None:
    with_gpu(monkeypatch, MISSING)
    assert lines_of("sft", keys) == [message]


@pytest.mark.parametrize(
    ("keys", "expected"),
    [
        ({}, ("cuda", "vllm", "colocate", "bfloat16", "full", False)),
        ({"device": "cpu"}, ("cpu", "native", "auto", "auto", "auto", None)),
        ({"rollouts": {"engine": "native"}}, ("cpu", "native", "auto", "auto", "auto", None)),
        ({"device": "cpu", "rollouts": {"engine": "vllm"}, "lora": True}, ("cpu", "vllm", "colocate", "float32", "merged", True)),
        ({"rollouts": {"vllm": {"replicas": 2}}}, ("cuda", "vllm", "server", "bfloat16", "full", False)),
    ],
)
def test_the_engine(monkeypatch: pytest.MonkeyPatch, keys: dict[str, Any], expected: tuple[object, ...]) -> None:
    with_gpu(monkeypatch, no_vllm="")
    config = parse_config({**BASES["grpo"], **keys}, "grpo")
    section = config.rollouts.vllm
    assert (config.device, config.rollouts.engine, section.mode, section.dtype, section.sync, section.enforce_eager) == expected
    assert parse_config(config, "grpo") == config


@pytest.mark.parametrize(("keys", "expected"), [({}, 256), ({"device": "cpu"}, 64), ({"rollouts": {"max_sequences": 7}}, 7)])
def test_sequences_together(monkeypatch: pytest.MonkeyPatch, keys: dict[str, Any], expected: int) -> None:
    with_gpu(monkeypatch, no_vllm="")
    assert parse_config({**BASES["grpo"], **keys}, "grpo").rollouts.max_sequences == expected


def test_a_plan_needs_no_gpu(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    with_gpu(monkeypatch, MISSING)
    file = tmp_path / "config.yaml"
    file.write_text("model: m\noutput_dir: out\ndatasets: [rows.jsonl]\ndevice: cuda\n")
    assert load_config(file, "sft", planning=True).recipe == "bfloat16"
    with pytest.raises(ConfigError, match=rf"^{file}:4: device: cuda was asked for, but {MISSING}$"):
        load_config(file, "sft")


@pytest.mark.parametrize(
    ("command", "keys", "gpu", "message"),
    [
        ("sft", {"master_weights": False}, False, "master_weights has no effect while the recipe is float32"),
        ("sft", {"deterministic": True}, False, "deterministic has no effect while the device is cpu, which always gives the same bits"),
        ("sft", {"threads": 3}, True, "threads has no effect while the device is cuda"),
        (
            "grpo",
            {},
            True,
            "device: auto takes the cpu, although there is a GPU: the native engine samples on the cpu only; vLLM would on the GPU",
        ),
    ],
)
def test_told(monkeypatch: pytest.MonkeyPatch, command: Command, keys: dict[str, Any], gpu: bool, message: str) -> None:
    with_gpu(monkeypatch, "" if gpu else MISSING)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", ConfigWarning)
        parse_config({**BASES[command], **keys}, command)
    assert [str(warning.message) for warning in caught] == [message]


def test_the_reason_is_the_cores() -> None:
    from surogate_rl import _core

    assert devices.cuda_unavailable_reason() == _core.cuda_unavailable_reason()
    assert _core.cuda_available() == (not _core.cuda_unavailable_reason())
