"""Hands each turn of an episode its own advantage (``environment.turn_credit``)."""

from __future__ import annotations

from collections.abc import Sequence

from surogate_rl.config.schema import EnvironmentConfig, PolicyLossConfig
from surogate_rl.objectives.turn_credit import rewards_to_go, turn_advantages
from surogate_rl.rollouts.manager import Group
from surogate_rl.rollouts.types import Episode


def credit_turns(groups: Sequence[Group], environment: EnvironmentConfig, loss: PolicyLossConfig) -> None:
    """Fills `Segment.advantages` of every scored episode; 0 where the policy did not sample."""
    returns = [[_returns(episode, environment) for episode in group.episodes] for group in groups]
    advantages = turn_advantages(returns, scale_rewards=loss.scale_rewards, loss_type=loss.loss_type)
    for group, values in zip(groups, advantages, strict=True):
        for episode, by_turn in zip(group.episodes, values, strict=True):
            if by_turn is None:
                continue
            for segment in episode.segments:
                segment.advantages = [float(by_turn[turn]) if turn >= 0 else 0.0 for turn in segment.turns]


def _returns(episode: Episode, environment: EnvironmentConfig) -> list[float] | None:
    """Rewards to go; whatever is not the environment's reward of a turn is the outcome."""
    if episode.reward is None:
        return None
    by_turn = [environment.weight * reward for reward in episode.turn_rewards]
    return rewards_to_go(by_turn, episode.reward - sum(by_turn), environment.turn_discount)
