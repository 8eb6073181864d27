"""How an episode unfolds: one module per kind of environment."""

from __future__ import annotations

import dataclasses
import functools
import typing
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from surogate_rl.rollouts.environments.games import GAMES
from surogate_rl.rollouts.environments.named import ByName, EnvironmentConfigError, check_arguments, load_named, nearest
from surogate_rl.rollouts.environments.single_turn import SingleTurn
from surogate_rl.rollouts.types import Environment, Task

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from surogate_rl.rollouts.environments.tools import ToolOptions

__all__ = ["KINDS", "EnvironmentConfigError", "Environments", "check_environment", "gives_rewards", "make_environments", "parse_name"]

KINDS = ("single_turn", "tools", "text_game", "gym", "verifiers", "user")
"""What the part of a name before its colon says; ``path/file.py:Class`` without one is the user's own."""

_WITH_TARGET = {
    "text_game": f"text_game:{'|'.join(GAMES)} or text_game:path/file.py:Class",
    "gym": "gym:path/file.py:Class",
    "verifiers": "verifiers:<id of an installed environment>",
}


@dataclass
class Environments:
    """A run's environments: makes a fresh one for each episode.

    Attributes:
        inline: they never block and may be called on the event loop that deadlines live on.
        prepare: what the environment adds to a task's prompt.
        required: columns without which a task cannot be played.
        several_turns: an episode may have more than one.
        timeout: seconds for one call.
        max_turns: of an episode; None: no limit.
        name: as configured.
    """

    make: Callable[[], Environment]
    inline: bool = False
    prepare: Callable[[Task], Task] = lambda task: task
    required: tuple[str, ...] = ()
    close: Callable[[], None] = lambda: None
    several_turns: bool = True
    timeout: float = 60.0
    max_turns: int | None = None
    name: str = ""

    def check_columns(self, tasks: Iterable[Task]) -> None:
        """Refuses tasks without the columns that the environment asks for; call it before the run.

        Raises:
            EnvironmentConfigError: naming column and task.
        """
        for task in tasks if self.required else ():
            for name in self.required:
                if name not in task.columns:
                    known = ", ".join(sorted(task.columns)) or "none"
                    raise EnvironmentConfigError(
                        f"environment: its reset asks for a column {name!r}, which task {task.index} of the data set does not have "
                        f"(columns: {known}{nearest(name, task.columns)}); rename a column under datasets: columns, or give it a default"
                    )


def parse_name(name: str) -> tuple[str, str]:
    """(kind, target) of an environment's name.

    Raises:
        EnvironmentConfigError: no kind is called so, or its target is missing.
    """
    kind, colon, target = name.partition(":")
    if kind in KINDS and kind != "user":
        if kind in _WITH_TARGET and not target:
            raise EnvironmentConfigError(f"{kind} is to be told which: write {_WITH_TARGET[kind]}")
        if kind not in _WITH_TARGET and colon:
            raise EnvironmentConfigError(f"{kind} takes nothing after a colon; write {kind}")
        if kind == "gym" or (kind == "text_game" and target not in GAMES):
            path, _, cls = target.rpartition(":")
            if not path.endswith(".py") or not cls:
                raise EnvironmentConfigError(f"unknown {kind} {target!r}{nearest(target, GAMES)}; write {_WITH_TARGET[kind]}")
        return kind, target
    path, _, cls = name.rpartition(":")
    if path.endswith(".py") and cls:
        return "user", name
    if name.endswith(".py"):
        raise EnvironmentConfigError(f"{name!r} names a file; write {name}:Class")
    known = "single_turn, tools, text_game:<game>, gym:path/file.py:Class, verifiers:<id>"
    raise EnvironmentConfigError(f"unknown environment {name!r}{nearest(kind, KINDS)}; known: {known}, or path/file.py:Class of your own")


def gives_rewards(name: str) -> bool:
    """Whether environments of this name give rewards of their own, so that a run needs no reward function."""
    return parse_name(name)[0] not in ("single_turn", "tools")


def check_environment(name: str, args: Mapping[str, Any]) -> None:
    """Refuses a wrong name, and options that a built-in environment does not have; loads nothing of the user's.

    Raises:
        EnvironmentConfigError: what is wrong, and what to do.
    """
    kind, target = parse_name(name)
    if kind == "single_turn" and args:
        raise EnvironmentConfigError(f"args: {', '.join(args)}: single_turn takes none; remove them")
    if kind == "tools":
        _tool_options(args)
    if kind == "text_game" and target in GAMES:
        _checked_game(target, args)


