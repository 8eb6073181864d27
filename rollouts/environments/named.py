"""Arguments by name, and what a user names: ``path/file.py:Class``."""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from surogate_rl.errors import InputError
from surogate_rl.files import user_path
from surogate_rl.rewards.worker import attribute, module_of_file, short_traceback
from surogate_rl.rollouts.seeds import derive_seed
from surogate_rl.rollouts.types import Task


class EnvironmentConfigError(InputError):
    """An environment that is named, defined or configured wrongly. The message says which one, what is wrong and what to do."""


def seed_of(task: Task) -> int:
    """The seed of a task: its column ``seed``, else one of 31 bits made from its row number. All episodes of a group share it."""
    own = task.columns.get("seed")
    if isinstance(own, int) and not isinstance(own, bool):
        return own
    return derive_seed(task.index) >> 33


@dataclass(frozen=True)
class ByName:
    """A function that is called with what its parameters name: ``task``, ``seed`` (the task's) and columns of the data set.

    Attributes:
        required: columns without which it cannot be called.
    """

    names: frozenset[str]
    required: tuple[str, ...]
    everything: bool

    SPECIAL = ("task", "seed")

    @staticmethod
    def of(function: Callable[..., Any]) -> ByName:
        try:
            parameters = inspect.signature(function).parameters.values()
        except (TypeError, ValueError):
            return ByName(frozenset(), (), False)
        named = [p for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
        required = tuple(p.name for p in named if p.default is p.empty and p.name not in ByName.SPECIAL)
        return ByName(frozenset(p.name for p in named), required, any(p.kind is p.VAR_KEYWORD for p in parameters))

    def arguments(self, task: Task) -> dict[str, Any]:
        """Raises KeyError where the task lacks a column."""
        for name in self.required:
            if name not in task.columns:
                raise KeyError(f"task {task.index} has no column {name!r}")
        values = {name: value for name, value in task.columns.items() if self.everything or name in self.names}
        special = {"task": task, "seed": seed_of(task)}
        return values | {name: value for name, value in special.items() if name in self.names}


def nearest(name: str, choices: Iterable[str]) -> str:
    """``; did you mean 'x'?`` or nothing."""
    close = difflib.get_close_matches(name, list(choices), n=1, cutoff=0.6)
    return f"; did you mean {close[0]!r}?" if close else ""


def load_named(label: str) -> Any:
    """What ``path/file.py:name`` names. A relative path counts from the working directory.

    Raises:
        EnvironmentConfigError: no such file or name, or importing the file failed.
    """
    path, _, name = label.rpartition(":")
    file = user_path(path).resolve()
    if not file.is_file():
        raise EnvironmentConfigError(f"environment: {label!r}: there is no file {file}")
    try:
        module = module_of_file(str(file))
    except Exception as error:
        raise EnvironmentConfigError(f"environment: {label!r}: importing {file} failed:\n{short_traceback(error)}") from error
    try:
        found = attribute(module, name)
    except AttributeError:
        own = [key for key, value in vars(module).items() if callable(value) and getattr(value, "__module__", "") == module.__name__]
        known = ", ".join(own) or "none"
        raise EnvironmentConfigError(
            f"environment: {label!r}: {file} has no {name!r}{nearest(name, own) or '.'} Classes and functions there: {known}"
        ) from None
    if not callable(found):
        raise EnvironmentConfigError(
            f"environment: {label!r}: {name!r} in {file} is a {type(found).__name__}, expected a class or a function"
        )
    return found


def check_arguments(label: str, function: Callable[..., Any], args: Mapping[str, Any]) -> None:
    """Refuses arguments that `function` does not take.

    Raises:
        EnvironmentConfigError: naming them.
    """
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):
        return
    try:
        signature.bind(**args)
    except TypeError as error:
        raise EnvironmentConfigError(
            f"environment: {label!r} takes {signature}; with environment.args it cannot be made: {error}"
        ) from None
