"""Everything in a few minutes on a laptop's CPU, nothing downloaded: imitate a sloppy teacher (SFT), then learn from rewards (GRPO)."""

from __future__ import annotations

import argparse
import os
import time
from pathlib import Path

import make_data
from plot import terminal_plot, write_svg
from rich.console import Console
from rich.table import Table

import surogate_rl
from surogate_rl.config import load_config

HERE = Path(__file__).resolve().parent


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seed", type=int, default=0, help="of data, weights and samples")
    parser.add_argument("--output", type=Path, default=Path("quickstart-output"), help="folder for everything that is written")
    arguments = parser.parse_args()
    output: Path = arguments.output.resolve()
    os.chdir(HERE.parent.parent)  # the YAML files name the tiny model from the root of the project
    console = Console()
    started = time.perf_counter()
    make_data.main(output / "data", arguments.seed)

    common = [f"seed={arguments.seed}", f"eval.datasets.0.path={output}/data/heldout.jsonl"]
    console.rule("SFT: imitate the teacher")
    set_aside(output / "sft")
    changes = [*common, f"output_dir={output}/sft", f"datasets.0.path={output}/data/demonstrations.jsonl"]
    sft = surogate_rl.sft(load_config(HERE / "sft.yaml", "sft", changes))
    console.rule("GRPO: learn from rewards")
    set_aside(output / "grpo")
    changes = [*common, f"output_dir={output}/grpo", f"datasets.0.path={output}/data/train.jsonl", f"model={sft.final_model}"]
    grpo = surogate_rl.grpo(load_config(HERE / "grpo.yaml", "grpo", changes))

    rewards = [(int(line["step"]), line["reward"]) for line in grpo.history if "reward" in line]
    held_out = [(int(line["step"]), line["eval_reward"]) for line in grpo.history if "eval_reward" in line]
    console.rule("Result")
    console.print(terminal_plot(rewards, title="exact match of the sampled completions, by GRPO step"), highlight=False)
    picture = write_svg(output / "reward.svg", {"training samples": rewards, "held out": held_out})
    table = Table(title=f"Held-out exact match, {int(grpo.evaluation['eval_num_prompts'])} prompts, sampled at temperature 1")
    table.add_column("after")
    table.add_column("exact match", justify="right")
    table.add_row("teacher (by construction)", f"{make_data.TEACHER_RIGHT:.2f}")
    table.add_row(f"SFT, {sft.steps} steps", f"{sft.evaluation['eval_reward']:.2f}")
    table.add_row(f"GRPO, {grpo.steps} steps", f"{grpo.evaluation['eval_reward']:.2f}")
    console.print(table)
    console.print(f"{time.perf_counter() - started:.0f} s in all. Model: {grpo.final_model}; plot: {picture}")
    console.print(f"Every completion, token by token: {grpo.output_dir}/report.html")


def set_aside(directory: Path) -> None:
    """Moves what an earlier run left out of the way, so that the quickstart can be run again."""
    if directory.exists():
        directory.rename(directory.with_name(f"{directory.name}-{time.strftime('%Y%m%d-%H%M%S')}"))


if __name__ == "__main__":
    main()
