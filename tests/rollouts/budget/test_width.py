"""Completions per prompt: sums and bounds, what they gain, and the posterior that they come from."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from surogate_rl.rollouts.budget.history import TaskHistory
from surogate_rl.rollouts.budget.width import allocate, efficiency, shares


@settings(max_examples=200, deadline=None)
@given(
    st.lists(st.floats(0, 1), min_size=1, max_size=20),
    st.integers(2, 4),
    st.integers(0, 12),
    st.floats(0, 1),
    st.floats(0, 1),
)
def test_sums_are_exact_and_bounds_hold(variances: list[float], least: int, room: int, floor: float, position: float) -> None:
    most = least + room
    total = round(len(variances) * (least + position * room))
    numbers = allocate(variances, total, least, most, floor)
    assert sum(numbers) == total
    assert all(least <= number <= most for number in numbers)


def test_impossible_sums_are_refused() -> None:
    with pytest.raises(ValueError, match=r"33 completions for 2 prompts do not fit between min 2 and max 16"):
        allocate([0.1, 0.2], 33, 2, 16, 0.1)


def test_in_proportion_to_the_root() -> None:
    """Variances 1 : 4 : 16 give 1 : 2 : 4 of what the floor leaves."""
    np.testing.assert_allclose(shares([1, 4, 16], 0.3), 0.1 + 0.7 * np.array([1, 2, 4]) / 7)
    assert allocate([1, 4, 16], 28, 2, 20, 0.0) == [4, 8, 16]
    assert allocate([0, 0, 0], 9, 2, 8, 0.1) == [3, 3, 3]
    assert allocate([0.25, 0, 0, 0], 32, 2, 32, 0.25) == [26, 2, 2, 2]


def test_neyman_is_the_best() -> None:
    """No other numbers with the same sum give less variance of the mean over prompts (all of them tried)."""
    variances = [0.25, 0.09, 0.01]
    best = allocate(variances, 24, 2, 20, 0.0)
    chosen = sum(v / n for v, n in zip(variances, best, strict=True))
    others = [(a, b, 24 - a - b) for a in range(2, 21) for b in range(2, 21) if 2 <= 24 - a - b <= 20]
    assert chosen == pytest.approx(min(sum(v / n for v, n in zip(variances, n, strict=True)) for n in others), rel=1e-3)
    assert efficiency(variances, best) > 1.2


def test_no_other_numbers_make_variance_times_cost_less() -> None:
    """All other numbers with the same sum tried, where completions of the first prompt take eight times the tokens of the last."""
    variances, costs = [0.25, 0.2, 0.01], [8.0, 2.0, 1.0]

    def product(numbers: tuple[int, ...] | list[int]) -> float:
        spread = sum(v / n for v, n in zip(variances, numbers, strict=True))
        return spread * sum(c * n for c, n in zip(costs, numbers, strict=True))

    total = 60
    best = allocate(variances, total, 2, 56, 0.0, costs)
    others = [(a, b, total - a - b) for a in range(2, 57) for b in range(2, 57) if 2 <= total - a - b <= 56]
    assert product(best) == pytest.approx(min(map(product, others)), rel=2e-3)
    assert product(allocate(variances, total, 2, 56, 0.0)) > 1.05 * product(best)
    assert efficiency(variances, best, costs) == pytest.approx(product([20, 20, 20]) / product(best))
    assert allocate(variances, total, 2, 56, 0.0, [3.0] * 3) == allocate(variances, total, 2, 56, 0.0)


def test_expected_tokens_of_a_task() -> None:
    """By hand: visits of 10 and 40 tokens in the mean, a discount of one half, and the population's mean (25) as one visit more."""
    history = TaskHistory(discount=0.5, keep=1.0)
    assert history.cost(1) == 1.0
    history.add_cost(1, [10, 10])
    history.add_cost(1, [30, 50])
    assert history.cost(1) == pytest.approx((25 + 0.5 * 10 + 40) / (1 + 0.5 + 1))
    assert history.cost(2) == pytest.approx(25)
    again = TaskHistory(discount=0.5, keep=1.0)
    again.restore(history.state())
    assert (again.cost(1), again.cost(2)) == (history.cost(1), history.cost(2))


