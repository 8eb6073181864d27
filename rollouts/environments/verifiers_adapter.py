"""Environments of the package `verifiers`, in the interface that its published environments have (``load_environment(id)``, releases before
0.4, which took it away).

An environment's own rollout runs as it is, beside the engine's event loop, with a client that samples nothing: the messages that the
environment wants a model to answer become the observation, and what the policy says to them is the client's response. Its rubric scores the
episode once it is over, by itself or by a limit. Tools that it defines are shown by the model's chat template, and calls are read from
what the policy says (see `tool_formats`).
"""

from __future__ import annotations

import asyncio
import importlib
import json
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from surogate_rl.rollouts.environments.named import EnvironmentConfigError
from surogate_rl.rollouts.environments.tool_formats import Parsed, ToolCall, parse
from surogate_rl.rollouts.environments.tools import ToolDialect, call_id, call_message, with_tools
from surogate_rl.rollouts.types import Episode, Message, Observation, Task

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

MODEL = "policy"
LIMITS = ("max_turns_reached", "max_total_completion_tokens_reached", "timeout_reached", "prompt_too_long")
"""Conditions of the package that end a rollout without its being over."""


class VerifiersAdapter:
    """A loaded environment of the package, shared by a run's episodes.

    Args:
        name: its id, as for ``verifiers.load_environment``.
        args: its arguments.

    Raises:
        EnvironmentConfigError: the package or the environment is not there, or cannot be used so.
    """

    def __init__(self, name: str, args: Mapping[str, Any], tokenizer: PreTrainedTokenizerBase) -> None:
        self._verifiers = _package(name)
        try:
            self.environment: Any = self._verifiers.load_environment(name, **args)
        except Exception as error:
            raise EnvironmentConfigError(f"environment: verifiers:{name} could not be loaded: {type(error).__name__}: {error}") from error
        if getattr(self.environment, "requires_group_rollouts", False):
            raise EnvironmentConfigError(
                f"environment: verifiers:{name} has rewards over groups, which are not known while an episode is played; use one whose "
                "rubric scores rollouts one by one"
            )
        self.schemas = [_schema(tool) for tool in getattr(self.environment, "tool_defs", None) or []]
        self._dialect = ToolDialect.of(tokenizer) if self.schemas and tokenizer.chat_template else None
        self._parameters = {schema["function"]["name"]: schema["function"]["parameters"] for schema in self.schemas}

    def make(self) -> VerifiersEnvironment:
        return VerifiersEnvironment(self)

    def prepare(self, task: Task) -> Task:
        """The environment's system prompt and tools in the task's prompt.

        Raises:
            EnvironmentConfigError: the task is plain text.
        """
        if task.messages is None:
            raise EnvironmentConfigError(
                "environment: verifiers needs conversations, the rows of the data set are plain text or the tokenizer has no chat template"
            )
        system = getattr(self.environment, "system_prompt", None)
        if system and not (task.messages and task.messages[0]["role"] == "system"):
            task = Task(task.index, [{"role": "system", "content": system}, *task.messages], task.prompt, task.columns, task.tools)
        return task if self._dialect is None else with_tools(task, self.schemas, self._dialect)

    def row_of(self, task: Task) -> dict[str, Any]:
        """The task as a row of the environment's data set."""
        return {"example_id": task.index, "answer": ""} | dict(task.columns) | {"prompt": list(task.messages or [])}

    def parse(self, episode: Episode) -> Parsed:
        if self._dialect is None:
            return Parsed(episode.completion, [])
        return parse(episode.raw_completion, self._dialect.format, self._parameters)

    @property
    def shows_calls(self) -> bool:
        return self._dialect is not None and self._dialect.shows_calls

    def shown(self, messages: Sequence[Message], parts: Message | None) -> list[Message]:
        """As the chat template can show them: results of tools as the user's words where it knows no others."""
        if self._dialect is None or self._dialect.shows_results or parts is not None:
            return list(messages)
        told = "<tool_response>\n{}\n</tool_response>"
        return [m if m["role"] != "tool" else {"role": "user", "content": told.format(m["content"])} for m in messages]

    def response(self, content: str, calls: Sequence[ToolCall], turn: int, truncated: bool) -> Any:
        types = importlib.import_module("verifiers.types")
        made = [
            types.ToolCall(id=call_id(turn, number), name=call.name, arguments=json.dumps(call.arguments))
            for number, call in enumerate(calls)
        ]
        message = types.ResponseMessage(
            content=content,
            tool_calls=made or None,
            finish_reason="length" if truncated else "tool_calls" if made else "stop",
            is_truncated=truncated,
        )
        return types.Response(id=f"turn-{turn}", created=int(time.time()), model=MODEL, message=message)

    def client(self, ask: Callable[[Any, Any], Awaitable[Any]]) -> Any:
        """A client whose model is ``await ask(messages, state)``."""
        base: Any = importlib.import_module("verifiers.clients").Client

        class Policy(base):  # type: ignore[misc]
            def setup_client(self, config: Any) -> Any:
                return config

            async def to_native_tool(self, tool: Any) -> Any:
                return tool

            async def to_native_prompt(self, messages: Any) -> tuple[Any, dict[str, Any]]:
                return messages, {}

            async def get_native_response(self, prompt: Any, *_: Any, state: Any = None, **__: Any) -> Any:
                return await ask(prompt, state)

            async def raise_from_native_response(self, response: Any) -> None:
                return None

            async def from_native_response(self, response: Any) -> Any:
                return response

            async def close(self) -> None:
                return None

        return Policy(None)


