"""The built-in rewards by name, the `reward` decorator and the error type that this package raises."""

from __future__ import annotations

import dataclasses
import difflib
import typing
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from importlib import import_module
from typing import Any, TypeVar, overload

from surogate_rl.errors import InputError

Function = TypeVar("Function", bound=Callable[..., Any])

_MARK = "__surogate_reward__"

#: Name in the YAML -> "module:class". A class is a frozen dataclass: its fields are the options (`args` in the YAML) and its
#: `__call__` is the reward function, whose parameters are filled by name as in a user's own.
BUILTINS: Mapping[str, str] = {
    "code_execution": "code_execution:CodeExecution",
    "exact_match": "exact_match:ExactMatch",
    "format": "format_tags:FormatTags",
    "json_schema": "json_schema:JsonSchema",
    "length": "length:Length",
    "math": "math_answer:MathAnswer",
    "numeric": "numeric:Numeric",
    "reasoning_gym": "reasoning_gym_task:ReasoningGymTask",
    "regex": "regex:Regex",
}


class RewardError(InputError):
    """A reward that is named, defined or configured wrongly. The message says which one, what is wrong and what to do."""


@dataclass(frozen=True)
class Mark:
    """What the decorator says about a function."""

    name: str | None = None
    batch: bool | None = None


@overload
def reward(function: Function) -> Function: ...
@overload
def reward(function: None = None, *, name: str | None = None, batch: bool | None = None) -> Callable[[Function], Function]: ...
def reward(function: Any = None, *, name: str | None = None, batch: bool | None = None) -> Any:
    """Marks a function as a reward. Optional: any function can be named in the YAML as ``path/file.py:fn``.

    A file with exactly one marked function can be named without ``:fn``. The function itself is returned unchanged.

    Args:
        name: its name in metrics and messages; default: the function's.
        batch: True if it takes lists and is called once per batch, False if it is called for each completion; default: as its
            parameter names say (`prompts`, `completions`, `completion_ids` take lists).
    """

    def mark(target: Any) -> Any:
        if not callable(target):
            raise TypeError(f"@reward marks functions, not {type(target).__name__}")
        setattr(target, _MARK, Mark(name, batch))
        return target

    return mark if function is None else mark(function)


def mark_of(function: Any) -> Mark | None:
    mark = getattr(function, _MARK, None)
    return mark if isinstance(mark, Mark) else None


def nearest(name: str, choices: Iterable[str]) -> str:
    """``; did you mean 'x'?`` or nothing."""
    close = difflib.get_close_matches(name, list(choices), n=1, cutoff=0.6)
    return f"; did you mean {close[0]!r}?" if close else ""


def build(name: str, options: Mapping[str, Any]) -> Callable[..., Any]:
    """A built-in reward with its options.

    Raises:
        RewardError: unknown name or option, or an option of the wrong type or value.
    """
    if name not in BUILTINS:
        hint = nearest(name, BUILTINS) or "."
        known = ", ".join(sorted(BUILTINS))
        raise RewardError(f"unknown reward {name!r}{hint} Built-in rewards: {known}. A function of your own is named path/file.py:fn.")
    module, _, attribute = BUILTINS[name].partition(":")
    kind: Any = getattr(import_module(f"surogate_rl.rewards.{module}"), attribute)
    _check_options(name, kind, options)
    try:
        return typing.cast(Callable[..., Any], kind(**options))
    except (ValueError, ImportError, OSError) as error:
        raise RewardError(f"reward {name!r}: {error}") from error


def _check_options(name: str, kind: Any, options: Mapping[str, Any]) -> None:
    from pydantic import ConfigDict, TypeAdapter, ValidationError

    fields = {field.name: field for field in dataclasses.fields(kind) if field.init}
    hints = typing.get_type_hints(kind)
    for key, value in options.items():
        if key not in fields:
            known = f"options: {', '.join(fields)}" if fields else "it takes no options"
            raise RewardError(f"reward {name!r}: unknown option {key!r}{nearest(key, fields)} ({known})")
        try:
            TypeAdapter(hints[key], config=ConfigDict(strict=True)).validate_python(value)
        except ValidationError as error:
            reasons = {str(item["msg"]) for item in error.errors()}
            raise RewardError(f"reward {name!r}: option {key!r} is {value!r}: {'; '.join(sorted(reasons))}") from None
    for key, field in fields.items():
        if key not in options and field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING:
            raise RewardError(f"reward {name!r}: option {key!r} is required; give it under args")
