"""The one-turn case: the policy answers once, rewards judge."""

from __future__ import annotations

from surogate_rl.rollouts.types import Episode, Observation, Task


class SingleTurn:
    """Adds nothing to the task's prompt and ends after the first action."""

    async def reset(self, task: Task, seed: int) -> Observation:
        return Observation()

    async def step(self, episode: Episode, action: str) -> Observation:
        # an answer that a limit has cut short is neither right nor wrong by itself
        return Observation(done=True, truncated=episode.truncated)

    async def close(self) -> None:
        return None
