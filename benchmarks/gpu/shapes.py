"""Learners at the shapes of known models, with random weights, and batches of random tokens for them: what the GPU benchmarks share."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from surogate_rl import _core
from surogate_rl.batch import PackedBatch
from surogate_rl.learner import Compute, Learner, LoraSettings

COLUMNS = 2048
_QWEN3: dict[str, Any] = {"head_dim": 128, "vocab": 151936, "qk_norm": True}
_QWEN2: dict[str, Any] = {"head_dim": 128, "vocab": 151936, "qkv_bias": True}
SHAPES: dict[str, dict[str, Any]] = {
    "0.6B": _QWEN3 | {"hidden": 1024, "ffn": 3072, "layers": 28, "heads": 16, "kv_heads": 8, "tied": True},
    "1.7B": _QWEN3 | {"hidden": 2048, "ffn": 6144, "layers": 28, "heads": 16, "kv_heads": 8, "tied": True},
    "8B": _QWEN3 | {"hidden": 4096, "ffn": 12288, "layers": 36, "heads": 32, "kv_heads": 8, "tied": False},
    # those of Qwen2.5, which llmq is measured at
    "0.5B": _QWEN2 | {"hidden": 896, "ffn": 4864, "layers": 24, "heads": 14, "kv_heads": 2, "head_dim": 64, "tied": True},
    "1.5B": _QWEN2 | {"hidden": 1536, "ffn": 8960, "layers": 28, "heads": 12, "kv_heads": 2, "tied": True},
    "7B": _QWEN2 | {"hidden": 3584, "ffn": 18944, "layers": 28, "heads": 28, "kv_heads": 4, "vocab": 152064, "tied": False},
}


def weights_per_token(shape: dict[str, Any]) -> int:
    """Weights that multiply each token: those of the blocks' linears and of the head."""
    d, f, q, k, layers = shape["hidden"], shape["ffn"], shape["heads"], shape["kv_heads"], shape["layers"]
    size = shape["head_dim"]
    return int(layers * (2 * d * q * size + 2 * d * k * size + 3 * d * f) + shape["vocab"] * d)


def needed_flops(shape: dict[str, Any], lora: bool, columns: int = COLUMNS) -> float:
    """Per token of rows of `columns`, recomputation not counted, causal attention by the pairs that it has."""
    weights = weights_per_token(shape)
    attention = shape["layers"] * 2 * columns * shape["heads"] * shape["head_dim"]
    return 2.0 * weights + attention + (2 if lora else 4) * weights + 2.5 * attention


def make_spec(size: str, layers: int = 0, vocab: int = 0) -> _core.ModelSpec:
    """The model of that size, of fewer layers or ids if asked for."""
    shape = dict(SHAPES[size])
    shape |= ({"layers": layers} if layers else {}) | ({"vocab": vocab} if vocab else {})
    half = shape["head_dim"] // 2
    return _core.ModelSpec(
        **shape, max_positions=40960, norm_eps=1e-6, rope_inv_freq=[float(1e6 ** (-2 * i / shape["head_dim"])) for i in range(half)]
    )


def make_learner(
    spec: _core.ModelSpec, max_tokens: int, *, lora: bool = False, recompute: bool = False, seed: int = 0, **compute: Any
) -> Learner:
    """On the GPU in bfloat16, unless `compute` says otherwise; weights normal with deviation 0.02, norms 1."""
    settings: dict[str, Any] = {"device": "cuda", "recipe": "bfloat16", "master_weights": False}
    settings |= {"head_gradient_in_forward": lora, "border_adapters": lora} | compute
    learner = Learner(
        spec,
        max_tokens=max_tokens,
        recompute=recompute,
        seed=seed,
        lora=LoraSettings(16, 32.0) if lora else None,
        compute=Compute(**settings),
    )
    block = (np.random.default_rng(seed).standard_normal(1 << 20) * 0.02).astype(np.float32)
    for info in learner.tensors():
        count = int(np.prod(info.shape))
        value = np.ones(count, np.float32) if info.name.endswith("norm.weight") else np.resize(block, count)
        learner.load(info.name, value.reshape(info.shape))
    return learner


def make_batch(lengths: Sequence[int], vocab: int, seed: int = 1, **fields: Any) -> PackedBatch:
    """Segments of random tokens, each of which predicts the next one."""
    tokens = np.random.default_rng(seed).integers(0, vocab, sum(lengths)).astype(np.int32)
    bounds = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)
    targets = np.roll(tokens, -1)
    targets[bounds[1:] - 1] = -100
    positions = np.concatenate([np.arange(length, dtype=np.int32) for length in lengths])
    return PackedBatch(tokens, positions, bounds, targets, targets >= 0, **fields)


def mean_seeds(batch: PackedBatch) -> np.ndarray[Any, np.dtype[np.float32]]:
    """The derivatives of the mean negative log-likelihood."""
    return np.where(batch.mask, -1.0 / batch.num_trained, 0.0).astype(np.float32)
