"""Rows of every type into the few shapes that are encoded: conversations, prompt/completion text, plain text, preference pairs."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from surogate_rl.data.detect import CHAT_COLUMNS, RowType, parse_json_list
from surogate_rl.data.report import DataError
from surogate_rl.data.tokens import shared_beginning

Message = dict[str, Any]

SPEAKERS = {
    "human": "user",
    "user": "user",
    "gpt": "assistant",
    "chatgpt": "assistant",
    "assistant": "assistant",
    "model": "assistant",
    "bot": "assistant",
    "function_call": "assistant",
    "system": "system",
    "tool": "tool",
    "function": "tool",
    "observation": "tool",
    "function_response": "tool",
}

# the wording of the Alpaca project, for tokenizers without a chat template
ALPACA_INSTRUCTION = "### Instruction:\n{instruction}\n\n### Response:\n"
ALPACA_INPUT = "### Instruction:\n{instruction}\n\n### Input:\n{input}\n\n### Response:\n"


@dataclass(frozen=True)
class Conversation:
    """Messages; those before `completion_start` are the prompt of a prompt/completion row (0: it is no such row)."""

    messages: list[Message]
    tools: list[dict[str, Any]] | None = None
    completion_start: int = 0


@dataclass(frozen=True)
class PromptCompletion:
    prompt: str
    completion: str


@dataclass(frozen=True)
class Text:
    text: str


Unit = Conversation | PromptCompletion | Text


@dataclass(frozen=True)
class Prompt:
    """What a policy answers: messages or plain text."""

    messages: list[Message] | None
    text: str | None
    tools: list[dict[str, Any]] | None = None
    reference: str | None = None


class Converter:
    """Turns rows of one data set into units.

    Args:
        chat: whether the tokenizer has a chat template. Rows that leave the form open (instruction, reasoning_gym, text prompts with a
            system prompt) become conversations if so.
        system_prompt: put before conversations that have no system message; makes text prompts the user's message.
    """

    def __init__(self, row_type: RowType, *, label: str, chat: bool, system_prompt: str | None) -> None:
        self._type = row_type
        self._label = label
        self._chat = chat
        self._system = system_prompt
        if system_prompt is not None and row_type == "text":
            raise DataError(f"{label}: a system_prompt has no place in rows of type text")

    def unit(self, row: Mapping[str, Any], where: str) -> Unit:
        """For supervised training. Raises DataError that names the row."""
        match self._type:
            case "messages" | "sharegpt":
                return Conversation(self._with_system(_chat_column(row, where)), _tools(row, where))
            case "text":
                return Text(_text(row, "text", where))
            case "prompt_completion":
                prompt, completion = _value(row, "prompt", where), _value(row, "completion", where)
                return self._answered(prompt, completion, _tools(row, where), where, "completion")
            case "instruction":
                return self._ask(self._instruction(row, where), _text(row, "output", where), chat=self._chat)
            case "reasoning_gym":
                if row["answer"] is None:
                    raise DataError(f"{where}: this reasoning_gym task gives no answers to learn from; it can be used with grpo only")
                return self._ask(row["question"], row["answer"], chat=self._chat)
            case _:
                raise AssertionError(self._type)

    def pair(self, row: Mapping[str, Any], where: str) -> tuple[Unit, Unit]:
        """(chosen, rejected) of a preference row, each with the prompt."""
        chosen, rejected = _value(row, "chosen", where), _value(row, "rejected", where)
        if isinstance(chosen, str) != isinstance(rejected, str):
            raise DataError(f"{where}: chosen is {_name(chosen)} but rejected is {_name(rejected)}; both must be text or lists of messages")
        if row.get("prompt") is None:
            prompt, chosen, rejected = _split_prompt(chosen, rejected, where)
        else:
            prompt = _value(row, "prompt", where)
        tools = _tools(row, where)
        return (
            self._answered(prompt, chosen, tools, where, "chosen"),
            self._answered(prompt, rejected, tools, where, "rejected"),
        )

    def prompt(self, row: Mapping[str, Any], where: str) -> Prompt:
        """What to answer, for rollouts. An answer in the row becomes the reference."""
        tools = _tools(row, where)
        match self._type:
            case "messages" | "sharegpt":
                messages = _chat_column(row, where)
                return self._chat_prompt(messages, tools, where)
            case "instruction":
                return self._text_prompt(self._instruction(row, where), chat=self._chat, tools=tools)
            case "reasoning_gym":
                return self._text_prompt(row["question"], chat=self._chat, tools=None)
            case _:
                value = _value(row, "prompt", where)
                reference = None
                if self._type == "prompt_completion" and row.get("completion") is not None:
                    completion = _value(row, "completion", where)
                    reference = completion if isinstance(completion, str) else _last_answer(completion)
                if isinstance(value, str):
                    made = self._text_prompt(value, chat=False, tools=tools)
                elif value[-1]["role"] == "assistant":
                    raise DataError(f"{where}: the prompt ends with a message of the assistant, so that there is nothing to answer")
                else:
                    made = self._chat_prompt(value, tools, where)
                return Prompt(made.messages, made.text, made.tools, reference)

    # ---- pieces ----

    def _with_system(self, messages: list[Message]) -> list[Message]:
        if self._system is None or messages[0]["role"] in ("system", "developer"):
            return messages
        return [{"role": "system", "content": self._system}, *messages]

    def _instruction(self, row: Mapping[str, Any], where: str) -> str:
        instruction = _text(row, "instruction", where)
        given = row.get("input")
        if given is not None and not isinstance(given, str):
            raise DataError(f"{where}: column 'input' must be text, it is {_name(given)}")
        if self._chat or self._system is not None:
            return f"{instruction}\n\n{given}" if given else instruction
        return (ALPACA_INPUT if given else ALPACA_INSTRUCTION).format(instruction=instruction, input=given)

    def _ask(self, question: str, answer: str, *, chat: bool) -> Unit:
        if not chat and self._system is None:
            return PromptCompletion(question, answer)
        prompt = self._with_system([{"role": "user", "content": question}])
        return Conversation([*prompt, {"role": "assistant", "content": answer}], completion_start=len(prompt))

    def _answered(
        self, prompt: str | list[Message], answer: str | list[Message], tools: list[dict[str, Any]] | None, where: str, column: str
    ) -> Unit:
        if isinstance(prompt, str) and isinstance(answer, str):
            return self._ask(prompt, answer, chat=False)
        answers = [{"role": "assistant", "content": answer}] if isinstance(answer, str) else answer
        if isinstance(prompt, str):
            # ultrafeedback: the prompt is text, the answers repeat it as the user's message
            repeated = answers[0]["role"] == "user" and answers[0].get("content") == prompt
            prompt = [{"role": "user", "content": prompt}]
            answers = answers[1:] if repeated else answers
        elif answers[: len(prompt)] == prompt:
            answers = answers[len(prompt) :]
        if not any(message["role"] == "assistant" for message in answers):
            raise DataError(f"{where}: column '{column}' has no message of the assistant beyond the prompt")
        start = self._with_system(prompt)
        return Conversation([*start, *answers], tools, completion_start=len(start))

    def _text_prompt(self, text: str, *, chat: bool, tools: list[dict[str, Any]] | None) -> Prompt:
        if not chat and self._system is None:
            return Prompt(None, text, tools)
        return Prompt(self._with_system([{"role": "user", "content": text}]), None, tools)

    def _chat_prompt(self, messages: list[Message], tools: list[dict[str, Any]] | None, where: str) -> Prompt:
        last = max((i for i, message in enumerate(messages) if message["role"] not in ("assistant", "system", "developer")), default=None)
        if last is None:
            raise DataError(f"{where}: there is no message to answer, only {', '.join(m['role'] for m in messages)}")
        return Prompt(self._with_system(messages[: last + 1]), None, tools, _last_answer(messages[last + 1 :]))


def messages_of(value: Any, where: str) -> list[Message]:
    """A list of {role, content} (or {from, value}) as {role, content}, keys that are None left out.

    Raises:
        DataError: not such a list; names the message.
    """
    value = parse_json_list(value)
    if not isinstance(value, Sequence) or isinstance(value, str):
        raise DataError(f"{where}: expected a list of messages, got {_name(value)}")
    if not value:
        raise DataError(f"{where}: the list of messages is empty")
    messages = []
    for number, message in enumerate(value):
        here = f"{where}, message {number}"
        if not isinstance(message, Mapping):
            raise DataError(f"{here}: expected an object with role and content, got {_name(message)}")
        message = _without_none(message)
        if "role" not in message and "from" in message:
            role = SPEAKERS.get(str(message.pop("from")).lower())
            if role is None:
                raise DataError(f"{here}: unknown speaker '{value[number]['from']}'; known are {', '.join(SPEAKERS)}")
            message = {"role": role, "content": message.pop("value", None), **message}
        role = message.get("role")
        if not isinstance(role, str) or not role:
            raise DataError(f"{here}: its role must be text such as user or assistant, got {_name(role)}")
        message["content"] = _content(message, here)
        messages.append(message)
    return messages


def _content(message: Mapping[str, Any], here: str) -> str:
    content = message.get("content")
    if isinstance(content, str):
        return content
    if content is None and (message.get("tool_calls") or message.get("reasoning_content")):
        return ""
    if isinstance(content, Sequence):
        if not all(isinstance(part, Mapping) and isinstance(part.get("text"), str) for part in content):
            raise DataError(f"{here}: only text can be trained on; its content has parts of another kind")
        return "".join(part["text"] for part in content)
    raise DataError(f"{here}: the content of {message['role']} must be text, got {_name(content)}")


def _without_none(value: Any) -> Any:
    # Arrow tables give every object every key, None where the file had none; templates test for presence
    if isinstance(value, Mapping):
        return {key: _without_none(inner) for key, inner in value.items() if inner is not None}
    if isinstance(value, Sequence) and not isinstance(value, str):
        return [_without_none(inner) for inner in value]
    return value


def _chat_column(row: Mapping[str, Any], where: str) -> list[Message]:
    for column in CHAT_COLUMNS:
        if row.get(column) is not None:
            return messages_of(row[column], f"{where}, column '{column}'")
    raise DataError(f"{where}: no column 'messages' or 'conversations'; the row has {', '.join(row)}")


def _tools(row: Mapping[str, Any], where: str) -> list[dict[str, Any]] | None:
    tools = row.get("tools")
    if isinstance(tools, str):
        try:
            tools = json.loads(tools)
        except json.JSONDecodeError as error:
            raise DataError(f"{where}: column 'tools' is not valid JSON: {error.msg}") from None
    if not tools:
        return None
    if not isinstance(tools, Sequence) or not all(isinstance(tool, Mapping) for tool in tools):
        raise DataError(f"{where}: column 'tools' must be a list of JSON schemas, it is {_name(tools)}")
    return [_without_none(tool) for tool in tools]


def _value(row: Mapping[str, Any], column: str, where: str) -> str | list[Message]:
    if column not in row:
        raise DataError(f"{where}: no column '{column}'; the row has {', '.join(row)}")
    value = row[column]
    if isinstance(value, Sequence) and not isinstance(value, str):
        return messages_of(value, f"{where}, column '{column}'")
    return _text(row, column, where)


def _text(row: Mapping[str, Any], column: str, where: str) -> str:
    if column not in row:
        raise DataError(f"{where}: no column '{column}'; the row has {', '.join(row)}")
    value = row[column]
    if not isinstance(value, str):
        raise DataError(f"{where}: column '{column}' must be text, it is {_name(value)}")
    if not value:
        raise DataError(f"{where}: column '{column}' is empty; remove the row or fill it")
    return value


def _name(value: Any) -> str:
    if value is None:
        return "None"
    if isinstance(value, str):
        return "text"
    if isinstance(value, list | tuple):
        return "a list"
    return f"{type(value).__name__} {value!r:.40}"


def _last_answer(messages: Sequence[Message]) -> str | None:
    return next((message["content"] for message in reversed(messages) if message["role"] == "assistant"), None)


def _split_prompt(
    chosen: str | list[Message], rejected: str | list[Message], where: str
) -> tuple[str | list[Message], str | list[Message], str | list[Message]]:
    """(prompt, chosen, rejected) where both sides begin with the prompt."""
    if isinstance(chosen, str) and isinstance(rejected, str):
        shared = shared_beginning(chosen, rejected)
        # cut where a word begins, its leading space included, so that the prompt ends as text that people would send ends
        shared = _word_start(chosen, min(shared, len(chosen) - 1, len(rejected) - 1))
        prompt: str | list[Message] = chosen[:shared]
    elif isinstance(chosen, list) and isinstance(rejected, list):
        shared = 0
        for mine, other in zip(chosen, rejected, strict=False):
            if mine != other:
                break
            shared += 1
        # identical conversations differ nowhere: the last turn is the answer
        shared = min(shared, len(chosen) - 1, len(rejected) - 1)
        while shared > 0 and chosen[shared - 1]["role"] == "assistant":
            shared -= 1  # answers that begin with the same assistant turn
        prompt = chosen[:shared]
    else:
        raise AssertionError("checked by the caller")
    if not prompt:
        raise DataError(f"{where}: chosen and rejected share no beginning that could be the prompt; give a column 'prompt'")
    return prompt, chosen[shared:], rejected[shared:]


def _word_start(text: str, position: int) -> int:
    while position > 0 and not text[position].isspace():
        position -= 1
    while position > 0 and text[position - 1].isspace():
        position -= 1
    return position