def test_beta_posterior() -> None:
    """Against the Beta distribution of scipy, with the prior's strength as fitted."""
    stats = pytest.importorskip("scipy.stats")
    history = TaskHistory(discount=0.5)
    history.add(7, [1, 0, 0, 0, 0, 0, 0, 0], [1.0] * 8)
    history.add(7, [1, 1, 0, 0], [1.0] * 4)
    mean, strength, _ = history.population()
    found = history.posterior(7)
    law = stats.beta(strength * mean + 0.5 + 2, strength * (1 - mean) + 3.5 + 2)
    assert found.mean == pytest.approx(law.mean())
    assert found.variance == pytest.approx(law.expect(lambda p: p * (1 - p)))
    assert found.seen == pytest.approx(8)


def test_population_is_fitted() -> None:
    """Mean and strength of the Beta law that tasks were drawn from: a U-shaped and a bell-shaped one."""
    rng = np.random.default_rng(0)
    for a, b in ((0.3, 0.6), (6.0, 4.0)):
        history = TaskHistory(keep=1.0)
        for task, p in enumerate(rng.beta(a, b, size=4000)):
            history.add(task, (rng.random(8) < p).astype(float).tolist(), [1.0] * 8)
        mean, strength, _ = history.population()
        assert mean == pytest.approx(a / (a + b), abs=0.02)
        assert strength == pytest.approx(a + b, rel=0.15)


def test_graded_rewards() -> None:
    """The posterior mean of the variance finds noisy tasks, whatever their means, and takes unseen ones for average."""
    rng = np.random.default_rng(1)
    history = TaskHistory(discount=1.0, keep=1.0)
    spread = [0.05, 0.4, 0.05, 0.4]
    for _ in range(100):
        for task, scale in enumerate(spread):
            history.add(task, (task + scale * rng.standard_normal(4)).tolist(), [1.0] * 4)
    for task, scale in enumerate(spread):
        assert history.posterior(task).variance == pytest.approx(scale**2, rel=0.25, abs=0.004)
        assert history.posterior(task).mean == pytest.approx(task, abs=0.1)
    assert history.posterior(99).variance == pytest.approx((0.05**2 + 0.4**2) / 2, rel=0.2)


def test_weights_do_not_make_much_of_little() -> None:
    """One episode that stands for ten is one episode."""
    history = TaskHistory()
    history.add(1, [1.0], [10.0])
    assert history.posterior(1).seen == pytest.approx(1.0)


def test_state_comes_back() -> None:
    history = TaskHistory()
    history.add(3, [1, 0, 0.5], [1.0, 2.0, 1.0])
    again = TaskHistory()
    again.restore(history.state())
    for task in (3, 4):
        assert again.posterior(task) == history.posterior(task)


def test_gain_over_equal_numbers_in_simulation() -> None:
    """A U-shaped population visited again and again, 8 completions per prompt in the mean: the true variance of the step's gradient under
    the chosen numbers is well below that under equal ones."""
    rng = np.random.default_rng(2)
    chances = rng.beta(0.3, 0.3, size=64)
    history = TaskHistory(discount=0.7)
    gains = []
    for step in range(80):
        tasks = rng.permutation(64)[:16]
        numbers = allocate([history.posterior(int(t)).variance for t in tasks], 128, 2, 24, 0.1)
        true = chances[tasks] * (1 - chances[tasks])
        if step > 20:
            gains.append((true / 8).sum() / (true / np.array(numbers)).sum())
        history.forget()
        for task, number in zip(tasks.tolist(), numbers, strict=True):
            history.add(task, (rng.random(number) < chances[task]).astype(float).tolist(), [1.0] * number)
    assert np.mean(gains) > 1.15
