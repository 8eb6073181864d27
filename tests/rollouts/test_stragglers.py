"""Steps that close without the groups that are still under way: which are passed over, how often, and what becomes of them.

Which group ends when is said by the test, or counted in turns of the event loop; nothing depends on time.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from surogate_rl.rollouts.plan import GroupPlan
from surogate_rl.rollouts.stream import Batch, RolloutStream, StreamSettings
from surogate_rl.rollouts.types import Completion, SamplingParams

Numbers = list[int]


def numbers(batch: Batch) -> Numbers:
    return [group.number for group in batch.groups]


async def settle() -> None:
    """Lets everything happen that can without anything ending from outside."""
    for _ in range(50):
        await asyncio.sleep(0)


class Script:
    """A stream whose groups end when they are told to. A completion's first token has the version that it began with, its second one that
    with which it ended."""

    def __init__(self, fakes: SimpleNamespace, scorer: Any = None, clock: Callable[[], float] | None = None, **settings: Any) -> None:
        script = self
        self.begun: Numbers = []
        self.may_end: dict[int, asyncio.Event] = {}

        class Engine(fakes.TickEngine):  # type: ignore[name-defined,misc]
            async def generate(self, request: Any) -> Completion:
                task = request.prompt[0]
                first = self.version
                if task not in script.begun:
                    script.begun.append(task)
                await script.gate(task).wait()
                return Completion([1, 2], [-0.5, -0.5], "stop", [first, self.version])

        self.engine = Engine()
        options = StreamSettings(**({"groups": 2, "completions": 2, "total_steps": 100, "carry_over": True} | settings))
        manager = fakes.make_manager(self.engine, scorer)
        more = {} if clock is None else {"clock": clock}
        self.stream = RolloutStream(manager, fakes.make_task, options, SamplingParams(max_tokens=1), **more)  # type: ignore[arg-type]
        self.version = 0

    def gate(self, task: int) -> asyncio.Event:
        return self.may_end.setdefault(task, asyncio.Event())

    def end(self, *tasks: int) -> None:
        for task in tasks:
            self.gate(task).set()

    async def step(self, *ended: Numbers) -> tuple[Batch, int]:
        """The next step's batch, and how many of the lists of groups `ended`, one after the other, it took until it closed."""
        self.version += 1
        collecting = asyncio.create_task(self.stream.collect(self.version))
        await settle()
        waited = 0
        while not collecting.done() and waited < len(ended):
            self.end(*ended[waited])
            await settle()
            waited += 1
        assert collecting.done(), "the step waits for more"
        return collecting.result(), waited

    def learned(self) -> None:
        self.engine.version = self.version
        self.stream.weights_changed(self.version)


def test_a_step_closes_with_the_first_that_have_ended_and_leaves_the_rest_to_the_next(fakes: SimpleNamespace) -> None:
    async def work() -> None:
        script = Script(fakes, groups=4, max_staleness=1, oversample=2)
        # in the order in which they started, whatever the order in which they end
        first, waited = await script.step([4], [1], [3], [2])
        assert (numbers(first), waited) == ([1, 2, 3, 4], 4)
        assert first.position == 4
        assert first.metrics["rollouts/passed_over"] == 1.0
        assert first.metrics["rollouts/carried_over"] == 2.0
        assert script.begun == [0, 1, 2, 3, 4, 5]  # nothing is begun ahead with weights that could not be passed over once
        script.learned()
        second, waited = await script.step([6, 7], [5], [0])
        assert (numbers(second), waited) == ([0, 5, 6, 7], 3)
        assert second.position == 8
        assert second.metrics["rollouts/passed_over"] == 0.0
        # what was sampled before the update is kept: both versions are in it
        assert [group.versions.tolist() for group in second.groups] == [[0, 1, 0, 1], [0, 1, 0, 1], [1, 1, 1, 1], [1, 1, 1, 1]]
        assert second.metrics["rollouts/staleness_max"] == 1.0
        await script.stream.close()

    fakes.run(work())


