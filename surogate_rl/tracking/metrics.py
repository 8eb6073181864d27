"""metrics.jsonl: one JSON object a line, ``{"step": 3, "time": "2026-01-01T12:00:00+00:00", "loss": 1.25}``."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, TextIO

FILE_NAME = "metrics.jsonl"
RESERVED = ("step", "time")


def read_metrics(path: str | os.PathLike[str]) -> list[dict[str, Any]]:
    """All whole lines, in order; a line cut off by a crash is left out."""
    rows = []
    for line in Path(path).read_text(encoding="utf-8").splitlines():
        row = _parse(line)
        if row is not None:
            rows.append(row)
    return rows


def _parse(line: str) -> dict[str, Any] | None:
    try:
        row = json.loads(line)
    except json.JSONDecodeError:
        return None
    return row if isinstance(row, dict) and isinstance(row.get("step"), int) else None


class MetricsFile:
    """Appends lines, each flushed, so that whoever reads along or comes after a crash finds all of them.

    Args:
        directory: where metrics.jsonl lies.
        resume_step: the step that the run goes on after; lines of later steps were lost with the weights and are cut.
            0 or None starts over: an earlier file is kept beside it as ``metrics-1.jsonl``, ``metrics-2.jsonl``...
    """

    def __init__(self, directory: Path, resume_step: int | None = None) -> None:
        directory.mkdir(parents=True, exist_ok=True)
        self.path = directory / FILE_NAME
        if self.path.exists():
            if resume_step:
                self._cut(resume_step)
            else:
                self._set_aside()
        self._file: TextIO = self.path.open("a", encoding="utf-8")

    def write(self, step: int, metrics: Mapping[str, float | None]) -> None:
        """Raises OSError, as on a full disk."""
        row: dict[str, Any] = {"step": step, "time": datetime.now(UTC).isoformat(timespec="milliseconds")}
        row.update({name: value if value is not None and math.isfinite(value) else None for name, value in metrics.items()})
        self._file.write(json.dumps(row, allow_nan=False) + "\n")
        self._file.flush()

    def close(self) -> None:
        self._file.close()

    def _cut(self, last_step: int) -> None:
        kept = [
            line
            for line in self.path.read_text(encoding="utf-8").splitlines()
            if (row := _parse(line)) is not None and row["step"] <= last_step
        ]
        aside = self.path.with_name(f".{FILE_NAME}.{os.getpid()}")
        with aside.open("w", encoding="utf-8") as file:
            file.writelines(line + "\n" for line in kept)
            file.flush()
            os.fsync(file.fileno())
        aside.replace(self.path)

    def _set_aside(self) -> None:
        if self.path.stat().st_size == 0:
            return
        number = 1
        while (kept := self.path.with_name(f"metrics-{number}.jsonl")).exists():
            number += 1
        self.path.rename(kept)
