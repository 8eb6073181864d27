"""Credit by turns: hand-worked groups, single turns as the special case, and the expected gradient by exact enumeration."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest

from surogate_rl.objectives import POLICY_LOSSES, group_advantages
from surogate_rl.objectives.turn_credit import rewards_to_go, turn_advantages


def test_rewards_to_go_by_hand() -> None:
    assert rewards_to_go([1.0, 2.0, 3.0], 4.0) == [10.0, 9.0, 7.0]
    # 1 + .5 (2 + .5 (3 + 4)), 2 + .5 (3 + 4), 3 + 4: the outcome comes with the last turn
    assert rewards_to_go([1.0, 2.0, 3.0], 4.0, discount=0.5) == [3.75, 5.5, 7.0]
    assert rewards_to_go([0.0, 0.0], 1.0, discount=0.0) == [0.0, 1.0]
    assert rewards_to_go([0.1] * 3, -0.3)[0] == 0.0  # no residue of rounding
    with pytest.raises(ValueError, match="has one turn at least"):
        rewards_to_go([], 1.0)


def test_a_group_by_hand() -> None:
    """N = 3. Turn 0: 6, 3, 0 against the others' means 1.5, 3, 4.5. Turn 1: 4 and 2 against each other. Turn 2: only the first has one,
    its 5 is compared with the other's 2 at turn 1. All times 2/3."""
    (group,) = turn_advantages([[[6.0, 4.0, 5.0], [3.0, 2.0], [0.0], None]], scale_rewards="none")
    assert group[3] is None
    expected = [[4.5, 2.0, 3.0], [0.0, -2.0], [-4.5]]
    for own, values in zip(group[:3], expected, strict=True):
        assert own is not None
        np.testing.assert_allclose(own, np.array(values) * 2 / 3)


def test_scales_are_those_of_the_completions_rewards() -> None:
    groups = [[[2.0, 1.0], [0.0]], [[5.0], [1.0, 3.0]]]
    plain = turn_advantages(groups, scale_rewards="none")
    by_group = turn_advantages(groups, scale_rewards="group")
    by_batch = turn_advantages(groups, scale_rewards="batch")
    for place, std in enumerate([np.std([2.0, 0.0], ddof=1), np.std([5.0, 1.0], ddof=1)]):
        for sample in range(2):
            own = plain[place][sample]
            assert own is not None
            np.testing.assert_allclose(by_group[place][sample], own / (std + 1e-4))
            np.testing.assert_allclose(by_batch[place][sample], own / (np.std([2.0, 0.0, 5.0, 1.0], ddof=1) + 1e-4))


@pytest.mark.parametrize("loss_type", [loss for loss in POLICY_LOSSES if loss not in ("rloo", "gspo")])
@pytest.mark.parametrize("scale", [None, "none", "batch"])
def test_with_one_turn_each_it_is_the_usual_advantage(loss_type: str, scale: str | None) -> None:
    rng = np.random.default_rng(0)
    rewards: list[list[float | None]] = [[float(x) for x in rng.normal(size=4)] for _ in range(3)]
    rewards[0][1] = None
    rewards[2] = [1.0, 1.0, 1.0, None]
    usual = group_advantages(rewards, scale_rewards=scale, loss_type=loss_type).values
    turns = turn_advantages([[None if r is None else [r] for r in g] for g in rewards], scale_rewards=scale, loss_type=loss_type)
    for group, values in zip(turns, usual, strict=True):
        for own, value in zip(group, values, strict=True):
            assert value == (0.0 if own is None else pytest.approx(float(own[0]), rel=1e-5, abs=1e-7))


def test_equal_rewards_are_exactly_zero_and_a_single_completion_teaches_nothing() -> None:
    (group,) = turn_advantages([[[0.3, 0.1], [0.3, 0.1], [0.3]]])
    assert [list(own) for own in group if own is not None] == [[0.0, 0.0], [0.0, 0.0], [0.0]]
    (alone,) = turn_advantages([[[1.0, 2.0], None]])
    assert alone[0] is not None
    assert list(alone[0]) == [0.0, 0.0]
    assert turn_advantages([[None, None]]) == [[None, None]]


def test_the_expected_gradient_is_the_policys() -> None:
    """A walk with three decisions, each a coin of its own: stop or go on. Over all outcomes of a group of three, weighted by their
    probabilities, advantages times the gradients of the log-probabilities give (N - 1) / N times the gradient of the expected reward."""
    theta = np.array([0.4, -0.3, 0.8])
    go = 1 / (1 + np.exp(-theta))
    stop_reward, go_reward, end = [0.3, -1.0, 2.0], [0.1, 0.5, -0.2], 1.7

    # a trajectory: how often it goes on; its turns' rewards; its outcome
    trajectories = []
    for goes in range(4):
        turns = min(goes + 1, 3)
        rewards = [go_reward[t] if t < goes else stop_reward[t] for t in range(turns)]
        probability = math.prod(go[t] if t < goes else 1 - go[t] for t in range(turns))
        score = np.zeros(3)
        for t in range(turns):
            score[t] = (1 - go[t]) if t < goes else -go[t]
        trajectories.append((probability, rewards_to_go(rewards, end if goes == 3 else 0.0), score))
    assert sum(p for p, _, _ in trajectories) == pytest.approx(1.0)
    exact = sum(p * returns[0] * score for p, returns, score in trajectories)

    size = 3
    expected = np.zeros(3)
    for group in itertools.product(trajectories, repeat=size):
        probability = math.prod(p for p, _, _ in group)
        (advantages,) = turn_advantages([[returns for _, returns, _ in group]], scale_rewards="none")
        for own, (_, returns, score) in zip(advantages, group, strict=True):
            assert own is not None
            for turn in range(len(returns)):
                expected[turn] += probability * own[turn] * score[turn] / size
    np.testing.assert_allclose(expected, exact * (size - 1) / size, atol=1e-8)
