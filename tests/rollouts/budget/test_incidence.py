"""The estimator of success by depth, against the laws that episodes were drawn from and against lifelines."""

from __future__ import annotations

import warnings
from typing import Any

import numpy as np
import pytest

from surogate_rl.rollouts.budget.incidence import DepthLaw, wilson, wilson_high


def censored(law: Any, rng: np.random.Generator, count: int, cap: int | None, explore: float, into: DepthLaw | None = None) -> DepthLaw:
    """`count` episodes, cut after cell `cap` unless they go on with probability `explore`."""
    result = into or DepthLaw(law.cells)
    cells, success = law.sample(rng, count)
    went_on = rng.random(count) < explore
    for cell, won, on in zip(cells.tolist(), success.tolist(), went_on.tolist(), strict=True):
        if cap is None or cell <= cap:
            result.add_end(cell, success=won, reward=float(won))
        elif on:
            result.add_end(cell, success=won, reward=float(won), cap=cap, explore=explore)
        else:
            result.add_cut(cap)
    return result


def test_hand_worked() -> None:
    """Four episodes over three cells, cap after the first: one success at 1, one failure at 2 and one success at 3 that went on with
    e = 1/2, and one that was cut."""
    law = DepthLaw(3)
    law.add_end(1, success=True, reward=1.0)
    law.add_end(2, success=False, reward=0.0, cap=1, explore=0.5)
    law.add_end(3, success=True, reward=1.0, cap=1, explore=0.5)
    law.add_cut(1)
    estimate = law.estimate()
    np.testing.assert_allclose(law.entered, [4, 4, 2])
    np.testing.assert_allclose(estimate.hazard, [1 / 4, 1 / 2, 1])
    np.testing.assert_allclose(estimate.survival, [1, 3 / 4, 3 / 8, 0])
    np.testing.assert_allclose(estimate.success, [0, 1 / 4, 1 / 4, 1 / 4 + 3 / 8])
    np.testing.assert_allclose(estimate.effective, [4, 2, 1])
    assert estimate.value(1).value == pytest.approx(1 / 2)
    assert estimate.coverage(1).value == pytest.approx((1 / 4) / (5 / 8))


def test_without_cuts_it_is_the_share(long_tail: Any) -> None:
    """No cuts: the incidence is the empirical share, and its variance the binomial one."""
    rng = np.random.default_rng(0)
    cells, success = long_tail.sample(rng, 500)
    law = DepthLaw(long_tail.cells)
    for cell, won in zip(cells.tolist(), success.tolist(), strict=True):
        law.add_end(cell, success=won, reward=float(won))
    estimate = law.estimate()
    for depth in range(1, long_tail.cells + 1):
        share = float(np.mean(success & (cells <= depth)))
        found = estimate.success_by(depth)
        assert found.value == pytest.approx(share)
        assert found.error == pytest.approx(np.sqrt(share * (1 - share) / 500), rel=1e-9)


def test_failures_are_not_censored(make_law: Any) -> None:
    """What one minus Kaplan-Meier gives when other ends count as censored is not the incidence, and larger by far."""
    often_fails = make_law(success=(0.1,) * 12, other=(0.15,) * 12)
    law = censored(often_fails, np.random.default_rng(1), 4000, None, 1.0)
    naive = 1 - np.cumprod(1 - law.success / np.maximum(law.entered, 1))
    truth = often_fails.incidence[-1]
    assert abs(law.estimate().success[-1] - truth) < 0.02
    assert naive[-1] > 1.5 * truth


