"""Metrics of one step's completions, under TRL's names."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from surogate_rl.rollouts.manager import Group


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
