"""What runs inside a worker process. Imports little: a worker that is killed is replaced, and the replacement should be quick."""

from __future__ import annotations

import asyncio
import hashlib
import importlib.util
import math
import numbers
import pickle
import sys
import time
import traceback
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any, Literal

Reason = Literal["exception", "timeout", "non_finite", "not_a_number", "died"]


@dataclass(frozen=True)
class FileSource:
    """A function of a Python file; the worker imports the file itself."""

    path: str
    function: str


@dataclass(frozen=True)
class PickledSource:
    """Anything callable, as bytes."""

    data: bytes


@dataclass(frozen=True)
class Outcome:
    """Of one completion under one function.

    Attributes:
        value: the reward, or None: does not apply (if `reason` is None) or no reward was had.
        reason: why there is none.
        detail: the same for people, with a short traceback of an exception.
        seconds: that the call took.
    """

    value: float | None
    reason: Reason | None = None
    detail: str = ""
    seconds: float = 0.0


@dataclass(frozen=True)
class BatchOutcome:
    """Of a call for a whole batch.

    Attributes:
        outcomes: one per completion if the function gave that many.
        problem: what is wrong with the shape of what it gave, if anything: a fault in the program, which ends the run.
    """

    outcomes: list[Outcome]
    problem: str = ""
    log: Log = field(default_factory=lambda: Log())


@dataclass
class Log:
    """What a function said through TRL's ``log_metric`` and ``log_extra``."""

    metrics: list[tuple[str, float]] = field(default_factory=list)
    extras: list[tuple[str, list[Any]]] = field(default_factory=list)

    def log_metric(self, name: str, value: float) -> None:
        self.metrics.append((str(name), float(value)))

    def log_extra(self, column: str, values: Iterable[Any]) -> None:
        self.extras.append((str(column), [_sendable(value) for value in values]))

    def functions(self, names: Sequence[str]) -> dict[str, Callable[..., None]]:
        return {name: getattr(self, name) for name in names}


def _sendable(value: Any) -> Any:
    if value is None or isinstance(value, str | int | float | bool):
        return value
    return repr(value)


def short_traceback(error: BaseException, frames: int = 4) -> str:
    """The error's last frames and its message; those of the machinery that loads and calls functions are left out."""
    machinery = (__file__, str(Path(__file__).with_name("loader.py")), "<frozen importlib")
    shown = [frame for frame in traceback.extract_tb(error.__traceback__) if not frame.filename.startswith(machinery)][-frames:]
    head = ["Traceback (most recent call last):\n", *traceback.format_list(shown)] if shown else []
    text = "".join([*head, *traceback.format_exception_only(error)]).strip()
    return text if len(text) <= 2000 else f"{text[:500]}\n  ...\n{text[-1400:]}"


def module_of_file(path: str) -> ModuleType:
    """Imports a Python file once per process, under a name that hides nothing. Its folder is appended to `sys.path`."""
    file = Path(path)
    name = f"_surogate_reward_{hashlib.sha256(path.encode()).hexdigest()[:12]}_{file.stem}"
    if name in sys.modules:
        return sys.modules[name]
    spec = importlib.util.spec_from_file_location(name, file)
    if spec is None or spec.loader is None:
        raise ImportError(f"{path} is not a Python file")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    folder = str(file.parent)
    if folder not in sys.path:
        sys.path.append(folder)
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module


def attribute(root: Any, dotted: str) -> Any:
    for part in dotted.split("."):
        root = getattr(root, part)
    return root


def load(source: FileSource | PickledSource) -> Callable[..., Any]:
    """The function itself. An object with a ``load`` method (a built-in with expensive imports) gets it called."""
    function = attribute(module_of_file(source.path), source.function) if isinstance(source, FileSource) else pickle.loads(source.data)
    prepare = getattr(function, "load", None)
    if getattr(type(function), "__module__", "").startswith("surogate_rl.rewards.") and callable(prepare):
        prepare()
    if not callable(function):
        raise TypeError(f"a {type(function).__name__} is not callable")
    return function  # type: ignore[no-any-return]


_functions: list[Callable[..., Any] | str] = []
_runner: asyncio.Runner | None = None


def initialise(path: str) -> None:
    """Loads every function before the first call, so that imports do not count against a deadline.

    Args:
        path: file with a pickled list of sources. A function that fails to load answers each call with that failure.
    """
    with open(path, "rb") as file:
        sources = pickle.load(file)
    for source in sources:
        try:
            _functions.append(load(source))
        except BaseException as error:  # SystemExit at import too: the worker must live to say so
            _functions.append(short_traceback(error))


def failures() -> list[str | None]:
    """For each function why it could not be loaded, or None."""
    return [function if isinstance(function, str) else None for function in _functions]


def loaded_modules() -> list[str]:
    return sorted(sys.modules)


