"""Everything in a few minutes on a laptop's CPU, nothing downloaded: imitate a sloppy teacher's use of tools (SFT), then use them for real
and learn from the result (GRPO)."""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
from rich.console import Console
from rich.table import Table

import surogate_rl
from surogate_rl.config import load_config

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE))

import make_data  # noqa: E402
import make_model  # noqa: E402


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seed", type=int, default=0, help="of data, weights and samples")
    parser.add_argument("--output", type=Path, default=Path("tool-use-output"), help="folder for everything that is written")
    parser.add_argument("--sft-steps", type=int, help="default: as sft.yaml says")
    parser.add_argument("--grpo-steps", type=int, help="default: as grpo.yaml says")
    arguments = parser.parse_args()
    output: Path = arguments.output.resolve()
    console = Console()
    started = time.perf_counter()
    make_data.main(output / "data", arguments.seed)
    make_model.main(output / "tiny", output / "data" / "demonstrations.jsonl")

    data = output / "data"
    console.rule("SFT: imitate the teacher")
    changes = [f"model={output}/tiny", f"datasets.0.path={data}/demonstrations.jsonl"]
    changes += common(output / "sft", arguments.seed, arguments.sft_steps)
    sft = surogate_rl.sft(load_config(HERE / "sft.yaml", "sft", changes))
    console.rule("GRPO: use the tools")
    changes = [f"model={sft.final_model}", f"datasets.0.path={data}/train.jsonl", f"eval.datasets.0.path={data}/heldout.jsonl"]
    changes += common(output / "grpo", arguments.seed, arguments.grpo_steps)
    grpo = surogate_rl.grpo(load_config(HERE / "grpo.yaml", "grpo", changes))

    console.rule("Result")
    before, after = (rollouts(grpo.output_dir, step) for step in (1, grpo.steps))
    console.print(episode(before, wanted=lambda row: row["turns"] == 2 and row["reward"] == 0.0), highlight=False)
    console.print(episode(after, wanted=lambda row: row["turns"] == 2 and row["reward"] == 1.0), highlight=False)
    evaluations = [line for line in grpo.history if "eval_reward" in line]
    table = Table(title=f"{int(grpo.evaluation['eval_num_prompts'])} held-out questions, sampled at temperature 1")
    for title in ("after", "right", "calls per question", "calls that failed"):
        table.add_column(title, justify="left" if title == "after" else "right")
    for label, line in ((f"SFT, {sft.steps} steps", evaluations[0]), (f"GRPO, {grpo.steps} steps", grpo.evaluation)):
        calls, failed = line["eval_tools/call_frequency"], line["eval_tools/failure_frequency"]
        table.add_row(label, f"{line['eval_reward']:.2f}", f"{calls:.2f}", f"{failed:.0%}")
    console.print(table)
    console.print(f"{time.perf_counter() - started:.0f} s in all. Every turn, call and result: {grpo.output_dir}/rollouts and report.html")


def common(directory: Path, seed: int, steps: int | None) -> list[str]:
    if directory.exists():
        directory.rename(directory.with_name(f"{directory.name}-{time.strftime('%Y%m%d-%H%M%S')}"))
    return [f"output_dir={directory}", f"seed={seed}", *([f"max_steps={steps}", "warmup_steps=0"] if steps else [])]


def rollouts(directory: Path, step: int) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = pq.read_table(directory / "rollouts" / f"step-{step:08d}.parquet").to_pylist()
    return rows


def episode(rows: list[dict[str, Any]], wanted: Any) -> str:
    """One episode as text: the first that is wanted, else the first."""
    row = next(filter(wanted, rows), rows[0])
    lines = [f"step {row['step']}, reward {row['reward']:g}"]
    for message in json.loads(row["messages"]):
        calls = "".join(f" {c['function']['name']}({json.dumps(c['function']['arguments'])})" for c in message.get("tool_calls", []))
        lines.append(f"  {message['role']:>9}  {message['content']}{calls}")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
