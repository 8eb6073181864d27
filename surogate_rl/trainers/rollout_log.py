"""What was sampled, as Parquet: one file per step."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pyarrow.parquet as pq

from surogate_rl.plain import plain_text
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
        ("advantage_after_cap", pa.float64()),
        ("weight", pa.float64()),
        ("finish_reason", pa.string()),
        ("turns", pa.int64()),
        ("token_turns", pa.list_(pa.int32())),
        ("segments", pa.int64()),
        ("turn_rewards", pa.list_(pa.float64())),
        ("environment_reward", pa.float64()),
        ("cut", pa.string()),
        ("depth_cap", pa.int64()),
        ("reached_cap", pa.bool_()),
        ("went_on", pa.bool_()),
        ("explore", pa.float64()),
        ("value", pa.float64()),
        ("messages", pa.string()),
        ("info", pa.string()),
        ("error", pa.string()),
    ]
)


class RolloutLog:
    """Writes `step-00000012.parquet`: one row per completion.

    `tokens`, `token_texts`, `logps` and `token_turns` (the turn that each belongs to) are those that the policy sampled, over all turns;
    `completion` is the text of the last turn. `rewards` is a JSON object by function, `messages` the whole conversation as JSON, calls of
    tools and their results included, `info` a JSON object of what the environment counted. Of a budget: `depth_cap`, whether the episode
    came to it (`reached_cap`) and was drawn to go on (`went_on`, with probability `explore`), the `value` that going on was held to have,
    the advantages of tokens up to and after the cap, and the `weight` that makes up for the number of the prompt's completions.
    """

    def __init__(self, directory: Path, tokenizer: PreTrainedTokenizerBase) -> None:
        self._directory = directory
        self._tokenizer = tokenizer
        self._texts: dict[int, str] = {}  # of single tokens, as far as they have come up

    def write(self, step: int, groups: Sequence[Group]) -> Path:
        self._directory.mkdir(parents=True, exist_ok=True)
        episodes = [episode for group in groups for episode in group.episodes]
        segments = [segment for episode in episodes for segment in episode.segments]
        self._decode({token for each in segments for token, mine in zip(each.tokens, each.sampled, strict=True) if mine})
        rows = [self._row(step, episode) for episode in episodes]
        path = self._directory / f"step-{step:08d}.parquet"
        aside = path.with_suffix(".partial")
        pq.write_table(pa.Table.from_pylist(rows, schema=SCHEMA), aside, compression="zstd")
        aside.replace(path)
        return path

    def _decode(self, tokens: set[int]) -> None:
        """Texts of those that are new, at once: a call for each token of a step would take longer than learning from it."""
        if new := sorted(tokens - self._texts.keys()):
            self._texts |= zip(new, self._tokenizer.batch_decode([[token] for token in new]), strict=True)

    def _row(self, step: int, episode: Episode) -> dict[str, Any]:
        sampled = [
            (token, logp, turn)
            for segment in episode.segments
            for token, logp, turn, mine in zip(
                segment.tokens, segment.logps, segment.turns or [0] * len(segment.tokens), segment.sampled, strict=True
            )
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
            "tokens": [token for token, _, _ in sampled],
            "token_texts": [self._texts[token] for token, _, _ in sampled],
            "logps": [logp for _, logp, _ in sampled],
            "reward": episode.reward,
            "rewards": _json(episode.rewards),
            "advantage": episode.advantage,
            "advantage_after_cap": episode.advantage_after_cap,
            "weight": episode.weight,
            "finish_reason": episode.finish_reason,
            "turns": episode.turns,
            "token_turns": [turn for _, _, turn in sampled],
            "segments": len(episode.segments),
            "turn_rewards": episode.turn_rewards,
            "environment_reward": episode.environment_reward,
            "cut": episode.cut,
            "depth_cap": episode.depth_cap,
            "reached_cap": episode.reached_cap,
            "went_on": episode.went_on,
            "explore": episode.explore,
            "value": episode.value,
            "messages": _json(episode.messages),
            "info": _json(episode.info),
            "error": plain_text(episode.error) if episode.error is not None else None,
        }


def _json(value: Any) -> str:
    """Of what users' code has made: what JSON does not know is shown as text, and what Arrow cannot hold is replaced."""
    return plain_text(json.dumps(value, ensure_ascii=False, default=str))
