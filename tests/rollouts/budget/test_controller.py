"""The budget as the stream and the trainer ask it, over episodes made by hand."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest

from surogate_rl.objectives import group_advantages
from surogate_rl.rollouts.budget.controller import AdaptiveBudget, BudgetSettings, WidthSettings
from surogate_rl.rollouts.budget.credit import EpisodePlan as DepthPlan
from surogate_rl.rollouts.budget.depth import DepthSettings
from surogate_rl.rollouts.manager import Group
from surogate_rl.rollouts.plan import GroupPlan
from surogate_rl.rollouts.types import Episode, EpisodeLimits, Segment, Task

PROMPTS, COMPLETIONS, TURNS = 4, 4, 6
TASKS = [Task(index, None, "p", {}) for index in range(PROMPTS)]
DEPTH = DepthSettings(coverage=0.5, max=2, explore=0.5, min_episodes=8)
WIDTH = WidthSettings(min=2, max=8)


def settings(**changes: Any) -> BudgetSettings:
    limits = EpisodeLimits(max_completion_length=3, sequence_len=64, max_turns=TURNS)
    return BudgetSettings(**({"prompts": PROMPTS, "completions": COMPLETIONS, "limits": limits, "seed": 5} | changes))


def episode(task: Task, sample: int, turns: int, reward: float | None, cut: str | None = None, per_turn: int = 1) -> Episode:
    sampled = [False, *[True] * (turns * per_turn)]
    numbers = [-1, *np.repeat(np.arange(turns), per_turn).tolist()]
    zeros = [0.0] * len(sampled)
    segment = Segment([0] * len(sampled), sampled, zeros, [0] * len(sampled), numbers)
    return Episode(task, sample, 0, segments=[segment], turns=turns, reward=reward, cut=cut, truncated=cut is not None)  # type: ignore[arg-type]


def play(budget: AdaptiveBudget, block: int, rng: np.random.Generator, depth_of: Any = None) -> list[Group]:
    """Episodes that succeed at turn 1 or 2, or go on to the horizon and fail; tasks 0 and 1 fail always."""
    groups = []
    for place, (task, plan) in enumerate(zip(TASKS, budget.plan(block, TASKS), strict=True)):
        members = []
        for sample, how in enumerate(plan.episodes):
            limit = how.limits.max_turns if how.limits is not None else TURNS
            turns = int(rng.integers(1, 3)) if task.index > 1 and rng.random() < 0.7 else TURNS
            one = episode(task, sample, min(turns, limit), float(turns < TURNS), "turns" if turns >= limit else None)
            one.depth_cap, one.went_on = how.depth_cap, how.went_on
            members.append(one)
        groups.append(Group(task, members, (block - 1) * PROMPTS + place))
    return groups


def rewards(groups: list[Group]) -> list[list[float | None]]:
    return [[member.reward for member in group.episodes] for group in groups]


def test_plans_before_there_is_evidence_are_plain() -> None:
    budget = AdaptiveBudget(settings(depth=DEPTH, width=WIDTH))
    assert budget.plan(1, TASKS) == [GroupPlan.plain(COMPLETIONS)] * PROMPTS


def test_plain_plans_get_the_plain_advantages() -> None:
    """Equal groups without a cap: advantages as the loss type's own, by token too, and no weight but 1."""
    budget, rng = AdaptiveBudget(settings(depth=DEPTH, width=WIDTH)), np.random.default_rng(0)
    groups = play(budget, 1, rng)
    credit = budget.credit(groups, rewards(groups))
    plain = group_advantages(rewards(groups), scale_rewards="none", loss_type="dr_grpo")
    for place, group in enumerate(groups):
        np.testing.assert_allclose(credit.advantages[place], plain.values[place], rtol=1e-6)
        for member, advantage in zip(group.episodes, credit.advantages[place], strict=True):
            assert member.segments[0].advantages == pytest.approx([0.0] + [float(advantage)] * member.turns)
    assert credit.weights is not None
    assert all((weights == 1).all() for weights in credit.weights)
    for name, value in plain.metrics.items():
        assert credit.metrics[name] == pytest.approx(value), name


def after(blocks: int, **changes: Any) -> tuple[AdaptiveBudget, np.random.Generator]:
    budget, rng = AdaptiveBudget(settings(**({"depth": DEPTH, "width": WIDTH} | changes))), np.random.default_rng(1)
    for block in range(1, blocks + 1):
        groups = play(budget, block, rng)
        budget.credit(groups, rewards(groups))
        budget.observe(groups)
    return budget, rng


def test_caps_and_draws_reach_the_limits() -> None:
    budget, _ = after(4)
    plans = [plan for block in range(5, 30) for group in budget.plan(block, TASKS) for plan in group.episodes]
    capped = [plan for plan in plans if plan.depth_cap is not None]
    assert len(capped) == len(plans)
    assert all((plan.limits is None) == plan.went_on for plan in capped)
    assert all(
        plan.limits is None or (plan.limits.max_turns == plan.depth_cap <= 2 and plan.limits.max_completion_length == 3) for plan in capped
    )
    assert np.mean([plan.went_on for plan in capped]) == pytest.approx(0.5, abs=0.1)


