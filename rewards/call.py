"""From a function's signature to the arguments of its calls.

A function takes what its parameters name. Called for each completion:

* ``prompt``: the task's text, or its list of messages if it is a chat;
* ``completion``: the text of what the policy said (in an episode of several turns: its last one);
* ``messages``: the whole conversation;
* ``tokens``: ids that the policy sampled;
* ``episode``: the `Episode` itself;
* any other name: the data set's column of this name (``answer``...).

Called once per batch (a parameter named ``prompts``, ``completions`` or ``completion_ids``; or ``**kwargs`` and none of the
names above, as TRL does): ``prompts`` and ``completions`` are lists of texts, or of message lists where the task is a chat;
``completion_ids`` a list of token lists; ``episodes`` a list of `Episode`; any other name a list of the column's values. It returns
one number or None per completion.

Both kinds may also take TRL's ``trainer_state`` (`TrainerState`), ``log_metric(name, value)`` and ``log_extra(column, values)``.
``**kwargs`` gets all that is not named. A parameter with a default keeps it where the data set has no such column.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from surogate_rl.rewards.registry import RewardError, mark_of, nearest

if TYPE_CHECKING:
    from surogate_rl.rollouts.types import Episode, Message

SINGLE_NAMES = ("prompt", "completion", "messages", "tokens", "episode")
BATCH_NAMES = ("prompts", "completions", "completion_ids", "episodes")
COMMON_NAMES = ("trainer_state", "log_metric", "log_extra")
LOGGERS = ("log_metric", "log_extra")


@dataclass(frozen=True)
class TrainerState:
    """How far the run is, for rewards that change over time. The fields carry TRL's names."""

    global_step: int = 0
    max_steps: int = 0
    epoch: float = 0.0


@dataclass(frozen=True)
class CallPlan:
    """How one function is called.

    Attributes:
        batch: once for all completions, with lists; else once for each.
        is_async: its result is awaited.
        required: columns without which it cannot be called.
        optional: columns that it takes if they are there.
        special: names other than columns that it takes.
        everything: it has ``**kwargs``.
        options: fixed keyword arguments from the configuration.
    """

    name: str
    batch: bool
    is_async: bool
    required: tuple[str, ...]
    optional: tuple[str, ...]
    special: frozenset[str]
    everything: bool
    options: Mapping[str, Any] = field(default_factory=dict)

    @property
    def loggers(self) -> tuple[str, ...]:
        """The logging functions that the worker has to supply."""
        return tuple(name for name in LOGGERS if name in self.special)


def is_async(function: Callable[..., Any]) -> bool:
    """True for ``async def``, for a partial of one and for an object whose ``__call__`` is one."""
    while isinstance(function, functools.partial):
        function = function.func
    return inspect.iscoroutinefunction(function) or (
        not inspect.isroutine(function) and inspect.iscoroutinefunction(type(function).__call__)
    )


def plan_call(name: str, function: Callable[..., Any], options: Mapping[str, Any] | None = None) -> CallPlan:
    """Reads the signature.

    Raises:
        RewardError: a signature that cannot be filled by name, or an option that is no parameter.
    """
    options = dict(options or {})
    try:
        parameters = inspect.signature(function).parameters
    except (TypeError, ValueError) as error:
        raise RewardError(f"reward {name!r}: its signature cannot be read ({error}); wrap it in a Python function") from error
    positional = [p.name for p in parameters.values() if p.kind is p.POSITIONAL_ONLY]
    if positional:
        raise RewardError(f"reward {name!r}: parameter {positional[0]!r} is positional-only; rewards are called by name")
    named = {p.name: p for p in parameters.values() if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)}
    everything = any(p.kind is p.VAR_KEYWORD for p in parameters.values())

    mark = mark_of(function)
    singles = [p for p in named if p in SINGLE_NAMES]
    plurals = [p for p in named if p in BATCH_NAMES]
    if mark is not None and mark.batch is not None:
        batch = mark.batch
    elif singles and plurals:
        raise RewardError(
            f"reward {name!r}: takes both {singles[0]!r} (one completion per call) and {plurals[0]!r} (all completions in one call); "
            "use one kind, or say which by @reward(batch=True) or @reward(batch=False)"
        )
    else:
        batch = bool(plurals) or (everything and not singles)

    special_names = (*(BATCH_NAMES if batch else SINGLE_NAMES), *COMMON_NAMES)
    for key in options:
        if key in special_names:
            raise RewardError(f"reward {name!r}: argument {key!r} is filled from the rollout and cannot be set under args")
        if key not in named and not everything:
            raise RewardError(f"reward {name!r}: unknown argument {key!r}{nearest(key, named)} (its parameters: {', '.join(named)})")
    columns = [p for p in named.values() if p.name not in special_names and p.name not in options]
    special = {p for p in named if p in special_names}
    if everything:
        # An `Episode` is large and everything in it is passed apart: only who names it gets it.
        special |= set(special_names) - {"episode", "episodes"}
    return CallPlan(
        name=name,
        batch=batch,
        is_async=is_async(function),
        required=tuple(p.name for p in columns if p.default is p.empty),
        optional=tuple(p.name for p in columns if p.default is not p.empty),
        special=frozenset(special),
        everything=everything,
        options=options,
    )


