"""The depth budget of a run: laws of depth by difficulty, the cap and exploration that they call for, and the value of going on."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from surogate_rl.errors import InputError
from surogate_rl.rollouts.budget.cap import UNCAPPED, CapRule, Choice, choose_caps
from surogate_rl.rollouts.budget.credit import NO_CAP, EpisodePlan
from surogate_rl.rollouts.budget.grid import DepthGrid, DepthUnit
from surogate_rl.rollouts.budget.history import TaskHistory
from surogate_rl.rollouts.budget.incidence import DepthLaw, Incidence
from surogate_rl.rollouts.seeds import derive_seed

_GOES_ON = 0x676F65736F6E  # what is mixed into an episode's seed for the draw, so that it shares nothing with its samples
SLOPE_PRIOR = 0.5
SLOPE_PRIOR_WEIGHT = 0.5


@dataclass(frozen=True)
class DepthSettings:
    """Attributes:
    coverage: share of eventual success that a cap must reach.
    min, max: bounds of the cap in depth units; None: 1 and the horizon (which is no cap). Without enough evidence there is no cap at all.
    explore: probability of going on past the cap, or None: chosen, at least `min_explore`.
    memory: steps over which what was seen fades to 1/e.
    buckets: classes of difficulty, by the tasks' past success; tasks never seen before have one of their own.
    min_episodes: effective number of episodes from which a law is used; a bucket with fewer uses all, and all with fewer: no cap.
    success_threshold: a reward from here on is a success.
    """

    coverage: float = 0.9
    min: int | None = None
    max: int | None = None
    explore: float | None = None
    min_explore: float = 0.1
    memory: float = 10.0
    buckets: int = 3
    min_episodes: float = 64.0
    success_threshold: float = 0.5


@dataclass(frozen=True)
class Observed:
    """One finished episode.

    Attributes:
        depth: turns or sampled tokens.
        reached: whether it came to its cap and had not ended.
        reward: None: unscored, it says nothing.
        tokens: sampled in the whole episode.
    """

    task: int
    plan: EpisodePlan
    depth: int
    reached: bool
    reward: float | None
    tokens: int


class DepthBudget:
    def __init__(self, settings: DepthSettings, grid: DepthGrid) -> None:
        self.settings, self.grid = settings, grid
        least = max(1, grid.cell(settings.min)) if settings.min is not None else 1
        most = grid.cells if settings.max is None else max(grid.floor(settings.max), least)
        self.rule = CapRule(settings.coverage, least, most, settings.explore, settings.min_explore)
        self.history = TaskHistory()
        self.laws = [DepthLaw(grid.cells) for _ in range(settings.buckets + 1)]
        self._slope = np.zeros(2)  # sums of w (R - v) (q - v) and w (q - v)^2, v of the bucket and q of the task
        self._size = np.zeros(2)  # tokens, depth
        self._choose()

    @staticmethod
    def of(settings: DepthSettings, unit: DepthUnit, horizon: int) -> DepthBudget:
        """Over a grid on which the settings' bounds lie.

        Args:
            horizon: depth of an episode without a budget, at the most.

        Raises:
            InputError: the least cap is the horizon or more: no episode would ever come to one.
        """
        if settings.min is not None and settings.min >= horizon:
            raise InputError(
                f"rollouts.budget.depth.min: episodes have at most {horizon} {unit} anyway, so that a cap of {settings.min} or more would "
                "never cut one; lower it"
            )
        bounds = [bound for bound in (settings.min, settings.max) if bound is not None]
        return DepthBudget(settings, DepthGrid.of(unit, horizon, bounds=bounds))

    # -- before a step

    def plan(self, task: int, seed: int) -> EpisodePlan:
        """Fixes what an episode may do. `seed` is the episode's own; what is drawn from it here is independent of its samples."""
        bucket = self.bucket(task)
        choice = self.choices[bucket]
        if choice.cap is None:
            return EpisodePlan(unit=self.grid.unit, bucket=bucket)
        draw = (derive_seed(seed, _GOES_ON) >> 11) * 2.0**-53
        guess = self._guess(task, bucket, choice)
        return EpisodePlan(
            unit=self.grid.unit,
            cap=self.grid.edges[choice.cap - 1],
            explore=choice.explore,
            went_on=draw < choice.explore,
            value=choice.value + self.slope * (guess - choice.value),
            bucket=bucket,
            guess=guess,
            law_value=choice.value,
        )

    def bucket(self, task: int) -> int:
        """0 for a task that was never seen, else 1 + its class by the posterior mean of its success."""
        posterior = self.history.posterior(task)
        if posterior.seen <= 0:
            return 0
        return 1 + min(int(posterior.mean * self.settings.buckets), self.settings.buckets - 1)

    def _guess(self, task: int, bucket: int, choice: Choice) -> float:
        """Value of going on for the task itself: the bucket's, in proportion to how its success compares with the bucket's."""
        law = self._estimates[bucket]
        usual = float(law.success[-1])
        if self.history.posterior(task).seen <= 0 or usual <= 0 or not 0 <= choice.value <= 1:
            return choice.value
        return min(choice.value * self.history.posterior(task).mean / usual, 1.0)

    @property
    def slope(self) -> float:
        """How far V follows the task's own past, 0 to 1: least squares over those that went on, drawn to a prior of a half."""
        value = (self._slope[0] + SLOPE_PRIOR * SLOPE_PRIOR_WEIGHT) / (self._slope[1] + SLOPE_PRIOR_WEIGHT)
        return float(min(max(value, 0.0), 1.0))

    # -- after a step

    def observe(self, episodes: Sequence[Observed]) -> None:
        """Takes in a step's episodes and chooses anew for the next one."""
        keep = float(np.exp(-1.0 / self.settings.memory))
        for law in self.laws:
            law.forget(keep)
        self._slope *= keep
        self._size *= keep
        self.history.forget()
        visits: dict[int, tuple[list[float], list[float]]] = {}
        for episode in episodes:
            self._observe(episode, visits)
        for task, (rewards, weights) in visits.items():
            self.history.add(task, rewards, weights)
        self._choose()

    def _observe(self, episode: Observed, visits: dict[int, tuple[list[float], list[float]]]) -> None:
        plan, law = episode.plan, self.laws[episode.plan.bucket]
        self._size += (episode.tokens, episode.depth)
        cap = None if plan.cap is None else self.grid.cell(plan.cap)
        if episode.reached and not plan.went_on:
            assert cap is not None
            law.add_cut(cap)
            visits.setdefault(episode.task, ([], []))
            return
        if episode.reward is None:
            return
        success = episode.reward >= self.settings.success_threshold
        explore = plan.explore if episode.reached else 1.0
        # an episode that ended where its cap is has not reached it, whatever the cell says
        cell = self.grid.cell(episode.depth)
        law.add_end(cell, success=success, reward=episode.reward, cap=cap if episode.reached else None, explore=explore)
        rewards, weights = visits.setdefault(episode.task, ([], []))
        rewards.append(float(success))
        weights.append(1.0 / explore)
        if episode.reached:
            off = plan.guess - plan.law_value
            self._slope += (off * (episode.reward - plan.law_value) / explore, off * off / explore)

    def _choose(self) -> None:
        everything = DepthLaw(self.grid.cells)
        for law in self.laws:
            everything.add(law)
        pooled = everything.estimate()
        own = [law.estimate() for law in self.laws]
        least = self.settings.min_episodes
        self._estimates: list[Incidence] = [law if law.effective[0] >= least else pooled for law in own]
        self.pooled = pooled
        if pooled.effective[0] < least:
            self.choices = [UNCAPPED] * len(self.laws)
            return
        weights = [float(law.entered[0]) for law in self.laws]
        self.choices = choose_caps(self._estimates, weights, self.grid.widths, self.rule)

    # -- what it says of itself

    def beyond(self, plan: EpisodePlan) -> float:
        """Depth that a cut episode would have gone on for, in expectation."""
        if plan.cap is None:
            return 0.0
        law, cap = self._estimates[plan.bucket], self.grid.cell(plan.cap)
        left = float(law.survival[cap])
        return float((law.survival[cap:-1] * self.grid.widths[cap:]).sum()) / left if left > 0 else 0.0

    @property
    def tokens_per_depth(self) -> float:
        return float(self._size[0] / self._size[1]) if self._size[1] > 0 else 0.0

    def metrics(self, episodes: Sequence[Observed]) -> dict[str, float]:
        """Of a step's episodes, before they are observed."""
        reached = [episode for episode in episodes if episode.reached]
        cut = [episode for episode in reached if not episode.plan.went_on]
        capped = [episode for episode in episodes if episode.plan.cap is not None]
        caps = [float(e.plan.cap if e.plan.cap is not None else self.grid.horizon) for e in episodes]
        saved = sum(self.beyond(episode.plan) for episode in cut)
        count = max(len(episodes), 1)
        values = {
            "budget/depth/cap": float(np.mean(caps)) if caps else float(self.grid.horizon),
            "budget/depth/capped_share": len(capped) / count,
            "budget/depth/reached_share": len(reached) / count,
            "budget/depth/censored_share": len(cut) / count,
            "budget/depth/explored_share": (len(reached) - len(cut)) / count,
            "budget/depth/explore": float(np.mean([e.plan.explore for e in capped])) if capped else 1.0,
            "budget/depth/value": float(np.mean([e.plan.value for e in capped])) if capped else 0.0,
            "budget/depth/coverage": float(np.mean([self.choices[e.plan.bucket].coverage for e in episodes])) if episodes else 1.0,
            "budget/depth/success": float(self.pooled.success[-1]),
            "budget/depth/effective_episodes": float(self.pooled.effective[0]),
            f"budget/depth/saved_{self.grid.unit}": saved,
        }
        if self.grid.unit == "turns":
            values["budget/depth/saved_tokens"] = saved * self.tokens_per_depth
        return values | self._bucket_metrics(episodes)

    def _bucket_metrics(self, episodes: Sequence[Observed]) -> dict[str, float]:
        """What was decided for the episodes of each bucket that has any."""
        values: dict[str, float] = {}
        for bucket in sorted({episode.plan.bucket for episode in episodes}):
            plans = [episode.plan for episode in episodes if episode.plan.bucket == bucket]
            capped = [plan for plan in plans if plan.cap is not None]
            name = f"budget/depth/bucket{bucket}"
            values |= {
                f"{name}/episodes": float(len(plans)),
                f"{name}/cap": float(np.mean([plan.cap if plan.cap is not None else self.grid.horizon for plan in plans])),
                f"{name}/explore": float(np.mean([plan.explore for plan in capped])) if capped else 1.0,
                f"{name}/value": float(np.mean([plan.value for plan in capped])) if capped else 0.0,
                f"{name}/coverage": self.choices[bucket].coverage,
            }
        return values

    def state(self) -> dict[str, NDArray[Any]]:
        arrays: dict[str, NDArray[Any]] = {"slope": self._slope.copy(), "size": self._size.copy()}
        arrays |= {"unit": np.array([self.grid.unit]), "edges": np.array(self.grid.edges, dtype=np.int64)}
        for number, law in enumerate(self.laws):
            arrays |= {f"law{number}/{name}": values for name, values in law.state().items()}
        return arrays | {f"history/{name}": values for name, values in self.history.state().items()}

    def restore(self, state: Mapping[str, NDArray[Any]]) -> None:
        """Raises:
        InputError: the state is of another grid or another number of buckets.
        """
        unit, edges = str(state["unit"][0]), [int(edge) for edge in state["edges"]]
        if unit != self.grid.unit or edges != list(self.grid.edges):
            had, has = f"{edges[-1]} {unit}", f"{self.grid.horizon} {self.grid.unit}"
            what = "within other bounds (min, max)" if had == has else f"up to {had}, this run up to {has}"
            raise InputError(
                f"rollouts.budget.depth: the checkpoint counts depth {what}, and what it has seen does not carry over; keep "
                "rollouts.budget.depth.unit, min and max, environment.max_turns, rollouts.max_completion_length and sequence_len as they "
                "were, or start anew in another output_dir"
            )
        numbers = {name.split("/")[0] for name in state if name.startswith("law")}
        if len(numbers) != len(self.laws):
            raise InputError(
                f"rollouts.budget.depth.buckets: the checkpoint has {len(numbers) - 1}, this run {len(self.laws) - 1}; keep it as it was"
            )
        self._slope, self._size = np.array(state["slope"], dtype=np.float64), np.array(state["size"], dtype=np.float64)
        for number, law in enumerate(self.laws):
            law.restore({name.split("/", 1)[1]: values for name, values in state.items() if name.startswith(f"law{number}/")})
        self.history.restore({name.split("/", 1)[1]: values for name, values in state.items() if name.startswith("history/")})
        self._choose()


__all__ = ["NO_CAP", "DepthBudget", "DepthSettings", "Observed"]
