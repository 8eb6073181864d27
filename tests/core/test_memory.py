"""The plan is what is taken, and what does not fit is refused with every item and what to change."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest

from surogate_rl import _core

SPEC: dict[str, Any] = {
    "layers": 6,
    "hidden": 256,
    "heads": 8,
    "kv_heads": 4,
    "head_dim": 32,
    "ffn": 512,
    "vocab": 1000,
    "max_positions": 512,
    "rope_inv_freq": [0.5**i for i in range(16)],
}
LORA = {"lora_rank": 8, "lora_alpha": 16.0, "lora_targets": ["q_proj", "v_proj"]}


def plan(**options: Any) -> dict[str, int]:
    items = _core.Learner.plan(_core.ModelSpec(**SPEC), **({"max_tokens": 256} | options))
    assert len(dict(items)) == len(items)
    return dict(items)


def find(items: dict[str, int], word: str) -> int:
    (size,) = [size for name, size in items.items() if name.startswith(word)]
    return size


def test_sizes() -> None:
    items = plan()
    weights = 4 * (2 * 1000 * 256 + 256 + 6 * (256 * (256 + 2 * 128) + 256 * 256 + 3 * 256 * 512 + 2 * 256))
    assert find(items, "weights") == find(items, "gradients") == weights
    assert find(items, "optimizer") == 2 * weights
    assert find(items, "rotary") == 4 * 2 * 512 * 16
    per_token = 4 * (3 * 256 + 512 + 256 + 8 + 2 * 512 + 2)  # normed inputs and middle, qkv, attention out and lse, gate and up, two rstd
    assert find(items, "activations") == 6 * 256 * per_token
    assert find(items, "residual") == 7 * 256 * 256 * 4


def test_what_saves_memory() -> None:
    full, recompute, adapter, frozen = plan(), plan(recompute=True), plan(**LORA), plan(trainable=False)
    assert find(recompute, "activations") == find(full, "activations") // 6
    assert find(recompute, "residual") == find(full, "residual")
    assert find(adapter, "adapter") == 4 * 6 * (2 * 8 * 256 + 8 * (256 + 128))
    assert find(adapter, "gradients") == find(adapter, "initial adapter") == find(adapter, "adapter")
    assert find(adapter, "optimizer") == 2 * find(adapter, "adapter")
    assert not any(name.startswith(("gradients", "optimizer")) for name in frozen)
    assert find(frozen, "activations") == find(recompute, "activations")
    assert find(frozen, "residual") == 256 * 256 * 4
    assert find(plan(head_rows=10), "head") < find(plan(head_rows=100), "head")
    # The residual stream but for its first part, and the head's buffers, lie in gradients that are not written yet.
    lent = plan(recompute=True, lend_gradients=True, head_rows=64)
    assert find(lent, "gradients") == find(recompute, "gradients")
    assert lent.get("residual stream (256 tokens)", 0) <= find(recompute, "residual") // 7
    assert not any(name.startswith("head") for name in lent)
    assert sum(lent.values()) < sum(plan(recompute=True, head_rows=64).values()) - 6 * 256 * 256 * 4


def test_gradients_of_activations_cost_nothing() -> None:
    """But for the stream's: they take the place of what they are computed from."""
    items = plan()
    buffers = find(items, "working") + find(items, "backward")
    assert buffers <= 4 * 256 * (512 + 256) + 4 * (4 * 256 + 5 * 256) + 4096


