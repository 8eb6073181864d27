"""Which groups a step trains: order of start, staleness, dynamic sampling, carrying over, state."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from surogate_rl.errors import RunError
from surogate_rl.rollouts.manager import Group
from surogate_rl.rollouts.stream import Batch
from surogate_rl.rollouts.types import SamplingParams

PARAMS = SamplingParams(max_tokens=1)


def numbers(batches: list[Batch]) -> list[list[int]]:
    return [[group.number for group in batch.groups] for batch in batches]


def contents(batches: list[Batch]) -> list[Any]:
    return [[(g.number, [(e.seed, e.segments, e.reward) for e in g.episodes]) for g in batch.groups] for batch in batches]


def mean_length(groups: list[Group]) -> float:
    return float(np.mean([episode.sampled_tokens for group in groups for episode in group.episodes]))


# Order ------------------------------------------------------------------------------------------------------------------------------


def test_with_everything_off_a_step_is_its_own_block(fakes: SimpleNamespace) -> None:
    async def work() -> None:
        engine = fakes.TickEngine()
        stream = fakes.make_stream(engine)
        batches = await fakes.serve(stream, engine, range(1, 4))
        assert numbers(batches) == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 10, 11]]
        assert engine.running == 0
        assert engine.requests == 24
        assert [batch.position for batch in batches] == [4, 8, 12]
        for step, batch in enumerate(batches, start=1):
            again = fakes.TickEngine()
            again.version = step - 1
            groups = await fakes.make_manager(again).collect(
                [fakes.make_task(n) for n in range(4 * step - 4, 4 * step)], 2, PARAMS, visit=step
            )
            assert [g.episodes for g in groups] == [g.episodes for g in batch.groups]
            assert batch.metrics == {"rollouts/staleness_mean": 0.0, "rollouts/staleness_max": 0.0}

    fakes.run(work())


def heavy_tail(task: int, seed: int) -> int:
    return 60 if task % 3 == 0 else 3


def test_groups_are_taken_in_order_of_start_and_never_by_who_ends_first(fakes: SimpleNamespace) -> None:
    """Every third prompt's completions are twenty times longer than the others."""
    ended: list[Group] = []

    class Watching(fakes.Scorer):  # type: ignore[name-defined,misc]
        async def score(self, episodes: Any) -> None:
            await super().score(episodes)
            ended.append(Group(episodes[0].task, list(episodes)))

    async def work() -> list[Batch]:
        engine = fakes.TickEngine(heavy_tail)
        stream = fakes.make_stream(engine, Watching(), groups=6, max_staleness=1, oversample=6)
        return await fakes.serve(stream, engine, range(1, 9))

    batches = fakes.run(work())
    assert numbers(batches) == [list(range(6 * i, 6 * i + 6)) for i in range(8)]
    population = (60 + 3 + 3) / 3
    assert [mean_length(batch.groups) for batch in batches] == [population] * 8
    # what a step that took the first six to end would have trained, out of the very same completions
    assert mean_length(ended[:6]) < 0.2 * population


def test_the_engine_has_work_while_a_step_waits_for_its_last_episode(fakes: SimpleNamespace) -> None:
    async def work(oversample: int) -> tuple[int, int]:
        """Requests begun before the step closed, and how many ran beside the long one early on."""
        engine = fakes.TickEngine(lambda task, seed: 50 if task == 0 else 20 if task > 3 else 2)
        stream = fakes.make_stream(engine, completions=2, max_staleness=1, oversample=oversample)
        collecting = asyncio.create_task(stream.collect(1))
        for _ in range(15):
            await asyncio.sleep(0)
        beside, begun = engine.running - 1, engine.requests
        await collecting
        await stream.close()
        return begun, beside

    # without spares the last completion runs alone; with them the next batch is sampled meanwhile
    assert fakes.run(work(0)) == (8, 1)
    assert fakes.run(work(4)) == (16, 9)


