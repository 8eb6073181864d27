"""The expected gradient with cuts, worked out exactly: every action, every draw of going on and every combination within a group.

The policy is tabular: in each state (the history of actions) it takes one of two actions with its own logit. An episode ends in the
histories that `ENDS` lists, with their rewards, so lengths, successes and what the first actions tell about the rest all vary ("10" ends
just where the cap is, without having reached it). The gradient
by the logits that `step_credits` and `token_advantages` make is compared with that of the expected reward without a cap.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import pytest

from surogate_rl.rollouts.budget.credit import EpisodePlan, Outcome, prompt_weights, step_credits, token_advantages

STATES = ("", "0", "1", "00", "01", "10", "11", "010", "011", "110")
ENDS = {
    "000": 1.0,
    "001": 0.0,
    "10": 0.25,
    "111": 1.0,
    "0100": 0.0,
    "0101": 1.0,
    "0110": 1.0,
    "0111": 0.0,
    "1100": 0.0,
    "1101": 1.0,
}
LOGITS = dict(zip(STATES, (0.3, -0.4, 0.8, 0.1, -0.9, 0.5, 0.2, -1.1, 0.7, 0.4), strict=True))
CAP = 2


@dataclass(frozen=True)
class Path:
    """One way an episode can go, with its probability, what it shows to the credit, and the score of each of its actions."""

    actions: str
    probability: float
    outcome: Outcome

    def gradient(self, before: float, after: float) -> np.ndarray:
        advantages, _ = token_advantages(
            [True] * len(self.actions),
            list(range(len(self.actions))),
            self.outcome.plan,
            type(CREDIT)(before, after),
        )
        result = np.zeros(len(STATES))
        for place, action in enumerate(self.actions):
            state = self.actions[:place]
            result[STATES.index(state)] += advantages[place] * ((action == "1") - go_one(state))
        return result


CREDIT = step_credits([[Outcome(EpisodePlan(), 0.0, False), Outcome(EpisodePlan(), 1.0, False)]])[0][0]


def go_one(state: str) -> float:
    return 1 / (1 + math.exp(-LOGITS[state]))


def chance(actions: str) -> float:
    return math.prod(go_one(actions[:i]) if a == "1" else 1 - go_one(actions[:i]) for i, a in enumerate(actions))


def exact_gradient(ends: dict[str, float] = ENDS) -> np.ndarray:
    """Of the expected reward, without a cap: sum over histories of probability x reward x score."""
    total = np.zeros(len(STATES))
    for actions, reward in ends.items():
        for place, action in enumerate(actions):
            state = actions[:place]
            total[STATES.index(state)] += chance(actions) * reward * ((action == "1") - go_one(state))
    return total


def paths(explore: float, value: float, ends: dict[str, float] = ENDS, at_cap: float = 0.0) -> list[Path]:
    """All that can happen to an episode with a cap of two actions. `at_cap`: what a cut episode is scored as it stands."""
    found: dict[tuple[str, bool], Path] = {}
    for actions, reward in ends.items():
        for went_on in (True, False):
            share = explore if went_on else 1 - explore
            plan = EpisodePlan(unit="turns", cap=CAP, explore=explore, went_on=went_on, value=value)
            cut = len(actions) > CAP and not went_on
            seen = actions[:CAP] if cut else actions
            key = (seen, went_on)
            before = found[key].probability if key in found else 0.0
            found[key] = Path(seen, before + share * chance(actions), Outcome(plan, at_cap if cut else reward, len(actions) > CAP))
    assert sum(path.probability for path in found.values()) == pytest.approx(1)
    return [path for path in found.values() if path.probability > 0]


def expected_gradient(group: Sequence[Path], size: int, kind: str, factor: float = 1.0) -> np.ndarray:
    """Expectation over all combinations of `size` episodes of the mean gradient of a group."""
    total = np.zeros(len(STATES))
    for members in itertools.product(group, repeat=size):
        probability = math.prod(path.probability for path in members)
        (credits,) = step_credits([[path.outcome for path in members]], kind=kind, factor=factor)
        for path, credit in zip(members, credits, strict=True):
            if credit.trained:
                total += probability / size * path.gradient(credit.before, credit.after)
    return total


@pytest.mark.parametrize("explore", [0.1, 0.5, 0.9])
@pytest.mark.parametrize("value", [-0.3, 0.0, 0.37, 1.0])
def test_unbiased_whatever_v_and_e(explore: float, value: float) -> None:
    np.testing.assert_allclose(expected_gradient(paths(explore, value), 2, "unbiased"), exact_gradient(), atol=1e-12)


def test_unbiased_in_groups_of_three() -> None:
    np.testing.assert_allclose(expected_gradient(paths(0.2, 0.37), 3, "unbiased"), exact_gradient(), atol=1e-12)


@pytest.mark.parametrize("kind", ["value", "mask", "zero"])
def test_the_others_are_biased(kind: str) -> None:
    """By more than a tenth of the gradient, although V is the true mean value of going on."""
    value = sum(chance(a) * r for a, r in ENDS.items() if len(a) > CAP) / sum(chance(a) for a in ENDS if len(a) > CAP)
    exact = exact_gradient()
    assert np.linalg.norm(expected_gradient(paths(0.25, value), 2, kind) - exact) > 0.1 * np.linalg.norm(exact)


def test_counting_the_weight_twice_is_wrong() -> None:
    """Later tokens with (V + (R - V) / e) / e: their expected gradient is multiplied by 1/e, the others' is right."""
    explore, value = 0.25, 0.37
    total = np.zeros(len(STATES))
    for members in itertools.product(paths(explore, value), repeat=2):
        probability = math.prod(path.probability for path in members)
        (credits,) = step_credits([[path.outcome for path in members]])
        for path, credit in zip(members, credits, strict=True):
            total += probability / 2 * path.gradient(credit.before, (value + (path.outcome.reward - value) / explore) / explore)
    exact = exact_gradient()
    early = [place for place, state in enumerate(STATES) if len(state) < CAP]
    late = [place for place, state in enumerate(STATES) if len(state) >= CAP]
    np.testing.assert_allclose(total[early], exact[early], atol=1e-12)
    np.testing.assert_allclose(total[late], exact[late] / explore, atol=1e-12)


