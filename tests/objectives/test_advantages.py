"""Advantages against TRL's, by hand, and under conditions that break naive code."""

from __future__ import annotations

from itertools import pairwise
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from surogate_rl.objectives.advantages import group_advantages, penalise, reference_kl, resolve_scale_rewards

FLOATS = st.floats(-100, 100, allow_nan=False)
LOSSES = ["grpo", "rloo", "reinforce_plus_plus"]


def test_right_values() -> None:
    result = group_advantages([[1, 0, 0, 1]])
    np.testing.assert_allclose(result.values[0], [0.865875, -0.865875, -0.865875, 0.865875], atol=1e-6)
    assert result.metrics["reward"] == (2.0, 4.0)
    assert result.metrics["frac_reward_zero_std"] == (0.0, 1.0)


@pytest.mark.parametrize("loss_type", LOSSES)
@pytest.mark.parametrize("scale", ["batch", "none"])
@pytest.mark.parametrize("reward", [0.35, 1 / 3, 1e-30, 1e8, 0.1 + 0.2])
def test_equal_rewards_are_exactly_zero(loss_type: str, scale: str, reward: float) -> None:
    result = group_advantages([[reward] * 8, [reward] * 8], loss_type=loss_type, scale_rewards=scale)
    assert all((values == 0).all() for values in result.values)
    assert result.metrics["frac_reward_zero_std"][0] == result.metrics["frac_reward_zero_std"][1]


@pytest.mark.parametrize("scale", ["group", "batch", "none", None])
def test_an_equal_group_is_exactly_zero_beside_an_unequal_one(scale: str | None) -> None:
    result = group_advantages([[0.35] * 8, [0.0, 1.0, 0.3, 0.2]], scale_rewards=scale)
    assert (result.values[0] == 0).all()
    assert (result.values[1] != 0).all()
    assert result.metrics["frac_reward_zero_std"] == (1.0, 2.0)
    result = group_advantages([[0.35] * 7, [0.0, 1.0, 0.3]], loss_type="rloo", scale_rewards="batch")
    assert (result.values[0] == 0).all()


@pytest.mark.parametrize("loss_type", ["grpo", "rloo", "dapo"])
def test_a_group_of_one_is_an_error(loss_type: str) -> None:
    with pytest.raises(
        ValueError, match=r"prompt 1 has 1 completion\(s\), but the baseline of loss_type .* raise rollouts.num_generations"
    ):
        group_advantages([[1, 0], [1]], loss_type=loss_type)
    np.testing.assert_allclose(group_advantages([[1], [0]], loss_type="reinforce_plus_plus", scale_rewards="none").values, [[0.5], [-0.5]])


def test_reinforce_plus_plus_by_hand() -> None:
    # Scored 0, 3, 2, 3: mean 2, sample variance (4 + 1 + 0 + 1) / 3.
    result = group_advantages([[0, 3, None], [2, 3]], loss_type="reinforce_plus_plus")
    assert result.scored[0].tolist() == [True, True, False]
    mean, std = 2.0, np.sqrt((4 + 1 + 0 + 1) / 3)
    np.testing.assert_allclose(result.values[0], [(0 - mean) / (std + 1e-4), (3 - mean) / (std + 1e-4), 0], rtol=1e-6)
    np.testing.assert_allclose(result.values[1], [0, (3 - mean) / (std + 1e-4)], rtol=1e-6)


def test_leave_one_out_by_hand() -> None:
    result = group_advantages([[1, 0, 0, None], [5, None, None, None]], loss_type="rloo")
    np.testing.assert_allclose(result.values[0], [1, -0.5, -0.5, 0])
    np.testing.assert_array_equal(result.values[1], 0)


def test_unscored_completions_leave_mean_and_deviation() -> None:
    result = group_advantages([[1, None, 0, 1]])
    std = np.std([1, 0, 1], ddof=1)
    np.testing.assert_allclose(result.values[0], [(1 / 3) / (std + 1e-4), 0, (-2 / 3) / (std + 1e-4), (1 / 3) / (std + 1e-4)], rtol=1e-6)
    assert result.scored[0].tolist() == [True, False, True, True]
    assert result.metrics["reward"][0] / result.metrics["reward"][1] == pytest.approx(0.6666667)