def check_columns(plans: Iterable[CallPlan], tasks: Iterable[Collection[str]]) -> None:
    """Refuses a data set without the columns that the functions ask for.

    Args:
        tasks: the column names of each task (a mapping of columns will do).

    Raises:
        RewardError: naming function, parameter and the columns that there are.
    """
    counts: dict[str, int] = {}
    total = 0
    for columns in tasks:
        if isinstance(columns, str):
            raise TypeError("check_columns takes the columns of each task, not a list of names")
        total += 1
        for column in columns:
            counts[column] = counts.get(column, 0) + 1
    if not total:
        return
    for plan in plans:
        for parameter in plan.required:
            have = counts.get(parameter, 0)
            if have == total:
                continue
            # A batch function gets None for the rows that lack a column that others have, as in a concatenated data set.
            if plan.batch and have:
                continue
            available = ", ".join(sorted(counts)) if counts else "none"
            hint = nearest(parameter, counts) if not have else ""
            where = "which the data set does not have" if not have else f"which {total - have} of {total} tasks lack"
            taken = ", ".join((*(BATCH_NAMES if plan.batch else SINGLE_NAMES), *COMMON_NAMES))
            raise RewardError(
                f"reward {plan.name!r}: parameter {parameter!r} asks for a column {where}{hint or '.'} "
                f"Columns: {available}. Besides columns it can take: {taken}. Rename a column under datasets: columns, "
                "give the value under args, or give the parameter a default."
            )


def prompt_of(episode: Episode) -> str | list[Message]:
    """The task's prompt in the form that the data set has it."""
    task = episode.task
    if task.messages is not None:
        return list(task.messages)
    return task.prompt if task.prompt is not None else ""


def completion_of(episode: Episode) -> str | list[Message]:
    """What came after the prompt, in the form that the prompt has: text, or messages (a single one but for several turns)."""
    task = episode.task
    if task.messages is None:
        return episode.completion
    later = episode.messages[len(task.messages) :]
    if len(later) > 1 and episode.messages[: len(task.messages)] == list(task.messages):
        return list(later)
    return [{"role": "assistant", "content": episode.completion}]


def messages_of(episode: Episode) -> list[Message]:
    """The whole conversation; a plain prompt counts as the user's turn."""
    if episode.messages:
        return list(episode.messages)
    prompt = prompt_of(episode)
    start = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
    return [*start, {"role": "assistant", "content": episode.completion}]


def tokens_of(episode: Episode) -> list[int]:
    """Ids that the policy sampled, in order."""
    return [token for segment in episode.segments for token, sampled in zip(segment.tokens, segment.sampled, strict=True) if sampled]


def portable(episode: Episode) -> Episode:
    """The episode with plain dictionaries for columns, so that it can be sent to another process."""
    return dataclasses.replace(episode, task=dataclasses.replace(episode.task, columns=dict(episode.task.columns)))


def single_arguments(plan: CallPlan, episode: Episode, state: TrainerState) -> dict[str, Any]:
    """Arguments of a call for one completion (the logging functions are added by the worker).

    Raises:
        KeyError: the task lacks a column that the function cannot do without.
    """
    columns = episode.task.columns
    arguments: dict[str, Any] = {}
    if plan.everything:
        arguments.update((key, value) for key, value in columns.items() if key not in SINGLE_NAMES + COMMON_NAMES)
    for key in plan.required:
        if key not in columns:
            raise KeyError(f"task {episode.task.index} has no column {key!r}")
        arguments[key] = columns[key]
    for key in plan.optional:
        if key in columns:
            arguments[key] = columns[key]
    makers: dict[str, Callable[[], Any]] = {
        "prompt": lambda: prompt_of(episode),
        "completion": lambda: episode.completion,
        "messages": lambda: messages_of(episode),
        "tokens": lambda: tokens_of(episode),
        "episode": lambda: portable(episode),
        "trainer_state": lambda: state,
    }
    arguments.update((key, make()) for key, make in makers.items() if key in plan.special)
    return {**arguments, **plan.options}


def batch_arguments(plan: CallPlan, episodes: Sequence[Episode], state: TrainerState) -> dict[str, Any]:
    """Arguments of the one call for all completions (the logging functions are added by the worker).

    Raises:
        KeyError: no task has a column that the function cannot do without.
    """
    present = {key for episode in episodes for key in episode.task.columns}
    wanted = set(plan.required) | {key for key in plan.optional if key in present}
    missing = set(plan.required) - present
    if missing:
        raise KeyError(f"no task has a column {min(missing)!r}")
    if plan.everything:
        wanted |= present - {"prompt", "completion", *BATCH_NAMES, *COMMON_NAMES}
    arguments: dict[str, Any] = {key: [episode.task.columns.get(key) for episode in episodes] for key in sorted(wanted)}
    makers: dict[str, Callable[[], Any]] = {
        "prompts": lambda: [prompt_of(episode) for episode in episodes],
        "completions": lambda: [completion_of(episode) for episode in episodes],
        "completion_ids": lambda: [tokens_of(episode) for episode in episodes],
        "episodes": lambda: [portable(episode) for episode in episodes],
        "trainer_state": lambda: state,
    }
    arguments.update((key, make()) for key, make in makers.items() if key in plan.special)
    return {**arguments, **plan.options}
