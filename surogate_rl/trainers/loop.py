"""The one trainer loop: step, log, evaluate, save; resumable at any step."""

from __future__ import annotations

import json
import signal
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from surogate_rl.checkpoint import CheckpointStore, LazyArray, Saved, Under
from surogate_rl.errors import InputError
from surogate_rl.models import save_adapter, save_model
from surogate_rl.report import write_report
from surogate_rl.rollouts.engines.vllm.errors import EngineFailed
from surogate_rl.tracking import Tracker
from surogate_rl.trainers.output import FINAL, drop_later_rollouts
from surogate_rl.trainers.session import Session

_LEARNER = "learner/"
_ALGORITHM = "algorithm/"


class Interrupted(KeyboardInterrupt):
    """The run was asked to stop and did so after a whole step; the message says what was saved."""


@dataclass(frozen=True)
class RunResult:
    """What a run leaves.

    Attributes:
        output_dir: everything the run wrote.
        steps: steps done, those before a resume included.
        final_model: directory of the final model (of the adapter, with LoRA).
        metrics: the last logged value of each metric.
        history: every logged line of this process, as in metrics.jsonl.
        evaluation: the last evaluation.
    """

    output_dir: Path
    steps: int
    final_model: Path
    metrics: dict[str, float]
    history: list[dict[str, float]] = field(default_factory=list)
    evaluation: dict[str, float] = field(default_factory=dict)


class Algorithm(Protocol):
    """What SFT, DPO and GRPO differ in.

    Attributes:
        learned: the last step of this process that has been learned, after which `state` is that step's, whatever goes wrong in the rest
            of it (an engine that does not take the new weights); 0: none has.
    """

    learned: int

    @property
    def total_steps(self) -> int: ...
    def start(self) -> None:
        """Called once with the initial weights in the learner, before a checkpoint is loaded."""
        ...

    def step(self, step: int) -> dict[str, float]:
        """Does step `step` (from 1). Returns values of this step alone; what objectives report gathers in the session's updater."""
        ...

    def evaluate(self, step: int) -> dict[str, float]: ...
    def state(self) -> tuple[Mapping[str, Saved], dict[str, Any]]: ...
    def restore(self, arrays: Mapping[str, NDArray[Any]], state: Mapping[str, Any]) -> None:
        """Called after weights and optimiser state were loaded."""
        ...

    def close(self) -> None: ...


def train(session: Session, algorithm: Algorithm) -> RunResult:
    """Closes `algorithm`, however it ends."""
    with closing(algorithm):
        return _train(session, algorithm)


def _train(session: Session, algorithm: Algorithm) -> RunResult:
    config = session.config
    algorithm.start()
    done = _resume(session, algorithm)
    total = algorithm.total_steps
    drop_later_rollouts(session.output_dir, done)
    tracker = Tracker(session.output_dir, config.report_to, config.run_name, config, resume_step=done)
    history: list[dict[str, float]] = []
    evaluation: dict[str, float] = {}
    logged: dict[str, float] = {}

    def log(step: int, values: dict[str, float]) -> None:
        tracker.log(step, values)
        history.append({"step": float(step), **values})
        logged.update(values)
        session.progress.update(step, values)

    def evaluate(step: int) -> None:
        with _rescued(session, algorithm, step):
            result = algorithm.evaluate(step)
        if result:
            evaluation.update(result)
            log(step, result)

    save_at_all = config.save_steps > 0
    session.progress.start(session.command, total, done)
    try:
        with _graceful_stop(session) as stop:
            if done == 0 and config.eval is not None and config.eval.at_start:
                evaluate(0)
            window = _Window()
            for step in range(done + 1, total + 1):
                with _rescued(session, algorithm, step - 1):
                    values = algorithm.step(step)
                window.add(values)
                if step % config.logging_steps == 0 or step == total:
                    log(step, {**session.updater.metrics.take(), **window.values()})
                    window = _Window()
                saved = (save_at_all and (step % config.save_steps == 0 or step == total)) or (stop.is_set() and step != total)
                if saved:  # before the evaluation, which takes long and may be the end of the engine
                    _save(session, algorithm, step)
                if config.eval is not None and config.eval.steps and step % config.eval.steps == 0 and step != total:
                    evaluate(step)
                if stop.is_set() and step != total:
                    if not saved:
                        _save(session, algorithm, step)
                    raise Interrupted(
                        f"stopped after step {step} of {total}; checkpoint saved in {session.store.newest()}; go on with --set resume=auto"
                    )
            if config.eval is not None and total > done:
                evaluate(total)
        final = save_final(session)
    finally:
        session.progress.stop()
        tracker.close()
    _report(session)
    return RunResult(session.output_dir, max(total, done), final, logged, history, evaluation)


