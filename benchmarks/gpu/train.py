"""Training speed and memory of the CUDA back-end at Qwen3 shapes, random weights, packed rows of 2048 tokens, bf16.

    python benchmarks/gpu/train.py SIZE,lora|full,recompute,ROWS[,state dtype[,gradient dtype]] ...

SIZE is 0.6B, 1.7B or 8B, ROWS how many rows of 2048 tokens make a step. Prints a line of JSON for each case: tokens per second over
sustained steps (forward, backward, clipping, AdamW), TFLOP/s that the model needs, and the memory that the device lost to us.
"""

from __future__ import annotations

import json
import sys
import time

import numpy as np

from surogate_rl import _core
from surogate_rl.batch import PackedBatch
from surogate_rl.learner import Compute, Learner, LoraSettings

COLUMNS = 2048
VOCAB = 151936
SHAPES = {
    "0.6B": {"hidden": 1024, "ffn": 3072, "layers": 28, "heads": 16, "kv_heads": 8, "tied": True},
    "1.7B": {"hidden": 2048, "ffn": 6144, "layers": 28, "heads": 16, "kv_heads": 8, "tied": True},
    "8B": {"hidden": 4096, "ffn": 12288, "layers": 36, "heads": 32, "kv_heads": 8, "tied": False},
}
WARM, TIMED = 4, 10


def needed_flops(shape: dict[str, int], lora: bool) -> float:
    """Per token, recomputation not counted; as the peer's script counts."""
    d, f, h, k, layers = shape["hidden"], shape["ffn"], shape["heads"], shape["kv_heads"], shape["layers"]
    weights = layers * (2 * d * h * 128 + 2 * d * k * 128 + 3 * d * f) + VOCAB * d
    attention = layers * 2 * COLUMNS * h * 128
    return 2 * weights + attention + (2 if lora else 4) * weights + 2.5 * attention


def make(size: str, lora: bool, recompute: bool, rows: int, state: str, gradient: str) -> Learner:
    spec = _core.ModelSpec(
        **SHAPES[size],
        head_dim=128,
        vocab=VOCAB,
        max_positions=40960,
        qk_norm=True,
        norm_eps=1e-6,
        rope_inv_freq=[float(1e6 ** (-2 * i / 128)) for i in range(64)],
    )
    compute = Compute(
        device="cuda",
        recipe="bfloat16",
        optimizer_state_dtype=state,  # type: ignore[arg-type]
        gradient_dtype=gradient,  # type: ignore[arg-type]
        master_weights=False,
        head_gradient_in_forward=lora,
        border_adapters=lora,
    )
    settings = LoraSettings(16, 32.0) if lora else None
    learner = Learner(spec, max_tokens=rows * COLUMNS, recompute=recompute, lora=settings, compute=compute)
    block = (np.random.default_rng(0).standard_normal(1 << 20) * 0.02).astype(np.float32)
    for info in learner.tensors():
        size_of = int(np.prod(info.shape))
        value = np.ones(size_of, np.float32) if len(info.shape) == 1 else np.resize(block, size_of)
        learner.load(info.name, value.reshape(info.shape))
    return learner


def run(size: str, mode: str, recompute: bool, rows: int, state: str = "bfloat16", gradient: str = "float32") -> None:
    before = _core.available_memory("cuda")
    learner = make(size, mode == "lora", recompute, rows, state, gradient)
    tokens = np.random.default_rng(1).integers(0, VOCAB, rows * COLUMNS).astype(np.int32)
    targets = np.roll(tokens, -1)
    targets[COLUMNS - 1 :: COLUMNS] = -100
    mask = targets >= 0
    batch = PackedBatch(
        tokens, np.tile(np.arange(COLUMNS, dtype=np.int32), rows), np.arange(0, rows * COLUMNS + 1, COLUMNS, dtype=np.int32), targets, mask
    )
    seeds = np.where(mask, -1.0 / mask.sum(), 0.0).astype(np.float32)

    def step() -> float:
        stats = learner.forward_backward(batch, seeds)
        learner.step(1e-5, max_grad_norm=1.0)
        return float(-stats.logp[mask].mean())

    for _ in range(WARM):
        loss = step()
    started = time.perf_counter()
    for _ in range(TIMED):
        loss = step()
    seconds = (time.perf_counter() - started) / TIMED
    rate = rows * COLUMNS / seconds
    used = before - _core.available_memory("cuda")
    line = {
        "model": size, "mode": mode, "recompute": recompute, "rows": rows, "state": state, "gradient": gradient, "tok_s": round(rate),
        "tflops_needed": round(rate * needed_flops(SHAPES[size], mode == "lora") / 1e12), "mem_gb": round(used / 1e9, 1),
        "loss": round(loss, 3),
    }  # fmt: skip
    print(json.dumps(line), flush=True)
    learner.close()


def main() -> None:
    for case in sys.argv[1:]:
        size, mode, recompute, rows, *rest = case.split(",")
        try:
            run(size, mode, recompute == "1", int(rows), *rest)
        except (MemoryError, RuntimeError, ValueError) as error:
            print(case, "FAILED", str(error)[:600], flush=True)


if __name__ == "__main__":
    main()
