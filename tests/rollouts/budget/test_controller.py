"""The budget as the stream and the trainer ask it, over episodes made by hand."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from surogate_rl.errors import InputError
from surogate_rl.objectives import group_advantages
from surogate_rl.rollouts.budget.controller import AdaptiveBudget, BudgetSettings, WidthSettings
from surogate_rl.rollouts.budget.credit import EpisodePlan as DepthPlan
from surogate_rl.rollouts.budget.depth import DepthSettings
from surogate_rl.rollouts.manager import Group
from surogate_rl.rollouts.plan import GroupPlan
from surogate_rl.rollouts.types import DepthCap, Episode, EpisodeLimits, Segment, Task
from surogate_rl.trainers import budgeting

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
            cap = how.cap
            limit = cap.depth if cap is not None and not cap.goes_on else TURNS
            turns = int(rng.integers(1, 3)) if task.index > 1 and rng.random() < 0.7 else TURNS
            one = episode(task, sample, min(turns, limit), float(turns < TURNS), "turns" if turns > limit or turns == TURNS else None)
            one.depth_cap, one.went_on = how.depth_cap, how.went_on
            one.reached_cap = cap is not None and turns > cap.depth
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


def test_token_caps_reach_the_limits() -> None:
    budget, _ = after(4, unit="tokens", depth=replace(DEPTH, max=2))
    plans = [plan for group in budget.plan(5, TASKS) for plan in group.episodes]
    assert {plan.cap for plan in plans} == {DepthCap("tokens", plans[0].depth_cap or 0, goes_on) for goes_on in (True, False)}


def test_caps_and_draws_reach_the_limits() -> None:
    budget, _ = after(4)
    plans = [plan for block in range(5, 30) for group in budget.plan(block, TASKS) for plan in group.episodes]
    capped = [plan for plan in plans if plan.depth_cap is not None]
    assert len(capped) == len(plans)
    limits = settings().limits
    assert all(plan.limits == replace(limits, cap=plan.cap) and plan.cap.unit == "turns" and plan.cap.depth <= 2 for plan in capped)
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
            reached = member.turns > plan.cap if plan.went_on else member.cut == "turns"  # no episode of `play` has a limit there
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
            assert member.segments[0].importance == [0.0] + [1.0 if turn < cap else 2.0 for turn in range(member.turns)]  # 1 / 0.5
            assert (member.explore, member.value) == (0.5, plans[place][sample].value)
            assert (member.advantage_after_cap is None) == (member.turns <= cap)
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
    assert budget.metrics(1.0)["budget/width/efficiency"] > 1


@pytest.mark.parametrize("went_on", [True, False])
def test_an_end_at_the_cap_by_other_means_is_an_end(went_on: bool) -> None:
    """A limit of the task's own at the very depth of the cap: credited with the reward and counted as an end, drawn to go on or not."""
    budget, _ = after(4, width=None)
    plan = DepthPlan(unit="turns", cap=2, explore=0.5, went_on=went_on, value=0.3)
    members = [episode(TASKS[0], sample, 2, reward, "length") for sample, reward in enumerate((1.0, 0.0))]
    budget._plans = {16: [plan, plan]}
    for member in members:
        member.depth_cap, member.went_on = plan.cap, went_on
    group = Group(TASKS[0], members, 16)
    credit = budget.credit([group], rewards([group]))
    assert credit.advantages[0] == pytest.approx([0.75, -0.75])  # (R - the other's R) (n - 1) / n
    assert [member.advantage_after_cap for member in members] == [None, None]
    assert budget.depth is not None
    ended = sum(law.ended for law in budget.depth.laws) * np.exp(-1 / DEPTH.memory)
    budget.observe([group])
    assert sum(law.ended for law in budget.depth.laws) - ended == pytest.approx([0, 2, 0, 0, 0, 0])
    assert budget.metrics(1.0)["budget/depth/censored_share"] == 0


def test_saved_seconds_are_of_the_steps_own_time() -> None:
    """Of two cut episodes each had, by the law, as many turns before it as `beyond` says; every turn is one token here."""
    budget, rng = after(4, width=None)
    groups = play(budget, 5, rng)
    assert budget.depth is not None
    plans = budget._plans
    cut = [plan for g in groups for e, plan in zip(g.episodes, plans[g.number], strict=True) if e.cut_by_budget]
    saved = sum(budget.depth.beyond(plan) for plan in cut)
    tokens = sum(member.turns for group in groups for member in group.episodes)
    budget.observe(groups)
    found = budget.metrics(3.0)
    assert found["budget/depth/saved_tokens"] == pytest.approx(saved) != 0
    assert found["budget/depth/saved_seconds"] == pytest.approx(saved * 3.0 / tokens)


def test_what_is_decided_for_each_bucket_is_said() -> None:
    budget, rng = after(6, width=None)
    groups = play(budget, 7, rng)
    plans = [plan for group in groups for plan in budget._plans[group.number]]
    budget.observe(groups)
    found = budget.metrics(1.0)
    buckets = {plan.bucket for plan in plans}
    assert len(buckets) > 1
    for bucket in buckets:
        own = [plan for plan in plans if plan.bucket == bucket]
        assert found[f"budget/depth/bucket{bucket}/episodes"] == len(own)
        assert found[f"budget/depth/bucket{bucket}/cap"] == pytest.approx(np.mean([plan.cap for plan in own]))
        assert found[f"budget/depth/bucket{bucket}/explore"] == 0.5
        assert found[f"budget/depth/bucket{bucket}/value"] == pytest.approx(np.mean([plan.value for plan in own]))
        assert 0 < found[f"budget/depth/bucket{bucket}/coverage"] <= 1
    assert not any(name.startswith(f"budget/depth/bucket{bucket}") for name in found for bucket in set(range(4)) - buckets)


@pytest.mark.parametrize(("loss_type", "scale"), [("rloo", "batch"), ("rloo", "none"), ("dr_grpo", "batch"), ("dr_grpo", "group")])
def test_unequal_numbers_are_scaled_as_without_a_budget(loss_type: str, scale: str) -> None:
    """rloo: the very advantages of its own, whatever the numbers. The others' have the group's mean with the own reward in it for their
    baseline: (n - 1) / n times the leave-one-out ones, where the budget takes the mean n for all."""
    leave_one_out = loss_type == "rloo"
    budget, rng = after(6, depth=None, scale=budgeting.scale_of(loss_type, scale), leave_one_out=leave_one_out)
    groups = play(budget, 7, rng)
    numbers = [len(group.episodes) for group in groups]
    assert len(set(numbers)) > 1
    credit = budget.credit(groups, rewards(groups))
    plain = group_advantages(rewards(groups), scale_rewards=scale, loss_type=loss_type)
    assert any((values != 0).any() for values in plain.values)
    for ours, theirs, n in zip(credit.advantages, plain.values, numbers, strict=True):
        factor = 1.0 if leave_one_out else n / (n - 1) * (COMPLETIONS - 1) / COMPLETIONS
        np.testing.assert_allclose(ours, theirs * factor, rtol=1e-5, atol=1e-7)


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
    with pytest.raises(InputError, match=r"the checkpoint is of a run with rollouts\.budget\.width"):
        AdaptiveBudget(settings(depth=DEPTH)).restore(budget.state())


def test_plans_of_groups_that_never_come_are_forgotten() -> None:
    budget, rng = after(4)
    budget.plan(5, TASKS)
    groups = play(budget, 6, rng)
    budget.observe(groups)
    assert budget._plans.keys() == set(range(16, 20))  # block 5: a step may have passed over it
    budget.forget(range(16, 20))
    assert budget._plans == {}
