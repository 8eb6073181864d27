"""What the report shows, read from a run's folder."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from surogate_rl.tracking.metrics import read_metrics

MAX_STEPS = 8
MAX_COMPLETIONS = 8


@dataclass(frozen=True)
class Series:
    """One metric: ``points`` are (step, value) in the order of the file; value None where it was not finite."""

    name: str
    points: list[tuple[int, float | None]]

    @property
    def last(self) -> float | None:
        return next((value for _, value in reversed(self.points) if value is not None), None)

    @property
    def constant(self) -> bool:
        """Whether it never changed, over two points or more."""
        return len(self.points) > 1 and len({value for _, value in self.points}) == 1


@dataclass(frozen=True)
class Rollout:
    """One completion. ``tokens`` are (id, text, logp) of what the policy sampled, ``token_turns`` the turn of each, ``messages`` the whole
    conversation; both are empty in files that lack them."""

    task: int
    sample: int
    prompt: str
    completion: str
    tokens: list[tuple[int, str, float]]
    reward: float | None
    rewards: dict[str, float | None]
    advantage: float | None
    finish_reason: str
    error: str | None
    token_turns: list[int] = field(default_factory=list)
    messages: list[dict[str, Any]] = field(default_factory=list)
    turns: int = 1
    cut: str | None = None


@dataclass(frozen=True)
class RolloutStep:
    """The rollouts of one step: ``total`` of them, of which some are shown."""

    step: int
    total: int
    shown: list[Rollout]


@dataclass(frozen=True)
class Run:
    """Attributes:
    config: the text of config.yaml, or None.
    steps_with_rollouts: how many steps left rollouts, of which `rollouts` are some.
    notes: what could not be read.
    """

    name: str
    config: str | None
    series: list[Series]
    first_time: str | None
    last_time: str | None
    last_step: int
    rollouts: list[RolloutStep] = field(default_factory=list)
    steps_with_rollouts: int = 0
    notes: list[str] = field(default_factory=list)


def read_run(folder: Path) -> Run:
    rows = read_metrics(folder / "metrics.jsonl")
    config = folder / "config.yaml"
    notes: list[str] = []
    files = sorted((folder / "rollouts").glob("step-*.parquet"), key=lambda path: (len(path.name), path.name))
    rollouts = [step for path in spread(files, MAX_STEPS) if (step := _read_rollouts(path, notes)) is not None]
    return Run(
        name=folder.resolve().name,
        config=config.read_text(encoding="utf-8") if config.exists() else None,
        series=_series(rows),
        first_time=rows[0].get("time") if rows else None,
        last_time=rows[-1].get("time") if rows else None,
        last_step=max((row["step"] for row in rows), default=0),
        rollouts=rollouts,
        steps_with_rollouts=len(files),
        notes=notes,
    )


def spread(items: list[Path], count: int) -> list[Path]:
    """``count`` of the items, evenly spaced, the first and the last among them."""
    if len(items) <= count:
        return items
    return [items[round(index * (len(items) - 1) / (count - 1))] for index in range(count)]


def _series(rows: list[dict[str, Any]]) -> list[Series]:
    points: dict[str, list[tuple[int, float | None]]] = {}
    for row in rows:
        for name, value in row.items():
            if name not in ("step", "time") and (value is None or isinstance(value, int | float)):
                points.setdefault(name, []).append((row["step"], value))
    return [Series(name, values) for name, values in points.items()]


def _read_rollouts(path: Path, notes: list[str]) -> RolloutStep | None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        table = pq.read_table(path)
        missing = {"step", "completion", "tokens", "token_texts", "logps"} - set(table.column_names)
        if missing:
            notes.append(f"{path.name}: lacks the columns {', '.join(sorted(missing))}")
            return None
        rows = table.slice(0, MAX_COMPLETIONS).to_pylist()
    except (OSError, pa.ArrowException) as error:
        notes.append(f"{path.name}: cannot be read: {error}")
        return None
    if not rows:
        return None
    return RolloutStep(rows[0]["step"], table.num_rows, [_rollout(row) for row in rows])


def _rollout(row: Mapping[str, Any]) -> Rollout:
    return Rollout(
        task=row.get("task") or 0,
        sample=row.get("sample") or 0,
        prompt=row.get("prompt") or "",
        completion=row["completion"] or "",
        tokens=list(zip(row["tokens"] or [], row["token_texts"] or [], row["logps"] or [], strict=False)),
        reward=row.get("reward"),
        rewards=_rewards(row.get("rewards")),
        advantage=row.get("advantage"),
        finish_reason=row.get("finish_reason") or "",
        error=row.get("error"),
        token_turns=list(row.get("token_turns") or []),
        messages=_messages(row.get("messages")),
        turns=row.get("turns") or 1,
        cut=row.get("cut"),
    )


def _messages(value: Any) -> list[dict[str, Any]]:
    try:
        messages = json.loads(value) if isinstance(value, str) else value
    except json.JSONDecodeError:
        return []
    return [message for message in messages if isinstance(message, dict)] if isinstance(messages, list) else []


def _rewards(value: Any) -> dict[str, float | None]:
    """By function: a JSON object, a struct, or a list of pairs (Parquet's map)."""
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except json.JSONDecodeError:
            return {}
    if isinstance(value, list):
        value = dict(value)
    return dict(value) if isinstance(value, Mapping) else {}
