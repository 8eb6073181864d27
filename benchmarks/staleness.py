"""What sampling ahead of the learner (rollouts.max_staleness: 1) does to the quickstart task: final held-out reward and wall clock.

    python benchmarks/staleness.py --work DIR [--seeds 10] [--processes 2]

Both arms of a seed start from the same SFT model and see the same prompts in the same order; everything else is
examples/quickstart/grpo.yaml. The reward is the mean exact match over the 500 held-out prompts, 8 samples each at temperature 1. The arms
of a seed run side by side, one CPU thread each, so that whatever else the machine does slows both; the wall clock is that of their steps.
Runs that are in DIR already are not run again.
"""

from __future__ import annotations

import argparse
import json
import os
import runpy
import statistics
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from datetime import date
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

ROOT = Path(__file__).resolve().parent.parent
QUICKSTART = ROOT / "examples" / "quickstart"
ARMS = (0, 1)
SAMPLES = 8
KEPT = ("rollouts/staleness_mean", "sampling/sampling_logp_difference/mean", "time/wait", "time/learn", "time/engine_idle", "step_time")
T_975 = {4: 2.776, 6: 2.447, 9: 2.262, 14: 2.145, 19: 2.093}
"""97.5% points of Student's t."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", type=Path, required=True, help="folder of data, models and results")
    parser.add_argument("--seeds", type=int, default=10, help="seeds 0 to SEEDS - 1")
    parser.add_argument("--processes", type=int, default=2, help="runs side by side; an even number keeps the arms of a seed together")
    parser.add_argument("--run", nargs=3, metavar=("KIND", "SEED", "STALENESS"), help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    work: Path = arguments.work.resolve()
    if arguments.run is not None:
        kind, *numbers = arguments.run
        one(work, kind, *map(int, numbers))
        return
    work.mkdir(parents=True, exist_ok=True)
    with ThreadPoolExecutor(arguments.processes) as pool:
        list(pool.map(lambda seed: start(work, "sft", seed, 0), range(arguments.seeds)))
        jobs = [(seed, arm) for seed in range(arguments.seeds) for arm in ARMS]
        results = list(pool.map(lambda job: start(work, "grpo", *job), jobs))
    runs = {arm: [result for result, job in zip(results, jobs, strict=True) if job[1] == arm] for arm in ARMS}
    rewards = {arm: [run["reward"] for run in runs[arm]] for arm in ARMS}
    seconds = {arm: [round(run["seconds"], 1) for run in runs[arm]] for arm in ARMS}
    ratios = [slow / fast for slow, fast in zip(seconds[0], seconds[1], strict=True)]
    ours, peer = (statistics.mean(rewards[arm]) for arm in (1, 0))
    low, high = interval([a - b for a, b in zip(rewards[1], rewards[0], strict=True)])
    line = {
        "bench": "staleness",
        "ours": round(ours, 4),
        "peer": round(peer, 4),
        "ratio": round(ours / peer, 4),
        "difference": round(ours - peer, 4),
        "difference_95": [round(low, 4), round(high, 4)],
        "unit": f"held-out exact match after GRPO, max_staleness 1 (ours) and 0 (peer), mean of {arguments.seeds} paired seeds",
        "rewards": rewards,
        "mean_staleness": round(statistics.mean(r["rollouts/staleness_mean"] for r in runs[1]), 3),
        "mean_logp_difference": round(statistics.mean(r["sampling/sampling_logp_difference/mean"] for r in runs[1]), 4),
        "wall_clock": {
            "seconds": seconds,
            "ratio": round(statistics.median(ratios), 3),
            "ratio_range": [round(min(ratios), 3), round(max(ratios), 3)],
            "idle_share": {arm: round(statistics.mean(r["time/engine_idle"] / r["step_time"] for r in runs[arm]), 3) for arm in ARMS},
            "unit": "seconds of 60 GRPO steps, the arms side by side with one CPU thread each; ratio above 1: max_staleness 1 is faster",
        },
        "machine": machine(),
        "date": date.today().isoformat(),
        "command": f"python benchmarks/staleness.py --work DIR --seeds {arguments.seeds}",
    }
    path = ROOT / "benchmarks" / "results" / f"{date.today().isoformat()}-cpu-rollouts.jsonl"
    with path.open("a", encoding="utf-8") as file:
        file.write(json.dumps(line) + "\n")
    print(json.dumps(line, indent=1))


def machine() -> str:
    from protocol import machine as name

    return name()


def interval(differences: list[float]) -> tuple[float, float]:
    """95% confidence interval of the mean by Student's t."""
    mean, n = statistics.mean(differences), len(differences)
    if n - 1 not in T_975:
        raise SystemExit(f"--seeds {n}: no t quantile for {n - 1} degrees of freedom; choose from {[d + 1 for d in T_975]}")
    half = T_975[n - 1] * statistics.stdev(differences) / n**0.5
    return mean - half, mean + half


def start(work: Path, kind: str, seed: int, staleness: int) -> dict[str, Any]:
    """Runs `one` in a process of its own, unless its result is there."""
    name = f"{kind}-{seed}" + ("" if kind == "sft" else f"-k{staleness}")
    result = work / f"{name}.json"
    if not result.is_file():
        command = [sys.executable, __file__, "--work", str(work), "--run", kind, str(seed), str(staleness)]
        with (work / f"{name}.log").open("w") as log:
            done = subprocess.run(command, stdout=subprocess.PIPE, stderr=log, text=True, check=True)
        result.write_text(done.stdout.strip().splitlines()[-1] + "\n")
        print(name, result.read_text().strip(), file=sys.stderr, flush=True)
    return dict(json.loads(result.read_text()))


def one(work: Path, kind: str, seed: int, staleness: int) -> None:
    """Prints one line of JSON as its last."""
    import torch

    import surogate_rl
    from surogate_rl.config import load_config

    torch.set_num_threads(1)
    os.chdir(ROOT)
    data, sft = work / f"data-{seed}", work / f"sft-{seed}"
    common = [f"seed={seed}", "threads=1", f"eval.datasets.0.path={data}/heldout.jsonl"]
    if kind == "sft":
        runpy.run_path(str(QUICKSTART / "make_data.py"))["main"](data, seed)
        changes = [*common, f"output_dir={sft}", f"datasets.0.path={data}/demonstrations.jsonl", "eval=null"]
        surogate_rl.sft(load_config(QUICKSTART / "sft.yaml", "sft", changes))
        print(json.dumps({"seed": seed}))
        return
    changes = [
        *common,
        f"output_dir={work}/grpo-{seed}-k{staleness}-{os.getpid()}",
        f"datasets.0.path={data}/train.jsonl",
        f"model={sft}/final",
        f"rollouts.max_staleness={staleness}",
        "logging_steps=1",
        f"eval.samples={SAMPLES}",
        "eval.steps=0",
        "eval.at_start=false",
    ]
    result = surogate_rl.grpo(load_config(QUICKSTART / "grpo.yaml", "grpo", changes))
    steps = [line for line in result.history if "step_time" in line]
    sums = {name: sum(line[name] for line in steps) for name in KEPT}
    sums |= {name: sums[name] / len(steps) for name in KEPT[:2]}
    reward = result.evaluation[f"eval_mean@{SAMPLES}"]
    print(json.dumps({"seed": seed, "staleness": staleness, "reward": reward, "seconds": sums["step_time"], **sums}))


if __name__ == "__main__":
    main()
