"""What was sampled, as Parquet: one file per step."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pyarrow.parquet as pq

from surogate_rl.rollouts.manager import Group
from surogate_rl.rollouts.types import Episode

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

SCHEMA = pa.schema(
    [
        ("step", pa.int64()),
        ("task", pa.int64()),
        ("sample", pa.int64()),
        ("seed", pa.uint64()),
        ("prompt", pa.string()),
        ("completion", pa.string()),
        ("tokens", pa.list_(pa.int32())),
        ("token_texts", pa.list_(pa.string())),
        ("logps", pa.list_(pa.float32())),
        ("reward", pa.float64()),
        ("rewards", pa.string()),
        ("advantage", pa.float64()),
        ("finish_reason", pa.string()),
        ("error", pa.string()),
    ]
)


class RolloutLog:
    """Writes `step-00000012.parquet`: one row per completion; `tokens`, `token_texts` and `logps` are those that the policy sampled,
    `rewards` is a JSON object by function."""

    def __init__(self, directory: Path, tokenizer: PreTrainedTokenizerBase) -> None:
        self._directory = directory
        self._tokenizer = tokenizer

    def write(self, step: int, groups: Sequence[Group]) -> Path:
        self._directory.mkdir(parents=True, exist_ok=True)
        rows = [self._row(step, episode) for group in groups for episode in group.episodes]
        path = self._directory / f"step-{step:08d}.parquet"
        aside = path.with_suffix(".partial")
        pq.write_table(pa.Table.from_pylist(rows, schema=SCHEMA), aside, compression="zstd")
        aside.replace(path)
        return path

    def _row(self, step: int, episode: Episode) -> dict[str, Any]:
        sampled = [
            (token, logp)
            for segment in episode.segments
            for token, logp, mine in zip(segment.tokens, segment.logps, segment.sampled, strict=True)
            if mine
        ]
        first = episode.segments[0] if episode.segments else None
        prompt = first.tokens[: first.prompt_length] if first else []
        return {
            "step": step,
            "task": episode.task.index,
            "sample": episode.sample,
            "seed": episode.seed,
            "prompt": self._tokenizer.decode(prompt),
            "completion": episode.completion,
            "tokens": [token for token, _ in sampled],
            "token_texts": [self._tokenizer.decode([token]) for token, _ in sampled],
            "logps": [logp for _, logp in sampled],
            "reward": episode.reward,
            "rewards": json.dumps(episode.rewards),
            "advantage": episode.advantage,
            "finish_reason": episode.finish_reason,
            "error": episode.error,
        }
