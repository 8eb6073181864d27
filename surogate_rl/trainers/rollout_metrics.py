"""Metrics of one step's completions, under TRL's names."""

from __future__ import annotations

from collections.abc import Sequence
from typing import get_args

import numpy as np

from surogate_rl.rollouts.manager import Group
from surogate_rl.rollouts.types import Cut


def rollout_metrics(groups: Sequence[Group]) -> dict[str, float]:
    """Lengths in sampled tokens; a completion cut by a limit counts as clipped."""
    episodes = [episode for group in groups for episode in group.episodes]
    lengths = np.array([sum(sum(segment.sampled) for segment in episode.segments) for episode in episodes], dtype=np.float64)
    truncated = np.array([episode.truncated for episode in episodes])
    ended = lengths[~truncated] if (~truncated).any() else np.zeros(1)
    return {
        "completions/mean_length": float(lengths.mean()),
        "completions/min_length": float(lengths.min()),
        "completions/max_length": float(lengths.max()),
        "completions/clipped_ratio": float(truncated.mean()),
        "completions/mean_terminated_length": float(ended.mean()),
        "completions/min_terminated_length": float(ended.min()),
        "completions/max_terminated_length": float(ended.max()),
        "completions/unscored": float(sum(episode.reward is None for episode in episodes)),
    }


def episode_metrics(groups: Sequence[Group]) -> dict[str, float]:
    """What there is to say of episodes of several turns: turns, shares of episodes that a limit cut (by limit), episodes that their
    environment lost, and under TRL's names calls of tools per completion and the share of them that failed."""
    episodes = [episode for group in groups for episode in group.episodes]
    if not episodes:
        return {}
    values = {
        "episodes/turns_mean": float(np.mean([episode.turns for episode in episodes])),
        "episodes/turns_max": float(max(episode.turns for episode in episodes)),
        "episodes/segments_mean": float(np.mean([len(episode.segments) for episode in episodes])),
        "episodes/environment_errors": float(sum((episode.error or "").startswith("environment: ") for episode in episodes)),
    }
    for cut in get_args(Cut):
        values[f"episodes/cut/{cut}"] = float(np.mean([episode.cut == cut for episode in episodes]))
    if any("tool_calls" in episode.info for episode in episodes):
        calls = sum(episode.info.get("tool_calls", 0.0) for episode in episodes)
        values["tools/call_frequency"] = calls / len(episodes)
        values["tools/failure_frequency"] = sum(episode.info.get("tool_failures", 0.0) for episode in episodes) / calls if calls else 0.0
    return values