def test_a_baseline_with_the_episodes_own_credit_is_wrong_after_the_cap() -> None:
    """With the group's mean for a baseline the factor is (n - 1) / n before the cap but 1 - 1 / (n e) after it: negative here."""
    explore, value, size = 0.25, 0.37, 2
    total = np.zeros(len(STATES))
    for members in itertools.product(paths(explore, value), repeat=size):
        probability = math.prod(path.probability for path in members)
        credited = []
        for path in members:
            outcome = path.outcome
            credited.append(
                outcome.reward
                if not outcome.reached
                else value + (outcome.reward - value) / explore * outcome.plan.went_on  # G / e (R - V)
            )
        mean = sum(credited) / size
        for path, own in zip(members, credited, strict=True):
            total += probability / size * path.gradient(own - mean, (path.outcome.reward - mean) / explore)
    exact = exact_gradient()
    early = [place for place, state in enumerate(STATES) if len(state) < CAP]
    late = [place for place, state in enumerate(STATES) if len(state) >= CAP]
    np.testing.assert_allclose(total[early], exact[early] * (size - 1) / size, atol=1e-12)
    np.testing.assert_allclose(total[late], exact[late] * (1 - 1 / (size * explore)), atol=1e-12)


def test_unequal_groups_stay_unbiased() -> None:
    """Prompts with two and with three completions, weighed by mean n / n: the sum over the step's completions, divided by their number,
    is the mean of the prompts' exact gradients; without the weights, or with baselines that contain the own reward, it is not."""
    other = {actions: 1.0 - reward if len(actions) == 3 else reward for actions, reward in ENDS.items()}
    sizes, laws = (2, 3), (ENDS, other)
    weights = prompt_weights(sizes)
    wanted = (exact_gradient(ENDS) + exact_gradient(other)) / 2
    means = [expected_gradient(paths(0.5, 0.4, law), size, "unbiased") for size, law in zip(sizes, laws, strict=True)]
    step = sum(size * weight * mean for size, weight, mean in zip(sizes, weights, means, strict=True)) / sum(sizes)
    np.testing.assert_allclose(step, wanted, atol=1e-12)
    unweighted = sum(size * mean for size, mean in zip(sizes, means, strict=True)) / sum(sizes)
    own = sum(size * weight * mean * (size - 1) / size for size, weight, mean in zip(sizes, weights, means, strict=True)) / sum(sizes)
    for biased in (unweighted, own * np.linalg.norm(wanted) / np.linalg.norm(own)):
        assert np.linalg.norm(biased - wanted) > 0.02 * np.linalg.norm(wanted)


