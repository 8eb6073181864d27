"""The learner's part of a GRPO step at Qwen3-0.6B's shapes: 128 sequences of 532 tokens (20 of prompt).

    python benchmarks/gpu/grpo_step.py [full|lora ...]

Prints a line of JSON: medians over steps of the whole (forward, objective, backward, update) and its parts, and the share of what the GPU
waits for: the objective on the host, with the copies between forward and backward. Parts are timed with the device idle at their ends, so
that they add up to somewhat more than the whole, which is timed without.
"""

from __future__ import annotations

import json
import statistics
import sys
import time
from typing import Any

import numpy as np
from shapes import make_batch, make_learner, make_spec

from surogate_rl.objectives import PolicyGradient, seeds, totals_of

SEQUENCES, LENGTH, PROMPT, BATCHES = 128, 532, 20, 2
WARM, TIMED = 3, 8


def batches_of() -> list[Any]:
    draw = np.random.default_rng(3)
    count = SEQUENCES // BATCHES
    result = []
    for part in range(BATCHES):
        plain = make_batch([LENGTH] * count, 151936, seed=part)
        completion = plain.mask & (plain.positions >= PROMPT - 1)
        advantage = draw.standard_normal(count).astype(np.float32)
        fields = {"per_sequence": {"advantage": advantage}, "ids": np.arange(count, dtype=np.int64) + part * count}
        targets = np.where(completion, plain.targets, -100).astype(np.int32)
        result.append(type(plain)(plain.tokens, plain.positions, plain.cu_seqlens, targets, completion, **fields))
    return result


def run(mode: str) -> None:
    learner = make_learner(
        make_spec("0.6B"), SEQUENCES // BATCHES * LENGTH, lora=mode == "lora", optimizer_state_dtype="bfloat16", keep_logits=mode == "full"
    )
    batches = batches_of()
    objective = PolicyGradient(loss_type="grpo")
    totals = totals_of(objective, batches)
    device = learner.native  # reading a single value waits for all that was queued before

    def wait() -> None:
        device.export("norm.weight")

    def step(timed: bool) -> dict[str, float]:
        parts = {"forward": 0.0, "objective": 0.0, "backward": 0.0, "update": 0.0}
        clock = time.perf_counter()

        def lap(name: str) -> None:
            nonlocal clock
            if timed and name != "objective":
                wait()
            now = time.perf_counter()
            parts[name] += now - clock
            clock = now

        for batch in batches:
            stats = learner.forward(batch, entropy=objective.needs_entropy)
            lap("forward")
            result = seeds(objective, stats.logp, stats.entropy, batch, totals)
            lap("objective")
            learner.backward(result.dlogp, result.dentropy)
            lap("backward")
        learner.step(1e-6, max_grad_norm=1.0)
        lap("update")
        return parts

    for _ in range(WARM):
        step(True)
    parts = [step(True) for _ in range(TIMED)]
    whole = []
    for _ in range(TIMED):
        wait()
        started = time.perf_counter()
        step(False)
        wait()
        whole.append(time.perf_counter() - started)
    total = statistics.median(whole)
    medians = {name: statistics.median(part[name] for part in parts) for name in parts[0]}
    tokens = SEQUENCES * LENGTH
    line = {
        "bench": "grpo_learner_step", "mode": mode, "sequences": SEQUENCES, "tokens_each": LENGTH, "ms": round(1e3 * total, 1),
        "tok_s": round(tokens / total), **{f"{name}_ms": round(1e3 * value, 2) for name, value in medians.items()},
        "objective_share": round(medians["objective"] / total, 4),
    }  # fmt: skip
    print(json.dumps(line), flush=True)
    learner.close()


if __name__ == "__main__":
    for chosen in sys.argv[1:] or ["full", "lora"]:
        run(chosen)