@pytest.mark.parametrize("staleness", [1, 2, 3])
def test_a_group_that_is_always_late_is_passed_over_as_often_as_allowed_and_then_waited_for(fakes: SimpleNamespace, staleness: int) -> None:
    async def work() -> None:
        script = Script(fakes, groups=2, max_staleness=staleness, oversample=2, total_steps=20)
        script.end(*range(1, 60))
        for _ in range(staleness):
            batch, waited = await script.step()
            assert 0 not in numbers(batch)
            assert (waited, batch.metrics["rollouts/passed_over"]) == (0, 1.0)
            script.learned()
        # all the others have ended, more than enough for a step: it waits for the one that could not wait any longer
        batch, waited = await script.step([], [0])
        assert (numbers(batch)[0], waited) == (0, 2)
        assert batch.metrics["rollouts/staleness_max"] == staleness
        assert batch.groups[0].oldest_version == 0
        await script.stream.close()

    fakes.run(work())


def test_no_more_are_passed_over_than_the_following_steps_have_places_for(fakes: SimpleNamespace) -> None:
    async def work() -> None:
        script = Script(fakes, groups=2, max_staleness=2, oversample=2)
        first, _ = await script.step([4, 5])
        assert numbers(first) == [4, 5]
        assert first.metrics["rollouts/passed_over"] == 4.0  # 0 to 3 have steps 2 and 3
        script.learned()
        # 0 to 3 have to be trained by step 3, which has two places: this one cannot close with 6 and 7, nor with one of the four
        second, waited = await script.step([6, 7], [2], [1])
        assert (numbers(second), waited) == ([1, 2], 3)
        script.learned()
        third, waited = await script.step([3], [0])
        assert (numbers(third), waited) == ([0, 3], 2)
        script.learned()
        fourth, waited = await script.step()
        assert (numbers(fourth), waited) == ([6, 7], 0)
        await script.stream.close()

    fakes.run(work())


@pytest.mark.parametrize(("staleness", "oversample"), [(1, 1), (1, 2), (1, 3), (2, 1), (2, 4), (3, 1), (3, 4)])
@pytest.mark.parametrize("learning", [0, 2, 40])
def test_every_group_is_trained_once_and_in_time(fakes: SimpleNamespace, staleness: int, oversample: int, learning: int) -> None:
    rng = np.random.default_rng([staleness, oversample, learning])
    lengths = rng.choice([1, 2, 5, 60], size=400)

    async def work() -> None:
        engine = fakes.TickEngine(lambda task, seed: int(lengths[task]))
        stream = fakes.make_stream(engine, max_staleness=staleness, oversample=oversample, total_steps=30, carry_over=True)
        batches = await fakes.serve(stream, engine, range(1, 31), learning)
        assert [len(batch.groups) for batch in batches] == [4] * 30
        assert sorted(number for batch in batches for number in numbers(batch)) == list(range(120))
        assert all(numbers(batch) == sorted(numbers(batch)) for batch in batches)
        for step, batch in enumerate(batches, start=1):
            lags = np.concatenate([step - 1 - group.versions for group in batch.groups])
            assert 0 <= lags.min() <= lags.max() <= staleness
            assert batch.metrics["rollouts/dropped_stale"] == 0
            assert batch.position == 4 * step
        passed = sum(batch.metrics["rollouts/passed_over"] for batch in batches)
        assert passed > (5 if staleness == 1 else 0)  # with more staleness much is done before its step comes
        assert engine.requests == 30 * 4 * 2  # nothing was sampled in vain, and nothing twice
        assert engine.running == 0

    fakes.run(work())


def test_the_longest_completion_of_a_batch_holds_up_nobody(fakes: SimpleNamespace) -> None:
    """The last of the four prompts of each step takes fifty turns, the others two, and learning five: what is begun while the step before
    learns has hardly a start. A group that is passed over shares its fifty turns between two steps."""

    async def turns(carry_over: bool) -> int:
        engine = fakes.TickEngine(lambda task, seed: 50 if task % 4 == 3 else 2)
        stream = fakes.make_stream(engine, max_staleness=1, oversample=2, total_steps=12, carry_over=carry_over)
        waited = 0

        async def count() -> None:
            nonlocal waited
            while True:
                waited += 1
                await asyncio.sleep(0)

        for step in range(1, 13):
            counting = asyncio.create_task(count())
            await stream.collect(step)
            counting.cancel()
            for _ in range(5):  # it learns
                await asyncio.sleep(0)
            engine.version = step
            stream.weights_changed(step)
        await stream.close()
        return waited

    assert fakes.run(turns(True)) < 0.7 * fakes.run(turns(False))