def test_weights_agree_with_lifelines() -> None:
    """Survival with weights 1/e beyond the cap, against lifelines' Kaplan-Meier, which takes the second part of an episode as a row that
    enters late. Every episode has a depth of its own."""
    lifelines = pytest.importorskip("lifelines")
    rng = np.random.default_rng(3)
    count, cap, explore = 200, 80, 0.3
    law, rows = DepthLaw(count), []
    for depth, on in zip((rng.permutation(count) + 1).tolist(), (rng.random(count) < explore).tolist(), strict=True):
        if depth <= cap:
            law.add_end(depth, success=True, reward=1.0)
            rows.append((0, depth, True, 1.0))
            continue
        # cut between cells, as here: half a cell after the cap, so that no row ends in the cell where it enters
        rows.append((0, cap + 0.5, False, 1.0))
        if on:
            law.add_end(depth, success=True, reward=1.0, cap=cap, explore=explore)
            rows.append((cap + 0.5, depth, True, 1 / explore))
        else:
            law.add_cut(cap)
    entry, duration, event, weight = (np.array(column, dtype=float) for column in zip(*rows, strict=True))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # it says that weights which are no whole numbers need another variance, which is right
        fitted = lifelines.KaplanMeierFitter().fit(duration, event > 0, entry=entry, weights=weight)
    curve = fitted.survival_function_.iloc[:, 0]
    left = [1.0] + [float(curve.loc[:depth].iloc[-1]) for depth in range(1, count + 1)]
    np.testing.assert_allclose(law.estimate().survival, left, atol=1e-9)


def test_censored_rows_agree_with_lifelines() -> None:
    """Plain censoring with unit weights (caps of two kinds, nobody goes on): incidence and variance."""
    lifelines = pytest.importorskip("lifelines")
    rng = np.random.default_rng(4)
    count = 300
    depths, success = rng.permutation(count) + 1, rng.random(count) < 0.5
    caps = rng.integers(40, count, size=count)
    law, duration, event = DepthLaw(count), [], []
    for depth, won, cap in zip(depths.tolist(), success.tolist(), caps.tolist(), strict=True):
        if depth <= cap:
            law.add_end(depth, success=won, reward=float(won))
            duration.append(float(depth))
            event.append(1 if won else 2)
        else:
            law.add_cut(cap)
            duration.append(cap + 0.25 + 0.5 * rng.random())
            event.append(0)
    fitter = lifelines.AalenJohansenFitter(calculate_variance=True).fit(np.array(duration), np.array(event), event_of_interest=1)
    curve = fitter.cumulative_density_.iloc[:, 0]
    for depth in (50, 120, 200, 280):
        ours = law.estimate().success_by(depth)
        assert ours.value == pytest.approx(float(curve.loc[:depth].iloc[-1]), abs=1e-9)
        assert ours.error**2 == pytest.approx(float(fitter.variance_.loc[:depth].iloc[-1]), rel=0.04)


N, EXPLORE, CAP = 500, 0.25, 4


def test_bias_and_coverage(long_tail: Any) -> None:
    """400 runs of 500 episodes, cap after 4 of 12 cells, e = 1/4: bias below 0.005 at every depth; 95% intervals hold the truth in 93% to
    97% of the runs (averaged over depths, so that the check itself is not noise) for incidence, coverage and the value of going on."""
    rng = np.random.default_rng(5)
    truth = long_tail.incidence
    total, probabilities = truth[-1], long_tail.end_probabilities
    value = probabilities[CAP:, 0].sum() / probabilities[CAP:].sum()
    depths = range(1, long_tail.cells + 1)
    estimates = np.zeros((400, long_tail.cells))
    hit = np.zeros((400, long_tail.cells))
    shares = np.zeros((400, 3))
    for run in range(400):
        estimate = censored(long_tail, rng, N, CAP, EXPLORE).estimate()
        for depth in depths:
            found = estimate.success_by(depth)
            estimates[run, depth - 1] = found.value
            hit[run, depth - 1] = found.low <= truth[depth] <= found.high
        for place, depth in enumerate((CAP - 1, CAP + 2)):
            found = estimate.coverage(depth)
            shares[run, place] = found.low <= truth[depth] / total <= found.high
        found = estimate.value(CAP, reward=False)
        shares[run, 2] = found.low <= value <= found.high
    assert np.abs(estimates.mean(axis=0) - truth[1:]).max() < 0.005
    assert 0.93 <= hit.mean() <= 0.97, hit.mean(axis=0)
    assert hit.mean(axis=0).min() > 0.92
    assert 0.93 <= shares.mean() <= 0.97, shares.mean(axis=0)
    assert shares.mean(axis=0).min() > 0.92


