"""What an episode that reached its cap is credited with, so that cuts leave the expected gradient as it is without them.

An episode goes on past its cap iff G = 1, with G ~ Bernoulli(e) drawn before it starts from a seed that its content does not depend on. V,
the estimated value of going on, was fitted on earlier steps and is a number by now. Of an episode that reaches the cap

    tokens up to the cap get    V + (G / e) (R - V) - b        b: mean over the *others* of their group of what is known of their rewards
    tokens after the cap get    (R - V) / e                    (they exist only if G = 1)

and one that ends at the cap or before it gets R - b, all of it. Then the expected gradient is that of the uncapped objective, for any V,
any e > 0 and any law of lengths and rewards:

* before the cap: E[V + (G/e)(R - V) | content up to the cap] = E[R | content up to the cap], because E[G/e] = 1 independently of all else,
  and b does not depend on the episode itself, so it adds 0;
* after it: a token is there with probability e and weighs 1/e. Its baseline may be any number known when it is sampled; V is the one
  that suits an episode which has come so far (b, the mean of all, is too high there and would push every such token down or up by far).

Two ways of getting this wrong are easy. Giving later tokens V + (G/e)(R - V) *and* the factor 1/e counts 1/e twice: the expected gradient
of going on is multiplied by 1/e. And a baseline that contains the episode's own credit (the mean of the group, as grpo has it) does not
only scale the gradient by (n - 1)/n, as without cuts: after the cap its own share is (R - V) / (n e), so the factor becomes 1 - 1/(n e),
which is negative when n e < 1, and differs from the factor before the cap.

Terms that are no reward but a sum over tokens (the KL to the reference, the entropy bonus) have no advantage, so past the cap they
have to be multiplied by 1/e themselves: `token_importance`.

The other credits bend the gradient and are there for comparison: `value` gives every cut episode V (so that reaching the cap is worth V
whatever led there: stalling pays), `mask` leaves cut episodes out, `zero` scores them as they stand at the cap.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np

from surogate_rl.rollouts.budget.grid import DepthUnit

CreditKind = Literal["unbiased", "value", "mask", "zero"]
Scale = Literal["group", "batch", "advantages", "none"]
STD_EPSILON = 1e-4


@dataclass(frozen=True)
class EpisodePlan:
    """What a depth budget fixed before an episode started.

    Attributes:
        unit: what `cap` counts.
        cap: depth after which the episode is cut unless it went on; None: no cap, so the rest does not matter.
        explore: the probability with which it was to go on.
        went_on: whether it was drawn to.
        value: V.
        bucket: of its task's difficulty, when it was drawn.
        guess: V of the task alone, of which V is a regression (see `depth`).
        law_value: V of the bucket alone.
    """

    unit: DepthUnit = "turns"
    cap: int | None = None
    explore: float = 1.0
    went_on: bool = True
    value: float = 0.0
    bucket: int = 0
    guess: float = 0.0
    law_value: float = 0.0


NO_CAP = EpisodePlan()


@dataclass(frozen=True)
class Outcome:
    """Attributes:
    reward: as scored, None for an unscored one.
    reached: whether it came to its cap and had not ended.
    """

    plan: EpisodePlan
    reward: float | None
    reached: bool

    @property
    def cut(self) -> bool:
        return self.reached and not self.plan.went_on


@dataclass(frozen=True)
class Credit:
    """Advantages of one episode.

    Attributes:
        before: of tokens up to the cap (all tokens, if it did not reach one).
        after: of tokens after it.
        trained: false for an episode that takes no part.
    """

    before: float
    after: float
    trained: bool = True


_LEFT_OUT = Credit(0.0, 0.0, trained=False)


@dataclass(frozen=True)
class _Worth:
    """Attributes:
    credit: what tokens up to the cap are worth, in expectation the reward of the episode without a cap.
    known: the reward, or V where it was cut: less noisy than `credit`, for baselines and deviations.
    after: what tokens after the cap are worth less their own baseline; None: as those before it.
    """

    credit: float
    known: float
    after: float | None


def _worth(outcome: Outcome, kind: CreditKind) -> _Worth | None:
    reward, plan = outcome.reward, outcome.plan
    if outcome.cut:
        if kind == "mask":
            return None
        if kind == "zero":
            return _Worth(reward or 0.0, reward or 0.0, None)
        return _Worth(plan.value, plan.value, None)
    if reward is None:
        return None
    if outcome.reached and kind == "unbiased":
        surprise = (reward - plan.value) / plan.explore
        return _Worth(plan.value + surprise, reward, surprise)
    return _Worth(reward, reward, None)


def step_credits(
    groups: Sequence[Sequence[Outcome]],
    *,
    kind: CreditKind = "unbiased",
    baseline: Literal["group", "batch"] = "group",
    scale: Scale = "none",
    factor: float = 1.0,
) -> list[list[Credit]]:
    """Advantages of a step's episodes, with baselines that leave each episode's own reward out.

    Args:
        groups: for each prompt its episodes. Numbers may differ.
        baseline: the mean over the others of the group, or of the step.
        scale: divide by the standard deviation (n - 1) of the known rewards of the group or (batch) of the step, or of the step's
            advantages, + 1e-4. Not "none" makes the gradient depend on its own noise: then it is unbiased only approximately.
        factor: multiplies everything. (n - 1) / n with equal groups of n makes a leave-one-out advantage that of the group's mean.

    Groups with fewer than two known rewards, and groups in which all credits are equal, have advantages of exactly 0.
    """
    worth = [[_worth(outcome, kind) for outcome in group] for group in groups]
    everyone = [one for group in worth for one in group if one is not None]
    spread = _std([one.known for one in everyone]) if scale == "batch" else 0.0
    result = []
    for group in worth:
        present = [one for one in group if one is not None]
        others = everyone if baseline == "batch" else present
        divisor = {"batch": spread + STD_EPSILON, "group": _std([one.known for one in present]) + STD_EPSILON}.get(scale, 1.0)
        result.append(_credits(group, others, factor / divisor))
    return _by_own_deviation(result) if scale == "advantages" else result


def _by_own_deviation(groups: Sequence[Sequence[Credit]]) -> list[list[Credit]]:
    trained = [[credit.before for credit in group if credit.trained] for group in groups]
    # alone in its group, a completion has an advantage of 0 by definition, which says nothing of how far they are apart
    divisor = _std([value for group in trained if len(group) > 1 for value in group]) + STD_EPSILON
    return [[replace(one, before=one.before / divisor, after=one.after / divisor) for one in group] for group in groups]


def _credits(group: Sequence[_Worth | None], others: Sequence[_Worth], factor: float) -> list[Credit]:
    values = {value for one in others for value in (one.credit, one.known)}
    silent = len(others) < 2 or (len(values) == 1 and not any(one.after for one in others))
    total = float(np.sum([one.known for one in others])) if others else 0.0
    credits = []
    for one in group:
        if one is None:
            credits.append(_LEFT_OUT)
        elif silent:
            credits.append(Credit(0.0, 0.0))
        else:
            before = one.credit - (total - one.known) / (len(others) - 1)
            after = before if one.after is None else one.after
            credits.append(Credit(before * factor, after * factor))
    return credits


def _std(values: Sequence[float]) -> float:
    if len(values) < 2 or min(values) == max(values):
        return 0.0
    return float(np.std(values, ddof=1))


def prompt_weights(trained: Sequence[int], mean: float | None = None) -> list[float]:
    """Weights by which each completion of a prompt with n trained ones is multiplied, mean n / n, so that every prompt counts the same.

    Args:
        trained: numbers of trained completions; a prompt without any weighs nothing.
        mean: what to take for the mean (the configured number); default: the mean over prompts that have any.
    """
    present = [number for number in trained if number]
    if not present:
        return [0.0] * len(trained)
    reference = sum(present) / len(present) if mean is None else mean
    return [reference / number if number else 0.0 for number in trained]


def past_cap(sampled: Sequence[bool], turns: Sequence[int], plan: EpisodePlan, tokens_before: int = 0) -> tuple[list[bool | None], int]:
    """Of every token of one segment whether it lies past the cap (None where the policy did not sample), and the episode's sampled tokens
    up to its end.

    Args:
        turns: turn of each sampled token, from 0.
        tokens_before: sampled tokens of the episode's earlier segments.
    """
    past: list[bool | None] = []
    count = tokens_before
    for mine, turn in zip(sampled, turns, strict=True):
        if not mine:
            past.append(None)
            continue
        depth = turn + 1 if plan.unit == "turns" else count + 1
        past.append(plan.cap is not None and depth > plan.cap)
        count += 1
    return past, count


def token_advantages(past: Sequence[bool | None], credit: Credit) -> list[float]:
    """Of every token of a segment; 0 where the policy did not sample."""
    return [0.0 if after is None else credit.after if after else credit.before for after in past]


def token_importance(past: Sequence[bool | None], plan: EpisodePlan, credit: Credit) -> list[float]:
    """How many of its kind each token stands for: 1, but 1/e past the cap, where it is there with probability e. Whatever is summed over
    tokens (a KL to the reference, an entropy) is then in expectation what it is without a cap. In advantages 1/e is contained already.
    0 for an episode that takes no part, and where the policy did not sample."""
    return [0.0 if after is None or not credit.trained else 1.0 / plan.explore if after else 1.0 for after in past]
