"""Keeps the engine full: episodes advance independently, a group is scored as soon as its last episode ends."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from surogate_rl.rollouts.episode import EpisodeRunner
from surogate_rl.rollouts.seeds import derive_seed
from surogate_rl.rollouts.types import Episode, SamplingParams, Task


class Scorer(Protocol):
    """Fills `rewards` and `reward` of episodes (see `surogate_rl.rewards.RewardRunner`)."""

    async def score(self, episodes: Sequence[Episode]) -> None: ...


@dataclass(frozen=True)
class Group:
    """All completions of one prompt, in the order of their sample numbers."""

    task: Task
    episodes: list[Episode]


class RolloutManager:
    def __init__(self, runner: EpisodeRunner, scorer: Scorer, seed: int) -> None:
        self.runner = runner
        self.scorer = scorer
        self.seed = seed

    async def collect(self, tasks: Sequence[Task], samples: int, sampling: SamplingParams, visit: int) -> list[Group]:
        """Plays `samples` episodes of each task and scores them.

        The result is in the order of `tasks`, whatever order episodes end in, and depends on the run's seed, `visit` (the step), the tasks
        and the weights alone. If one episode fails for good, the others are cancelled and its error is raised.
        """
        groups: list[asyncio.Task[Group]] = []
        try:
            async with asyncio.TaskGroup() as running:
                for slot, task in enumerate(tasks):
                    groups.append(running.create_task(self._group(task, slot, samples, sampling, visit)))
        except BaseExceptionGroup as errors:
            raise _first(errors) from None
        return [group.result() for group in groups]

    async def _group(self, task: Task, slot: int, samples: int, sampling: SamplingParams, visit: int) -> Group:
        # the slot takes part, so that a task drawn twice in one step gives other samples the second time
        seeds = [derive_seed(self.seed, visit, task.index, slot, sample) for sample in range(samples)]
        prompt = self.runner.encode(task)
        async with asyncio.TaskGroup() as running:
            episodes = [running.create_task(self.runner.run(task, prompt, sample, seed, sampling)) for sample, seed in enumerate(seeds)]
        group = Group(task, [episode.result() for episode in episodes])
        await self.scorer.score(group.episodes)
        return group


def _first(errors: BaseExceptionGroup[BaseException]) -> BaseException:
    error: BaseException = errors
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error