def make_environments(name: str, args: Mapping[str, Any], tokenizer: PreTrainedTokenizerBase) -> Environments:
    """Finds what `name` names and makes ready what all episodes share.

    Args:
        args: ``environment.args``: options of a built-in environment, arguments of the user's class.

    Raises:
        EnvironmentConfigError: a name, options or code that cannot be used.
    """
    check_environment(name, args)
    kind, target = parse_name(name)
    if kind == "single_turn":
        return Environments(SingleTurn, inline=True, several_turns=False)
    if kind == "tools":
        return _tools(args, tokenizer)
    if kind == "verifiers":
        from surogate_rl.rollouts.environments.verifiers_adapter import VerifiersAdapter

        adapter = VerifiersAdapter(target, args, tokenizer)
        return Environments(adapter.make, prepare=adapter.prepare)
    if kind == "text_game" and target in GAMES:
        from surogate_rl.rollouts.environments.text_game import TextGameEnvironment

        game = functools.partial(GAMES[target], **args)
        return Environments(lambda: typing.cast(Environment, TextGameEnvironment(game)), inline=True)
    found = load_named(target)
    check_arguments(target, found, args)
    make = functools.partial(found, **args)
    if kind == "user":
        _check_methods(target, found, ("reset", "step", "close"))
        return Environments(make)
    _check_methods(target, found, ("reset", "step"))
    required = ByName.of(functools.partial(typing.cast(Any, found).reset, None)).required if isinstance(found, type) else ()
    if kind == "text_game":
        from surogate_rl.rollouts.environments.text_game import TextGameEnvironment

        return Environments(lambda: typing.cast(Environment, TextGameEnvironment(make)), required=required)
    from surogate_rl.rollouts.environments.gym import make_gym_environment

    return Environments(lambda: make_gym_environment(make), required=required)


def _tools(args: Mapping[str, Any], tokenizer: PreTrainedTokenizerBase) -> Environments:
    from surogate_rl.rollouts.environments.tools import Toolbox, ToolDialect, ToolEnvironment, with_tools

    options = _tool_options(args)
    if not tokenizer.chat_template:
        raise EnvironmentConfigError("environment: tools needs a chat template, the tokenizer has none; set chat_template")
    toolbox, dialect = Toolbox(options), ToolDialect.of(tokenizer, options.format)
    return Environments(
        lambda: ToolEnvironment(toolbox, dialect, options.max_calls),
        inline=True,
        prepare=lambda task: with_tools(task, toolbox.schemas, dialect),
        close=toolbox.close,
    )


def _tool_options(args: Mapping[str, Any]) -> ToolOptions:
    from surogate_rl.rollouts.environments.tools import ToolOptions

    given = dict(args)
    if isinstance(given.get("tools"), str):
        given["tools"] = [given["tools"]]
    return typing.cast(ToolOptions, _options("tools", ToolOptions, given))


def _checked_game(name: str, args: Mapping[str, Any]) -> None:
    label = f"text_game:{name}"
    check_arguments(label, GAMES[name], args)
    try:
        GAMES[name](**args)
    except (TypeError, ValueError) as error:
        raise EnvironmentConfigError(f"args: {error}") from None


def _options(name: str, kind: Any, args: Mapping[str, Any]) -> Any:
    """A dataclass of options, its fields checked strictly."""
    from pydantic import ConfigDict, TypeAdapter, ValidationError

    fields = {item.name: item for item in dataclasses.fields(kind)}
    hints = typing.get_type_hints(kind)
    for key, value in args.items():
        if key not in fields:
            raise EnvironmentConfigError(f"args.{key}: {name} has no such option{nearest(key, fields)} (options: {', '.join(fields)})")
        number = float(value) if hints[key] is float and isinstance(value, int) and not isinstance(value, bool) else value
        try:
            TypeAdapter(hints[key], config=ConfigDict(strict=True)).validate_python(number)
        except ValidationError as error:
            reasons = "; ".join(sorted({str(item["msg"]) for item in error.errors()}))
            raise EnvironmentConfigError(f"args.{key}: {value!r}: {reasons}") from None
    for key, item in fields.items():
        if key not in args and item.default is dataclasses.MISSING and item.default_factory is dataclasses.MISSING:
            raise EnvironmentConfigError(f"args.{key}: {name} needs it")
    try:
        return kind(**args)
    except ValueError as error:
        raise EnvironmentConfigError(f"args.{error}") from None


def _check_methods(label: str, found: Any, names: tuple[str, ...]) -> None:
    """Of a class; what a function returns is seen when it is called."""
    missing = [name for name in names if isinstance(found, type) and not callable(getattr(found, name, None))]
    if missing:
        raise EnvironmentConfigError(f"environment: {label!r} has no method {' and no '.join(missing)}; it needs {', '.join(names)}")
