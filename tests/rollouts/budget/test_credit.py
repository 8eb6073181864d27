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

from surogate_rl.batch import PackedBatch, Totals
from surogate_rl.data.packing import PackSequence, pack
from surogate_rl.objectives import PolicyGradient, group_advantages
from surogate_rl.objectives.gradient import seeds
from surogate_rl.rollouts.budget.credit import (
    Credit,
    EpisodePlan,
    Outcome,
    past_cap,
    prompt_weights,
    step_credits,
    token_advantages,
    token_importance,
)

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
        past, _ = past_cap([True] * len(self.actions), list(range(len(self.actions))), self.outcome.plan)
        advantages = token_advantages(past, Credit(before, after))
        result = np.zeros(len(STATES))
        for place, action in enumerate(self.actions):
            state = self.actions[:place]
            result[STATES.index(state)] += advantages[place] * ((action == "1") - go_one(state))
        return result


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
    rewards = [[0.0, 1.0, 1.0, 0.25], [1.0, 1.0, 1.0, 1.0], [0.0, 0.0, 0.0, None]]
    for scale in ("none", "batch", "group"):
        plain = group_advantages(rewards, scale_rewards=scale, loss_type="dr_grpo")
        ours = step_credits([[Outcome(EpisodePlan(), r, False) for r in group] for group in rewards], scale=scale, factor=0.75)
        for expected, found in zip(plain.values, ours, strict=True):
            np.testing.assert_allclose([c.before for c in found], expected, rtol=1e-6)


def test_variance_of_exploration() -> None:
    """With V and R as they are in practice, less exploration is noisier, and the baseline of later tokens matters: with b in place of V,
    (R - b) / e instead of (R - V) / e, the expected gradient is the same and its variance greater. (Exact, over groups of two.)"""
    value = sum(chance(a) * r for a, r in ENDS.items() if len(a) > CAP) / sum(chance(a) for a in ENDS if len(a) > CAP)

    def moments(explore: float, later: str) -> tuple[np.ndarray, float]:
        first, second = np.zeros(len(STATES)), 0.0
        for members in itertools.product(paths(explore, value), repeat=2):
            probability = math.prod(path.probability for path in members)
            (credits,) = step_credits([[path.outcome for path in members]])
            # what is known of the reward of the other one of the two: b
            known = [value if path.outcome.cut else path.outcome.reward for path in members]
            gradient = np.zeros(len(STATES))
            for path, credit, b in zip(members, credits, reversed(known), strict=True):
                after = credit.after if later == "V" else (path.outcome.reward - b) / explore
                gradient += path.gradient(credit.before, after) / 2
            first += probability * gradient
            second += probability * float(gradient @ gradient)
        return first, second

    grid = (0.1, 0.25, 0.5, 0.99)
    ours, others = ([moments(explore, later) for explore in grid] for later in ("V", "b"))
    assert [second for _, second in ours] == sorted((second for _, second in ours), reverse=True)
    for (first, second), (other_first, other_second) in zip(ours, others, strict=True):
        np.testing.assert_allclose(first, exact_gradient(), atol=1e-12)
        np.testing.assert_allclose(other_first, first, atol=1e-12)
        assert other_second > 1.05 * second


# ---- terms that are summed over tokens --------------------------------------------------------------------------------------------------

REFERENCE = dict(zip(STATES, (-0.5, 0.2, 0.1, 0.9, -0.2, 0.0, -1.0, 0.6, 0.3, -0.8), strict=True))
BETA, ENTROPY, LENGTH, WEIGHED = 0.3, 0.05, 4, 2.5


def logp_of(actions: str, place: int, logits: dict[str, float]) -> float:
    one = 1 / (1 + math.exp(-logits[actions[:place]]))
    return math.log(one if actions[place] == "1" else 1 - one)


