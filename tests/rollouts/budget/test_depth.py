"""The cap in a simulated run: it settles, it does not drift inward by what it does itself, and it comes back when more depth is needed."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest

from surogate_rl.errors import InputError
from surogate_rl.rollouts.budget.credit import EpisodePlan
from surogate_rl.rollouts.budget.depth import DepthBudget, DepthSettings, Observed
from surogate_rl.rollouts.budget.grid import DepthGrid

PER_STEP = 64


def play(budget: DepthBudget, law: Any, rng: np.random.Generator, step: int, tasks: int = 10_000, count: int = PER_STEP) -> list[Observed]:
    """A step's episodes of tasks that all follow `law`."""
    cells, success = law.sample(rng, count)
    episodes = []
    for place, (cell, won) in enumerate(zip(cells.tolist(), success.tolist(), strict=True)):
        task = (step * count + place) % tasks
        plan = budget.plan(task, seed=step * 1_000_003 + place)
        reached = plan.cap is not None and cell > plan.cap
        cut = reached and not plan.went_on
        depth = plan.cap if cut else cell
        episodes.append(Observed(task, plan, depth, reached, float(won and not cut), tokens=10 * depth))
    return episodes


def run(budget: DepthBudget, law_of: Any, steps: int, seed: int) -> list[float]:
    """Caps by step (the horizon where there is none), before each step."""
    rng = np.random.default_rng(seed)
    caps = []
    for step in range(steps):
        episodes = play(budget, law_of(step), rng, step)
        caps.append(float(np.mean([e.plan.cap if e.plan.cap is not None else budget.grid.horizon for e in episodes])))
        budget.observe(episodes)
    return caps


def early(make_law: Any) -> Any:
    """Of 12 turns the first three hold nearly all success; what fails goes on to the end."""
    return make_law(success=(0.25, 0.3, 0.2, 0.03, *(0.004,) * 8), other=(0.02,) * 12)


def late(make_law: Any) -> Any:
    return make_law(success=(0.0, 0.02, 0.03, 0.05, 0.1, 0.2, 0.25, 0.3, 0.2, 0.02, 0.01, 0.01), other=(0.01,) * 12)


def test_no_cap_before_there_is_evidence(make_law: Any) -> None:
    caps = run(DepthBudget(DepthSettings(min_episodes=100), DepthGrid.of("turns", 12)), lambda step: early(make_law), 4, seed=0)
    assert caps[:2] == [12.0, 12.0]
    assert caps[3] < 12


def test_no_ratchet_over_1000_steps(make_law: Any) -> None:
    """The law stays as it is for 1,000 steps. The cap of the last 300 is that of steps 100 to 400, and on average the true coverage is
    above the floor. (A quantile of the successes seen under the cap itself drifts inward without end.)"""
    law = early(make_law)
    budget = DepthBudget(DepthSettings(coverage=0.9, min_explore=0.1), DepthGrid.of("turns", 12))
    caps = np.array(run(budget, lambda step: law, 1000, seed=1))
    first, last = caps[100:400].mean(), caps[700:].mean()
    assert last == pytest.approx(first, abs=0.5)
    coverage = np.interp(caps, np.arange(13), law.incidence / law.incidence[-1])
    assert coverage[50:].mean() > 0.9
    assert caps[50:].mean() < 7

    rng, quantile = np.random.default_rng(1), 12.0
    for _ in range(1000):
        cells, success = law.sample(rng, PER_STEP)
        wins = cells[success & (cells <= quantile)]
        quantile = 0.7 * quantile + 0.3 * float(np.quantile(wins, 0.8)) if wins.size else quantile
    assert law.incidence[int(quantile)] / law.incidence[-1] < 0.75


@pytest.mark.parametrize("seed", [2, 3, 4])
def test_recovers_from_a_shift_that_needs_more_depth(make_law: Any, seed: int) -> None:
    """After 60 steps success moves from turn 2 to turn 7. Within 20 steps the cap covers 90% of it, or is gone."""
    before, after = early(make_law), late(make_law)
    budget = DepthBudget(DepthSettings(coverage=0.9, memory=8), DepthGrid.of("turns", 12))
    caps = run(budget, lambda step: before if step < 60 else after, 100, seed=seed)
    assert np.mean(caps[50:60]) < 7
    assert np.mean(caps[60:62]) < 7
    needed = int(np.argmax(after.incidence / after.incidence[-1] >= 0.9))
    assert min(caps[80:]) >= needed


def test_value_of_going_on(make_law: Any) -> None:
    """V after many steps is what the law says of those that go beyond the cap, although nine in ten of them were cut."""
    law = early(make_law)
    settings = DepthSettings(coverage=0.5, min=3, max=3, explore=0.1, memory=60)
    budget = DepthBudget(settings, DepthGrid.of("turns", 12))
    run(budget, lambda step: law, 150, seed=5)
    plan = budget.plan(10_001, seed=0)
    probabilities = law.end_probabilities
    assert plan.cap == 3
    assert plan.value == pytest.approx(probabilities[3:, 0].sum() / probabilities[3:].sum(), abs=0.03)


def test_draws_are_bernoulli_and_depend_on_the_seed_alone(make_law: Any) -> None:
    budget = DepthBudget(DepthSettings(coverage=0.5, max=3, explore=0.2), DepthGrid.of("turns", 12))
    run(budget, lambda step: early(make_law), 10, seed=6)
    draws = [budget.plan(0, seed).went_on for seed in range(5000)]
    assert np.mean(draws) == pytest.approx(0.2, abs=0.02)
    assert draws == [budget.plan(0, seed).went_on for seed in range(5000)]


