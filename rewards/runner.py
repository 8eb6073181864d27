"""Scores episodes: calls every reward function in worker processes and adds up what they give.

Deadlines. `timeout` holds for one call. Calls for single completions travel in chunks that should take about 0.1 s; a chunk gets the
smaller of `timeout` and twenty times what it should take (at least 2 s). If it does not come back, its worker is killed and its
completions are called again one by one, each with the whole `timeout`, so that only those that really hang (or kill the worker) are
lost. N hanging completions thus cost at most N * (timeout + chunk deadline) / workers seconds. A function may therefore be called twice
for a completion.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import pickle
import tempfile
import threading
import weakref
from collections.abc import Callable, Collection, Coroutine, Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from surogate_rl.plain import plain_text
from surogate_rl.rewards import worker
from surogate_rl.rewards.call import TrainerState, batch_arguments, check_columns, single_arguments
from surogate_rl.rewards.loader import RewardFunction, load_functions
from surogate_rl.rewards.pool import WorkerDied, WorkerPool, WorkerTimeout
from surogate_rl.rewards.registry import RewardError
from surogate_rl.rewards.report import FunctionReport, RewardReport
from surogate_rl.rewards.worker import Log, Outcome

if TYPE_CHECKING:
    from surogate_rl.config.schema import RewardConfig
    from surogate_rl.rollouts.types import Episode

logger = logging.getLogger("surogate_rl.rewards")

Result = TypeVar("Result")

_CHUNK_SECONDS = 0.1
_LARGEST_CHUNK = 64
_ENVIRONMENT = "environment"
_WARNINGS = 3


def load_rewards(
    rewards: Sequence[RewardConfig | Callable[..., Any] | str],
    *,
    workers: int = 2,
    start_timeout: float = 120.0,
    environment_weight: float | None = None,
) -> RewardRunner:
    """Finds the functions, starts the workers and loads the functions there.

    Functions given from Python (closures and lambdas too) are copied to the workers: what they change in their surroundings stays
    there, and no two calls need see the same copy.

    Args:
        rewards: entries of the configuration, names of built-in rewards, ``path/file.py:fn``, or Python callables.
        workers: processes.
        start_timeout: seconds within which a worker has to be ready.
        environment_weight: of the reward that an episode's environment gives itself; None: it gives none, or of weight 1.

    Raises:
        RewardError: a reward that cannot be found, read, called or loaded.
        WorkersUnavailable: no worker could be started.
    """
    functions = load_functions(rewards, alone=not environment_weight)
    weight = 1.0 if environment_weight is None else environment_weight
    return RewardRunner(functions, workers=workers, start_timeout=start_timeout, environment_weight=weight)


class RewardRunner:
    """Owns the workers. Close it, or use it in a ``with`` statement; the workers die with this process in any case."""

    def __init__(
        self, functions: Sequence[RewardFunction], *, workers: int = 2, start_timeout: float = 120.0, environment_weight: float = 1.0
    ) -> None:
        if workers < 1:
            raise ValueError(f"reward workers: {workers}, expected at least 1")
        self._functions = list(functions)
        self._workers = workers
        self._environment_weight = environment_weight
        self._state = TrainerState()
        self._lock = threading.Lock()
        self._report = RewardReport()
        self._warned: dict[str, int] = {}
        self._call_seconds: dict[str, float] = {}
        self._reset()
        self._pool: WorkerPool | None = None
        if self._functions:
            self._start(start_timeout)

    def _start(self, start_timeout: float) -> None:
        descriptor, path = tempfile.mkstemp(prefix="surogate-rewards-", suffix=".pickle")
        with open(descriptor, "wb") as file:
            pickle.dump([function.source for function in self._functions], file)
        self._remove = weakref.finalize(self, _remove, path)
        self._pool = WorkerPool(self._workers, worker.initialise, (path,), start_timeout=start_timeout)
        for function, failure in zip(self._functions, self._pool.start(worker.failures), strict=True):
            if failure is not None:
                self.close()
                raise RewardError(f"reward {function.name!r} could not be loaded in a worker process:\n{failure}")

    @property
    def names(self) -> list[str]:
        """Of the functions, in order: the keys of `Episode.rewards`."""
        return [function.name for function in self._functions]

    @property
    def weights(self) -> dict[str, float]:
        return {function.name: function.weight for function in self._functions}

    def worker_pids(self) -> list[int]:
        return self._pool.pids() if self._pool is not None else []

    def check_columns(self, tasks: Iterable[Collection[str]]) -> None:
        """Refuses tasks without the columns that the functions ask for; call it before the run.

        Args:
            tasks: the columns of each task (their names, or a mapping by name).

        Raises:
            RewardError: naming function, parameter and the columns that there are.
        """
        check_columns((function.plan for function in self._functions), tasks)

    def set_state(self, *, global_step: int, max_steps: int = 0, epoch: float = 0.0) -> None:
        """Tells functions that take ``trainer_state`` how far the run is."""
        self._state = TrainerState(global_step, max_steps, epoch)

    async def score(self, episodes: Sequence[Episode], *, counted: bool = True) -> None:
        """Fills `rewards`, `reward` and, where there is none because of a failure, `error` of each episode.

        The reward is the sum of weight * value over the functions that apply (None: does not). It is None if a function with a weight
        failed, or if none with a weight applies. Episodes that have an `error` already stay unscored and are shown to no function.
        An environment's own reward counts as one more function, "environment".

        Args:
            counted: False keeps these episodes, and what functions log about them, out of the report.

        Raises:
            RewardError: a function for batches gave the wrong number of rewards.
            WorkersUnavailable: workers cannot be started any more.
        """
        whole = [episode for episode in episodes if episode.error is None]
        aside = None if counted else RewardReport()
        columns = await _all(self._call(index, whole, aside) for index in range(len(self._functions))) if whole else []
        with self._lock:
            report = self._report if aside is None else aside
            report.episodes += len(episodes)
            report.unscored += len(episodes) - len(whole)
            for position, episode in enumerate(whole):
                self._settle(episode, [column[position] for column in columns], report)
        for episode in episodes:
            if episode.error is not None:
                episode.reward = None

    def report(self, *, reset: bool = True) -> RewardReport:
        """Everything since the last report (since the start, the first time)."""
        with self._lock:
            report = self._report
            if reset:
                self._reset()
        return report

    def close(self) -> None:
        """Kills the workers and waits until they are gone. May be called again."""
        if self._pool is not None:
            self._pool.close()
            self._remove()

    def __enter__(self) -> RewardRunner:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _reset(self) -> None:
        self._report = RewardReport({function.name: FunctionReport() for function in self._functions})

    def _settle(self, episode: Episode, outcomes: Sequence[Outcome], report: RewardReport) -> None:
        terms: list[float] = []
        failures: list[str] = []
        episode.rewards = {}
        for function, outcome in zip(self._functions, outcomes, strict=True):
            self._count(function.name, outcome, report)
            episode.rewards[function.name] = outcome.value
            if function.weight == 0:
                continue
            if outcome.reason is not None:
                failures.append(f"reward {function.name!r}: {_headline(outcome)}")
            elif outcome.value is not None:
                terms.append(function.weight * outcome.value)
        if episode.environment_reward is not None:
            value = episode.environment_reward
            good = math.isfinite(value)
            episode.rewards[_ENVIRONMENT] = value if good else None
            outcome = Outcome(value) if good else Outcome(None, "non_finite", f"returned {value}")
            self._count(_ENVIRONMENT, outcome, report)
            if self._environment_weight == 0:
                pass
            elif good:
                terms.append(self._environment_weight * value)
            else:
                failures.append(f"reward {_ENVIRONMENT!r}: {_headline(outcome)}")
        total = sum(terms)
        if terms and not failures and not math.isfinite(total):
            failures.append(f"the weighted sum of the rewards is {total}")
        if failures:
            episode.error = plain_text("; ".join(failures))
        episode.reward = total if terms and not failures else None
        report.unscored += episode.reward is None
        report.nothing_applied += episode.reward is None and not failures

    def _count(self, name: str, outcome: Outcome, report: RewardReport) -> None:
        if report.functions.setdefault(name, FunctionReport()).add(outcome) and self._warned.get(name, 0) < _WARNINGS:
            self._warned[name] = self._warned.get(name, 0) + 1
            last = "; further failures are only counted" if self._warned[name] == _WARNINGS else ""
            logger.warning("reward %r: no reward for a completion (%s%s): %s", name, outcome.reason, last, outcome.detail)

    async def _call(self, index: int, episodes: Sequence[Episode], aside: RewardReport | None) -> list[Outcome]:
        """`aside`: where logs go; None: to the report that is current when they arrive."""
        if self._functions[index].plan.batch:
            return await self._call_batch(index, episodes, aside)
        return await self._call_singles(index, episodes, aside)

    async def _call_batch(self, index: int, episodes: Sequence[Episode], aside: RewardReport | None) -> list[Outcome]:
        function = self._functions[index]
        try:
            arguments = batch_arguments(function.plan, episodes, self._state)
        except KeyError as error:
            return [Outcome(None, "exception", str(error.args[0]))] * len(episodes)
        arguments_of_run = (index, arguments, function.plan.is_async, function.plan.loggers, len(episodes))
        result = await self._run(worker.run_batch, arguments_of_run, function.timeout)
        if isinstance(result, Outcome):
            return [result] * len(episodes)
        assert isinstance(result, worker.BatchOutcome)
        if result.problem:
            raise RewardError(f"reward {function.name!r} {result.problem}")
        self._take_logs([result.log], [episodes], aside)
        return result.outcomes

    async def _call_singles(self, index: int, episodes: Sequence[Episode], aside: RewardReport | None) -> list[Outcome]:
        function = self._functions[index]
        outcomes: list[Outcome | None] = [None] * len(episodes)
        calls: dict[int, dict[str, Any]] = {}
        for position, episode in enumerate(episodes):
            try:
                calls[position] = single_arguments(function.plan, episode, self._state)
            except KeyError as error:
                outcomes[position] = Outcome(None, "exception", str(error.args[0]))

        async def run(positions: Sequence[int], deadline: float) -> None:
            plan = function.plan
            # Async calls keep their deadlines themselves; the worker is killed if one of them blocks its loop.
            limit = function.timeout + 1.0 if plan.is_async else deadline
            work = (index, [calls[position] for position in positions], plan.is_async, plan.loggers, function.timeout)
            result = await self._run(worker.run_chunk, work, limit)
            if not isinstance(result, Outcome):
                done, logs = result
                for position, outcome in zip(positions, done, strict=True):
                    outcomes[position] = outcome
                self._take_logs(logs, [[episodes[position]] for position in positions], aside)
                self._learn_speed(function.name, done)
            elif len(positions) == 1:
                outcomes[positions[0]] = result
            else:
                await _all(run([position], function.timeout) for position in positions)

        order = list(calls)
        if order and function.name not in self._call_seconds and not function.plan.is_async:
            await run([order.pop()], function.timeout)  # alone, to learn how long a call takes
        size = self._chunk_size(function, len(order))
        expected = self._call_seconds.get(function.name, 0.0) * size
        deadline = function.timeout if size == 1 else min(function.timeout, max(2.0, 20 * expected))
        await _all(run(order[start : start + size], deadline) for start in range(0, len(order), size))
        return [outcome for outcome in outcomes if outcome is not None]

    def _chunk_size(self, function: RewardFunction, count: int) -> int:
        share = max(1, math.ceil(count / self._workers))
        if function.plan.is_async:
            return min(share, _LARGEST_CHUNK)
        seconds = max(self._call_seconds.get(function.name, _CHUNK_SECONDS), 1e-6)
        return max(1, min(share, _LARGEST_CHUNK, int(_CHUNK_SECONDS / seconds)))

    def _learn_speed(self, name: str, outcomes: Sequence[Outcome]) -> None:
        mean = sum(outcome.seconds for outcome in outcomes) / len(outcomes)
        before = self._call_seconds.get(name, mean)
        self._call_seconds[name] = 0.7 * before + 0.3 * mean

    def _take_logs(self, logs: Sequence[Log], episodes: Sequence[Sequence[Episode]], aside: RewardReport | None) -> None:
        with self._lock:
            report = self._report if aside is None else aside
            for log, rows in zip(logs, episodes, strict=True):
                report.add_log(log, [(episode.task.index, episode.sample) for episode in rows])

    async def _run(self, function: Callable[..., Any], arguments: tuple[Any, ...], timeout: float) -> Any:
        """The result, or the `Outcome` that stands for its failure."""
        if self._pool is None:
            raise RuntimeError("the reward workers are closed")
        try:
            return await self._pool.run(function, arguments, timeout)
        except WorkerTimeout as error:
            return Outcome(None, "timeout", str(error), timeout)
        except WorkerDied as error:
            return Outcome(None, "died", str(error))
        except (pickle.PicklingError, TypeError, AttributeError) as error:
            return Outcome(None, "exception", f"its arguments cannot be sent to a worker process: {error}")


async def _all(coroutines: Iterable[Coroutine[Any, Any, Result]]) -> list[Result]:
    """Waits for all; the first failure cancels the rest and is raised as it is."""
    tasks = [asyncio.ensure_future(coroutine) for coroutine in coroutines]
    try:
        return await asyncio.gather(*tasks)
    except BaseException:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        raise


def _headline(outcome: Outcome) -> str:
    last = outcome.detail.strip().splitlines()[-1] if outcome.detail.strip() else ""
    return f"{outcome.reason}: {last}" if last else str(outcome.reason)


def _remove(path: str) -> None:
    with contextlib.suppress(OSError):
        Path(path).unlink()
