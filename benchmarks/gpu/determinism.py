"""Two whole runs with the same seed are the same bits, in two processes, with `deterministic`.

    python benchmarks/gpu/determinism.py [STEPS]

Each of the four cases (full and adapter, float32 masters and stochastic rounding, kept and computed again) trains a model of Qwen3-0.6B's
shapes and four layers for STEPS steps (20) of packed segments of random lengths, with clipping and decay. A run's digest is over every loss
and norm, all weights and all of the optimiser's state. A third run with another seed must differ. Prints a line of JSON for each case; exit
status 1 if any differs.
"""

from __future__ import annotations

import hashlib
import json
import subprocess
import sys
from typing import Any

CASES: dict[str, dict[str, Any]] = {
    "full, masters": {"master_weights": True},
    "full, stochastic rounding, computed again, lent": {
        "recompute": True, "lend_gradients": True, "optimizer_state_dtype": "bfloat16", "gradient_dtype": "bfloat16",
    },
    "full, stochastic rounding": {"optimizer_state_dtype": "bfloat16"},
    "adapter": {"lora": True, "master_weights": True},
}  # fmt: skip
TOKENS = 4096


def digest(case: str, seed: int, steps: int) -> str:
    import numpy as np
    from shapes import make_batch, make_learner, make_spec, mean_seeds

    learner = make_learner(make_spec("0.6B", layers=4), TOKENS, seed=seed, deterministic=True, **CASES[case])
    draw = np.random.default_rng(seed)
    result = hashlib.sha256()
    for step in range(steps):
        lengths: list[int] = []
        while sum(lengths) < TOKENS:
            lengths.append(int(min(draw.integers(1, 900), TOKENS - sum(lengths))))
        batch = make_batch(lengths, 151936, seed=1000 * seed + step)
        stats = learner.forward_backward(batch, mean_seeds(batch))
        done = learner.step(1e-3, max_grad_norm=1.0, weight_decay=0.1)
        result.update(stats.logp.tobytes() + np.float64(done.grad_norm).tobytes())
    for name, value in learner.iterate_state():
        result.update(name.encode() + np.ascontiguousarray(value).tobytes())
    return result.hexdigest()


def main() -> None:
    if sys.argv[1:2] == ["--one"]:
        print(digest(sys.argv[2], int(sys.argv[3]), int(sys.argv[4])))
        return
    steps = int(sys.argv[1]) if len(sys.argv) > 1 else 20
    failed = False
    for case in CASES:

        def other_process(seed: int, case: str = case) -> str:
            command = [sys.executable, __file__, "--one", case, str(seed), str(steps)]
            done = subprocess.run(command, capture_output=True, text=True, check=False)
            return done.stdout.strip() or f"failed: {done.stderr.strip()[-800:]}"

        first, second, other = other_process(7), other_process(7), other_process(8)
        same = first == second and len(first) == 64
        failed |= not same or other == first or len(other) != 64
        line = {
            "bench": "determinism",
            "case": case,
            "steps": steps,
            "same_bits": same,
            "another_seed_differs": other != first,
            "digest": first,
        }
        print(json.dumps(line), flush=True)
    raise SystemExit(1 if failed else 0)


if __name__ == "__main__":
    main()
