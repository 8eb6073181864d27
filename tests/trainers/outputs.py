"""What runs leave in their folders, as tests read it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
from safetensors.numpy import load_file

import surogate_rl

RUN = {"sft": surogate_rl.sft, "dpo": surogate_rl.dpo, "grpo": surogate_rl.grpo}


def weights(directory: Path) -> dict[str, np.ndarray]:
    """Of a final model or adapter."""
    (path,) = directory.glob("*.safetensors")
    return load_file(path)


def same(a: dict[str, np.ndarray], b: dict[str, np.ndarray]) -> bool:
    """Bit for bit, under the same names."""
    return a.keys() == b.keys() and all(np.array_equal(a[name], b[name]) for name in a)


def lines(directory: Path) -> list[dict[str, Any]]:
    """Of metrics.jsonl."""
    return [json.loads(line) for line in (directory / "metrics.jsonl").read_text().splitlines()]


def rows_by_step(directory: Path) -> list[list[dict[str, Any]]]:
    """Completions of every step."""
    return [pq.read_table(path).to_pylist() for path in sorted((directory / "rollouts").glob("step-*.parquet"))]