@pytest.mark.parametrize("p", [0.05, 0.1])
def test_rare_successes(p: float) -> None:
    """One 0/1 action with success probability p: d p / d logit = p (1 - p), for every group size, fixed or chosen from another visit's
    rewards. A pilot of four in the same visit that is only followed up if it saw a success and a failure loses most of it."""
    exact = p * (1 - p)

    def group_mean(rewards: Sequence[int]) -> float:
        (credits,) = step_credits([[Outcome(EpisodePlan(), float(r), False) for r in rewards]])
        return sum(credit.before * (r - p) for credit, r in zip(credits, rewards, strict=True)) / len(rewards)

    def expectation(size: int) -> float:
        return sum(
            math.comb(size, hits) * p**hits * (1 - p) ** (size - hits) * group_mean([1] * hits + [0] * (size - hits))
            for hits in range(size + 1)
        )

    for size in (2, 3, 8, 16):
        assert expectation(size) == pytest.approx(exact, rel=1e-9)
    # past visit with h successes of 4 decides: 2 completions if it saw none, else 8
    past = sum(math.comb(4, h) * p**h * (1 - p) ** (4 - h) * expectation(2 if h == 0 else 8) for h in range(5))
    assert past == pytest.approx(exact, rel=1e-9)
    same_visit = 0.0
    for pilot in itertools.product((0, 1), repeat=4):
        chance_of = math.prod(p if r else 1 - p for r in pilot)
        if 0 < sum(pilot) < 4:
            for rest in range(5):
                share = math.comb(4, rest) * p**rest * (1 - p) ** (4 - rest)
                same_visit += chance_of * share * group_mean([*pilot, *[1] * rest, *[0] * (4 - rest)])
        else:
            same_visit += chance_of * group_mean(pilot)
    assert same_visit < 0.75 * exact


def test_stalling_does_not_pay() -> None:
    """In state "" the action 1 stalls: it reaches the cap for certain and never succeeds. After 0 the episode either fails at once ("01")
    or reaches the cap and succeeds beyond it, so that V, the mean of what has reached the cap so far, is high. The gradient of stalling
    is negative without a cap and just as negative with the unbiased credit; V alone makes it positive."""
    ends = {"000": 1.0, "001": 1.0, "01": 0.0, "100": 0.0, "101": 0.0, "111": 0.0, "1100": 0.0, "1101": 0.0}
    exact = exact_gradient(ends)[0]
    value = 0.9  # stalling was rare so far
    assert exact < -0.1
    assert expected_gradient(paths(0.2, value, ends), 2, "unbiased")[0] == pytest.approx(exact, abs=1e-12)
    assert expected_gradient(paths(0.2, value, ends), 2, "value")[0] > 0.02


def test_equal_credits_give_exactly_nothing() -> None:
    (credits,) = step_credits([[Outcome(EpisodePlan(), 0.1, False)] * 3], scale="group")
    assert [(c.before, c.after) for c in credits] == [(0.0, 0.0)] * 3


def test_equal_groups_without_cuts_are_the_plain_ones() -> None:
    """The factor (n - 1) / n makes leave-one-out advantages those of the group's mean, scaled or not, as group_advantages has them."""
    from surogate_rl.objectives import group_advantages

    rewards = [[0.0, 1.0, 1.0, 0.25], [1.0, 1.0, 1.0, 1.0], [0.0, 0.0, 0.0, None]]
    for scale in ("none", "batch"):
        plain = group_advantages(rewards, scale_rewards=scale, loss_type="dr_grpo")
        ours = step_credits([[Outcome(EpisodePlan(), r, False) for r in group] for group in rewards], scale=scale, factor=0.75)
        for expected, found in zip(plain.values, ours, strict=True):
            np.testing.assert_allclose([c.before for c in found], expected, rtol=1e-6)


def test_variance_of_exploration() -> None:
    """With V and R as they are in practice, less exploration is noisier, and the baseline of later tokens matters: with b in place of V
    the same gradient has more variance. (Exact second moments over groups of two.)"""
    value = sum(chance(a) * r for a, r in ENDS.items() if len(a) > CAP) / sum(chance(a) for a in ENDS if len(a) > CAP)

    def second_moment(explore: float) -> float:
        total = 0.0
        for members in itertools.product(paths(explore, value), repeat=2):
            probability = math.prod(path.probability for path in members)
            (credits,) = step_credits([[path.outcome for path in members]])
            gradient = sum(path.gradient(c.before, c.after) for path, c in zip(members, credits, strict=True)) / 2
            total += probability * float(gradient @ gradient)
        return total

    moments = [second_moment(explore) for explore in (0.1, 0.25, 0.5, 0.99)]
    assert moments == sorted(moments, reverse=True)
