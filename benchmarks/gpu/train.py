"""Training speed and memory of the CUDA back-end at the shapes of known models, random weights, packed rows of 2048 tokens, bf16.

    python benchmarks/gpu/train.py [--profile] SIZE,lora|full,recompute,ROWS[,state dtype[,gradient dtype[,lend]]] ...

SIZE is one of benchmarks/gpu/shapes.py, ROWS how many rows of 2048 tokens make a step, `lend` lends the gradients' memory to activations.
Prints a line of JSON for each case: tokens per second over sustained steps (forward, backward, clipping, AdamW), TFLOP/s that the model
needs (with attention, and without), and three measures of memory in GB: what was planned, that and the back-end's own (to be compared with
what torch says was allocated), and what the device has less. With --profile the time of each operation goes to stderr; rates are lower.
"""

from __future__ import annotations

import json
import sys
import time

from shapes import COLUMNS, SHAPES, make_batch, make_learner, make_spec, mean_seeds, needed_flops, weights_per_token

from surogate_rl import _core

WARM, TIMED = 4, 10


def run(
    size: str, mode: str, recompute: bool, rows: int, state: str = "bfloat16", gradient: str = "float32", lend: str = "", *, profile: bool
) -> None:
    if mode not in ("lora", "full") or lend not in ("", "lend"):
        raise ValueError("expected SIZE,lora|full,recompute,ROWS[,state[,gradient[,lend]]]")
    before = _core.available_memory("cuda")
    learner = make_learner(
        make_spec(size),
        rows * COLUMNS,
        lora=mode == "lora",
        recompute=recompute,
        optimizer_state_dtype=state,
        gradient_dtype=gradient,
        lend_gradients=lend == "lend",
        profile=profile,
    )
    batch = make_batch([COLUMNS] * rows, SHAPES[size]["vocab"])
    seeds = mean_seeds(batch)

    def step() -> float:
        stats = learner.forward_backward(batch, seeds)
        learner.step(1e-5, max_grad_norm=1.0)
        return float(-stats.logp[batch.mask].mean())

    for _ in range(WARM):
        loss = step()
    times = []
    for _ in range(TIMED):
        started = time.perf_counter()
        loss = step()
        times.append(time.perf_counter() - started)
    rate = rows * COLUMNS * TIMED / sum(times)
    planned = sum(size for _, size in learner.memory())
    line = {
        "model": size, "mode": mode, "recompute": recompute, "rows": rows, "state": state, "gradient": gradient, "lend": lend == "lend",
        "tok_s": round(rate), "step_ms": [round(1e3 * t, 1) for t in times],
        "tflops_needed": round(rate * needed_flops(SHAPES[size], mode == "lora") / 1e12, 1),
        "tflops_without_attention": round(rate * (4 if mode == "lora" else 6) * weights_per_token(SHAPES[size]) / 1e12, 1),
        "planned_gb": round(planned / 1e9, 2), "allocated_gb": round((planned + learner.workspace_bytes()) / 1e9, 2),
        "device_gb": round((before - _core.available_memory("cuda")) / 1e9, 2), "loss": round(loss, 3), "profiled": profile,
    }  # fmt: skip
    print(json.dumps(line), flush=True)
    learner.close()


def main() -> None:
    cases = [argument for argument in sys.argv[1:] if argument != "--profile"]
    for case in cases:
        size, mode, recompute, rows, *rest = case.split(",")
        try:
            run(size, mode, recompute == "1", int(rows), *rest, profile="--profile" in sys.argv)
        except Exception as error:  # the next case still counts
            print(case, "FAILED", type(error).__name__, str(error)[:1500], flush=True)


if __name__ == "__main__":
    main()
