"""A tiny model and its data, from the quickstart: everything runs in seconds and needs no network."""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
TINY = ROOT / "examples" / "quickstart" / "tiny"


@pytest.fixture(scope="session")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    spec = importlib.util.spec_from_file_location("make_data", ROOT / "examples" / "quickstart" / "make_data.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    directory = tmp_path_factory.mktemp("data")
    module.main(directory, seed=1)
    for name, rows in (("demonstrations", 400), ("train", 64), ("heldout", 16)):
        path = directory / f"{name}.jsonl"
        path.write_text("".join(path.read_text().splitlines(keepends=True)[:rows]))
    pairs = [json.loads(line) for line in (directory / "train.jsonl").read_text().splitlines()]
    (directory / "pairs.jsonl").write_text(
        "".join(json.dumps({"prompt": row["prompt"], "chosen": row["answer"], "rejected": row["answer"][::-1]}) + "\n" for row in pairs)
    )
    return directory


@pytest.fixture
def base(data: Path, tmp_path: Path) -> Callable[..., dict[str, Any]]:
    """Makes a config as a dict; keyword arguments replace or add keys."""

    def make(command: str, **changes: Any) -> dict[str, Any]:
        config: dict[str, Any] = {
            "model": str(TINY),
            "init": "random",
            "output_dir": str(tmp_path / "run"),
            "sequence_len": 32,
            "per_device_train_batch_size": 8,
            "learning_rate": 1e-3,
            "max_steps": 4,
            "save_steps": 0,
            "seed": 3,
            "threads": 1,
        }
        if command == "sft":
            config |= {"datasets": [{"path": str(data / "demonstrations.jsonl")}]}
        elif command == "dpo":
            config |= {"datasets": [{"path": str(data / "pairs.jsonl")}]}
        else:
            config |= {
                "datasets": [{"path": str(data / "train.jsonl"), "type": "prompt"}],
                "rollouts": {"prompts_per_step": 4, "num_generations": 4, "max_completion_length": 8, "max_sequences": 16},
                "rewards": [f"{Path(__file__).parent / 'digits.py'}:digits_in_order"],
            }
        return config | changes

    return make
