"""A 50-step SFT loss curve on the GPU in bf16 beside float32 on the CPU, and where any difference comes from.

    python benchmarks/gpu/loss_curve.py [--steps 50] [--rates 3e-4,1e-3,3e-3] [--torch]

A small Qwen3-like model is trained from random weights on this project's own text, as bytes. Arms: float32 on the CPU, which all are
compared with; float32 on the GPU (another order of sums: what chaos alone makes of rounding errors of 1e-7); float32 on the CPU from
weights moved by 2^-9 of themselves (what it makes of bf16's); bf16 with float32 masters; the same with float32 logits; bf16 without
masters; and with --torch transformers in float32 and under bf16 autocast, whose difference is what bf16 costs a peer with float32
weights. Prints a line of JSON for each arm and rate: the largest and the mean relative difference of the loss over the steps.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import numpy as np

from surogate_rl import _core
from surogate_rl.batch import PackedBatch
from surogate_rl.learner import Compute, Learner

ROOT = Path(__file__).resolve().parents[2]
SHAPE: dict[str, Any] = {
    "layers": 4, "hidden": 256, "heads": 4, "kv_heads": 2, "head_dim": 64, "ffn": 768, "vocab": 256, "max_positions": 512, "qk_norm": True,
    "norm_eps": 1e-6, "tied": False,
}  # fmt: skip
ROWS, COLUMNS, WARMUP, CLIP = 16, 256, 10, 1.0
Weights = dict[str, np.ndarray[Any, np.dtype[np.float32]]]


def text() -> np.ndarray[Any, np.dtype[np.int32]]:
    files = sorted([*ROOT.glob("docs/*.md"), *ROOT.glob("surogate_rl/**/*.py")])
    return np.frombuffer(b"\n".join(file.read_bytes() for file in files), np.uint8).astype(np.int32)


def batches(steps: int) -> list[PackedBatch]:
    source, draw = text(), np.random.default_rng(5)
    positions = np.tile(np.arange(COLUMNS, dtype=np.int32), ROWS)
    bounds = np.arange(0, ROWS * COLUMNS + 1, COLUMNS, dtype=np.int32)
    result = []
    for _ in range(steps):
        starts = draw.integers(0, len(source) - COLUMNS - 1, ROWS)
        tokens = np.concatenate([source[s : s + COLUMNS] for s in starts])
        targets = np.roll(tokens, -1)
        targets[bounds[1:] - 1] = -100
        result.append(PackedBatch(tokens, positions, bounds, targets, targets >= 0))
    return result


def first_weights(infos: list[Any], moved: bool = False) -> Weights:
    """That bf16 holds exactly, so that all arms start from the same; `moved`: by up to 2^-9 of themselves, as rounding does."""
    draw, noise = np.random.default_rng(11), np.random.default_rng(12)
    result: Weights = {}
    for info in infos:
        value = draw.standard_normal(info.shape).astype(np.float32) * np.float32(0.02)
        if info.name.endswith("norm.weight"):
            value = np.ones(info.shape, np.float32)
        bits = value.view(np.uint32)
        value = ((bits + 0x7FFF + ((bits >> 16) & 1)) & np.uint32(0xFFFF0000)).view(np.float32)
        if moved:
            value = value * (1 + noise.uniform(-1, 1, info.shape) / 512).astype(np.float32)
        result[info.name] = np.ascontiguousarray(value, np.float32)
    return result


def rate_at(step: int, rate: float) -> float:
    return rate * min(1.0, (step + 1) / WARMUP)


def ours(data: list[PackedBatch], rate: float, compute: dict[str, Any], moved: bool = False) -> np.ndarray[Any, Any]:
    half = SHAPE["head_dim"] // 2
    spec = _core.ModelSpec(**SHAPE, rope_inv_freq=[float(1e6 ** (-i / half)) for i in range(half)])
    learner = Learner(spec, max_tokens=ROWS * COLUMNS, compute=Compute(**compute))
    for name, value in first_weights(learner.tensors(), moved).items():
        learner.load(name, value)
    losses = []
    for step, batch in enumerate(data):
        seeds = np.where(batch.mask, -1.0 / batch.num_trained, 0.0).astype(np.float32)
        stats = learner.forward_backward(batch, seeds)
        losses.append(float(-stats.logp[batch.mask].astype(np.float64).mean()))
        learner.step(rate_at(step, rate), max_grad_norm=CLIP, betas=(0.9, 0.95))
    learner.close()
    return np.array(losses)


def theirs(data: list[PackedBatch], rate: float, autocast: bool) -> np.ndarray[Any, Any]:
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM

    torch.backends.cuda.matmul.allow_tf32 = False
    config = Qwen3Config(
        vocab_size=SHAPE["vocab"], hidden_size=SHAPE["hidden"], intermediate_size=SHAPE["ffn"], num_hidden_layers=SHAPE["layers"],
        num_attention_heads=SHAPE["heads"], num_key_value_heads=SHAPE["kv_heads"], head_dim=SHAPE["head_dim"],
        rms_norm_eps=SHAPE["norm_eps"], max_position_embeddings=SHAPE["max_positions"], rope_theta=1e6, tie_word_embeddings=False,
        use_cache=False,
    )  # fmt: skip
    model = Qwen3ForCausalLM(config).float().cuda()
    parameters = {name.removeprefix("model."): parameter for name, parameter in model.named_parameters()}
    # in the learner's order, which decides what is drawn
    half = SHAPE["head_dim"] // 2
    spec = _core.ModelSpec(**SHAPE, rope_inv_freq=[float(1e6 ** (-i / half)) for i in range(half)])
    order = Learner(spec, max_tokens=8).tensors()
    with torch.no_grad():
        for name, value in first_weights(order).items():
            parameters[name].copy_(torch.from_numpy(value))
    optimizer = torch.optim.AdamW(model.parameters(), lr=rate, betas=(0.9, 0.95), weight_decay=0.0)
    losses = []
    for step, batch in enumerate(data):
        for group in optimizer.param_groups:
            group["lr"] = rate_at(step, rate)
        tokens = torch.from_numpy(batch.tokens.reshape(ROWS, COLUMNS).astype(np.int64)).cuda()
        with torch.autocast("cuda", torch.bfloat16, enabled=autocast):
            logits = model(input_ids=tokens).logits
        loss = torch.nn.functional.cross_entropy(logits[:, :-1].float().flatten(0, 1), tokens[:, 1:].flatten())
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        losses.append(float(loss.detach()))
    return np.array(losses)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--rates", default="3e-4,1e-3,3e-3")
    parser.add_argument("--torch", action="store_true")
    parser.add_argument("--cpu-only", action="store_true", help="only the arms that need no GPU")
    options = parser.parse_args()
    data = batches(options.steps)
    bf16 = {"device": "cuda", "recipe": "bfloat16"}
    arms: dict[str, dict[str, Any]] = {
        "cuda float32": {"device": "cuda"},
        "cuda bf16, masters": bf16,
        "cuda bf16, masters, float32 logits": bf16 | {"logits_dtype": "float32"},
        "cuda bf16, no masters": bf16 | {"master_weights": False},
        "cuda bf16, no masters, bf16 states": bf16 | {"master_weights": False, "optimizer_state_dtype": "bfloat16"},
    }
    for rate in [float(text) for text in options.rates.split(",")]:
        right = ours(data, rate, {"device": "cpu"})

        def report(arm: str, losses: np.ndarray[Any, Any], against: np.ndarray[Any, Any], rate: float = rate) -> None:
            difference = np.abs(losses - against) / against
            line = {
                "bench": "loss_curve", "arm": arm, "learning_rate": rate, "steps": options.steps,
                "largest": round(float(difference.max()), 5), "at_step": int(difference.argmax()),
                "mean": round(float(difference.mean()), 5), "losses": [round(float(x), 4) for x in losses],
            }  # fmt: skip
            print(json.dumps(line), flush=True)

        report("cpu float32", right, right)
        report("cpu float32, weights moved by 2^-9", ours(data, rate, {"device": "cpu"}, moved=True), right)
        if options.cpu_only:
            continue
        for arm, compute in arms.items():
            report(arm, ours(data, rate, compute), right)
        if options.torch:
            exact = theirs(data, rate, autocast=False)
            report("torch float32", exact, right)
            report("torch bf16 autocast, against torch float32", theirs(data, rate, autocast=True), exact)


if __name__ == "__main__":
    main()
