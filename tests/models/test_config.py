"""From config.json to the core's ModelSpec, and what is refused."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from surogate_rl.models import ModelError, inspect_model
from surogate_rl.models.family import weight_shapes
from surogate_rl.models.load import describe
from surogate_rl.models.rope import make_rope, rope_parameters

BASE = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 32,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "rms_norm_eps": 1e-5,
    "hidden_act": "silu",
    "rope_theta": 10000.0,
}


def fields_of(raw: dict[str, Any]) -> dict[str, Any]:
    raw = {key: value for key, value in raw.items() if value is not ...}
    return describe(AutoConfig.for_model(**raw), raw, "here")[1]


def write(directory: Path, raw: dict[str, Any]) -> str:
    (directory / "config.json").write_text(json.dumps({key: value for key, value in raw.items() if value is not ...}))
    return str(directory)


# Rotation -------------------------------------------------------------------------------------------------------------------------

ROPES = {
    "default": {},
    "linear": {"factor": 4.0},
    "llama3": {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 32},
    "llama3, original length from the config": {"rope_type": "llama3", "factor": 2.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0},
    "yarn": {"factor": 4.0, "original_max_position_embeddings": 32},
    "yarn, attention factor": {"rope_type": "yarn", "factor": 4.0, "attention_factor": 0.7, "original_max_position_embeddings": 32},
    "yarn, mscale": {"rope_type": "yarn", "factor": 40.0, "mscale": 1.0, "mscale_all_dim": 0.6, "original_max_position_embeddings": 32},
    "yarn, mscale alone": {"rope_type": "yarn", "factor": 40.0, "mscale": 0.707, "original_max_position_embeddings": 32},
    "yarn, betas": {"rope_type": "yarn", "factor": 4.0, "beta_fast": 16, "beta_slow": 2, "original_max_position_embeddings": 64},
    "yarn, not truncated": {"rope_type": "yarn", "factor": 4.0, "truncate": False, "original_max_position_embeddings": 32},
    "yarn, factor 1": {"rope_type": "yarn", "factor": 1.0, "original_max_position_embeddings": 32},
}


@pytest.mark.parametrize("head_dim", [16, 18, 64, 128])
@pytest.mark.parametrize("theta", [10000.0, 500000.0, 1e6])
@pytest.mark.parametrize("kind", list(ROPES))
def test_frequencies_have_the_bits_of_transformers(kind: str, theta: float, head_dim: int) -> None:
    settings = {"rope_type": kind, **ROPES[kind], "rope_theta": theta}
    config = AutoConfig.for_model(**{**BASE, "rope_theta": theta, "head_dim": head_dim, "rope_parameters": dict(settings)})
    if settings["rope_type"] == "default":
        expected, scale = 1.0 / (theta ** (torch.arange(0, head_dim, 2, dtype=torch.int64).float() / head_dim)), 1.0
    else:
        expected, scale = ROPE_INIT_FUNCTIONS[settings["rope_type"]](config, torch.device("cpu"))
    parameters = rope_parameters({"max_position_embeddings": 128, "rope_parameters": settings})
    rope = make_rope(parameters, head_dim=head_dim, max_positions=128)
    np.testing.assert_array_equal(np.array(rope.inv_freq, np.float32), expected.numpy())
    assert rope.attention_scale == pytest.approx(scale, rel=1e-12)


def test_llama3_and_theta_by_hand() -> None:
    llama3 = {
        "rope_type": "llama3",
        "rope_theta": 5e5,
        "factor": 8,
        "low_freq_factor": 1,
        "high_freq_factor": 4,
        "original_max_position_embeddings": 8192,
    }
    scaled = make_rope(rope_parameters({"rope_parameters": llama3}), head_dim=128, max_positions=131072).inv_freq
    for index, ratio in {28: 1.0, 29: 0.828168, 31: 0.493507, 35: 0.125}.items():
        assert scaled[index] / 5e5 ** (-2 * index / 128) == pytest.approx(ratio, abs=1e-5)
    assert make_rope(rope_parameters({"rope_theta": 1e6}), head_dim=128, max_positions=1).inv_freq[1] == pytest.approx(0.805842, abs=1e-6)


@pytest.mark.parametrize(
    "where",
    [
        {"rope_theta": 5e5},
        {"rope_theta": ..., "rope_parameters": {"rope_type": "default", "rope_theta": 5e5}},
        {"rope_theta": ..., "rope_parameters": {"rope_theta": 5e5}},
        {"rope_theta": 5e5, "rope_scaling": None},
        {"rope_theta": 1e4, "rope_parameters": {"rope_type": "default", "rope_theta": 5e5}},
    ],
)
def test_theta_is_read_in_both_places(where: dict[str, Any]) -> None:
    assert fields_of({**BASE, **where})["rope_inv_freq"][1] == pytest.approx(5e5 ** (-2 / 16), rel=1e-6)


def test_old_rope_scaling_with_type() -> None:
    fields = fields_of({**BASE, "rope_scaling": {"type": "linear", "factor": 2.0}})
    np.testing.assert_allclose(fields["rope_inv_freq"], 0.5 * np.array(fields_of(BASE)["rope_inv_freq"]), rtol=1e-7)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"rope_theta": ...},
            "config.json: no rope_theta, neither at the top level nor inside rope_parameters; add the value that the model",
        ),
        ({"rope_theta": 0}, "config.json: rope_theta must be a positive number, got 0"),
        (
            {"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}},
            "rope_type 'dynamic' is not supported; supported are default, linear, llama3, yarn",
        ),
        ({"rope_scaling": {"type": "longrope", "factor": 2.0}}, "rope_type 'longrope' is not supported"),
        ({"rope_scaling": {"rope_type": "linear"}}, "rope_type 'linear' needs a number for factor, got None"),
        ({"rope_scaling": {"rope_type": "llama3", "factor": 8.0}}, "rope_type 'llama3' needs a number for low_freq_factor, got None"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor 0.5 is not supported"),
        (
            {"rope_parameters": {"full_attention": {"rope_theta": 1e4}}},
            r"rope_parameters per layer type \(full_attention\) are not supported",
        ),
    ],
)
def test_rotations_that_are_refused(changes: dict[str, Any], message: str, tmp_path: Path) -> None:
    raw = {key: value for key, value in {**BASE, **changes}.items() if value is not ...}
    with pytest.raises(ModelError, match=message):
        describe(AutoConfig.for_model(**{**BASE, "rope_theta": 1e4}), raw, "here")


# Shapes ---------------------------------------------------------------------------------------------------------------------------


def test_head_dim_is_read() -> None:
    for family in ("llama", "mistral", "qwen2", "qwen3"):
        shapes = weight_shapes(fields_of({**BASE, "model_type": family, "architectures": None, "head_dim": 128}))
        assert shapes["layers.0.self_attn.q_proj.weight"] == (512, 64)
        assert shapes["layers.0.self_attn.o_proj.weight"] == (64, 512)
        assert shapes["layers.0.self_attn.k_proj.weight"] == (256, 64)


def test_head_dim_where_the_file_has_none() -> None:
    for family, expected in {"llama": 16, "mistral": 16, "qwen2": 16, "qwen3": 128}.items():  # qwen3's class has a default of its own
        assert fields_of({**BASE, "model_type": family, "architectures": None})["head_dim"] == expected


def test_shapes_are_those_of_transformers(model_name: str, tiny: Callable[..., Any]) -> None:
    made = tiny(model_name)
    theirs = {name.removeprefix("model."): tuple(value.shape) for name, value in made.model.named_parameters()}
    assert weight_shapes(describe(made.model.config, made.model.config.to_dict(), "here")[1]) == theirs
    info = inspect_model(str(made.directory))
    assert info.parameters == sum(math.prod(shape) for shape in theirs.values())
    assert info.family == made.model.config.model_type
    assert {item.name: item.shape for item in made.learner().tensors()} == theirs


# Windows --------------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "windows"),
    [
        ({"model_type": "llama"}, [0, 0, 0]),
        ({"model_type": "llama", "sliding_window": 7}, [0, 0, 0]),
        ({"model_type": "mistral", "sliding_window": 7}, [7, 7, 7]),
        ({"model_type": "mistral", "sliding_window": None}, [0, 0, 0]),
        ({"model_type": "mistral"}, [4096, 4096, 4096]),
        ({"model_type": "qwen2", "sliding_window": 7, "use_sliding_window": False}, [0, 0, 0]),
        ({"model_type": "qwen2", "sliding_window": 7, "use_sliding_window": False, "max_window_layers": 1}, [0, 0, 0]),
        ({"model_type": "qwen2", "sliding_window": 7, "use_sliding_window": True, "max_window_layers": 1}, [0, 7, 7]),
        ({"model_type": "qwen3", "sliding_window": 7, "use_sliding_window": True, "max_window_layers": 3}, [0, 0, 0]),
        ({"model_type": "qwen3", "sliding_window": 7, "use_sliding_window": True, "max_window_layers": 0}, [7, 7, 7]),
        (
            {
                "model_type": "qwen3", "sliding_window": 7, "use_sliding_window": True, "max_window_layers": 3,
                "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
            },
            [7, 0, 7],
        ),
    ],
)  # fmt: skip
def test_windows(changes: dict[str, Any], windows: list[int]) -> None:
    assert fields_of({**BASE, "architectures": None, **changes})["windows"] == windows


def test_a_sliding_layer_without_a_window_is_refused() -> None:
    kinds = ["full_attention", "sliding_attention", "full_attention"]
    with pytest.raises(
        ModelError, match=r"layer_types\[1\] is sliding_attention, but there is no sliding window \(use_sliding_window = False"
    ):
        fields_of({**BASE, "model_type": "qwen3", "use_sliding_window": False, "layer_types": kinds})
    with pytest.raises(ModelError, match=r"layer_types\[0\] = 'chunked_attention' is not supported"):
        fields_of({**BASE, "model_type": "qwen3", "layer_types": ["chunked_attention", "full_attention", "full_attention"]})


# Refusals -------------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model_type": "gemma3_text"}, "model_type 'gemma3_text' is not supported; supported are llama, mistral, qwen2, qwen3"),
        (
            {"model_type": "qwen3_moe"},
            r"model_type 'qwen3_moe' is not supported \(the nearest is qwen3\); supported are llama, mistral, qwen2, qwen3",
        ),
        ({"model_type": ...}, "no model_type; supported are llama, mistral, qwen2, qwen3"),
        ({"hidden_act": "gelu"}, "hidden_act 'gelu' is not supported; only silu"),
        ({"pretraining_tp": 2}, "pretraining_tp = 2 is not supported"),
        ({"final_logit_softcapping": 30.0}, "final_logit_softcapping = 30.0 is not supported"),
        ({"attn_logit_softcapping": 50.0}, "attn_logit_softcapping = 50.0 is not supported"),
        (
            {"quantization_config": {"quant_method": "gptq", "bits": 4}},
            "quantization_config = .* is not supported; give a checkpoint that is not quantised",
        ),
        (
            {"architectures": ["LlamaForSequenceClassification"]},
            r"architectures \['LlamaForSequenceClassification'\] is no causal language model",
        ),
        ({"num_key_value_heads": 3}, "num_attention_heads 4 is not a multiple of num_key_value_heads 3"),
    ],
)
def test_what_is_refused_by_name(changes: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=message):
        inspect_model(write(tmp_path, {**BASE, **changes}))


def test_a_value_that_transformers_refuses(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"config.json: transformers refuses this config \((?s:.*)num_hidden_layers"):
        inspect_model(write(tmp_path, {**BASE, "num_hidden_layers": "three"}))


def test_broken_config_files(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"config.json is missing; the directory must hold a model in Hugging Face form"):
        inspect_model(str(tmp_path))
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ModelError, match=r"config.json is not valid JSON"):
        inspect_model(str(tmp_path))
    (tmp_path / "config.json").write_text("[]")
    with pytest.raises(ModelError, match="must hold a JSON object, got list"):
        inspect_model(str(tmp_path))


def test_attention_dropout_is_not_applied_and_said_so(caplog: pytest.LogCaptureFixture) -> None:
    fields_of({**BASE, "attention_dropout": 0.1})
    assert "attention_dropout = 0.1 is not applied" in caplog.text
