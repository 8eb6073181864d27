"""Tools: the policy calls Python functions, sees what they return, and answers when it calls none any more."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import pickle
import tempfile
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from surogate_rl.plain import plain_text
from surogate_rl.rewards.pool import WorkerDied, WorkerPool, WorkerTimeout
from surogate_rl.rewards.worker import FileSource
from surogate_rl.rollouts.environments import tool_worker
from surogate_rl.rollouts.environments.named import EnvironmentConfigError, load_named
from surogate_rl.rollouts.environments.tool_formats import ToolCall, format_of, parse
from surogate_rl.rollouts.types import Episode, Message, Observation, Task

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

SENTINEL = "surogate-result"


@dataclass(frozen=True)
class ToolOptions:
    """``environment.args`` of ``tools``.

    Attributes:
        tools: functions, as ``path/file.py:function``; their schemas come from signatures and docstrings.
        format: how the model writes calls: hermes, llama3, mistral, json; auto: as its chat template says.
        timeout: seconds for one call; a tool that takes longer is killed and the model told so.
        workers: processes that run tools.
        max_calls: calls of one turn that are run; the model is told of the rest.
        max_result_length: characters of a result that are shown to the model.
    """

    tools: list[str]
    format: Literal["auto", "hermes", "llama3", "mistral", "json"] = "auto"
    timeout: float = 10.0
    workers: int = 2
    max_calls: int = 8
    max_result_length: int = 4000

    def __post_init__(self) -> None:
        if not self.tools:
            raise ValueError("tools: the list is empty, there is nothing to call; name functions as path/file.py:function")
        for name in ("timeout", "workers", "max_calls", "max_result_length"):
            if getattr(self, name) <= 0:
                raise ValueError(f"{name}: {getattr(self, name)}, expected a number greater than 0")


class Toolbox:
    """The tools of a run and the processes that run them. Close it; the processes die with this one in any case.

    Raises:
        EnvironmentConfigError: a tool that cannot be found, described or loaded.
    """

    def __init__(self, options: ToolOptions, start_timeout: float = 120.0) -> None:
        self._options = options
        self.schemas: list[dict[str, Any]] = []
        self._index: dict[str, int] = {}
        sources: list[FileSource] = []
        for label in options.tools:
            function = load_named(label)
            schema = _schema(label, function)
            name = schema["function"]["name"]
            if name in self._index:
                raise EnvironmentConfigError(f"environment.args.tools: two tools are called {name!r}; rename one of the functions")
            self._index[name] = len(sources)
            self.schemas.append(schema)
            sources.append(FileSource(str(Path(function.__code__.co_filename).resolve()), label.rpartition(":")[2]))
        self.parameters: dict[str, Mapping[str, Any]] = {s["function"]["name"]: s["function"].get("parameters", {}) for s in self.schemas}
        descriptor, path = tempfile.mkstemp(prefix="surogate-tools-", suffix=".pickle")
        with open(descriptor, "wb") as file:
            pickle.dump(sources, file)
        self._remove = weakref.finalize(self, _remove, path)
        self._pool = WorkerPool(options.workers, tool_worker.initialise, (path,), start_timeout=start_timeout)
        for label, failure in zip(options.tools, self._pool.start(tool_worker.failures), strict=True):
            if failure is not None:
                self.close()
                raise EnvironmentConfigError(f"environment.args.tools: {label!r} could not be loaded in a worker process:\n{failure}")

    async def run(self, call: ToolCall) -> tuple[str, bool]:
        """(text for the model, whether the call failed). Never raises for what a tool or the model does.

        Raises:
            WorkersUnavailable: processes cannot be started any more.
        """
        text, failed = await self._run(call)
        text = plain_text(text)
        limit = self._options.max_result_length
        if len(text) > limit:
            text = f"{text[:limit]}... ({len(text) - limit} more characters)"
        return (f"Error: {text}" if failed else text), failed

    async def _run(self, call: ToolCall) -> tuple[str, bool]:
        if call.problem is not None:
            return call.problem, True
        if call.name not in self._index:
            return f"there is no tool {call.name!r}; the tools are {', '.join(self._index)}", True
        try:
            text, failed = await self._pool.run(tool_worker.call, (self._index[call.name], call.arguments), self._options.timeout)
            return str(text), bool(failed)
        except WorkerTimeout:
            return f"{call.name} gave no result within {self._options.timeout:g} s", True
        except WorkerDied as error:
            return f"{call.name} failed: {error}", True

    def close(self) -> None:
        self._pool.close()
        self._remove()


def _remove(path: str) -> None:
    with contextlib.suppress(OSError):
        os.unlink(path)


def _schema(label: str, function: Any) -> dict[str, Any]:
    from transformers.utils.chat_template_utils import get_json_schema

    if not hasattr(function, "__code__"):
        raise EnvironmentConfigError(f"environment.args.tools: {label!r} is a {type(function).__name__}, expected a function")
    try:
        schema: dict[str, Any] = get_json_schema(function)
    except Exception as error:
        raise EnvironmentConfigError(
            f"environment.args.tools: {label!r} cannot be described to a model: {error}. A tool needs type hints, and a docstring with a "
            "sentence and a line 'name: what it is' under 'Args:' for each parameter"
        ) from error
    return schema


@dataclass(frozen=True)
class ToolDialect:
    """What a chat template can show of tools.

    Attributes:
        format: how calls are written.
        shows_tools: it writes the schemas; else they are described in the system message.
        shows_calls: it writes calls (``tool_calls``) and results (role ``tool``).
        shows_results: it writes results after a turn whose calls stand in its text.
    """

    format: str
    shows_tools: bool
    shows_calls: bool
    shows_results: bool

    @staticmethod
    def of(tokenizer: PreTrainedTokenizerBase, format_name: str = "auto") -> ToolDialect:
        schema = {
            "type": "function",
            "function": {
                "name": SENTINEL,
                "description": "d",
                "parameters": {"type": "object", "properties": {"a": {"type": "string", "description": "d"}}, "required": ["a"]},
            },
        }
        user, result = {"role": "user", "content": "u"}, {"role": "tool", "name": "f", "tool_call_id": call_id(0, 0), "content": SENTINEL}
        structured = call_message("", [ToolCall("f", {"a": "b"})], 0)
        written = {"role": "assistant", "content": "c"}

        def shows(messages: Sequence[Message], tools: list[dict[str, Any]] | None, times: int = 1) -> bool:
            try:
                given: Any = tools
                text = tokenizer.apply_chat_template(list(messages), tools=given, tokenize=False, add_generation_prompt=True)
            except Exception:  # templates raise what they like, and refuse what they do not know
                return False
            return str(text).count(SENTINEL) >= times

        shows_tools = shows([user], [schema])
        template = tokenizer.get_chat_template(tools=[schema]) if shows_tools else ""
        found = (format_of(template) if shows_tools else "hermes") if format_name == "auto" else format_name
        # twice, as some templates insist on turns that take turns
        return ToolDialect(
            found,
            shows_tools,
            shows_calls=shows([user, structured, result, structured, result], None, 2),
            shows_results=shows([user, written, result, written, result], None, 2),
        )


def call_id(turn: int, number: int) -> str:
    """Nine letters or digits, as Mistral's template wants them."""
    return f"{turn % 10000:04d}{number % 100000:05d}"


