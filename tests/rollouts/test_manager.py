from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import pytest

from surogate_rl.rollouts.environments.single_turn import SingleTurn
from surogate_rl.rollouts.episode import EpisodeRunner
from surogate_rl.rollouts.manager import RolloutManager
from surogate_rl.rollouts.seeds import derive_seed
from surogate_rl.rollouts.types import Completion, Episode, EpisodeLimits, GenerateRequest, Observation, SamplingParams, Task

PARAMS = SamplingParams(max_tokens=1, stop_ids=(9,))


class Tokenizer:
    def decode(self, tokens: Sequence[int], skip_special_tokens: bool = False) -> str:
        return " ".join(map(str, tokens))


class FakeEngine:
    """Answers with tokens made from the seed, after a delay that turns the order of arrival round."""

    def __init__(self, fail_on: int | None = None) -> None:
        self.running = 0
        self.most = 0
        self.cancelled = 0
        self.requests: list[GenerateRequest] = []
        self.fail_on = fail_on

    async def generate(self, request: GenerateRequest) -> Completion:
        self.requests.append(request)
        number = len(self.requests)
        self.running += 1
        self.most = max(self.most, self.running)
        try:
            if number == self.fail_on:
                raise RuntimeError("engine died")
            await asyncio.sleep(0.05 / number)
        except asyncio.CancelledError:
            self.cancelled += 1
            raise
        finally:
            self.running -= 1
        tokens = [request.params.seed % 7, request.params.seed % 5]
        return Completion(tokens, [-0.5, -0.25], "length", [0, 0])


class Scorer:
    async def score(self, episodes: Sequence[Episode]) -> None:
        for episode in episodes:
            episode.reward = float(episode.sample)


def manager(engine: Any, environment: Any = None) -> RolloutManager:
    runner = EpisodeRunner(
        engine=engine,
        make_environment=environment or SingleTurn,
        tokenizer=Tokenizer(),  # type: ignore[arg-type]
        encode=lambda task: [1, 2, 3],
        limits=EpisodeLimits(max_completion_length=8, sequence_len=6),
    )
    return RolloutManager(runner, Scorer(), seed=0)


TASKS = [Task(index, [{"role": "user", "content": "hi"}], None, {}) for index in (5, 3)]


def test_all_run_together_and_come_back_in_order() -> None:
    engine = FakeEngine()
    groups = asyncio.run(manager(engine).collect(TASKS, 4, PARAMS, visit=1))
    assert engine.most == 8
    assert [group.task.index for group in groups] == [5, 3]
    assert [[e.sample for e in group.episodes] for group in groups] == [[0, 1, 2, 3]] * 2
    again = asyncio.run(manager(FakeEngine()).collect(TASKS, 4, PARAMS, visit=1))
    assert [[e.segments for e in g.episodes] for g in groups] == [[e.segments for e in g.episodes] for g in again]
    other = asyncio.run(manager(FakeEngine()).collect(TASKS, 4, PARAMS, visit=2))
    assert [[e.seed for e in g.episodes] for g in groups] != [[e.seed for e in g.episodes] for g in other]


def test_what_was_sampled_is_what_is_trained() -> None:
    engine = FakeEngine()
    (group,) = asyncio.run(manager(engine).collect(TASKS[:1], 2, PARAMS, visit=1))
    for episode, request in zip(group.episodes, engine.requests, strict=True):
        (segment,) = episode.segments
        assert segment.tokens == [1, 2, 3, request.params.seed % 7, request.params.seed % 5]
        assert segment.sampled == [False] * 3 + [True] * 2
        assert segment.logps == [0.0] * 3 + [-0.5, -0.25]
        assert segment.versions == [-1] * 3 + [0, 0]
        assert segment.prompt_length == 3
        assert request.params.max_tokens == 3  # what sequence_len leaves
        assert episode.messages[-1] == {"role": "assistant", "content": episode.completion}
        assert episode.truncated


def test_an_engine_that_dies_ends_the_step_and_cancels_the_rest() -> None:
    engine = FakeEngine(fail_on=8)
    with pytest.raises(RuntimeError, match="engine died"):
        asyncio.run(manager(engine).collect(TASKS, 4, PARAMS, visit=1))
    assert engine.running == 0
    assert engine.cancelled == 7


def test_an_environment_that_raises_loses_its_episode_only() -> None:
    class Broken:
        async def reset(self, task: Task, seed: int) -> Observation:
            return Observation()

        async def step(self, episode: Episode, action: str) -> Observation:
            if episode.sample == 1:
                raise KeyError("lost")
            return Observation(done=True, reward=2.0)

        async def close(self) -> None:
            return None

    (group,) = asyncio.run(manager(FakeEngine(), Broken).collect(TASKS[:1], 3, PARAMS, visit=1))
    assert [episode.error for episode in group.episodes] == [None, "environment: step: KeyError: 'lost'", None]
    assert group.episodes[0].environment_reward == 2.0


def test_a_prompt_that_leaves_no_room_is_named() -> None:
    manager_ = manager(FakeEngine())
    object.__setattr__(manager_.runner, "limits", EpisodeLimits(8, 3))
    with pytest.raises(ValueError, match="task 5: its prompt of 3 tokens leaves no room for a completion within sequence_len 3"):
        asyncio.run(manager_.collect(TASKS[:1], 1, PARAMS, visit=1))


def test_seeds_differ_in_every_part_and_are_64_bits() -> None:
    seeds = {derive_seed(a, b, c) for a in range(20) for b in range(20) for c in range(20)}
    assert len(seeds) == 8000
    assert all(0 <= seed < 1 << 64 for seed in seeds)
    assert derive_seed(1, 2) != derive_seed(2, 1)
