"""An engine without a model, whose time is the event loop's own turns: every run of a test goes the same way."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import Any, TypeVar

import pytest

from surogate_rl.rollouts.manager import RolloutManager
from surogate_rl.rollouts.stream import Batch, RolloutStream, StreamSettings
from surogate_rl.rollouts.types import Completion, Episode, EpisodeLimits, GenerateRequest, SamplingParams, Segment, Task

T = TypeVar("T")


class TickEngine:
    """Gives every request one token per turn of the event loop, unless it is paused.

    Args:
        length_of: tokens of a completion, from its prompt (which is the task's number) and seed.
        fail_on: number of the request, from 1, that raises after its first token.
    """

    shares_weights = True

    def __init__(self, length_of: Callable[[int, int], int] = lambda task, seed: 1 + seed % 7, fail_on: int | None = None) -> None:
        self.length_of = length_of
        self.fail_on = fail_on
        self.version = 0
        self.requests = 0
        self.running = 0
        self.most = 0
        self.aborted = 0
        self.turn = asyncio.Event()
        self.turn.set()

    async def generate(self, request: GenerateRequest) -> Completion:
        task, seed = request.prompt[0], request.params.seed
        self.requests += 1
        number = self.requests
        self.running += 1
        self.most = max(self.most, self.running)
        versions: list[int] = []
        try:
            for _ in range(min(self.length_of(task, seed), request.params.max_tokens)):
                await asyncio.sleep(0)
                await self.turn.wait()
                versions.append(self.version)
                if number == self.fail_on:
                    raise RuntimeError("engine died")
        except asyncio.CancelledError:
            self.aborted += 1
            raise
        finally:
            self.running -= 1
        tokens = [(seed >> i) % 10 for i in range(len(versions))]
        return Completion(tokens, [-0.5] * len(tokens), "stop", versions)

    async def update_weights(self, learner: Any, version: int) -> None:
        self.version = version

    async def pause(self) -> None:
        self.turn.clear()

    async def resume(self) -> None:
        self.turn.set()

    async def health(self) -> None: ...
    async def close(self) -> None: ...


class Scorer:
    """Rewards from `reward_of` (task, sample); `turns` of the event loop pass before they are there."""

    def __init__(self, reward_of: Callable[[int, int], float | None] = lambda task, sample: float(sample), turns: int = 0) -> None:
        self.reward_of = reward_of
        self.turns = turns
        self.cancelled = 0

    async def score(self, episodes: Sequence[Episode]) -> None:
        try:
            for _ in range(self.turns):
                await asyncio.sleep(0)
        except asyncio.CancelledError:
            self.cancelled += 1
            raise
        for episode in episodes:
            episode.reward = self.reward_of(episode.task.index, episode.sample)


@dataclass
class Runner:
    """One turn of the engine, whose prompt is the task's number."""

    engine: TickEngine
    limit: int = 10**9
    limits: list[EpisodeLimits | None] = field(default_factory=list)

    def encode(self, task: Task) -> list[int]:
        return [task.index, 1]

    async def run(
        self, task: Task, prompt: list[int], sample: int, seed: int, sampling: SamplingParams, limits: EpisodeLimits | None = None
    ) -> Episode:
        self.limits.append(limits)
        most = self.limit if limits is None else limits.max_completion_length
        completion = await self.engine.generate(GenerateRequest(prompt, replace(sampling, max_tokens=most, seed=seed)))
        count = len(completion.tokens)
        segment = Segment(
            [*prompt, *completion.tokens], [False] * 2 + [True] * count, [0.0] * 2 + completion.logps, [-1] * 2 + completion.versions
        )
        return Episode(task, sample, seed, segments=[segment])


def make_manager(engine: TickEngine, scorer: Scorer | None = None) -> RolloutManager:
    return RolloutManager(Runner(engine), scorer or Scorer(), seed=5)  # type: ignore[arg-type]


def make_task(number: int) -> Task:
    """Rows in the order of their numbers: the group's number is the task's index."""
    return Task(number, None, "p", {})


def make_stream(engine: TickEngine, scorer: Scorer | None = None, budget: Any = None, **settings: Any) -> RolloutStream:
    options = StreamSettings(**({"groups": 4, "completions": 2, "total_steps": 100} | settings))
    return RolloutStream(make_manager(engine, scorer), make_task, options, SamplingParams(max_tokens=1), budget)


async def serve(
    stream: RolloutStream, engine: TickEngine, steps: range, learning: int = 3, watch: Callable[[], None] | None = None
) -> list[Batch]:
    """Collects the steps one after the other; `learning` turns of the event loop pass while each is learned."""
    batches = []
    for step in steps:
        batches.append(await stream.collect(step))
        for _ in range(learning):
            await asyncio.sleep(0)
            if watch is not None:
                watch()
        engine.version = step
        stream.weights_changed(step)
        if watch is not None:
            watch()
    return batches


def run(work: Coroutine[Any, Any, T]) -> T:
    return asyncio.run(asyncio.wait_for(work, 30))


@pytest.fixture
def fakes() -> SimpleNamespace:
    return SimpleNamespace(
        TickEngine=TickEngine, Scorer=Scorer, make_manager=make_manager, make_task=make_task, make_stream=make_stream, serve=serve, run=run
    )