@contextmanager
def _rescued(session: Session, algorithm: Algorithm, done: int) -> Iterator[None]:
    """A run whose engine is lost for good stops with a checkpoint of what has been learned: `done` steps, or more if meanwhile another one
    was learned before the engine went."""
    try:
        yield
    except EngineFailed as error:
        done = max(done, algorithm.learned)
        if done == 0:
            raise EngineFailed(f"{error}\nthe run stops; nothing had been learned yet") from error
        if done not in session.store.steps():
            _save(session, algorithm, done)
        raise EngineFailed(
            f"{error}\nthe run stops after step {done}; checkpoint in {session.store.newest()}; go on with --set resume=auto"
        ) from error


def _report(session: Session) -> None:
    """A page about the run; the run is done and does not fail for it."""
    try:
        write_report(session.output_dir)
    except Exception as error:
        session.progress.note(f"report.html was not written ({error}); 'surogate-rl report {session.output_dir}' tries again")


class _Window:
    """Values of steps since the last log: rates and lengths are averaged, counters keep their last value."""

    LAST = frozenset({"epoch", "num_tokens", "learning_rate", "skipped_steps"})

    def __init__(self) -> None:
        self._sums: dict[str, tuple[float, int]] = {}

    def add(self, values: Mapping[str, float]) -> None:
        for name, value in values.items():
            total, count = self._sums.get(name, (0.0, 0))
            self._sums[name] = (value, 1) if name in self.LAST else (total + value, count + 1)

    def values(self) -> dict[str, float]:
        return {name: total / count for name, (total, count) in self._sums.items()}


def _save(session: Session, algorithm: Algorithm, step: int) -> None:
    arrays, state = algorithm.state()
    learner = session.learner
    of_learner: dict[str, Saved] = {
        _LEARNER + name: LazyArray(shape, dtype, partial(learner.state_entry, name))
        for name, (shape, dtype) in learner.state_layout().items()
    }
    session.store.save(
        step,
        of_learner | {_ALGORITHM + name: array for name, array in arrays.items()},
        {
            "command": session.command,
            "algorithm": state,
            "skipped": session.updater.skipped,
            "skipped_in_a_row": session.updater.skipped_in_a_row,
        },
    )


def _resume(session: Session, algorithm: Algorithm) -> int:
    """Loads the checkpoint that `resume` names and returns the steps done; 0 without one."""
    where = session.config.resume
    if where == "never":
        return 0
    found = session.store.load_newest(session.progress.note) if where == "auto" else (Path(where), CheckpointStore.load(Path(where)))
    if found is None:
        return 0
    path, checkpoint = found
    if checkpoint.state["command"] != session.command:
        raise InputError(f"resume: {path} is a checkpoint of '{checkpoint.state['command']}', this command is '{session.command}'")
    try:
        session.learner.load_state(Under(checkpoint.arrays, _LEARNER))
    except ValueError as error:
        raise InputError(f"resume: {path} is of another model or other LoRA settings ({error})") from error
    session.updater.skipped = checkpoint.state["skipped"]
    session.updater.skipped_in_a_row = checkpoint.state["skipped_in_a_row"]
    algorithm.restore(Under(checkpoint.arrays, _ALGORITHM), checkpoint.state["algorithm"])
    session.progress.note(f"resumed from {path}, {checkpoint.step} of {algorithm.total_steps} steps done")
    return checkpoint.step


def save_final(session: Session) -> Path:
    """Writes the model in Hugging Face form, or the adapter in PEFT form, and returns where."""
    final = session.output_dir / FINAL
    if session.config.lora:
        save_adapter(session.learner, session.loaded, final, session.config.model)
    else:
        save_model(session.learner, session.loaded, final)
    return final


@contextmanager
def _graceful_stop(session: Session) -> Iterator[threading.Event]:
    """The first Ctrl-C or SIGTERM ends the run after the present step, with a checkpoint; the second one ends it at once."""
    stop = threading.Event()
    if threading.current_thread() is not threading.main_thread():
        yield stop
        return

    def ask(number: int, frame: FrameType | None) -> None:
        if stop.is_set():
            raise KeyboardInterrupt
        stop.set()
        session.progress.note("stopping after this step, with a checkpoint; once more to stop at once")

    before = {number: signal.signal(number, ask) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield stop
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@dataclass
class Clock:
    """Seconds since it was last read."""

    last: float = field(default_factory=time.perf_counter)

    def lap(self) -> float:
        now = time.perf_counter()
        seconds, self.last = now - self.last, now
        return seconds


def fingerprint(value: Any) -> str:
    """A short hash of anything JSON can hold, to tell whether two runs mean the same."""
    import hashlib

    return hashlib.sha256(json.dumps(value, sort_keys=True, default=str).encode()).hexdigest()[:16]


def seeded(*parts: int) -> np.random.Generator:
    return np.random.default_rng(list(parts))