# Staleness --------------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("staleness", [1, 2, 3])
@pytest.mark.parametrize("oversample", [0, 2, 4])
@pytest.mark.parametrize("learning", [0, 2, 40])
def test_nothing_lags_more_than_allowed_and_nothing_is_lost(fakes: SimpleNamespace, staleness: int, oversample: int, learning: int) -> None:
    rng = np.random.default_rng([staleness, oversample, learning])
    lengths = rng.choice([1, 2, 5, 60], size=400)

    async def work() -> None:
        engine = fakes.TickEngine(lambda task, seed: int(lengths[task]))
        stream = fakes.make_stream(engine, max_staleness=staleness, oversample=oversample, total_steps=30)
        ahead = []
        batches = await fakes.serve(stream, engine, range(1, 31), learning, watch=lambda: ahead.append(stream.under_way))
        assert numbers(batches) == [list(range(4 * i, 4 * i + 4)) for i in range(30)]
        for step, batch in enumerate(batches, start=1):
            lags = [step - 1 - v for g in batch.groups for e in g.episodes for s in e.segments for v in s.versions if v >= 0]
            assert 0 <= min(lags) <= max(lags) <= staleness
            assert batch.metrics["rollouts/staleness_max"] == max(lags)
            assert batch.metrics["rollouts/staleness_mean"] == pytest.approx(np.mean(lags))
            assert batch.metrics["rollouts/dropped_stale"] == 0
        assert max(ahead) <= (staleness + 1) * 4
        assert engine.requests == 30 * 4 * 2  # nothing that no step would train was ever started
        assert engine.running == 0

    fakes.run(work())


def test_a_completion_that_survives_an_update_says_which_token_is_whose(fakes: SimpleNamespace) -> None:
    async def work() -> None:
        engine = fakes.TickEngine(lambda task, seed: 3 if task < 4 else 10)
        stream = fakes.make_stream(engine, max_staleness=1)
        first, second = await fakes.serve(stream, engine, range(1, 3), learning=5)
        assert {tuple(s.versions[2:]) for g in first.groups for e in g.episodes for s in e.segments} == {(0, 0, 0)}
        mixed = {tuple(s.versions[2:]) for g in second.groups for e in g.episodes for s in e.segments}
        (versions,) = mixed
        assert len(versions) == 10
        assert list(versions) == sorted(versions)
        assert set(versions) == {0, 1}
        assert second.groups[0].oldest_version == 0
        await stream.close()

    fakes.run(work())


def late_engine(fakes: SimpleNamespace, late: int) -> Any:
    """One that takes up a weight update only after `late` further requests, and serves what it had two updates before until then."""

    class LateEngine(fakes.TickEngine):  # type: ignore[name-defined,misc]
        told = since = 0

        @property
        def version(self) -> int:
            return self.told if self.since > late else max(0, self.told - 2)

        @version.setter
        def version(self, value: int) -> None:
            self.told, self.since = value, 0

        async def generate(self, request: Any) -> Any:
            self.since += 1
            return await super().generate(request)

    return LateEngine()


@pytest.mark.parametrize("staleness", [0, 1])
def test_what_is_too_old_is_dropped_counted_and_replaced(fakes: SimpleNamespace, staleness: int) -> None:
    async def work() -> None:
        engine = late_engine(fakes, 10)
        engine.length_of = lambda task, seed: 3
        stream = fakes.make_stream(engine, max_staleness=staleness)
        batches = await fakes.serve(stream, engine, range(1, 6), learning=60)
        dropped = [batch.metrics.get("rollouts/dropped_stale", 0.0) for batch in batches]
        assert sum(dropped) > 0
        assert [batch.metrics.get("rollouts/dropped_stale_tokens", 0.0) for batch in batches] == [2 * 3 * count for count in dropped]
        for step, batch in enumerate(batches, start=1):
            assert len(batch.groups) == 4
            assert all(step - 1 - (group.oldest_version or 0) <= staleness for group in batch.groups)
        taken = [number for batch in batches for number in (group.number for group in batch.groups)]
        assert taken == sorted(set(taken))
        await stream.close()

    fakes.run(work())


