"""What is wrong is refused with a message that names operation, argument, place, expected and got; and nothing has happened then."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from surogate_rl import _core

FIELDS = {
    "layers": 2,
    "hidden": 16,
    "heads": 4,
    "kv_heads": 2,
    "head_dim": 4,
    "ffn": 24,
    "vocab": 32,
    "max_positions": 64,
    "tied": True,
    "rope_inv_freq": [1.0, 0.1],
}


def spec(**changes: Any) -> _core.ModelSpec:
    return _core.ModelSpec(**(FIELDS | changes))


def learner(**options: Any) -> _core.Learner:
    return _core.Learner(spec(), **({"max_tokens": 8, "threads": 1} | options))


def i32(*values: int) -> np.ndarray:
    return np.array(values, dtype=np.int32)


GOOD = {"tokens": i32(1, 2, 3, 4), "positions": i32(0, 1, 0, 1), "cu_seqlens": i32(0, 2, 4), "targets": i32(2, -100, 4, -100)}


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        ({"layers": 0}, "layers: expected a positive number, got 0"),
        ({"hidden": -1}, "hidden"),
        ({"vocab": 0}, "vocab"),
        ({"max_positions": 0}, "max_positions"),
        ({"heads": 3}, r"heads: expected a multiple of kv_heads \(2\), got 3"),
        ({"head_dim": 5}, "head_dim"),
        ({"norm_eps": float("nan")}, "norm_eps"),
        ({"activation": "gelu"}, "activation: expected 'silu'.*'gelu'"),
        ({"rope_inv_freq": [1.0]}, "rope_inv_freq: expected head_dim / 2 = 2 frequencies, got 1"),
        ({"rope_inv_freq": [1.0, float("inf")]}, r"rope_inv_freq\[1\]"),
        ({"rope_attention_scale": 0.0}, "rope_attention_scale"),
        ({"windows": [4]}, r"windows: expected one per layer \(2\).*got 1"),
        ({"windows": [4, -1]}, r"windows\[1\]"),
    ],
)
def test_spec(changes: dict[str, Any], match: str) -> None:
    for refuse in (
        lambda: spec(**changes).validate(),
        lambda: _core.Learner(spec(**changes), max_tokens=8),
        lambda: _core.Learner.plan(spec(**changes), max_tokens=8),
    ):
        with pytest.raises(ValueError, match=f"ModelSpec: {match}"):
            refuse()


def test_spec_fields() -> None:
    with pytest.raises(TypeError, match="no field 'layer'"):
        _core.ModelSpec(layer=2)
    with pytest.raises(TypeError, match="no field 'validate'"):
        _core.ModelSpec(validate=2)
    with pytest.raises(TypeError, match="layers: expected the field's type, got a str"):
        _core.ModelSpec(layers="two")
    made = spec(qk_norm=True)
    assert {name: getattr(made, name) for name in FIELDS} == FIELDS
    assert made.qk_norm


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": 2**40}, "max_tokens"),
        ({"threads": -1}, "threads"),
        ({"head_rows": -1}, "head_rows"),
        ({"lora_rank": -1}, "lora_rank"),
        ({"lora_rank": 4, "lora_alpha": 8.0}, "lora_targets: expected at least one"),
        ({"lora_rank": 4, "lora_targets": ["q_proj"]}, "lora_alpha"),
        ({"lora_targets": ["q_proj"]}, "lora_targets: expected none without a lora_rank"),
        ({"lora_rank": 4, "lora_alpha": 8.0, "lora_targets": ["q_proj", "c_attn"]}, "q_proj, k_proj.*lm_head, got 'c_attn'"),
        ({"lora_rank": 4, "lora_alpha": 8.0, "lora_targets": ["q_proj", "q_proj"]}, "'q_proj' is named twice"),
        ({"lora_rank": 4, "lora_alpha": 8.0, "lora_targets": ["lm_head"]}, "shares its weight with the embedding"),
    ],
)
def test_options(options: dict[str, Any], match: str) -> None:
    with pytest.raises(ValueError, match=match):
        learner(**options)


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        ({"tokens": i32(1, 2, 32, 4)}, r"tokens\[2\]: expected an id in \[0, 32\), got 32"),
        ({"tokens": i32(1, -1, 3, 4)}, r"tokens\[1\]"),
        ({"tokens": np.array([1, 2, 3, 4])}, "tokens: expected a C-contiguous int32 numpy array.*got int64"),
        ({"tokens": np.zeros((2, 2), dtype=np.int32)}, r"tokens: .*got int32 of shape \(2, 2\)"),
        ({"tokens": np.zeros(8, dtype=np.int32)[::2]}, "tokens: .*not C-contiguous"),
        ({"tokens": [1, 2, 3, 4]}, "tokens: .*got a list"),
        ({"positions": i32(0, 1, 0)}, r"positions: .*length 4, got int32 of shape \(3,\)"),
        ({"positions": i32(0, 1, 0, 64)}, r"positions\[3\]: expected a position in \[0, 64\), got 64"),
        ({"positions": i32(0, 1, -1, 1)}, r"positions\[2\]"),
        ({"cu_seqlens": i32()}, "cu_seqlens"),
        ({"cu_seqlens": i32(1, 4)}, r"cu_seqlens\[0\]: expected 0, got 1"),
        ({"cu_seqlens": i32(0, 3, 2, 4)}, r"cu_seqlens\[2\]: expected more than the one before \(3\), got 2"),
        ({"cu_seqlens": i32(0, 2, 2, 4)}, r"cu_seqlens\[2\]"),
        ({"cu_seqlens": i32(0, 2)}, "cu_seqlens: expected to end with the number of tokens, 4, got 2"),
        ({"targets": i32(2, -100, 32, -100)}, r"targets\[2\]: expected an id below the vocabulary's 32, got 32"),
        ({"targets": i32(2, -100, 30, -100), "valid_vocab": 30}, r"targets\[2\]: expected an id below valid_vocab = 30, got 30"),
        ({"valid_vocab": 33}, r"valid_vocab: expected a number in \[0, 32\], got 33"),
        ({"temperature": 0.0}, "temperature"),
        ({"temperature": float("nan")}, "temperature"),
    ],
)
def test_batch(changes: dict[str, Any], match: str) -> None:
    model = learner()
    seeds = np.ones(4, dtype=np.float32)
    for op in ("score", "forward", "forward_backward"):
        arguments = GOOD | changes | ({"dlogp": seeds} if op == "forward_backward" else {})
        with pytest.raises(ValueError, match=f"{op}: {match}"):
            getattr(model, op)(**arguments)
    model.score(**GOOD)  # nothing is pending
    assert not model.gradient("embed_tokens.weight").any()


def test_too_many_tokens() -> None:
    count = 9
    batch = {
        "tokens": np.ones(count, dtype=np.int32),
        "positions": np.arange(count, dtype=np.int32),
        "cu_seqlens": i32(0, count),
        "targets": np.ones(count, dtype=np.int32),
    }
    with pytest.raises(ValueError, match=r"tokens: expected at most max_tokens = 8.*got 9"):
        learner().score(**batch)


def test_seeds() -> None:
    model = learner()
    model.forward(**GOOD)
    with pytest.raises(ValueError, match="backward: dlogp: expected 4, got 3"):
        model.backward(np.ones(3, dtype=np.float32))
    with pytest.raises(ValueError, match=r"backward: dlogp: .*float32.*got float64"):
        model.backward(np.ones(4))
    with pytest.raises(ValueError, match="backward: dentropy: the pending forward pass was run without entropy"):
        model.backward(np.ones(4, dtype=np.float32), np.ones(4, dtype=np.float32))
    model.backward(np.ones(4, dtype=np.float32))  # still pending after the errors
    with pytest.raises(ValueError, match="forward_backward: dlogp"):
        model.forward_backward(**GOOD, dlogp=np.ones(5, dtype=np.float32))


def test_order_of_calls() -> None:
    model = learner()
    seeds = np.ones(4, dtype=np.float32)
    with pytest.raises(ValueError, match="backward: no forward pass is pending"):
        model.backward(seeds)
    model.forward(**GOOD)
    weight = model.export("norm.weight")
    for refused in (
        lambda: model.forward(**GOOD),
        lambda: model.score(**GOOD),
        lambda: model.forward_backward(**GOOD, dlogp=seeds),
        lambda: model.step(1e-3),
        lambda: model.load("norm.weight", weight),
    ):
        with pytest.raises(ValueError, match="a forward pass is pending"):
            refused()
    model.discard_pending()
    with pytest.raises(ValueError, match="no forward pass is pending"):
        model.backward(seeds)
    model.forward(**GOOD)
    model.backward(seeds)
    model.score(**GOOD)


def test_a_frozen_learner_only_scores() -> None:
    model = learner(trainable=False)
    seeds = np.ones(4, dtype=np.float32)
    model.score(**GOOD)
    for refused in (
        lambda: model.forward(**GOOD),
        lambda: model.backward(seeds),
        lambda: model.forward_backward(**GOOD, dlogp=seeds),
        lambda: model.step(1e-3),
    ):
        with pytest.raises(ValueError, match="trainable = false"):
            refused()
    assert not any(trainable for _, _, trainable in model.tensors())
    assert model.optimizer_state() == []


def test_adapter_names() -> None:
    model = learner()
    with pytest.raises(ValueError, match="adapter: expected 'live', 'initial' or 'off', got 'base'"):
        model.score(**GOOD, adapter="base")
    for choice in ("initial", "off"):
        with pytest.raises(ValueError, match="need a learner with an adapter"):
            model.score(**GOOD, adapter=choice)
    with pytest.raises(ValueError, match="no adapter"):
        model.snapshot_adapter()


def test_tensors() -> None:
    model = learner(lora_rank=1, lora_alpha=1.0, lora_targets=["k_proj"])
    shapes = {name: shape for name, shape, _ in model.tensors()}
    assert shapes["embed_tokens.weight"] == (32, 16)
    assert shapes["norm.weight"] == (16,)
    assert shapes["layers.1.self_attn.k_proj.weight"] == (8, 16)
    assert shapes["layers.1.self_attn.k_proj.lora_A"] == (1, 16)
    assert shapes["layers.1.self_attn.k_proj.lora_B"] == (8, 1)
    assert "lm_head.weight" not in shapes
    for value in (
        np.zeros(15, dtype=np.float32),
        np.zeros((1, 16), dtype=np.float32),
        np.zeros(16),
        np.zeros(32, dtype=np.float32)[::2],
        1.0,
    ):
        with pytest.raises(ValueError, match=r"load: norm.weight: expected a C-contiguous float32 numpy array of shape \(16,\), got"):
            model.load("norm.weight", value)
    for call in (model.export, lambda name: model.load(name, np.zeros(1, dtype=np.float32)), model.gradient, model.export_optimizer):
        with pytest.raises(ValueError, match=r"there is no 'layers\.2\.mlp'"):
            call("layers.2.mlp")
    for name, shape, _ in model.tensors():
        value = np.random.default_rng(1).normal(size=shape).astype(np.float32)
        model.load(name, value)
        np.testing.assert_array_equal(model.export(name), value)
    with pytest.raises(ValueError, match="update_count"):
        model.update_count = -1


def test_empty_batches() -> None:
    """A rank without work still takes part: no tokens, or none with a target, is no error and adds nothing."""
    model = learner()
    empty = {"tokens": i32(), "positions": i32(), "cu_seqlens": i32(0), "targets": i32()}
    nothing = np.zeros(0, dtype=np.float32)
    logp, entropy = model.score(**empty, entropy=True)
    assert logp.shape == (0,)
    assert entropy is not None
    assert entropy.shape == (0,)
    model.forward(**empty)
    model.backward(nothing)
    model.forward_backward(**empty, dlogp=nothing)
    untargeted = GOOD | {"targets": i32(-1, -100, -1, -1)}
    logp, _ = model.forward(**untargeted)
    np.testing.assert_array_equal(logp, np.zeros(4, dtype=np.float32))
    model.backward(np.ones(4, dtype=np.float32))
    stats = model.step(1e-3)
    assert stats.applied
    assert stats.grad_norm == 0.0


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"recipe": "float16"}, "recipe: expected float32 or bfloat16, got 'float16'"),
        ({"recipe": "bfloat16"}, "recipe: the cpu computes in float32, got bfloat16"),
        ({"gradient_dtype": "bfloat16"}, "gradient_dtype: expected float32 with the float32 recipe, got bfloat16"),
        ({"optimizer_state_dtype": "int32"}, "optimizer_state_dtype: expected float32 or bfloat16, got 'int32'"),
        ({"device": "gpu"}, "device: expected 'cpu', 'cuda' or 'cuda:N', got 'gpu'"),
        ({"device": "cuda:x"}, "device: expected 'cpu', 'cuda' or 'cuda:N', got 'cuda:x'"),
    ],
)
def test_device_and_formats(options: dict[str, Any], match: str) -> None:
    with pytest.raises(ValueError, match=match):
        learner(**options)


def test_a_device_that_is_not_there() -> None:
    with pytest.raises(ValueError, match="device: ") as caught:
        _core.Learner(spec(), max_tokens=8, device="cuda:99")
    if not _core.cuda_available():
        assert _core.cuda_unavailable_reason() in str(caught.value)
    assert _core.available_memory("cpu") > 0