def test_buckets_have_caps_of_their_own(make_law: Any) -> None:
    """Easy tasks succeed early, hard ones late: visited often enough each class gets its own cap, and that of the hard ones is deeper."""
    easy = make_law(success=(0.5, 0.4, 0.3, *(0.01,) * 9), other=(0.01,) * 12)
    hard = make_law(success=(0.0, 0.0, 0.0, 0.01, 0.02, 0.04, 0.04, 0.02, 0.01, 0.001, 0.001, 0.001), other=(0.02,) * 12)
    budget, rng = DepthBudget(DepthSettings(coverage=0.8), DepthGrid.of("turns", 12)), np.random.default_rng(7)
    for step in range(80):
        episodes = []
        for place in range(PER_STEP):
            task = place % 16
            (cell,), (won,) = (easy if task < 8 else hard).sample(rng, 1)
            plan = budget.plan(task, seed=step * 1000 + place)
            reached = plan.cap is not None and cell > plan.cap
            cut = reached and not plan.went_on
            depth = plan.cap if cut else int(cell)
            episodes.append(Observed(task, plan, depth, reached, float(won and not cut), depth))
        budget.observe(episodes)
    caps = {name: [budget.plan(task, 0).cap or 12 for task in tasks] for name, tasks in (("easy", range(8)), ("hard", range(8, 16)))}
    assert np.mean(caps["easy"]) + 2 <= np.mean(caps["hard"])


def test_nothing_to_save_means_no_cap(make_law: Any) -> None:
    """Success comes last, failures end early: no cap."""
    law = make_law(success=(*(0.0,) * 10, 0.4, 0.4), other=(0.05,) * 12)
    caps = run(DepthBudget(DepthSettings(), DepthGrid.of("turns", 12)), lambda step: law, 60, seed=8)
    assert np.mean(caps[30:]) > 10


def test_resumed_state_plans_alike(make_law: Any) -> None:
    grid, settings = DepthGrid.of("tokens", 200), DepthSettings()
    budget = DepthBudget(settings, grid)
    rng = np.random.default_rng(9)
    for _ in range(20):
        cells, success = early(make_law).sample(rng, PER_STEP)
        budget.observe(
            [
                Observed(i % 8, EpisodePlan(unit="tokens"), int(c) * 15, False, float(s), int(c) * 15)
                for i, (c, s) in enumerate(zip(cells, success, strict=True))
            ]
        )
    again = DepthBudget(settings, grid)
    again.restore(budget.state())
    plans = [budget.plan(task, seed) for task in range(10) for seed in range(20)]
    assert plans == [again.plan(task, seed) for task in range(10) for seed in range(20)]
    assert any(plan.cap is not None for plan in plans)
    with pytest.raises(InputError, match=r"depth\.buckets"):
        DepthBudget(DepthSettings(buckets=2), grid).restore(budget.state())


@pytest.mark.parametrize(
    ("unit", "horizon", "bounds", "named"),
    [
        ("tokens", 512, {}, "256 tokens, this run up to 512 tokens"),
        ("tokens", 40, {}, "256 tokens, this run up to 40 tokens"),
        ("turns", 256, {}, "256 tokens, this run up to 256 turns"),
        ("tokens", 256, {"max": 50}, "other bounds"),
        ("tokens", 256, {"max": 64}, None),  # on the grid as it is
    ],
)
def test_depths_of_another_run_are_not_taken_over(unit: Any, horizon: int, bounds: dict[str, int], named: str | None) -> None:
    """64 cells of 256 tokens are not 64 cells of 512: their numbers agree, what they say does not."""
    state = DepthBudget.of(DepthSettings(), "tokens", 256).state()
    through_json = {name: np.array(json.loads(json.dumps(values.tolist()))) for name, values in state.items()}
    other = DepthBudget.of(DepthSettings(**bounds), unit, horizon)
    if named is None:
        other.restore(through_json)
        return
    with pytest.raises(InputError, match=named):
        other.restore(through_json)


def test_bounds_are_kept_to_the_token(make_law: Any) -> None:
    """Cells of 64 tokens, and caps between 100 and 120 or up to 50 all the same."""
    both, most = (DepthBudget.of(DepthSettings(**b), "tokens", 4096) for b in ({"min": 100, "max": 120}, {"max": 50}))
    assert [both.grid.edges[cell - 1] for cell in (both.rule.least, both.rule.most)] == [100, 120]
    assert [most.grid.edges[cell - 1] for cell in (most.rule.least, most.rule.most)] == [50, 50]
    assert most.grid.edges[:4] == (50, 64, 128, 192)
    rng = np.random.default_rng(10)
    depths = rng.integers(1, 1000, size=400)
    most.observe([Observed(i, EpisodePlan(unit="tokens"), int(d), False, float(d < 40), int(d)) for i, d in enumerate(depths)])
    assert {most.plan(task, task).cap for task in range(500)} == {50}
    with pytest.raises(InputError, match=r"min: episodes have at most 12 turns anyway.*12 or more would never cut one"):
        DepthBudget.of(DepthSettings(min=12), "turns", 12)


def test_grids() -> None:
    turns, tokens = DepthGrid.of("turns", 5), DepthGrid.of("tokens", 1000)
    assert turns.edges == (1, 2, 3, 4, 5)
    assert tokens.cells == 64
    assert tokens.horizon == 1000
    assert [turns.cell(d) for d in (0, 1, 3, 5, 9)] == [1, 1, 3, 5, 5]
    assert all(tokens.cell(edge) == cell for cell, edge in enumerate(tokens.edges, start=1))
    assert tokens.cell(tokens.edges[0] + 1) == 2
    assert tokens.widths.sum() == 1000
    with pytest.raises(ValueError, match="horizon is 0"):
        DepthGrid.of("turns", 0)