def term_seeds(path: Path, *, importance: bool) -> tuple[np.ndarray, np.ndarray]:
    """d loss / d logp and d loss / d entropy of the path's actions, as the objective makes them without any reward."""
    past, _ = past_cap([True] * len(path.actions), list(range(len(path.actions))), path.outcome.plan)
    extra = {"importance": [0.0, *token_importance(past, path.outcome.plan, Credit(0.0, 0.0))]} if importance else {}
    places = range(len(path.actions))
    reference = [0.0] + [logp_of(path.actions, place, REFERENCE) for place in places]
    sequence = PackSequence(
        tokens=[5, *map(int, path.actions)],
        mask=[False] + [True] * len(path.actions),
        per_token={"reference_logp": reference, **extra},
        per_sequence={"advantage": 0.0},
    )
    (batch,) = pack([[sequence]], 16)
    objective = PolicyGradient("dr_grpo", beta=BETA, entropy_coef=ENTROPY, max_completion_length=LENGTH)
    logp = np.array([logp_of(path.actions, place, LOGITS) for place in places] + [0.0], dtype=np.float32)
    entropy = np.ones(len(path.actions) + 1, dtype=np.float32)
    found = seeds(objective, logp, entropy, batch, Totals(int(WEIGHED), 1, importance=WEIGHED))
    assert found.dentropy is not None
    return found.dlogp[:-1], found.dentropy[:-1]


def expected_terms(explore: float, *, importance: bool) -> tuple[np.ndarray, np.ndarray]:
    """By state: expected gradients of the KL term by its logit, and of the loss by its entropy."""
    kl, entropy = np.zeros(len(STATES)), np.zeros(len(STATES))
    for path in paths(explore, 0.37):
        dlogp, dentropy = term_seeds(path, importance=importance)
        for place, action in enumerate(path.actions):
            state = path.actions[:place]
            kl[STATES.index(state)] += path.probability * dlogp[place] * ((action == "1") - go_one(state))
            entropy[STATES.index(state)] += path.probability * dentropy[place]
    return kl, entropy


@pytest.mark.parametrize("explore", [0.1, 0.5])
def test_kl_and_entropy_are_those_without_a_cap(explore: float) -> None:
    """k3 = exp(r - p) - (r - p) - 1 has the derivative 1 - exp(r - p) by p; of the mean entropy, each state's is its probability of being
    visited over the number of tokens. Without the weights whatever lies past the cap is multiplied by e."""
    kl, entropy = np.zeros(len(STATES)), np.zeros(len(STATES))
    for actions in ENDS:
        for place, action in enumerate(actions):
            state = STATES.index(actions[:place])
            slope = 1 - math.exp(logp_of(actions, place, REFERENCE) - logp_of(actions, place, LOGITS))
            kl[state] += chance(actions) * BETA * slope * ((action == "1") - go_one(actions[:place])) / LENGTH
            entropy[state] -= chance(actions) * ENTROPY / WEIGHED
    found = expected_terms(explore, importance=True)
    np.testing.assert_allclose(found[0], kl, atol=1e-6)
    np.testing.assert_allclose(found[1], entropy, rtol=1e-5)
    late = np.array([len(state) >= CAP for state in STATES])
    plain = expected_terms(explore, importance=False)[0]
    np.testing.assert_allclose(plain, np.where(late, explore * kl, kl), atol=1e-6)
    assert np.abs(plain - kl).max() > 0.1 * np.abs(kl).max() * (1 - explore)


def test_importance_is_counted_over_the_whole_step() -> None:
    """Two trained tokens of 1 and one of 4; prompts' do not count, and metrics are means over what tokens stand for."""

    def batch(importance: list[float]) -> PackedBatch:
        mask = [False] + [True] * (len(importance) - 1)
        per_token = {"importance": importance, "reference_logp": [0.0] * len(importance)}
        return pack([[PackSequence([5] * len(importance), mask, per_token, {"advantage": 0.0})]], 16)[0]

    first, second = batch([7.0, 1.0, 4.0]), batch([7.0, 1.0])
    totals = Totals.of([first, second])
    assert (totals.tokens, totals.importance) == (3, 6.0)
    objective = PolicyGradient("dr_grpo", entropy_coef=0.5, max_completion_length=2)
    logp = np.zeros(3, dtype=np.float32)
    found = seeds(objective, logp, np.array([2.0, 0.5, 9.0], dtype=np.float32), first, totals)
    assert found.loss == pytest.approx(-0.5 * (1 * 2.0 + 4 * 0.5) / 6)
    assert found.metrics["entropy"] == pytest.approx((4.0, 5.0))
