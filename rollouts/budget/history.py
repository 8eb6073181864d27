"""What past visits say of each task: discounted counts, and the posterior that they make.

0/1 rewards: a Beta posterior of the probability of success p. Its prior is the population of tasks, Beta(k m, k (1 - m)), with mean m and
strength k fitted by moments to recent visits (empirical Bayes; a U-shaped population of solved and hopeless tasks has k < 2 and makes a
few equal rewards say more). What width wants is E[p (1 - p)] = a b / ((a + b) (a + b + 1)).

Graded rewards: the variance has an inverse-gamma prior, whose mean is the mean variance within recent groups, and a flat one of the mean
beside it, so that its posterior after n rewards with a sum of squares SS about their mean is IG(alpha + (n - 1) / 2, beta + SS / 2)
(Gelman et al., "Bayesian Data Analysis", section 3.2). What width wants is its mean. (In the conjugate normal-inverse-gamma model a task
far from the population's mean would count as noisy, however equal its own rewards are.)

A visit multiplies all that the task's earlier visits said by `discount`: the policy has moved since. Episodes that a depth budget cut
have no reward; those that went on past the cap stand for them with weight 1/e, so counts are those of uncapped episodes in expectation.

What a completion costs, in tokens as played, is the discounted mean of past visits, with one visit at the population's mean as its prior.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

PRIOR_MEAN = 0.5
PRIOR_STRENGTH = 2.0
LEAST_STRENGTH, MOST_STRENGTH = 0.1, 20.0
GRADED_SHAPE = 2.0
"""alpha of the prior of graded variances; its mean is beta / (alpha - 1)."""


@dataclass(frozen=True)
class Posterior:
    """Attributes:
    mean: of the task's expected reward.
    variance: expected variance of one reward, E[p (1 - p)] for 0/1 ones.
    seen: effective number of rewards behind it.
    """

    mean: float
    variance: float
    seen: float


class TaskHistory:
    """
    Args:
        discount: of earlier visits at each visit of a task.
        keep: of the population's moments at each step.
    """

    def __init__(self, discount: float = 0.5, keep: float = 0.95) -> None:
        self.discount = discount
        self.keep = keep
        self._tasks: dict[int, NDArray[np.float64]] = {}  # weight, sum of rewards, sum of squares
        self._costs: dict[int, NDArray[np.float64]] = {}  # visits, sum of their mean tokens
        self._cost_population = np.zeros(2)
        self._population = np.zeros(4)  # weight, sum of means, sum of p^2 estimates, sum of variances within groups
        self.graded = False
        self._prior: tuple[float, float, float] | None = None

    def __len__(self) -> int:
        return len(self._tasks)

    def forget(self) -> None:
        """Once per step: lets the population's moments fade."""
        self._population *= self.keep
        self._cost_population *= self.keep
        self._prior = None

    def add_cost(self, task: int, tokens: Sequence[int]) -> None:
        """One visit of a task: the tokens of each of its episodes, cut ones included."""
        if tokens:
            visit = np.array([1.0, sum(tokens) / len(tokens)])
            self._costs[task] = self.discount * self._costs.get(task, np.zeros(2)) + visit
            self._cost_population += visit

    def cost(self, task: int) -> float:
        """Expected tokens of one completion of the task, at least 1; 1 for all before anything was seen."""
        visits, total = self._cost_population
        if visits <= 0:
            return 1.0
        own = self._costs.get(task, np.zeros(2))
        return max(float((total / visits + own[1]) / (1.0 + own[0])), 1.0)

    def add(self, task: int, rewards: Sequence[float], weights: Sequence[float]) -> None:
        """One visit of a task: its observed rewards, each with the number of episodes that it stands for."""
        if not rewards:
            return
        values, own = np.asarray(rewards, dtype=np.float64), np.asarray(weights, dtype=np.float64)
        self.graded = self.graded or bool(np.any((values != 0) & (values != 1)))
        # 1/e weights make a few episodes look like many: scale to the effective number, never above what was played
        own = own * min(1.0, float(own.sum()) / float(own @ own))
        sums = np.array([own.sum(), own @ values, own @ values**2])
        self._tasks[task] = self.discount * self._tasks.get(task, np.zeros(3)) + sums
        weight = float(sums[0])
        self._prior = None
        if weight > 1:
            mean = sums[1] / weight
            spread = max(sums[2] / weight - mean * mean, 0.0) * weight / (weight - 1)  # unbiased for unit weights
            self._population += weight * np.array([1.0, mean, mean * mean - spread / weight, spread])

    def population(self) -> tuple[float, float, float]:
        """Mean of the tasks' means, strength of the Beta prior, mean variance within a task."""
        if self._prior is None:
            self._prior = self._fit_prior()
        return self._prior

    def _fit_prior(self) -> tuple[float, float, float]:
        weight = float(self._population[0])
        if weight <= 0:
            return PRIOR_MEAN, PRIOR_STRENGTH, PRIOR_MEAN * (1 - PRIOR_MEAN)
        mean, square, within = (float(value) / weight for value in self._population[1:])
        inside = min(max(mean, 0.01), 0.99)
        between = square - mean * mean
        strength = MOST_STRENGTH if between <= 0 else inside * (1 - inside) / between - 1
        return mean, min(max(strength, LEAST_STRENGTH), MOST_STRENGTH), within

    def posterior(self, task: int) -> Posterior:
        mean, strength, within = self.population()
        weight, total, squares = (float(value) for value in self._tasks.get(task, np.zeros(3)))
        if self.graded:
            return self._graded(weight, total, squares, mean, strength, within)
        inside = min(max(mean, 0.01), 0.99)
        a = strength * inside + total
        b = strength * (1 - inside) + weight - total
        return Posterior(a / (a + b), a * b / ((a + b) * (a + b + 1)), weight)

    @staticmethod
    def _graded(weight: float, total: float, squares: float, mean: float, strength: float, within: float) -> Posterior:
        own = total / weight if weight > 0 else mean
        spread = max(squares - total * own, 0.0)
        shape = GRADED_SHAPE + max(weight - 1, 0.0) / 2
        scale = within * (GRADED_SHAPE - 1) + spread / 2
        return Posterior((strength * mean + total) / (strength + weight), scale / (shape - 1), weight)

    def state(self) -> dict[str, NDArray[Any]]:
        tasks, priced = sorted(self._tasks), sorted(self._costs)
        return {
            "priced": np.array(priced, dtype=np.int64),
            "costs": np.array([self._costs[task] for task in priced], dtype=np.float64).reshape(-1, 2),
            "cost_population": self._cost_population.copy(),
            "tasks": np.array(tasks, dtype=np.int64),
            "sums": np.array([self._tasks[task] for task in tasks], dtype=np.float64).reshape(-1, 3),
            "population": self._population.copy(),
            "graded": np.array([self.graded], dtype=np.int64),
        }

    def restore(self, state: Mapping[str, NDArray[Any]]) -> None:
        sums = np.asarray(state["sums"], dtype=np.float64).reshape(-1, 3)
        self._tasks = {int(task): row.copy() for task, row in zip(state["tasks"], sums, strict=True)}
        costs = np.asarray(state["costs"], dtype=np.float64).reshape(-1, 2)
        self._costs = {int(task): row.copy() for task, row in zip(state["priced"], costs, strict=True)}
        self._cost_population = np.array(state["cost_population"], dtype=np.float64)
        self._population = np.array(state["population"], dtype=np.float64)
        self.graded = bool(state["graded"][0])
        self._prior = None