# Dynamic sampling -------------------------------------------------------------------------------------------------------------------


def only_even(task: int, sample: int) -> float:
    return float(sample) if task % 2 == 0 else 0.5


@pytest.mark.parametrize("staleness", [1, 2])
def test_with_dynamic_sampling_every_group_with_signal_is_trained_once(fakes: SimpleNamespace, staleness: int) -> None:
    lengths = np.random.default_rng(staleness).choice([1, 2, 5, 60], size=400)

    async def work() -> None:
        engine = fakes.TickEngine(lambda task, seed: int(lengths[task]))
        stream = fakes.make_stream(
            engine, fakes.Scorer(only_even), max_staleness=staleness, oversample=4, max_rounds=6, total_steps=20, carry_over=True
        )
        batches = await fakes.serve(stream, engine, range(1, 21), learning=10)
        assert [len(batch.groups) for batch in batches] == [4] * 20
        trained = sorted(number for batch in batches for number in numbers(batch))
        assert trained == list(range(0, 160, 2))
        used = [group.number for batch in batches for group in batch.used]
        assert len(set(used)) == len(used) == batches[-1].position
        assert max(batch.metrics["rollouts/staleness_max"] for batch in batches) <= staleness
        assert sum(batch.metrics["rollouts/passed_over"] for batch in batches) > 0
        await stream.close()

    fakes.run(work())


def test_a_step_is_not_given_up_while_groups_under_way_may_fill_it(fakes: SimpleNamespace) -> None:
    """Four groups without signal are all that a step may use, but one that could have some is still under way."""

    async def work() -> None:
        scorer = fakes.Scorer(lambda task, sample: float(sample) if task == 0 else 1.0)
        script = Script(fakes, scorer, groups=2, max_staleness=2, oversample=2, max_rounds=2)
        batch, waited = await script.step([1, 2, 3, 4, 5], [0])
        assert (numbers(batch), [group.number for group in batch.used], waited) == ([0], [0, 1, 2, 3], 2)
        await script.stream.close()

    fakes.run(work())


# State ------------------------------------------------------------------------------------------------------------------------------


def test_a_checkpoint_knows_what_was_passed_over_and_a_resumed_run_begins_with_it(fakes: SimpleNamespace) -> None:
    async def work() -> None:
        script = Script(fakes, groups=4, max_staleness=1, oversample=2)
        await script.step([1, 2, 3, 5])
        script.learned()
        state = json.loads(json.dumps(script.stream.state()))
        assert (state["first"], state["passed_over"]) == (6, [0, 4])
        assert [entry["number"] for entry in state["unfinished"]] == [0, 4, 6, 7, 8, 9]
        await script.stream.close()
        # also when everything was cancelled before, as where the engine is lost
        closed = script.stream.state()
        assert (closed["first"], closed["passed_over"]) == (6, [0, 4])

        resumed = Script(fakes, groups=4, max_staleness=1, oversample=2)
        resumed.version = resumed.engine.version = 1
        resumed.stream.restore(state)
        resumed.stream.weights_changed(1)
        await settle()
        assert resumed.begun == [0, 4, 6, 7, 8, 9]
        # sampled anew with the weights of the checkpoint, they may be passed over anew
        batch, _ = await resumed.step([6, 7, 8, 9])
        assert (numbers(batch), batch.position) == ([6, 7, 8, 9], 8)
        assert resumed.stream.state()["passed_over"] == [0, 4]
        resumed.learned()
        batch, _ = await resumed.step([10, 11], [0, 4])
        assert (numbers(batch), batch.position) == ([0, 4, 10, 11], 12)
        await resumed.stream.close()

    fakes.run(work())


