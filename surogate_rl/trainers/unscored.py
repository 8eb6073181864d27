"""Steps in which no completion could be scored: nothing is learned from them, and many in a row mean a broken reward."""

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
