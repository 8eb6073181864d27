"""The quickstart learns what it says, on every seed, and its controls do not."""

from __future__ import annotations

import importlib.util
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import surogate_rl
from surogate_rl.config import load_config

ROOT = Path(__file__).resolve().parents[2]
QUICKSTART = ROOT / "examples" / "quickstart"

pytestmark = pytest.mark.timeout(900)


def config(name: str, work: Path, *changes: str) -> Any:
    """A YAML file of the quickstart with its folders moved to `work`."""
    text = (QUICKSTART / f"{name}.yaml").read_text()
    path = work / f"{name}.yaml"
    path.write_text(text.replace("quickstart-output", str(work)).replace("examples/quickstart", str(QUICKSTART)))
    return load_config(path, name, list(changes))  # type: ignore[call-overload]


def prepare(work: Path, seed: int) -> float:
    """Data and SFT; held-out exact match after it."""
    spec = importlib.util.spec_from_file_location("make_data", QUICKSTART / "make_data.py")
    assert spec is not None
    assert spec.loader is not None
    make_data = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(make_data)
    make_data.main(work / "data", seed)
    return surogate_rl.sft(config("sft", work, f"seed={seed}")).evaluation["eval_reward"]


@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.slow) for seed in (1, 2, 3, 4))])
def test_it_imitates_and_then_learns_more(tmp_path: Path, seed: int) -> None:
    assert 0.25 < prepare(tmp_path, seed) < 0.5
    result = surogate_rl.grpo(config("grpo", tmp_path, f"seed={seed}"))
    assert result.evaluation["eval_reward"] > 0.9


@pytest.mark.slow
def test_more_imitation_does_not_get_there(tmp_path: Path) -> None:
    prepare(tmp_path, 0)
    more = config("sft", tmp_path, f"model={tmp_path / 'sft' / 'final'}", "init=pretrained", f"output_dir={tmp_path / 'more'}")
    assert surogate_rl.sft(more).evaluation["eval_reward"] < 0.6


@pytest.mark.slow
def test_shuffled_rewards_do_not_get_there(tmp_path: Path) -> None:
    prepare(tmp_path, 0)
    reward = f"{Path(__file__).parent / 'shuffled.py'}:shuffled_exact_match"
    shuffled = config("grpo", tmp_path, f"rewards=[{reward}]", "eval.rewards=[exact_match]")
    assert surogate_rl.grpo(shuffled).evaluation["eval_reward"] < 0.6


@pytest.mark.slow
def test_the_script_ends_with_table_and_plot(tmp_path: Path) -> None:
    done = subprocess.run([sys.executable, str(QUICKSTART / "run.py"), "--output", str(tmp_path / "out")], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert re.search(r"GRPO, \d+ steps\s+│\s+0\.9\d|GRPO, \d+ steps\s+│\s+1\.00", done.stdout)
    assert (tmp_path / "out" / "reward.svg").is_file()
