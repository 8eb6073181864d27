"""Which groups a step trains: the first ones that were started, not the first ones that ended; none is ever dropped for being long.

Groups wait in one queue, in the order in which they start. A step takes from its head, and waits for the head as long as it must; so what
is trained, and when, does not depend on how long a completion is. (A step that took whatever is ready first would train short completions
early and long ones late or, past the limit on staleness, never.) What keeps the engine busy while a step waits for its last episodes are
the groups behind:

* ``max_staleness: k`` lets groups start up to k versions before the one that trains them. Up to k batches are under way while the learner
  learns, and ``oversample`` groups more while a step waits. A group whose place in the queue would have it trained later than that is not
  started, so that in normal operation nothing grows too old; what does all the same (an engine that samples with older weights than it was
  told to) is dropped and counted.
* With k = 0 nothing can be carried over. ``oversample`` then holds spares for dynamic sampling; those that a step does not need are cut
  and started anew in the next one, whatever has become of them, so they change no result.
* ``carry_over`` lets a step close without the groups at its head that are still under way, once as many as it needs have ended, taken in
  the order in which they started. Those that it passed over stay at the head of the queue with all that they have sampled, and the next
  step takes them first. Each is trained once, a bounded number of steps later: the last step that may train a group without its being
  too old waits for it, and a step passes over no more groups than the following ones have places for. For this one version of the
  staleness is kept back: while the learner learns, ``max_staleness - 1`` steps are sampled ahead.

*Dynamic sampling* (DAPO, arXiv:2503.14476) passes over groups without signal and starts others in their place, until the batch is full or
`max_rounds` batches were used up.

Batches of k = 0 are a function of the run's seed, the step and the weights. With k > 0 the weight version of each token depends on timing.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from surogate_rl.errors import RunError
from surogate_rl.rollouts.manager import Group, RolloutManager
from surogate_rl.rollouts.plan import Budget, GroupPlan
from surogate_rl.rollouts.types import SamplingParams, Task


@dataclass(frozen=True)
class StreamSettings:
    """Attributes:
    groups: of a batch (`prompts_per_step`).
    completions: of a group, where no budget says otherwise (`num_generations`).
    total_steps: no group is started that only a later step could train.
    max_staleness: versions by which a token may lag the learner.
    oversample: groups under way beyond the batch while a step waits.
    max_rounds: of dynamic sampling: batches that a step may use up at the most; None: dynamic sampling is off.
    carry_over: whether a step may close without groups that are still under way; needs `max_staleness` and `oversample`.
    """

    groups: int
    completions: int
    total_steps: int
    max_staleness: int = 0
    oversample: int = 0
    max_rounds: int | None = None
    carry_over: bool = False

    @property
    def waiting(self) -> int:
        """Groups under way while a step waits, at the most."""
        if self.max_staleness == 0:
            return self.groups + self.oversample
        return min(self.max_staleness * self.groups + self.oversample, (self.max_staleness + 1) * self.groups)

    @property
    def learning(self) -> int:
        """Groups under way while the learner learns, at the most."""
        return (self.max_staleness - self.carry_over) * self.groups

    @property
    def limit(self) -> int | None:
        """Groups that one step may use up."""
        return None if self.max_rounds is None else self.max_rounds * self.groups


@dataclass(frozen=True)
class Batch:
    """What one step got.

    Attributes:
        groups: to be trained, in the order in which they started.
        used: the same and those that dynamic sampling passed over, in that order.
        position: groups that the run has used up so far, these included: its place in the order of the data, but for those passed over.
        metrics: of this step.
    """

    groups: list[Group]
    used: list[Group]
    position: int
    metrics: dict[str, float] = field(default_factory=dict)


@dataclass(eq=False)
class _Slot:
    """Attributes:
    number: of the group.
    last: the last step that may train it: later, its first tokens would be too old.
    passed: when the first step that passed over it closed; None: none has.
    ended: when its last reward was there.
    """

    number: int
    last: int
    scoring: bool = False
    passed: float | None = None
    ended: float = 0.0
    work: asyncio.Task[Group] = field(init=False)

    @property
    def result(self) -> Group | None:
        """None while it is under way."""
        return self.work.result() if self.work.done() else None


class RolloutStream:
    """Serves a run's steps in order. All methods but the constructor belong on one event loop.

    Args:
        manager: plays and scores.
        task_of: the task of each group number.
        settings: how far ahead, how many, how old.
        sampling: of all training completions.
        budget: fixes the groups' sizes and limits; None: `settings.completions` each, within the run's limits.
        clock: seconds.
    """

    def __init__(
        self,
        manager: RolloutManager,
        task_of: Callable[[int], Task],
        settings: StreamSettings,
        sampling: SamplingParams,
        budget: Budget | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._manager = manager
        self._task_of = task_of
        self._settings = settings
        self._sampling = sampling
        self._budget = budget
        self._clock = clock
        self._queue: list[_Slot] = []
        self._leaving: set[asyncio.Task[Group]] = set()
        self._plans: dict[int, list[GroupPlan]] = {}
        self._first = 0  # no step has used the group of this number or a later one; all earlier ones are used up, but for ...
        self._again: list[int] = []  # ... those in the queue, and these, which were passed over and have to be started anew
        self._next = 0  # number of the next group to start for the first time
        self._step = 0  # the last step that was served
        self._version = 0
        self._stale = 0  # groups dropped while the present step waits
        self._stale_tokens = 0  # sampled in them

    async def collect(self, step: int) -> Batch:
        """The batch of step `step`, which trains the weights of version ``step - 1`` and makes version `step` of them. What may be under
        way while the learner learns is started before this returns.

        Raises:
            RunError: all that the engine gives is older than the weights that it was given.
            Exception: what an engine, an environment's factory or a reward raised; everything under way is cancelled then.
        """
        self._step, self._stale, self._stale_tokens = step, 0, 0
        while True:
            try:
                self._drop_stale(step)
                self._start(step, self._settings.waiting)
                batch = self._close(step)
                if batch is not None:
                    self._start(step + 1, self._settings.learning)
                    return batch
                await asyncio.wait({slot.work for slot in self._queue if not slot.work.done()}, return_when=asyncio.FIRST_COMPLETED)
                self._raise_failure()
            except Exception:
                await self.close()
                raise

    def weights_changed(self, version: int) -> None:
        """The engine samples with `version` from now on: more may start."""
        self._version = version
        if self._settings.max_staleness:
            self._start(self._step + 1, self._settings.waiting)

    @property
    def under_way(self) -> int:
        """Groups that have begun and not ended."""
        return sum(not slot.work.done() for slot in self._queue)

    async def close(self) -> None:
        """Cancels what is under way and waits until it is gone. May be called again."""
        works = [slot.work for slot in self._queue] + list(self._leaving)
        self._again, self._next = self._passed_over(), self._first  # a checkpoint may still be asked for
        self._queue.clear()
        for work in works:
            work.cancel()
        await asyncio.gather(*works, return_exceptions=True)

    def state(self) -> dict[str, Any]:
        """Position and plans, as JSON. Of the groups that no step has used yet only the numbers are kept: a resumed run samples all of
        them anew, those that had ended too. To keep those that happened to have ended would prefer short completions."""
        plans = {} if self._budget is None else self._plans
        return {
            "first": self._first,
            "passed_over": self._passed_over(),
            "step": self._step,
            "version": self._version,
            "groups": self._settings.groups,
            "unfinished": [{"number": slot.number, "task": self._task_of(slot.number).index} for slot in self._queue],
            "plans": {str(block): [plan.to_state() for plan in block_plans] for block, block_plans in plans.items()},
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        """Goes on where `state` was taken; before the first `collect`. Plans of blocks of another size are made anew."""
        self._first = self._next = state["first"]
        self._again = list(state["passed_over"])
        self._step, self._version = state["step"], state["version"]
        if self._budget is not None and state["groups"] == self._settings.groups:
            self._plans = {int(block): [GroupPlan.from_state(plan) for plan in plans] for block, plans in state["plans"].items()}

    # Starting -----------------------------------------------------------------------------------------------------------------------

    def _start(self, next_step: int, at_most: int) -> None:
        """Starts groups while fewer than `at_most` are under way or wait for `next_step` and those behind it."""
        settings = self._settings
        useful = sum(not self._useless(slot) for slot in self._queue)
        last = settings.groups * max(0, settings.total_steps - next_step + 1)
        # those that turned out to be useless count against the rounds, or a task without any signal would start groups for ever
        most = None if settings.limit is None else max(settings.limit, at_most)
        while useful < min(at_most, last) and (most is None or len(self._queue) < most):
            self._queue.append(self._begin(self._number()))
            useful += 1

    def _number(self) -> int:
        if self._again:
            return self._again.pop(0)
        self._next += 1
        return self._next - 1

    def _useless(self, slot: _Slot) -> bool:
        if self._settings.max_rounds is None or not slot.work.done() or slot.work.exception() is not None:
            return False
        return not slot.work.result().has_signal

    def _begin(self, number: int) -> _Slot:
        slot = _Slot(number, last=self._version + 1 + self._settings.max_staleness)
        block, place = self._place(number)
        plan = self._plan(block)[place]
        slot.work = asyncio.get_running_loop().create_task(self._play(slot, self._task_of(number), block, place, plan))
        return slot

    async def _play(self, slot: _Slot, task: Task, block: int, place: int, plan: GroupPlan) -> Group:
        episodes = await self._manager.play(task, block, place, plan, self._sampling)
        slot.scoring = True
        await self._manager.scorer.score(episodes)
        slot.ended = self._clock()
        return Group(task, episodes, slot.number)

    def _place(self, number: int) -> tuple[int, int]:
        block, place = divmod(number, self._settings.groups)
        return block + 1, place

    def _plan(self, block: int) -> list[GroupPlan]:
        if block not in self._plans:
            groups = self._settings.groups
            if self._budget is None:
                self._plans[block] = [GroupPlan.plain(self._settings.completions)] * groups
            else:
                first = (block - 1) * groups
                self._plans[block] = self._budget.plan(block, [self._task_of(first + place) for place in range(groups)])
        return self._plans[block]

    # Closing ------------------------------------------------------------------------------------------------------------------------

    def _close(self, step: int) -> Batch | None:
        """The batch, if the queue holds one that may be taken; the queue is unchanged otherwise."""
        taken: list[Group] = []
        used: list[_Slot] = []
        late: list[_Slot] = []
        settings = self._settings
        for slot in self._queue:
            if len(taken) == settings.groups or len(used) == settings.limit:
                break
            group = slot.result
            if group is None:
                if not settings.carry_over or slot.last <= step:
                    return None
                late.append(slot)
                continue
            used.append(slot)
            if settings.max_rounds is None or group.has_signal:
                taken.append(group)
        # where the limit is reached the ones under way may yet fill the batch
        if len(taken) < settings.groups and (len(used) != settings.limit or late):
            return None
        left = [slot for slot in self._queue if slot not in used]
        if late and not self._in_time(step + 1, left):
            return None
        numbers = [slot.number for slot in used]
        self._first = max(self._first, *(number + 1 for number in numbers))
        self._queue = left
        metrics = self._metrics(step, used, taken, late)
        if settings.max_staleness == 0 and settings.oversample:
            metrics["rollouts/unused_spares"] = float(len(self._queue))
            metrics["rollouts/unused_spare_tokens"] = float(_tokens_of(self._queue))  # of those that had ended
        if settings.max_staleness == 0:
            self._cut()
        self._forget_plans()
        for slot in late:
            slot.passed = self._clock() if slot.passed is None else slot.passed
        groups = [group for slot in used if (group := slot.result) is not None]
        return Batch(taken, groups, self._first - len(self._passed_over()), metrics)

    def _in_time(self, step: int, queue: Sequence[_Slot]) -> bool:
        """Whether all of `queue` can be trained in time, by `step` and the steps after it, in this order."""
        useful = [slot for slot in queue if not self._useless(slot)]
        return all(slot.last >= step + place // self._settings.groups for place, slot in enumerate(useful))

    def _passed_over(self) -> list[int]:
        """Numbers of the groups that steps have passed over and that none has used yet, in their order."""
        return sorted([slot.number for slot in self._queue if slot.number < self._first] + self._again)

    def _drop_stale(self, step: int) -> None:
        """Takes out what has ended and is older than the limit allows for `step`, and with it for all later ones."""
        oldest = step - 1 - self._settings.max_staleness

        def too_old(slot: _Slot) -> bool:
            group = slot.result
            return group is not None and group.oldest_version is not None and group.oldest_version < oldest

        fresh = [slot for slot in self._queue if not too_old(slot)]
        if len(fresh) < len(self._queue) and self._budget is not None:
            self._budget.forget([slot.number for slot in self._queue if slot not in fresh])
        self._stale += len(self._queue) - len(fresh)
        self._stale_tokens += _tokens_of(slot for slot in self._queue if slot not in fresh)
        self._queue = fresh
        if self._stale > 2 * self._settings.waiting:
            raise RunError(
                f"step {step}: {self._stale} groups were sampled with weights older than version {oldest}, the oldest that "
                f"rollouts.max_staleness ({self._settings.max_staleness}) allows, although the engine was given version {step - 1}; "
                "its weight updates do not arrive"
            )

    def _cut(self) -> None:
        """Nothing can be carried over: gives up what is left. Rewards that are being computed are left to end by themselves, because to
        cancel one costs a worker process."""
        self._again = self._passed_over()  # of an earlier run, which carried them over
        for slot in self._queue:
            if slot.work.done():
                continue
            if not slot.scoring:
                slot.work.cancel()
            self._leaving.add(slot.work)
            slot.work.add_done_callback(self._gone)
        self._queue.clear()
        self._next = self._first

    def _gone(self, work: asyncio.Task[Group]) -> None:
        self._leaving.discard(work)
        if not work.cancelled():
            work.exception()  # looked at: nobody else will

    def _forget_plans(self) -> None:
        """Of blocks that are used up, and of those that will be planned again because nothing of them was used."""
        block, place = self._place(self._first)
        earliest = self._place(min([self._first, *self._passed_over()]))[0]
        latest = max([block if place else block - 1, *(self._place(slot.number)[0] for slot in self._queue)])
        self._plans = {number: plans for number, plans in self._plans.items() if earliest <= number <= latest}

    def _raise_failure(self) -> None:
        for slot in self._queue:
            if slot.work.done() and not slot.work.cancelled() and (error := slot.work.exception()) is not None:
                raise error

    def _metrics(self, step: int, used: Sequence[_Slot], taken: Sequence[Group], late: Sequence[_Slot]) -> dict[str, float]:
        settings = self._settings
        lags = step - 1 - np.concatenate([np.empty(0, np.int64), *(group.versions for group in taken)])
        metrics = {
            "rollouts/staleness_mean": float(lags.mean()) if lags.size else 0.0,
            "rollouts/staleness_max": float(lags.max(initial=0)),
        }
        if settings.max_staleness or self._stale:
            metrics["rollouts/dropped_stale"] = float(self._stale)
            metrics["rollouts/dropped_stale_tokens"] = float(self._stale_tokens)
        if settings.max_staleness:
            metrics["rollouts/carried_over"] = float(len(self._queue))
        if settings.carry_over:
            metrics["rollouts/passed_over"] = float(len(late))
            # what the steps that passed over them would have waited for the last of these
            waits = [slot.ended - slot.passed for slot in used if slot.passed is not None]
            metrics["rollouts/passed_over_seconds"] = max(waits, default=0.0)
        if settings.max_rounds is not None:
            sampled = [group for slot in used if (group := slot.result) is not None]
            rewards = [e.reward for group in sampled for e in group.episodes if e.reward is not None]
            metrics["dynamic_sampling/discarded_groups"] = float(len(used) - len(taken))
            metrics["dynamic_sampling/discarded_tokens"] = float(_tokens_of(used) - sum(group.sampled_tokens for group in taken))
            metrics["dynamic_sampling/rounds"] = len(used) / settings.groups
            metrics["dynamic_sampling/missing_groups"] = float(settings.groups - len(taken))
            if rewards:
                metrics["dynamic_sampling/reward"] = sum(rewards) / len(rewards)
        return metrics


def _tokens_of(slots: Iterable[_Slot]) -> int:
    """Sampled in the groups that have ended: what is under way has not said yet how many it has."""
    ended = [slot.work for slot in slots if slot.work.done() and not slot.work.cancelled() and slot.work.exception() is None]
    return sum(work.result().sampled_tokens for work in ended)