def test_credit_of_cut_and_gone_on() -> None:
    """Worked by hand from the plans: b is the mean of the others' known rewards."""
    budget, rng = after(4, width=None)
    groups = play(budget, 5, rng)
    plans = [budget._plans[group.number] for group in groups]
    credit = budget.credit(groups, rewards(groups))
    seen = set()
    for place, group in enumerate(groups):
        known, credited, later = [], [], []
        for member, plan in zip(group.episodes, plans[place], strict=True):
            reached = member.turns > plan.cap if plan.went_on else member.cut == "turns"
            seen.add((reached, plan.went_on))
            reward = float(member.reward or 0)
            cut = reached and not plan.went_on
            known.append(plan.value if cut else reward)
            surprise = (reward - plan.value) / plan.explore
            credited.append(plan.value if cut else plan.value + surprise if reached else reward)
            later.append(surprise)
        for sample, member in enumerate(group.episodes):
            others = known[:sample] + known[sample + 1 :]
            before = (credited[sample] - sum(others) / len(others)) * 3 / 4
            assert credit.advantages[place][sample] == pytest.approx(before, abs=1e-6)
            cap = plans[place][sample].cap
            wanted = [0.0] + [before if turn < cap else later[sample] * 3 / 4 for turn in range(member.turns)]
            assert member.segments[0].advantages == pytest.approx(wanted, abs=1e-6)
    assert seen >= {(True, True), (True, False), (False, True)}


def test_width_follows_the_past_and_weights_make_up_for_it() -> None:
    budget, rng = after(6, depth=None)
    groups = play(budget, 7, rng)
    numbers = [len(group.episodes) for group in groups]
    assert sum(numbers) == PROMPTS * COMPLETIONS
    assert max(numbers[:2]) < min(numbers[2:])  # tasks 0 and 1 never succeed
    credit = budget.credit(groups, rewards(groups))
    assert credit.weights is not None
    for number, weights in zip(numbers, credit.weights, strict=True):
        assert weights == pytest.approx(np.full(number, COMPLETIONS / number))
    budget.observe(groups)
    assert budget.metrics()["budget/width/efficiency"] > 1


@pytest.mark.parametrize(
    ("turns", "extra", "finish", "cut", "longest", "wanted"),
    [
        (1, 1, "length", None, 3, True),  # 3 + 1 tokens: the cap stopped the second turn
        (1, 1, "stop", None, 3, False),  # the policy ended it with the very last token, and the episode was over
        (1, 1, "stop", "tokens", 3, True),  # so it did, but the episode would have gone on
        (1, 0, "length", None, 3, False),  # 3 tokens: over before the cap
        (1, 1, "length", None, 1, False),  # turns have one token: the second one ended as it does without a cap, and with it the episode
    ],
)
def test_tokens_cut_in_the_midst_of_a_turn(turns: int, extra: int, finish: str, cut: str | None, longest: int, wanted: bool) -> None:
    """Which ends at a cap of four tokens are cuts: episodes of `turns` turns of three tokens and one of `extra`."""
    depth = DepthSettings(coverage=0.5, max=3, explore=0.5, min_episodes=1)
    budget = AdaptiveBudget(settings(depth=depth, unit="tokens", limits=EpisodeLimits(longest, 64, max_turns=TURNS)))
    one = episode(TASKS[0], 0, turns, 0.0, cut, per_turn=3)
    one.segments[0].sampled += [True] * extra
    one.segments[0].turns += [turns] * extra
    one.turns += extra > 0
    one.finish_reason = finish  # type: ignore[assignment]
    assert budget._reached(one, DepthPlan(unit="tokens", cap=4, explore=0.5, went_on=False)) == wanted


def test_state_is_json_and_comes_back() -> None:
    budget, rng = after(5)
    budget.plan(6, TASKS)
    again = AdaptiveBudget(settings(depth=DEPTH, width=WIDTH))
    again.restore(json.loads(json.dumps(budget.state())))
    groups = play(budget, 7, rng)
    again.plan(7, TASKS)
    first, second = budget.credit(groups, rewards(groups)), again.credit(groups, rewards(groups))
    for a, b in zip(first.advantages, second.advantages, strict=True):
        np.testing.assert_array_equal(a, b)
    budget.observe(groups)
    again.observe(groups)
    assert budget.plan(8, TASKS) == again.plan(8, TASKS)
    with pytest.raises(ValueError, match=r"rollouts\.budget\.width: the checkpoint is of a run with it"):
        AdaptiveBudget(settings(depth=DEPTH)).restore(budget.state())


def test_plans_of_groups_that_never_come_are_forgotten() -> None:
    budget, rng = after(4)
    budget.plan(5, TASKS)
    groups = play(budget, 6, rng)
    budget.observe(groups)
    assert budget._plans == {}
