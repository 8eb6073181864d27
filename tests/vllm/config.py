"""The configuration of whole runs with vLLM on the tiny model."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

TINY = Path(__file__).resolve().parents[2] / "examples" / "quickstart" / "tiny"


def grpo_config(folder: Path, reward: str, rollouts: dict[str, Any]) -> dict[str, Any]:
    """Four steps over prompts that are written to `folder`.

    Args:
        reward: source of a file with the function ``score``.
        rollouts: beside the sizes of a step.
    """
    rows = [{"prompt": f"{a}{b}{c}=", "answer": "".join(sorted(f"{a}{b}{c}"))} for a in range(8) for b in range(4) for c in range(2)]
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "reward.py").write_text(reward)
    return {
        "model": str(TINY),
        "init": "random",
        "device": "cpu",
        "threads": 1,
        "sequence_len": 32,
        "learning_rate": 0.01,
        "max_steps": 4,
        "save_steps": 0,
        "seed": 3,
        "datasets": [{"path": str(folder / "rows.jsonl"), "type": "prompt"}],
        "rewards": [f"{folder / 'reward.py'}:score"],
        "rollouts": {"prompts_per_step": 4, "num_generations": 4, "max_completion_length": 12} | rollouts,
    }