def _function(index: int) -> Callable[..., Any]:
    function = _functions[index]
    if isinstance(function, str):
        raise RuntimeError(f"the function could not be loaded in the worker process:\n{function}")
    return function


def outcome_of(value: Any, seconds: float) -> Outcome:
    """Judges one returned value: a finite number, None, or an error."""
    if value is None:
        return Outcome(None, seconds=seconds)
    number: Any = value
    if not isinstance(number, numbers.Real):
        # Scalars of numpy, torch and the like. Text is never a number, and a list of one number is a list.
        shape = getattr(number, "shape", None)
        if shape is not None and tuple(shape) == () and hasattr(number, "item"):
            number = number.item()
    if not isinstance(number, numbers.Real):
        return Outcome(None, "not_a_number", f"returned {_describe(value)}, expected a number or None", seconds)
    try:
        result = float(number)
    except OverflowError:
        result = math.inf
    if not math.isfinite(result):
        return Outcome(None, "non_finite", f"returned {result}", seconds)
    return Outcome(result, seconds=seconds)


def _describe(value: Any) -> str:
    text = repr(value)
    return f"{text if len(text) <= 60 else text[:57] + '...'} ({type(value).__name__})"


def _failed(error: BaseException, seconds: float) -> Outcome:
    if isinstance(error, TimeoutError):
        return Outcome(None, "timeout", f"gave up after {seconds:.1f} s" + (f": {error}" if str(error) else ""), seconds)
    return Outcome(None, "exception", short_traceback(error), seconds)


def run_chunk(
    index: int, calls: Sequence[Mapping[str, Any]], is_async: bool, loggers: Sequence[str], timeout: float
) -> tuple[list[Outcome], list[Log]]:
    """Calls function `index` once for each element of `calls`; async ones all at once, each with its deadline in seconds."""
    logs = [Log() for _ in calls]
    if is_async:
        return _event_loop().run(_run_async(index, calls, loggers, timeout, logs)), logs
    outcomes = []
    for arguments, log in zip(calls, logs, strict=True):
        start = time.perf_counter()
        try:
            value = _function(index)(**arguments, **log.functions(loggers))
            outcomes.append(outcome_of(value, time.perf_counter() - start))
        except BaseException as error:  # SystemExit and KeyboardInterrupt of a reward are its failures as well
            outcomes.append(_failed(error, time.perf_counter() - start))
    return outcomes, logs


def _event_loop() -> asyncio.Runner:
    # One loop for the worker's life: clients that a function keeps between calls are tied to the loop they were made in.
    global _runner
    if _runner is None:
        _runner = asyncio.Runner()
    return _runner


async def _run_async(
    index: int, calls: Sequence[Mapping[str, Any]], loggers: Sequence[str], timeout: float, logs: Sequence[Log]
) -> list[Outcome]:
    async def one(arguments: Mapping[str, Any], log: Log) -> Outcome:
        start = time.perf_counter()
        deadline = asyncio.timeout(timeout)
        try:
            async with deadline:
                value = await _function(index)(**arguments, **log.functions(loggers))
            return outcome_of(value, time.perf_counter() - start)
        except BaseException as error:
            if deadline.expired():
                return Outcome(None, "timeout", f"no result after {timeout:g} s", time.perf_counter() - start)
            return _failed(error, time.perf_counter() - start)

    return await asyncio.gather(*(one(arguments, log) for arguments, log in zip(calls, logs, strict=True)))


def run_batch(index: int, arguments: Mapping[str, Any], is_async: bool, loggers: Sequence[str], expected: int) -> BatchOutcome:
    """Calls function `index` once for `expected` completions."""
    log = Log()
    start = time.perf_counter()
    try:
        function = _function(index)
        if is_async:

            async def call() -> Any:
                return await function(**arguments, **log.functions(loggers))

            returned = _event_loop().run(call())
        else:
            returned = function(**arguments, **log.functions(loggers))
        seconds = (time.perf_counter() - start) / max(expected, 1)
        values = _as_list(returned)
    except BaseException as error:
        failed = _failed(error, (time.perf_counter() - start) / max(expected, 1))
        return BatchOutcome([failed] * expected, log=log)
    if values is None:
        return BatchOutcome([], f"returned {_describe(returned)}, expected a list of {expected} rewards", log)
    if len(values) != expected:
        counted = f"{len(values)} reward{'' if len(values) == 1 else 's'}"
        return BatchOutcome([], f"returned {counted}, expected {expected} (exactly one for each completion)", log)
    return BatchOutcome([outcome_of(value, seconds) for value in values], log=log)


def _as_list(returned: Any) -> list[Any] | None:
    if isinstance(returned, str | bytes | Mapping) or not isinstance(returned, Iterable):
        return None
    shape = getattr(returned, "shape", None)
    if shape is not None and hasattr(returned, "tolist"):
        listed = returned.tolist()  # numpy and torch: numbers instead of scalars of their own
        return listed if isinstance(listed, list) else None
    return list(returned)
