"""What runs inside a process that runs tools. It can be killed, and its replacement should start quickly, so it imports little."""

from __future__ import annotations

import asyncio
import inspect
import json
import pickle
from collections.abc import Callable, Mapping
from typing import Any

from surogate_rl.rewards.worker import load, short_traceback

_functions: list[Callable[..., Any] | str] = []


def initialise(path: str) -> None:
    """Loads every tool before the first call, so that imports do not count against a deadline.

    Args:
        path: file with a pickled list of sources. A tool that fails to load answers each call with that failure.
    """
    with open(path, "rb") as file:
        sources = pickle.load(file)
    for source in sources:
        try:
            _functions.append(load(source))
        except BaseException as error:  # SystemExit at import too: the worker must live to say so
            _functions.append(short_traceback(error))


def failures() -> list[str | None]:
    """For each tool why it could not be loaded, or None."""
    return [function if isinstance(function, str) else None for function in _functions]


def call(index: int, arguments: Mapping[str, Any]) -> tuple[str, bool]:
    """(what the tool returned as text, or what went wrong in words for the model; whether it went wrong)."""
    function = _functions[index]
    if isinstance(function, str):
        return f"the tool could not be loaded: {function.splitlines()[-1]}", True
    try:
        inspect.signature(function).bind(**arguments)
    except TypeError as error:
        return f"{error}", True
    try:
        result = function(**arguments)
        if inspect.isawaitable(result):
            result = asyncio.run(_awaited(result))
        return _text_of(result), False
    except BaseException as error:  # SystemExit of a tool is its failure as well
        return f"{type(error).__name__}: {error}" if str(error) else type(error).__name__, True


async def _awaited(result: Any) -> Any:
    return await result


def _text_of(result: Any) -> str:
    return result if isinstance(result, str) else json.dumps(result, ensure_ascii=False, default=str)