@pytest.mark.parametrize("staleness", [0, 1])
def test_weights_that_never_arrive_end_the_run(fakes: SimpleNamespace, staleness: int) -> None:
    async def work() -> None:
        engine = late_engine(fakes, 10**9)
        stream = fakes.make_stream(engine, max_staleness=staleness)
        with pytest.raises(RunError, match=r"sampled with weights older than version \d, the oldest that rollouts.max_staleness .* allows"):
            await fakes.serve(stream, engine, range(1, 10))
        assert engine.running == 0

    fakes.run(work())


# Dynamic sampling -------------------------------------------------------------------------------------------------------------------


def only_even(task: int, sample: int) -> float:
    return float(sample) if task % 2 == 0 else 0.5


@pytest.mark.parametrize("oversample", [0, 3])
@pytest.mark.parametrize("slow", [1, 30])
def test_groups_without_signal_are_passed_over_and_replaced(fakes: SimpleNamespace, oversample: int, slow: int) -> None:
    async def work() -> list[Batch]:
        # odd groups end at once, or long after the even ones
        engine = fakes.TickEngine(lambda task, seed: slow if task % 2 else 5)
        stream = fakes.make_stream(engine, fakes.Scorer(only_even), oversample=oversample, max_rounds=4)
        batches = await fakes.serve(stream, engine, range(1, 4))
        assert engine.running == 0
        return batches

    batches = fakes.run(work())
    assert numbers(batches) == [[0, 2, 4, 6], [8, 10, 12, 14], [16, 18, 20, 22]]
    for step, batch in enumerate(batches, start=1):
        # a batch ends with its last group: what lies behind it is the next step's, whether or not it had begun
        assert batch.position == [7, 15, 23][step - 1]
        assert [group.number for group in batch.used] == list(range([0, 7, 15][step - 1], batch.position))
        assert batch.metrics["dynamic_sampling/discarded_groups"] == len(batch.used) - 4
        assert batch.metrics["dynamic_sampling/discarded_tokens"] == (len(batch.used) - 4) * 2 * slow
        assert batch.metrics["dynamic_sampling/rounds"] == len(batch.used) / 4
        assert batch.metrics["dynamic_sampling/missing_groups"] == 0
        assert batch.metrics["dynamic_sampling/reward"] == 0.5
        assert ("rollouts/unused_spares" in batch.metrics) == (oversample > 0)


def test_tokens_of_spares_are_counted(fakes: SimpleNamespace) -> None:
    """Of the two behind the batch one has ended, with one token in each of its two completions; the other is still under way."""

    async def work() -> None:
        engine = fakes.TickEngine(lambda task, seed: [9, 9, 9, 9, 1, 30][task])
        stream = fakes.make_stream(engine, oversample=2)
        (batch,) = await fakes.serve(stream, engine, range(1, 2))
        assert batch.metrics["rollouts/unused_spares"] == 2
        assert batch.metrics["rollouts/unused_spare_tokens"] == 2
        await stream.close()

    fakes.run(work())


def test_spares_and_speed_change_no_result(fakes: SimpleNamespace) -> None:
    def steps(engine: Any, oversample: int, turns: int) -> list[Any]:
        async def work() -> list[Any]:
            stream = fakes.make_stream(engine, fakes.Scorer(only_even, turns), oversample=oversample, max_rounds=4)
            return contents(await fakes.serve(stream, engine, range(1, 6)))

        result: list[Any] = fakes.run(work())
        return result

    plain = steps(fakes.TickEngine(lambda task, seed: 1 + seed % 9), 0, 0)
    assert steps(fakes.TickEngine(lambda task, seed: 1 + seed % 9), 5, 0) == plain
    assert steps(fakes.TickEngine(lambda task, seed: 1 + seed % 9), 3, 7) == plain


