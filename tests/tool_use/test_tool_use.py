"""The example of tool use runs, and learns what it says."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pyarrow.parquet as pq
import pytest

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "tool_use"

pytestmark = pytest.mark.timeout(900)


def run(output: Path, *arguments: str) -> str:
    command = [sys.executable, str(EXAMPLE / "run.py"), "--output", str(output), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, cwd=output.parent, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_it_runs_from_anywhere_and_its_files_hold_conversations(tmp_path: Path) -> None:
    run(tmp_path / "out", "--sft-steps", "2", "--grpo-steps", "1")
    rows = pq.read_table(tmp_path / "out" / "grpo" / "rollouts" / "step-00000001.parquet").to_pylist()
    assert len(rows) == 128
    assert all(json.loads(row["messages"])[0]["role"] == "user" for row in rows)
    assert all(row["prompt"].startswith("<|tools|>add(a, b) multiply(a, b)<|end|><|user|>What is ") for row in rows)
    metrics = json.loads((tmp_path / "out" / "grpo" / "metrics.jsonl").read_text().splitlines()[-1])
    assert "tools/call_frequency" in metrics or "eval_tools/call_frequency" in metrics


@pytest.mark.slow
def test_it_learns_to_call_the_right_tool(tmp_path: Path) -> None:
    printed = run(tmp_path / "out")
    before = re.search(r"SFT, \d+ steps\s+│\s+(0\.\d\d)", printed)
    after = re.search(r"GRPO, \d+ steps\s+│\s+(\d\.\d\d)", printed)
    assert before is not None
    assert after is not None
    assert 0.25 < float(before[1]) < 0.5
    assert float(after[1]) > 0.9
    rows = pq.read_table(tmp_path / "out" / "grpo" / "rollouts" / "step-00000040.parquet").to_pylist()
    good = [json.loads(row["messages"]) for row in rows if row["reward"] == 1.0 and row["turns"] == 2]
    assert len(good) > 100
    for user, call, result, answer in good:
        a, word, b = re.fullmatch(r"What is (\d+) (plus|times) (\d+)\?", user["content"]).groups()  # type: ignore[union-attr]
        function = call["tool_calls"][0]["function"]
        assert function["arguments"] == {"a": int(a), "b": int(b)}
        assert result["role"] == "tool"
        assert result["content"] == answer["content"] == str(int(a) + int(b) if word == "plus" else int(a) * int(b))