def test_mixed_caps_and_forgetting_stay_unbiased(long_tail: Any) -> None:
    """Caps and e that change from step to step (a deeper one, a shallower one, none) and forgotten weights. To pool the same episodes as
    they are, cut ones as failures, misses by far."""
    rng = np.random.default_rng(6)
    truth = long_tail.incidence[-1]
    weighted, naive = [], []
    for _ in range(300):
        law, wins, seen = DepthLaw(long_tail.cells), 0.0, 0.0
        for cap, explore in ((None, 1.0), (5, 0.5), (3, 0.25), (7, 0.3), (2, 0.3)):
            law.forget(0.9)
            before = law.success[: cap or long_tail.cells].sum()
            censored(long_tail, rng, 200, cap, explore, into=law)
            wins = 0.9 * wins + law.success[: cap or long_tail.cells].sum() - before
            seen = 0.9 * seen + 200
        weighted.append(law.estimate().success[-1])
        naive.append(wins / seen)
    assert abs(np.mean(weighted) - truth) < 0.005
    assert truth - np.mean(naive) > 0.05


def test_rewards_of_any_size(long_tail: Any) -> None:
    """The value of going on of graded rewards, against the law's own, and its standard error against the spread over runs."""
    rng = np.random.default_rng(7)
    probabilities = long_tail.end_probabilities
    left = probabilities[CAP:].sum()
    cells = np.arange(1, long_tail.cells + 1)
    truth = float((probabilities[CAP:, 0] * (2 - 0.1 * cells[CAP:])).sum() - 0.3 * probabilities[CAP:, 1].sum()) / left
    values, errors = [], []
    for _ in range(400):
        law = DepthLaw(long_tail.cells)
        ends, success = long_tail.sample(rng, 400)
        for cell, won, on in zip(ends.tolist(), success.tolist(), (rng.random(400) < EXPLORE).tolist(), strict=True):
            reward = 2 - 0.1 * cell if won else -0.3
            if cell <= CAP:
                law.add_end(cell, success=won, reward=reward)
            elif on:
                law.add_end(cell, success=won, reward=reward, cap=CAP, explore=EXPLORE)
            else:
                law.add_cut(CAP)
        found = law.estimate().value(CAP)
        values.append(found.value)
        errors.append(found.error)
    assert np.mean(values) == pytest.approx(truth, abs=0.02)
    assert np.mean(errors) == pytest.approx(np.std(values), rel=0.08)


def test_all_depths_at_once(long_tail: Any) -> None:
    """What the choice of a cap reads for all depths is what is said of each."""
    estimate = censored(long_tail, np.random.default_rng(8), 300, CAP, EXPLORE).estimate()
    values, variances = estimate.values_by_depth()
    followed = estimate.followed_by_depth()
    limits = wilson_high(np.full(long_tail.cells + 1, 0.2), followed, 1.0)
    for depth in range(long_tail.cells):
        single = estimate.value(depth)
        assert values[depth] == pytest.approx(single.value, abs=1e-12)
        assert variances[depth] == pytest.approx(single.error**2, abs=1e-12)
        assert followed[depth] == pytest.approx(estimate.followed(depth))
        assert limits[depth] == pytest.approx(wilson(0.2, followed[depth], 1.0)[1])


def test_wilson_against_scipy() -> None:
    stats = pytest.importorskip("scipy.stats")
    for hits, count in ((0, 7), (3, 20), (20, 20)):
        expected = stats.binomtest(hits, count).proportion_ci(0.95, method="wilson")
        assert wilson(hits / count, count, stats.norm.ppf(0.975)) == pytest.approx((expected.low, expected.high), abs=1e-12)
    assert wilson(0.0, 0.0, 1.0) == (0.0, 1.0)
