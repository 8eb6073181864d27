"""What is fixed about a group before it starts, and the interface of a budget, which fixes it.

Groups are numbered in the order in which they start, and `prompts_per_step` successive numbers are a *block*: group g is place
``g % prompts_per_step`` of block ``g // prompts_per_step + 1``. With everything else off a step trains exactly its own block; dynamic
sampling uses blocks up faster, and with `max_staleness` the groups of the coming blocks start while a step is still waiting or learning.

A budget is asked, in this order:

1. ``plan(block, tasks)`` once for each block, before the first of its groups starts: how many completions each prompt gets, within which
   limits each of them runs, and whether it was drawn to go on past its cap. It must be a function of the run's seed, `block`, `tasks` and
   what `observe` was told; draws belong to ``derive_seed(seed, block, place, sample, ...)``. A block may be planned again (with newer
   observations) as long as none of its groups has been used.
2. ``credit(groups, rewards)`` for the groups that a step trains, before the learner sees them and before they are observed: advantages in
   place of `surogate_rl.objectives.group_advantages`. Advantages by token go into ``Segment.advantages``.
3. ``observe(groups)`` for all groups that the step used up, in their order: those it trains and those that dynamic sampling passed over.
4. ``metrics(seconds)`` once for each step, at its end, and ``state()`` / ``restore(state)`` with checkpoints. The state is JSON.

Groups that are dropped because they are too old (see `stream.py`) are told to ``forget(numbers)`` instead: they are not credited and not
observed. Groups that a step passes over while they are under way come to a later step, once, like all others.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
from numpy.typing import NDArray

from surogate_rl.rollouts.types import DepthCap, EpisodeLimits, Task

if TYPE_CHECKING:
    from surogate_rl.rollouts.manager import Group


@dataclass(frozen=True)
class EpisodePlan:
    """Attributes:
    limits: how far it may go, a cap on depth included; None: as far as the run's own limits.
    """

    limits: EpisodeLimits | None = None

    @property
    def cap(self) -> DepthCap | None:
        return None if self.limits is None else self.limits.cap

    @property
    def depth_cap(self) -> int | None:
        """See `Episode`."""
        return None if self.cap is None else self.cap.depth

    @property
    def went_on(self) -> bool | None:
        return None if self.cap is None else self.cap.goes_on


@dataclass(frozen=True)
class GroupPlan:
    """One entry for each completion of a prompt."""

    episodes: tuple[EpisodePlan, ...]

    @staticmethod
    def plain(completions: int) -> GroupPlan:
        return GroupPlan((EpisodePlan(),) * completions)

    def to_state(self) -> list[dict[str, Any]]:
        """As JSON."""
        return [asdict(episode) for episode in self.episodes]

    @staticmethod
    def from_state(state: Sequence[Mapping[str, Any]]) -> GroupPlan:
        return GroupPlan(tuple(EpisodePlan(_limits(entry["limits"])) for entry in state))


def _limits(state: Mapping[str, Any] | None) -> EpisodeLimits | None:
    if state is None:
        return None
    cap = state["cap"]
    return EpisodeLimits(**{**state, "cap": None if cap is None else DepthCap(**cap)})


@dataclass(frozen=True)
class Credit:
    """Attributes:
    advantages: float32, one array per group, one number per completion; 0 for an unscored one.
    weights: of the same shapes: what multiplies all of a completion's loss (and no divisor); None: all 1.
    metrics: name -> (sum, weight).
    """

    advantages: list[NDArray[np.float32]]
    weights: list[NDArray[np.float32]] | None = None
    metrics: Mapping[str, tuple[float, float]] = field(default_factory=dict)


class Budget(Protocol):
    """See the module."""

    def plan(self, block: int, tasks: Sequence[Task]) -> list[GroupPlan]:
        """A plan for each of `tasks`; `block` counts from 1."""
        ...

    def credit(self, groups: Sequence[Group], rewards: Sequence[Sequence[float | None]]) -> Credit:
        """`rewards`: of each completion, None if it is unscored; a penalty for the KL to the reference is taken off already."""
        ...

    def observe(self, groups: Sequence[Group]) -> None: ...
    def forget(self, numbers: Sequence[int]) -> None:
        """The groups of these numbers were planned and will not come."""
        ...

    def metrics(self, seconds: float) -> dict[str, float]:
        """`seconds`: that the step took, evaluations and checkpoints left out."""
        ...

    def state(self) -> dict[str, Any]: ...
    def restore(self, state: Mapping[str, Any]) -> None: ...