def call_message(content: str, calls: Sequence[ToolCall], turn: int) -> Message:
    """A turn with calls as a message."""
    made = [
        {"type": "function", "id": call_id(turn, number), "function": {"name": call.name, "arguments": call.arguments}}
        for number, call in enumerate(calls)
    ]
    return {"role": "assistant", "content": content, "tool_calls": made}


SYSTEM = (
    "You can call functions. For each call write a JSON object with the name and the arguments of the function between <tool_call> and "
    "</tool_call>:\n<tool_call>\n"
    '{"name": "...", "arguments": {...}}\n'
    "</tool_call>\nThe functions are:\n"
)


def with_tools(task: Task, schemas: list[dict[str, Any]], dialect: ToolDialect) -> Task:
    """The task with the tools in its prompt.

    Raises:
        EnvironmentConfigError: the task is plain text.
    """
    if task.messages is None:
        raise EnvironmentConfigError(
            "environment: tools needs conversations, the rows of the data set are plain text or the tokenizer has no chat template; set "
            "chat_template, and give the data set a column 'messages' (or 'prompt' as a list of messages)"
        )
    if dialect.shows_tools:
        names = {schema["function"]["name"] for schema in schemas}
        others = [tool for tool in task.tools or [] if tool.get("function", tool).get("name") not in names]
        return replace(task, tools=[*others, *schemas])
    description = SYSTEM + "\n".join(json.dumps(schema["function"], ensure_ascii=False) for schema in schemas)
    first = task.messages[0] if task.messages else None
    if first is not None and first["role"] == "system":
        return replace(task, messages=[{**first, "content": f"{first['content']}\n\n{description}"}, *task.messages[1:]])
    return replace(task, messages=[{"role": "system", "content": description}, *task.messages])


class ToolEnvironment:
    """One episode with tools. It ends with the first turn that calls none. `Episode.info` counts ``tool_calls`` and ``tool_failures``."""

    def __init__(self, toolbox: Toolbox, dialect: ToolDialect, max_calls: int) -> None:
        self._toolbox, self._dialect, self._max_calls = toolbox, dialect, max_calls

    async def reset(self, task: Task, seed: int) -> Observation:
        return Observation()

    async def step(self, episode: Episode, action: str) -> Observation:
        parsed = parse(episode.raw_completion, self._dialect.format, self._toolbox.parameters)
        for name in ("tool_calls", "tool_failures"):
            episode.info.setdefault(name, 0.0)
        if not parsed.calls:
            return Observation(done=True, truncated=episode.truncated)
        run, rest = parsed.calls[: self._max_calls], parsed.calls[self._max_calls :]
        results = list(await asyncio.gather(*map(self._toolbox.run, run)))
        results += [(f"Error: at most {self._max_calls} calls are run in one turn", True)] * len(rest)
        episode.info["tool_calls"] += len(parsed.calls)
        episode.info["tool_failures"] += sum(failed for _, failed in results)
        turn = episode.turns - 1
        well_formed = all(call.problem is None for call in parsed.calls)
        if well_formed and self._dialect.shows_calls:
            parts = call_message(parsed.content, parsed.calls, turn)
            return Observation(_results(parsed.calls, results, turn), turn=parts)
        if self._dialect.shows_results:
            return Observation(_results(parsed.calls, results, turn))
        told = "\n".join(f"<tool_response>\n{text}\n</tool_response>" for text, _ in results)
        return Observation([{"role": "user", "content": told}])

    async def close(self) -> None:
        return None


def _results(calls: Sequence[ToolCall], results: Sequence[tuple[str, bool]], turn: int) -> list[Message]:
    return [
        {"role": "tool", "name": call.name, "tool_call_id": call_id(turn, number), "content": text}
        for number, (call, (text, _)) in enumerate(zip(calls, results, strict=True))
    ]
