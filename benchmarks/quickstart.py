"""The quickstart's figures: held-out exact match on five seeds, and of two controls that must not get there. About ten minutes.

python benchmarks/quickstart.py [--seeds 0-4] [--control-seeds 0-0]
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
from collections.abc import Iterator
from datetime import date
from pathlib import Path
from typing import Any

from protocol import RESULTS, machine, record

import surogate_rl
from surogate_rl.config import load_config

ROOT = RESULTS.parent.parent
HERE = ROOT / "examples" / "quickstart"
SHUFFLED = ROOT / "tests" / "quickstart" / "shuffled.py"
sys.path.insert(0, str(HERE))

import make_data  # noqa: E402


class Quickstart:
    """One seed's data and imitation in a folder of its own, and what may follow."""

    def __init__(self, work: Path, seed: int) -> None:
        self._work, self._seed = work, seed
        make_data.main(work / "data", seed)
        self._start = self._run("sft", "sft", "demonstrations")
        self.imitated = self._start.evaluation["eval_reward"]

    def _run(self, command: str, name: str, data: str, *changes: str) -> Any:
        places = [f"output_dir={self._work / name}", f"datasets.0.path={self._work / 'data' / data}.jsonl"]
        places += [f"seed={self._seed}", f"eval.datasets.0.path={self._work / 'data' / 'heldout.jsonl'}"]
        config = load_config(HERE / f"{command}.yaml", command, [*places, *changes])  # type: ignore[call-overload]
        return getattr(surogate_rl, command)(config)

    def _after(self, command: str, name: str, data: str, *changes: str) -> float:
        return float(self._run(command, name, data, f"model={self._start.final_model}", *changes).evaluation["eval_reward"])

    def learned(self) -> float:
        return self._after("grpo", "grpo", "train")

    def imitated_longer(self) -> float:
        """As many steps of imitation again."""
        return self._after("sft", "more", "demonstrations", "init=pretrained")

    def learned_from_shuffled_rewards(self) -> float:
        changes = (f"rewards=[{SHUFFLED}:shuffled_exact_match]", "eval.rewards=[exact_match]")
        return self._after("grpo", "shuffled", "train", *changes)


def lines(seeds: range, controls: range) -> Iterator[dict[str, Any]]:
    unit = "held-out exact match, 1 sample per prompt at temperature 1"
    for seed in seeds:
        with tempfile.TemporaryDirectory() as work:
            started = time.perf_counter()
            run = Quickstart(Path(work), seed)
            ours = run.learned()
            seconds = round(time.perf_counter() - started)
            peers = {"SFT, before GRPO": run.imitated}
            if seed in controls:
                peers |= {"as much SFT again": run.imitated_longer(), "GRPO on shuffled rewards": run.learned_from_shuffled_rewards()}
        for name, peer in peers.items():
            line = {"bench": "quickstart", "seed": seed, "ours": ours, "peer": peer, "ratio": round(ours / peer, 3) if peer else None}
            yield line | {"unit": unit, "peer_name": name, "seconds": seconds}


def number_range(text: str) -> range:
    first, _, last = text.partition("-")
    return range(int(first), int(last or first) + 1)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=number_range, default=range(5))
    parser.add_argument("--control-seeds", type=number_range, default=range(1))
    arguments = parser.parse_args()
    os.chdir(ROOT)  # the YAML files name the tiny model from here
    today = date.today().isoformat()
    for line in lines(arguments.seeds, arguments.control_seeds):
        whole = line | {"machine": machine(), "date": today, "command": "python benchmarks/quickstart.py"}
        record(whole, "quickstart")
        print(json.dumps(line), flush=True)


if __name__ == "__main__":
    main()