@pytest.mark.parametrize("loss_type", ["grpo", "rloo"])
def test_fewer_than_two_scored_give_zero(loss_type: str) -> None:
    result = group_advantages([[None, 7.0, None], [None, None]], loss_type=loss_type)
    assert all((values == 0).all() for values in result.values)
    assert [mask.tolist() for mask in result.scored] == [[False, True, False], [False, False]]


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_rewards_that_are_not_finite_are_refused(bad: float) -> None:
    with pytest.raises(ValueError, match="completion 1 of prompt 0, expected a finite number, or None"):
        group_advantages([[1, bad]])


def test_scale_rewards_by_loss_type() -> None:
    assert resolve_scale_rewards("grpo", None) == "group"
    assert resolve_scale_rewards("my/loss.py:fn", None) == "group"
    assert resolve_scale_rewards("rloo", None) == "none"
    assert resolve_scale_rewards("reinforce_plus_plus", None) == "batch"
    for loss_type in ("rloo", "reinforce_plus_plus"):
        with pytest.raises(ValueError, match=f"scale_rewards: group does not go with loss_type {loss_type}"):
            resolve_scale_rewards(loss_type, "group")
    with pytest.raises(ValueError, match="scale_rewards: 'groups', expected one of group, batch, none"):
        resolve_scale_rewards("grpo", "groups")


@pytest.mark.parametrize(
    ("ours", "theirs"),
    [
        ({"scale_rewards": "group"}, {"scale_rewards": "group"}),
        ({"scale_rewards": "batch"}, {"scale_rewards": "batch"}),
        ({"scale_rewards": "none"}, {"scale_rewards": "none"}),
        ({"loss_type": "rloo"}, {"rloo": True}),
        ({"loss_type": "rloo", "scale_rewards": "batch"}, {"rloo": True, "normalize_advantages": True}),
    ],
)
def test_against_trl(tools: SimpleNamespace, ours: dict[str, str], theirs: dict[str, object]) -> None:
    step = tools.make_step(4, prompts=4, group=5)
    step.rewards[2] = step.rewards[11] = None
    step.rewards[15:19] = [None] * 4  # one score left
    trl = tools.run_trl_policy(step, **theirs)
    result = group_advantages(step.grouped(step.rewards), **ours)
    np.testing.assert_allclose(np.concatenate(result.values), trl.advantages, rtol=1e-4, atol=1e-6)
    assert result.metrics["reward"][0] / result.metrics["reward"][1] == pytest.approx(trl.metrics["reward"], rel=1e-5)
    assert result.metrics["reward_std"][0] == pytest.approx(trl.metrics["reward_std"], rel=1e-5)


def test_the_reference_penalty(tools: SimpleNamespace) -> None:
    step = tools.make_step(6)
    batch, _, _ = tools.pack_step(step)
    expected = [float((p - r).sum()) for p, r in zip(step.proximal, step.reference, strict=True)]
    np.testing.assert_allclose(reference_kl(batch), expected, rtol=1e-4, atol=1e-5)
    assert penalise([[1.0, None]], [[2.0, 3.0]], 0.5) == [[0.0, None]]


@settings(deadline=None)
@given(
    st.lists(st.lists(st.one_of(st.none(), FLOATS), min_size=2, max_size=6), min_size=1, max_size=5),
    st.sampled_from(LOSSES),
    st.sampled_from(["batch", "none", None]),
)
def test_advantages_are_finite_centred_and_keep_the_order(rewards: list[list[float | None]], loss_type: str, scale: str | None) -> None:
    result = group_advantages(rewards, loss_type=loss_type, scale_rewards=scale)
    for group, values, scored in zip(rewards, result.values, result.scored, strict=True):
        assert np.isfinite(values).all()
        assert (values[~scored] == 0).all()
        assert scored.tolist() == [reward is not None for reward in group]
        if loss_type != "reinforce_plus_plus":
            assert abs(float(values.astype(np.float64).sum())) < 1e-3
        known = [(reward, value) for reward, value in zip(group, values, strict=True) if reward is not None]
        ordered = [value for _, value in sorted(known, key=lambda item: item[0])]
        assert all(later >= earlier for earlier, later in pairwise(ordered))
