"""Steps that nothing is learned from: no completion could be scored (many in a row mean a broken reward), or rewards do not differ."""

from __future__ import annotations

from collections.abc import Sequence

from surogate_rl.errors import RunError
from surogate_rl.rollouts.types import Episode


class NothingScored(RunError):
    """So many steps in a row gave no reward at all that the run would go on without ever learning."""


class UnscoredSteps:
    """Counts them.

    Args:
        limit: steps in a row after which the run ends.
    """

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.in_a_row = 0

    def __call__(self, step: int, episodes: Sequence[Episode]) -> str | None:
        """What to tell about a step; None where at least one completion has a reward.

        Raises:
            NothingScored: it is the last one of `limit` in a row.
        """
        if any(episode.reward is not None for episode in episodes):
            self.in_a_row = 0
            return None
        self.in_a_row += 1
        why = next((episode.error for episode in episodes if episode.error), "every reward returned None (does not apply)")
        if self.in_a_row >= self.limit:
            raise NothingScored(
                f"no completion could be scored in {self.in_a_row} step{'s' if self.in_a_row > 1 else ''} in a row, so nothing is learned: "
                f"{why} (max_skipped_steps is the number of such steps that a run bears)"
            )
        return f"step {step}: no completion could be scored, nothing was learned: {why}"


class EqualRewards:
    """Tells once when the rewards of whole steps do not differ within any group: the advantages are all 0.

    Args:
        patience: such steps in a row before it is told.
    """

    def __init__(self, patience: int = 5) -> None:
        self.patience = patience
        self.in_a_row = 0

    def __call__(self, step: int, frac_reward_zero_std: float | None) -> str | None:
        """`frac_reward_zero_std`: the step's metric; None where it has none."""
        self.in_a_row = self.in_a_row + 1 if frac_reward_zero_std == 1.0 else 0
        if self.in_a_row != self.patience:
            return None
        return (
            f"step {step}: for {self.patience} steps the completions of every prompt had equal rewards, so nothing was learned from them; "
            "an easier task, a reward with steps in between, more num_generations or a higher temperature would make them differ"
        )
