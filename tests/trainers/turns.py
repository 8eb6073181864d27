"""Environments of several turns for the tiny model, whose words are digits and =."""

from __future__ import annotations

import asyncio
import time
from typing import Any

from surogate_rl.rollouts.types import Episode, Observation, Task


class Digits:
    """Three turns; each gives the share of digits in it that are even, and is answered by = and a digit."""

    def __init__(
        self, turns: int = 3, fail_on: int | None = None, hang_on: int | None = None, final: bool = False, odd: bool = False
    ) -> None:
        self.turns, self.fail_on, self.hang_on, self.final = turns, fail_on, hang_on, final
        self.mark = "\ud83d" if odd else ""  # no encoding has it
        if final:
            self.finish = self._finish

    async def reset(self, task: Task, seed: int) -> Observation:
        return Observation([{"role": "user", "content": f"7={self.mark}"}])

    async def step(self, episode: Episode, action: str) -> Observation:
        if episode.sample == self.fail_on:
            raise ValueError(f"the board broke{self.mark}")
        if episode.sample == self.hang_on:
            await asyncio.sleep(3600)
        digits = [c for c in action if c.isdigit()]
        reward = sum(c in "02468" for c in digits) / len(digits) if digits else 0.0
        return Observation([{"role": "user", "content": f"={episode.turns}="}], done=episode.turns >= self.turns, reward=reward)

    async def close(self) -> None:
        return None

    def _finish(self, episode: Episode) -> float:
        return 10.0


class Sleeping:
    """One turn; the first two completions of a group sleep through it."""

    def reset(self, task: Task, seed: int) -> Observation:
        return Observation()

    def step(self, episode: Episode, action: str) -> Observation:
        if episode.sample < 2:
            time.sleep(3600)
        return Observation(done=True, reward=float(len(action)))

    def close(self) -> None:
        return None


def length_of_conversation(messages: list[dict[str, Any]], episode: Episode) -> float:
    assert [m["role"] for m in messages[:2]] == ["user", "user"]
    assert sum(m["role"] == "assistant" for m in messages) == episode.turns
    return float(len(messages))