def test_formats() -> None:
    """What each number format halves."""
    full, half = plan(), plan(recipe="bfloat16")
    for part in ("weights", "activations", "residual"):
        # rstd and lse of a layer's activations stay float32
        statistics = 6 * 256 * 4 * (8 + 2) if part == "activations" else 0
        assert find(half, part) - statistics == (find(full, part) - statistics) // 2
    for part in ("gradients", "optimizer", "rotary"):
        assert find(half, part) == find(full, part)
    assert find(half, "float32 master") == find(full, "weights")
    small = plan(recipe="bfloat16", master_weights=False, gradient_dtype="bfloat16", optimizer_state_dtype="bfloat16")
    assert not any(name.startswith("float32 master") for name in small)
    for part in ("gradients", "optimizer"):
        assert find(small, part) == find(full, part) // 2
    assert find(plan(recipe="bfloat16", logits_dtype="float32"), "head") > find(half, "head")

    adapter = plan(recipe="bfloat16", **LORA)
    assert find(adapter, "weights") == find(half, "weights")
    for part in ("gradients", "float32 master"):
        assert find(adapter, part) == 2 * find(adapter, "adapter") == 2 * find(adapter, "initial adapter")
    assert not any("master" in name for name in plan(recipe="bfloat16", trainable=False))


def test_kept_logits_cost_their_rows() -> None:
    few, all_rows = plan(head_rows=16), plan(head_rows=16, keep_logits=True)
    assert find(all_rows, "head") - find(few, "head") == (256 - 16) * 4 * (1000 + 2 * 256 + 1) - 192  # rstd of 16 rows is padded
    assert plan(head_rows=16, keep_logits=True, trainable=False) == plan(head_rows=16, trainable=False)
    ahead = find(plan(head_rows=16, head_gradient_in_forward=True, **LORA), "head")
    assert ahead - find(plan(head_rows=16, **LORA), "head") == (256 - 16) * 4 * 256


def test_memory_is_the_plan() -> None:
    for options in ({}, {"recompute": True}, LORA, {"trainable": False}):
        learner = _core.Learner(_core.ModelSpec(**SPEC), max_tokens=256, **options)
        assert dict(learner.memory()) == plan(**options)


def test_refusal_is_itemised() -> None:
    limit = sum(plan().values()) - 1
    with pytest.raises(MemoryError) as caught:
        _core.Learner(_core.ModelSpec(**SPEC), max_tokens=256, memory_limit=limit)
    message = str(caught.value)
    for name, size in plan().items():
        assert f"{name}: {size / 2**20:.2f} MiB" in message
    assert f"{sum(plan().values()) / 2**20:.2f} MiB needed" in message
    for word in ("memory_limit", "per_device_train_batch_size", "sequence_len", "recompute", "lora"):
        assert word in message
    _core.Learner(_core.ModelSpec(**SPEC), max_tokens=256, memory_limit=limit + 1)
    with pytest.raises(MemoryError) as caught:
        _core.Learner(_core.ModelSpec(**SPEC), max_tokens=256, memory_limit=1, recompute=True, **LORA)
    assert "recompute" not in str(caught.value)
    assert "lora" not in str(caught.value)


def test_what_the_machine_lacks_is_refused_at_once() -> None:
    with pytest.raises(MemoryError, match=r"GiB needed, .* available\. Needed for:"):
        _core.Learner(_core.ModelSpec(**SPEC), max_tokens=10**9)


def test_resident_memory_stays_within_the_plan() -> None:
    """A whole training step in a fresh process touches little more than what was planned."""
    script = f"""
import numpy as np
from surogate_rl import _core
def peak() -> int:
    lines = open("/proc/self/status").read().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM"))
learner = _core.Learner(_core.ModelSpec(**{SPEC!r}), max_tokens=2048, threads=2)
tokens = np.random.default_rng(0).integers(0, 1000, 2048).astype(np.int32)
batch = (tokens, np.tile(np.arange(512, dtype=np.int32), 4), np.arange(0, 2049, 512, dtype=np.int32), tokens)
before = peak()
for _ in range(3):
    learner.forward_backward(*batch, np.ones(2048, dtype=np.float32))
    learner.step(1e-3)
grown = peak() - before
print(grown, sum(size for _, size in learner.memory()))
"""
    result = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    grown, planned = map(int, result.stdout.split())
    assert 0.5 * planned < grown < planned + 64 * 2**20
