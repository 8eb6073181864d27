"""Plays groups: episodes advance independently, and a group is scored as soon as its last episode has ended.

`RolloutManager` plays; in which order groups start, which of them a step trains and what is carried over is decided in `stream.py`, and
how many completions a prompt gets and how far they may go in `plan.py`, which is also where a budget hooks in.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from surogate_rl.rollouts.episode import EpisodeRunner
from surogate_rl.rollouts.plan import EpisodePlan, GroupPlan
from surogate_rl.rollouts.seeds import derive_seed
from surogate_rl.rollouts.types import Episode, SamplingParams, Task


class Scorer(Protocol):
    """Fills `rewards` and `reward` of episodes (see `surogate_rl.rewards.RewardRunner`)."""

    async def score(self, episodes: Sequence[Episode]) -> None: ...


@dataclass(frozen=True)
class Group:
    """All completions of one prompt, in the order of their sample numbers.

    Attributes:
        number: its place in the order in which groups start, from 0 over the whole run (in an evaluation: over its prompts).
    """

    task: Task
    episodes: list[Episode]
    number: int = 0

    @cached_property
    def versions(self) -> NDArray[np.int64]:
        """The weight version of every sampled token."""
        segments = [segment for episode in self.episodes for segment in episode.segments]
        parts = [np.asarray(segment.versions, np.int64)[np.asarray(segment.sampled, np.bool_)] for segment in segments]
        return np.concatenate(parts) if parts else np.empty(0, np.int64)

    @property
    def sampled_tokens(self) -> int:
        return int(self.versions.size)

    @property
    def oldest_version(self) -> int | None:
        """The lowest of them; None if nothing was sampled."""
        return int(self.versions.min()) if self.versions.size else None

    @property
    def has_signal(self) -> bool:
        """Whether scored rewards differ, so that advantages within the group are not all 0."""
        rewards = [episode.reward for episode in self.episodes if episode.reward is not None]
        return len(rewards) > 1 and min(rewards) != max(rewards)


class RolloutManager:
    def __init__(self, runner: EpisodeRunner, scorer: Scorer, seed: int) -> None:
        self.runner = runner
        self.scorer = scorer
        self.seed = seed

    async def collect(self, tasks: Sequence[Task], samples: int, sampling: SamplingParams, visit: int) -> list[Group]:
        """Plays `samples` episodes of each task and scores them: an evaluation, or anything else that wants all of them at once.

        The result is in the order of `tasks`, whatever order episodes end in, and depends on the run's seed, `visit`, the tasks and the
        weights alone. If one episode fails for good, the others are cancelled and its error is raised.
        """
        plan = GroupPlan.plain(samples)

        async def group(slot: int, task: Task) -> Group:
            episodes = await self.play(task, visit, slot, plan, sampling)
            await self.scorer.score(episodes)
            return Group(task, episodes, slot)

        groups: list[asyncio.Task[Group]] = []
        try:
            async with asyncio.TaskGroup() as running:
                for slot, task in enumerate(tasks):
                    groups.append(running.create_task(group(slot, task)))
        except BaseExceptionGroup as errors:
            raise first_error(errors) from None
        return [group.result() for group in groups]

    async def play(self, task: Task, visit: int, slot: int, plan: GroupPlan, sampling: SamplingParams) -> list[Episode]:
        """Plays the episodes of one group, which are not scored yet. The slot takes part in their seeds, so that a task that is drawn twice
        for one visit gives other samples the second time."""
        prompt = self.runner.encode(task)

        async def episode(sample: int, how: EpisodePlan) -> Episode:
            seed = derive_seed(self.seed, visit, task.index, slot, sample)
            result = await self.runner.run(task, prompt, sample, seed, sampling, how.limits)
            result.depth_cap, result.went_on = how.depth_cap, how.went_on
            return result

        try:
            async with asyncio.TaskGroup() as running:
                episodes = [running.create_task(episode(sample, how)) for sample, how in enumerate(plan.episodes)]
        except BaseExceptionGroup as errors:
            raise first_error(errors) from None
        return [episode.result() for episode in episodes]


def first_error(errors: BaseExceptionGroup[BaseException]) -> BaseException:
    error: BaseException = errors
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error
