"""Rollout budgets on three small tasks: what it costs to reach a held-out reward, and where runs end.

    python benchmarks/budget.py all --work DIR [--seeds 0-9] [--processes 2]     every run that is not in DIR/runs.jsonl yet
    python benchmarks/budget.py run --work DIR --task keypad --arm both --seed 3  one of them
    python benchmarks/budget.py calibrate --work DIR                             what a token costs, on a quiet machine
    python benchmarks/budget.py report --work DIR                                summary lines of JSON

Arms: off (no budget), depth, width, both, known (the known coverage rule, see `budget_known_rule.py`) and known_longer (the same with more
steps, since its steps are cheaper). Tasks, targets and how costs are
counted are described in docs/budget.md.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
sys.path.insert(0, str(Path(__file__).resolve().parent))

ARMS = ("off", "depth", "width", "both", "known", "known_longer")
TASK_NAMES = ("keypad", "letters", "sorting")
STEPS, LONGER, EVERY = 48, 84, 6
CALIBRATION_SEED = 1000


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("verb", choices=("all", "run", "calibrate", "report"))
    parser.add_argument("--work", type=Path, required=True, help="folder of models, data and runs.jsonl")
    parser.add_argument("--task", choices=TASK_NAMES)
    parser.add_argument("--arm", help="one or several with commas")
    parser.add_argument("--seed", type=int)
    parser.add_argument("--seeds", default="0-9")
    parser.add_argument("--tasks", default=",".join(TASK_NAMES))
    parser.add_argument("--arms", default=",".join(ARMS))
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--set", action="append", default=[], help="overrides of the RL configuration, to try things")
    arguments = parser.parse_args()
    work: Path = arguments.work.resolve()
    if arguments.verb == "run":
        for arm in arguments.arm.split(","):
            run(work, arguments.task, arm, arguments.seed, arguments.set)
    elif arguments.verb == "all":
        first, _, last = arguments.seeds.partition("-")
        run_all(work, range(int(first), int(last or first) + 1), arguments.tasks.split(","), arguments.arms.split(","), arguments.processes)
    elif arguments.verb == "calibrate":
        for task in arguments.tasks.split(","):
            for arm in ("off", "known"):  # steps of many sizes
                run(work, task, arm, CALIBRATION_SEED, arguments.set, into="calibration.jsonl")
    else:
        from budget_report import report

        for line in report(work):
            print(json.dumps(line))


def run_all(work: Path, seeds: range, tasks: list[str], arms: list[str], processes: int) -> None:
    """A process for the arms of one task and seed; seeds in the outer loop, so that what there is stays paired."""
    work.mkdir(parents=True, exist_ok=True)

    def work_off(job: tuple[int, str]) -> None:
        seed, task = job
        missing = [arm for arm in arms if (task, arm, seed) not in set(done(work))]
        if missing:
            command = [sys.executable, __file__, "run", "--work", str(work), "--task", task, "--arm", ",".join(missing)]
            subprocess.run([*command, "--seed", str(seed)], check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)

    with ThreadPoolExecutor(processes) as pool:
        list(pool.map(work_off, [(seed, task) for seed in seeds for task in tasks]))


def done(work: Path) -> Iterator[tuple[str, str, int]]:
    path = work / "runs.jsonl"
    for line in path.read_text(encoding="utf-8").splitlines() if path.exists() else []:
        entry = json.loads(line)
        yield entry["task"], entry["arm"], entry["seed"]


def run(work: Path, name: str, arm: str, seed: int, overrides: list[str], into: str = "runs.jsonl") -> None:
    """Trains one arm and appends a line to a file of runs: by step what was sampled and trained, and each evaluation."""
    import shutil

    from budget_tasks.tasks import TASKS

    import surogate_rl
    from surogate_rl.config import load_config
    from surogate_rl.trainers import grpo

    task = TASKS[name]
    start = imitated(work, name, seed)
    output = work / "rl" / f"{name}-{arm}-{seed}"
    shutil.rmtree(output, ignore_errors=True)
    file = work / "configs" / f"{name}-{arm}-{seed}.yaml"
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(json.dumps(rl_config(task, start, work, arm, seed, output), indent=1), encoding="utf-8")  # which is YAML too
    config = load_config(file, "grpo", overrides)
    unit = "tokens" if task.environment is None else "turns"
    with StepClock(grpo, known_rule=unit if arm.startswith("known") else None) as clock:
        result = surogate_rl.grpo(config)
    steps = [line for line in result.history if "reward" in line]
    evaluations = [(int(line["step"]), line["eval_reward"]) for line in result.history if "eval_reward" in line]
    entry = {
        "task": name,
        "arm": arm,
        "seed": seed,
        "evaluations": evaluations,
        "sampled_tokens": [line["sampled_tokens"] for line in clock.steps],
        "trained_tokens": [line["trained_tokens"] for line in clock.steps],
        "seconds": [round(line["seconds"], 4) for line in clock.steps],
        "cpu_seconds": [round(line["cpu_seconds"], 4) for line in clock.steps],
        "generate_seconds": [round(line["time/generate"], 4) for line in steps],
        "learn_seconds": [round(line["time/learn"], 4) for line in steps],
        "reward": [round(line["reward"], 4) for line in steps],
        "budget": [
            {key: round(v, 4) for key, v in line.items() if key.startswith(("budget/", "known_rule/")) and "/bucket" not in key}
            for line in steps
        ],
    }
    with (work / into).open("a", encoding="utf-8") as file:
        file.write(json.dumps(entry) + "\n")
    shutil.rmtree(output, ignore_errors=True)
    best = max(value for _, value in evaluations)
    print(
        f"{name} {arm} {seed}: {evaluations[0][1]:.3f} -> {evaluations[-1][1]:.3f} (best {best:.3f}), {sum(entry['cpu_seconds']):.1f} s CPU"
    )


class StepClock:
    """Measures every training step from outside: tokens, wall clock and CPU time of this process, evaluations left out. The table of
    rollouts is not written, which would cost all arms the same.

    Args:
        known_rule: put the known rule over this unit in the place of the budget.
    """

    def __init__(self, trainer: Any, known_rule: str | None) -> None:
        self.steps: list[dict[str, float]] = []
        self._trainer, self._unit = trainer, known_rule
        self._before = (trainer.Grpo.__init__, trainer.Grpo.step, trainer.make_budget)

    def __enter__(self) -> StepClock:
        from budget_known_rule import KnownRule

        make, inner, _ = self._before
        log, unit = self.steps, self._unit

        def step(this: Any, number: int) -> Any:
            wall, cpu = time.perf_counter(), time.process_time()
            values = inner(this, number)
            sampled, trained = this.last_tokens
            spent = {"seconds": time.perf_counter() - wall, "cpu_seconds": time.process_time() - cpu}
            log.append(spent | {"sampled_tokens": sampled, "trained_tokens": trained})
            return values

        def init(this: Any, *arguments: Any, **keywords: Any) -> None:
            make(this, *arguments, **keywords)

            def count(number: int, groups: Any) -> None:
                segments = [segment for group in groups for episode in group.episodes for segment in episode.segments]
                this.last_tokens = (sum(s.sampled.count(True) for s in segments), sum(len(s.tokens) for s in segments))

            this._log.write = count

        self._trainer.Grpo.__init__, self._trainer.Grpo.step = init, step
        if unit is not None:
            self._trainer.make_budget = lambda config, limits: KnownRule(
                limits, unit, config.rollouts.num_generations, config.loss.loss_type, config.loss.scale_rewards
            )
        return self

    def __exit__(self, *error: object) -> None:
        self._trainer.Grpo.__init__, self._trainer.Grpo.step, self._trainer.make_budget = self._before


def imitated(work: Path, name: str, seed: int) -> Path:
    """The model that all arms of a seed start from: it has imitated the sloppy teacher."""
    from budget_tasks.tasks import TASKS, write_data, write_model

    import surogate_rl

    task = TASKS[name]
    data, start = work / "data" / f"{name}-{seed}", work / "sft" / f"{name}-{seed}"
    if (start / "final" / "model.safetensors").exists():
        return start / "final"
    write_model(task, work / "models" / name)
    write_data(task, data, seed)
    kind = "prompt_completion" if task.environment is None else "text"
    surogate_rl.sft(
        {
            "model": str(work / "models" / name),
            "init": "random",
            "output_dir": str(start),
            "datasets": [{"path": str(data / "demonstrations.jsonl"), "type": kind}],
            "sequence_len": task.context,
            "per_device_train_batch_size": 32,
            "packing": False,
            "max_steps": SFT_STEPS,
            "learning_rate": 5e-3,
            "warmup_steps": 20,
            "logging_steps": 50,
            "save_steps": 0,
            "seed": seed,
            "threads": 1,
        }
    )
    return start / "final"


SFT_STEPS = 400


def rl_config(task: Any, start: Path, work: Path, arm: str, seed: int, output: Path) -> dict[str, Any]:
    data = work / "data" / f"{task.name}-{seed}"
    budget: dict[str, Any] = {}
    if arm in ("depth", "both"):
        budget["depth"] = {}
    if arm in ("width", "both"):
        budget["width"] = {}
    config: dict[str, Any] = {
        "model": str(start),
        "output_dir": str(output),
        "datasets": [{"path": str(data / "train.jsonl"), "type": "prompt"}],
        "sequence_len": task.context,
        "per_device_train_batch_size": 32,
        "learning_rate": 8e-4 if task.name == "letters" else 4e-4,
        "lr_scheduler_type": "constant",
        "max_steps": LONGER if arm == "known_longer" else STEPS,
        "save_steps": 0,
        "seed": seed,
        "threads": 1,
        "rollouts": {
            "prompts_per_step": 16,
            "num_generations": 8,
            "max_completion_length": 1 if task.environment is not None else task.horizon,
            "max_sequences": 128,
            "budget": budget,
        },
        "loss": {"loss_type": "dr_grpo", "scale_rewards": "none"},
        "eval": {"datasets": [{"path": str(data / "heldout.jsonl"), "type": "prompt"}], "temperature": 1.0, "steps": EVERY},
    }
    if task.environment is not None:
        config["environment"] = {"name": task.environment, "max_turns": task.horizon}
    else:
        config["rewards"] = ["exact_match"]
        config["rollouts"]["reward_workers"] = 1
    return config


if __name__ == "__main__":
    main()