def test_dynamic_sampling_has_a_hard_limit(fakes: SimpleNamespace) -> None:
    async def work() -> None:
        engine = fakes.TickEngine()
        stream = fakes.make_stream(engine, fakes.Scorer(lambda task, sample: float(sample) if task == 1 else 1.0), max_rounds=3)
        first, second = await fakes.serve(stream, engine, range(1, 3))
        assert [group.number for group in first.groups] == [1]
        assert len(first.used) == 12
        assert engine.requests == 2 * 24
        assert first.metrics["dynamic_sampling/missing_groups"] == 3
        assert second.groups == []
        assert second.metrics["dynamic_sampling/rounds"] == 3
        assert second.metrics["dynamic_sampling/discarded_groups"] == 12
        assert second.metrics["rollouts/staleness_max"] == 0

    fakes.run(work())


@pytest.mark.parametrize("rewards", [lambda task, sample: 1.0, lambda task, sample: None, lambda task, sample: None if sample else 1.0])
def test_no_signal_at_all_starts_no_more_than_the_limit_ahead(fakes: SimpleNamespace, rewards: Callable[[int, int], float | None]) -> None:
    async def work() -> None:
        engine = fakes.TickEngine(lambda task, seed: 1)
        stream = fakes.make_stream(engine, fakes.Scorer(rewards), max_staleness=2, oversample=4, max_rounds=2)
        for step, batch in enumerate(await fakes.serve(stream, engine, range(1, 6), learning=100), start=1):
            assert batch.groups == []
            assert batch.position == 8 * step
        assert engine.requests <= 2 * (8 * 5 + 12)
        await stream.close()

    fakes.run(work())


def test_dynamic_sampling_over_stale_groups(fakes: SimpleNamespace) -> None:
    async def work() -> None:
        engine = fakes.TickEngine(heavy_tail)
        stream = fakes.make_stream(engine, fakes.Scorer(only_even), max_staleness=1, oversample=2, max_rounds=4)
        batches = await fakes.serve(stream, engine, range(1, 11), learning=20)
        assert numbers(batches) == [[2 * n for n in range(4 * i, 4 * i + 4)] for i in range(10)]
        assert max(batch.metrics["rollouts/staleness_max"] for batch in batches) == 1
        await stream.close()

    fakes.run(work())


# State ------------------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("oversample", [0, 3])
def test_on_policy_a_restored_stream_goes_on_exactly(fakes: SimpleNamespace, oversample: int) -> None:
    options: dict[str, Any] = {"oversample": oversample, "max_rounds": 4}

    async def whole() -> list[Any]:
        engine = fakes.TickEngine()
        return contents(await fakes.serve(fakes.make_stream(engine, fakes.Scorer(only_even), **options), engine, range(1, 7)))

    async def broken() -> list[Any]:
        engine = fakes.TickEngine()
        stream = fakes.make_stream(engine, fakes.Scorer(only_even), **options)
        before = await fakes.serve(stream, engine, range(1, 4))
        state = json.loads(json.dumps(stream.state()))
        assert state["first"] == before[-1].position
        assert state["unfinished"] == []
        await stream.close()
        engine = fakes.TickEngine()
        engine.version = 3
        stream = fakes.make_stream(engine, fakes.Scorer(only_even), **options)
        stream.restore(state)
        return contents(before + await fakes.serve(stream, engine, range(4, 7)))

    assert fakes.run(whole()) == fakes.run(broken())


