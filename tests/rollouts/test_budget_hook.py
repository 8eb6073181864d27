"""What a budget is asked, when, and what becomes of its answers."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from types import SimpleNamespace
from typing import Any

import pytest

from surogate_rl.rollouts.manager import Group
from surogate_rl.rollouts.plan import Credit, EpisodePlan, GroupPlan
from surogate_rl.rollouts.types import DepthCap, EpisodeLimits, Task


class Recorder:
    """Gives the task with index i of block b i % 3 + 1 completions of at most b tokens."""

    def __init__(self) -> None:
        self.planned: list[tuple[int, list[int]]] = []
        self.observed: list[int] = []

    def plan(self, block: int, tasks: Sequence[Task]) -> list[GroupPlan]:
        self.planned.append((block, [task.index for task in tasks]))
        limits = [EpisodeLimits(block, 1000, cap=DepthCap("tokens", block, goes_on)) for goes_on in (True, False)]
        return [GroupPlan(tuple(EpisodePlan(limits[s % 2]) for s in range(task.index % 3 + 1))) for task in tasks]

    def observe(self, groups: Sequence[Group]) -> None:
        self.observed += [group.number for group in groups]

    def forget(self, numbers: Sequence[int]) -> None:
        raise AssertionError("nothing is too old here")

    def credit(self, groups: Sequence[Group], rewards: Sequence[Sequence[float | None]]) -> Credit:
        raise AssertionError("the trainer's to ask")

    def metrics(self, seconds: float) -> dict[str, float]:
        return {}

    def state(self) -> dict[str, Any]:
        return {}

    def restore(self, state: Mapping[str, Any]) -> None: ...


def only_even(task: int, sample: int) -> float:
    return float(sample) if task % 2 == 0 else 0.5


def test_every_block_is_planned_once_and_played_as_planned(fakes: SimpleNamespace) -> None:
    async def work() -> None:
        engine, budget = fakes.TickEngine(lambda task, seed: 10), Recorder()
        stream = fakes.make_stream(engine, budget=budget, max_staleness=1, oversample=2, total_steps=4)
        batches = await fakes.serve(stream, engine, range(1, 5))
        assert budget.planned == [(b, list(range(4 * b - 4, 4 * b))) for b in range(1, 5)]
        for block, batch in enumerate(batches, start=1):
            for group in batch.groups:
                assert len(group.episodes) == group.number % 3 + 1
                for sample, episode in enumerate(group.episodes):
                    assert (episode.depth_cap, episode.went_on) == (block, sample % 2 == 0)
                    assert episode.sampled_tokens == block

    fakes.run(work())


def test_a_block_that_no_step_has_touched_is_planned_anew_with_what_was_seen_since(fakes: SimpleNamespace) -> None:
    async def work(oversample: int) -> Recorder:
        engine, budget = fakes.TickEngine(), Recorder()
        stream = fakes.make_stream(
            engine, fakes.Scorer(lambda task, sample: float(sample) if task % 3 else 0.0), budget, max_rounds=4, oversample=oversample
        )
        for step in range(1, 4):
            batch = await stream.collect(step)
            budget.observe(batch.used)
            engine.version = step
            stream.weights_changed(step)
        return budget

    plain, spares = fakes.run(work(0)), fakes.run(work(6))
    # groups 0, 3, 6, ... have one completion each and thus no signal: steps use 0-5, 6-11 and 12-17
    assert plain.observed == spares.observed == list(range(18))
    assert [block for block, _ in plain.planned] == [1, 2, 3, 4, 5]
    # the first step's spares reach into blocks that it does not use in the end; they are planned again by the next one
    blocks = [block for block, _ in spares.planned]
    assert (blocks.count(1), blocks.count(2), blocks.count(3)) == (1, 1, 2)


@pytest.mark.parametrize("options", [{"max_rounds": 4, "oversample": 3}, {"max_staleness": 1}])
def test_plans_of_what_is_not_used_yet_are_kept_in_checkpoints(fakes: SimpleNamespace, options: dict[str, Any]) -> None:
    async def work() -> None:
        engine, budget = fakes.TickEngine(), Recorder()
        stream = fakes.make_stream(engine, fakes.Scorer(lambda task, sample: float(sample)), budget, **options)
        await fakes.serve(stream, engine, range(1, 2))
        state = json.loads(json.dumps(stream.state()))
        planned = dict(budget.planned)
        await stream.close()
        assert state["plans"].keys() >= {str((state["first"]) // 4 + 1)}
        again, later = fakes.TickEngine(), Recorder()
        again.version = 1
        resumed = fakes.make_stream(again, fakes.Scorer(lambda task, sample: float(sample)), later, **options)
        resumed.restore(state)
        (batch,) = await fakes.serve(resumed, again, range(2, 3))
        assert [group.number for group in batch.used] == list(range(state["first"], batch.position))
        assert all(len(group.episodes) == group.number % 3 + 1 for group in batch.used)
        # none of the blocks that the checkpoint knows was planned twice
        assert not {block for block, _ in later.planned} & {int(block) for block in state["plans"]}
        assert {int(block) for block in state["plans"]} <= planned.keys()
        await resumed.close()

    fakes.run(work())


def test_plans_survive_json() -> None:
    plan = GroupPlan((EpisodePlan(), EpisodePlan(EpisodeLimits(8, 64, max_turns=2, max_tokens=5, cap=DepthCap("turns", 5, False)))))
    assert GroupPlan.from_state(json.loads(json.dumps(plan.to_state()))) == plan