@pytest.mark.parametrize("staleness", [0, 1])
def test_a_run_that_does_not_pass_over_groups_can_go_on_from_one_that_did(fakes: SimpleNamespace, staleness: int) -> None:
    async def work() -> None:
        engine = fakes.TickEngine()
        engine.version = 1
        stream = fakes.make_stream(engine, max_staleness=staleness, groups=2, total_steps=4)
        stream.restore({"first": 8, "passed_over": [0, 3, 5], "step": 1, "version": 1, "groups": 2, "unfinished": [], "plans": {}})
        stream.weights_changed(1)
        batches = await fakes.serve(stream, engine, range(2, 5))
        assert [numbers(batch) for batch in batches] == [[0, 3], [5, 8], [9, 10]]
        assert [batch.position for batch in batches] == [7, 9, 11]
        await stream.close()

    fakes.run(work())


class Planned:
    """A budget that plans two completions for each prompt and notes what it is told."""

    def __init__(self) -> None:
        self.blocks: Numbers = []
        self.forgotten: Numbers = []

    def plan(self, block: int, tasks: Any) -> list[GroupPlan]:
        self.blocks.append(block)
        return [GroupPlan.plain(2)] * len(tasks)

    def forget(self, numbers: Any) -> None:
        self.forgotten += numbers


def test_plans_of_what_was_passed_over_are_kept_until_it_is_trained(fakes: SimpleNamespace) -> None:
    async def work() -> None:
        engine, budget = fakes.TickEngine(lambda task, seed: 10**6 if task == 0 else 1), Planned()
        stream = fakes.make_stream(engine, budget=budget, groups=2, max_staleness=3, oversample=2, carry_over=True)
        await fakes.serve(stream, engine, range(1, 4))
        state = json.loads(json.dumps(stream.state()))
        assert state["passed_over"] == [0]
        assert "1" in state["plans"]
        await stream.close()
        again, later = fakes.TickEngine(lambda task, seed: 1), Planned()
        again.version = 3
        resumed = fakes.make_stream(again, budget=later, groups=2, max_staleness=3, oversample=2, carry_over=True)
        resumed.restore(state)
        (batch,) = await fakes.serve(resumed, again, range(4, 5))
        assert numbers(batch)[0] == 0
        assert 1 not in later.blocks
        assert "1" not in resumed.state()["plans"]
        await resumed.close()

    fakes.run(work())


def test_what_is_dropped_for_its_age_is_told_to_the_budget(fakes: SimpleNamespace) -> None:
    """An engine that stays at version 0: the first groups that are sampled for step 3 are too old for it."""

    class Late(fakes.TickEngine):  # type: ignore[name-defined,misc]
        version = property(lambda self: 0 if self.requests < 20 else self.told, lambda self, value: setattr(self, "told", value))

    async def work() -> None:
        engine, budget = Late(lambda task, seed: 1), Planned()
        stream = fakes.make_stream(engine, budget=budget, groups=2, max_staleness=1)
        batches = await fakes.serve(stream, engine, range(1, 6), learning=20)
        dropped = sum(batch.metrics["rollouts/dropped_stale"] for batch in batches)
        trained = {number for batch in batches for number in numbers(batch)}
        assert dropped == len(budget.forgotten) > 0
        assert not trained & set(budget.forgotten)
        await stream.close()

    fakes.run(work())


# What a step says ---------------------------------------------------------------------------------------------------------------------


def test_the_wait_that_was_saved_is_measured_when_it_is_known(fakes: SimpleNamespace) -> None:
    now = 100.0

    async def work() -> None:
        nonlocal now
        script = Script(fakes, clock=lambda: now, groups=2, max_staleness=2, oversample=2)
        batch, _ = await script.step([1, 2])
        assert batch.metrics["rollouts/passed_over_seconds"] == 0.0
        script.learned()
        now = 130.0
        script.end(0)
        await settle()
        now = 145.0
        batch, _ = await script.step([3])
        assert numbers(batch) == [0, 3]
        assert batch.metrics["rollouts/passed_over_seconds"] == 30.0
        script.learned()
        batch, _ = await script.step([4, 5])
        assert batch.metrics["rollouts/passed_over_seconds"] == 0.0
        await script.stream.close()

    fakes.run(work())


def test_without_the_option_nothing_is_said_of_it(fakes: SimpleNamespace) -> None:
    async def work() -> None:
        engine = fakes.TickEngine()
        (batch,) = await fakes.serve(stream := fakes.make_stream(engine, max_staleness=1), engine, range(1, 2))
        assert not [name for name in batch.metrics if "passed_over" in name]
        await stream.close()

    fakes.run(work())