def test_ahead_of_the_learner_a_restored_stream_samples_anew_what_no_step_had_used(fakes: SimpleNamespace) -> None:
    async def work() -> None:
        engine = fakes.TickEngine(heavy_tail)
        stream = fakes.make_stream(engine, max_staleness=1, oversample=2)
        before = await fakes.serve(stream, engine, range(1, 4), learning=10)
        state = json.loads(json.dumps(stream.state()))
        unfinished = [entry["number"] for entry in state["unfinished"]]
        # some of these have ended and some have not: all are sampled anew, or the short ones would be preferred
        assert unfinished == list(range(12, 12 + len(unfinished)))
        assert 0 < stream.under_way < len(unfinished)
        await stream.close()
        assert engine.running == 0
        again = fakes.TickEngine(heavy_tail)
        again.version = 3
        resumed = fakes.make_stream(again, max_staleness=1, oversample=2)
        resumed.restore(state)
        after = await fakes.serve(resumed, again, range(4, 7), learning=10)
        assert numbers(before + after) == [list(range(4 * i, 4 * i + 4)) for i in range(6)]
        assert {v for g in after[0].groups for e in g.episodes for s in e.segments for v in s.versions if v >= 0} == {3}
        await resumed.close()

    fakes.run(work())


# Ends -------------------------------------------------------------------------------------------------------------------------------


def test_a_failure_while_the_learner_learns_is_raised_by_the_next_step_and_ends_the_rest(fakes: SimpleNamespace) -> None:
    async def work() -> None:
        engine = fakes.TickEngine(lambda task, seed: 5, fail_on=11)
        stream = fakes.make_stream(engine, max_staleness=1)
        await stream.collect(1)
        for _ in range(20):
            await asyncio.sleep(0)
        engine.version = 1
        stream.weights_changed(1)
        with pytest.raises(RuntimeError, match="engine died"):
            await stream.collect(2)
        assert engine.running == 0
        assert stream.under_way == 0
        await stream.close()

    fakes.run(work())


def test_a_failing_reward_ends_the_run_and_leaves_nothing_behind(fakes: SimpleNamespace) -> None:
    class Broken(fakes.Scorer):  # type: ignore[name-defined,misc]
        async def score(self, episodes: Any) -> None:
            if episodes[0].task.index == 5:
                raise ValueError("wrong number of rewards")
            await super().score(episodes)

    async def work() -> None:
        engine = fakes.TickEngine(lambda task, seed: 3 if task < 6 else 500)
        stream = fakes.make_stream(engine, Broken(), max_staleness=1, oversample=4)
        with pytest.raises(ValueError, match="wrong number of rewards"):
            await fakes.serve(stream, engine, range(1, 9))
        assert engine.running == 0

    fakes.run(work())


@pytest.mark.parametrize("staleness", [0, 1])
def test_interrupted_while_it_waits_nothing_is_left(fakes: SimpleNamespace, staleness: int) -> None:
    async def work() -> None:
        engine = fakes.TickEngine(lambda task, seed: 10**6)
        stream = fakes.make_stream(engine, max_staleness=staleness)
        before = asyncio.all_tasks()
        waiting = asyncio.create_task(stream.collect(1))
        for _ in range(5):
            await asyncio.sleep(0)
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        await stream.close()
        await stream.close()
        assert engine.running == 0
        assert engine.aborted == 8
        assert asyncio.all_tasks() == before

    fakes.run(work())


def test_spares_are_cut_without_killing_their_rewards(fakes: SimpleNamespace) -> None:
    async def work() -> None:
        engine = fakes.TickEngine(lambda task, seed: 2 if task != 7 else 10**6)
        scorer = fakes.Scorer(turns=5)
        scorer.reward_of = only_even
        # 0, 2, 4, 6 make the batch; 7 is still sampled, 8 is being scored
        stream = fakes.make_stream(engine, scorer, oversample=4, max_rounds=4)
        batch = await stream.collect(1)
        assert [group.number for group in batch.groups] == [0, 2, 4, 6]
        assert batch.metrics["rollouts/unused_spares"] >= 2
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        assert engine.running == 0
        assert scorer.cancelled == 0
        await stream.close()

    fakes.run(work())