class VerifiersEnvironment:
    """One episode: the environment's own rollout, stopped wherever it asks its model."""

    def __init__(self, adapter: VerifiersAdapter) -> None:
        self._adapter = adapter
        self._asked: asyncio.Queue[list[Message]] = asyncio.Queue()
        self._answers: asyncio.Queue[Any] = asyncio.Queue()
        self._rollout: asyncio.Task[Any] | None = None
        self._seen: list[Message] = []
        self._state: Any = None
        self._over = False

    async def reset(self, task: Task, seed: int) -> Observation:
        async def ask(messages: Any, state: Any) -> Any:
            self._state = state
            await self._asked.put([_plain(message) for message in messages])
            return await self._answers.get()

        given = list(task.messages or [])
        rollout = self._adapter.environment.rollout(self._adapter.row_of(task), self._adapter.client(ask), MODEL, {})
        self._rollout = asyncio.create_task(rollout)
        asked = await self._next()
        if asked is None:
            raise RuntimeError("the environment ended before it asked the policy anything")
        if not _same(asked[: len(given)], given):
            raise RuntimeError("the environment changes the task's own messages, which the policy has been given already")
        self._seen = asked
        return Observation(asked[len(given) :])

    async def step(self, episode: Episode, action: str) -> Observation:
        adapter, turn = self._adapter, episode.turns - 1
        parsed = adapter.parse(episode)
        calls = parsed.calls if all(call.problem is None for call in parsed.calls) else []
        content = parsed.content if calls else action
        parts = call_message(content, calls, turn) if calls and adapter.shows_calls else None
        await self._answers.put(adapter.response(content, calls, turn, episode.truncated))
        asked = await self._next()
        if asked is None:
            last = [_plain(message) for message in self._state.get("final_env_response") or []]
            limit = self._state.get("stop_condition") in LIMITS and getattr(adapter.environment, "max_turns", None) != 1
            return Observation(adapter.shown(last, parts), done=True, truncated=limit or episode.truncated, turn=parts)
        if not _same(asked[: len(self._seen)], self._seen):
            raise RuntimeError("the environment rewrites earlier messages, which cannot be followed token by token")
        appended = asked[len(self._seen) + 1 :]
        self._seen = asked
        return Observation(adapter.shown(appended, parts), turn=parts)

    async def finish(self, episode: Episode) -> float | None:
        """The rubric's score. An episode that a limit has cut is scored as far as it went."""
        environment = self._adapter.environment
        if not self._over:
            await self.close()
            self._state["is_truncated"] = True
            if hasattr(environment, "render_completion"):
                await environment.render_completion(self._state)
        await environment.rubric.score_rollout(self._state)
        return float(self._state["reward"])

    async def close(self) -> None:
        if self._rollout is not None and not self._rollout.done():
            self._rollout.cancel()
            await asyncio.gather(self._rollout, return_exceptions=True)

    async def _next(self) -> list[Message] | None:
        """The messages that the environment wants answered; None: it has ended."""
        assert self._rollout is not None
        asking = asyncio.create_task(self._asked.get())
        await asyncio.wait({asking, self._rollout}, return_when=asyncio.FIRST_COMPLETED)
        if asking.done():
            return asking.result()
        asking.cancel()
        self._state, self._over = self._rollout.result(), True
        if self._state.get("error") is not None:
            raise RuntimeError(f"the environment failed: {self._state['error']!r}")
        return None


def _package(name: str) -> Any:
    try:
        package = importlib.import_module("verifiers")
        package.load_environment  # noqa: B018 (releases that have it load it when it is asked for)
    except ModuleNotFoundError as error:
        if error.name != "verifiers":
            raise EnvironmentConfigError(f"environment: verifiers:{name}: importing verifiers failed: {error}") from error
        raise EnvironmentConfigError(
            f"environment: verifiers:{name} needs the package verifiers: pip install 'verifiers<0.4', and the environment itself"
        ) from None
    except AttributeError:
        version = getattr(package, "__version__", "?")
        raise EnvironmentConfigError(
            f"environment: verifiers:{name}: this release of verifiers ({version}) has no load_environment any more; "
            "pip install 'verifiers<0.4'"
        ) from None
    return package


def _schema(tool: Any) -> dict[str, Any]:
    parameters = dict(tool.parameters)
    return {"type": "function", "function": {"name": tool.name, "description": tool.description, "parameters": parameters}}


def _plain(message: Any) -> Message:
    """One of the package's messages as a chat template wants it."""
    fields = message if isinstance(message, Mapping) else message.model_dump(exclude_none=True)
    content = fields.get("content")
    if isinstance(content, list):
        content = "".join(str(part.get("text", "")) for part in content if isinstance(part, Mapping))
    plain: Message = {"role": str(fields["role"]), "content": content or ""}
    if fields["role"] == "tool":
        plain["tool_call_id"] = fields.get("tool_call_id", "")
    return plain


def _same(a: Sequence[Message], b: Sequence[Message]) -> bool:
    def words(messages: Sequence[Message]) -> list[tuple[str, str]]:
        return [(message["role"], message["content"]) for message in messages]

    return words(a) == words(b)
