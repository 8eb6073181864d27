"""How families of models write tool calls, and how to read them.

=========  ==============================================================================  ==================================
format     a call                                                                          written by
=========  ==============================================================================  ==================================
hermes     ``<tool_call>{"name": ..., "arguments": {...}}</tool_call>``, or the same tag   Qwen2.5, Qwen3, Hermes; Qwen3-Coder
           around ``<function=name><parameter=key>value</parameter></function>``
llama3     a turn that is ``{"name": ..., "parameters": {...}}`` (several divided by       Llama 3.1, 3.2, 3.3
           ``;``), ``<|python_tag|>`` before it or not
mistral    ``[TOOL_CALLS][{"name": ..., "arguments": {...}}, ...]``, or                     Mistral
           ``[TOOL_CALLS]name[ARGS]{...}`` for each
json       any of these, a fenced block of JSON, or a turn that is such JSON               everything else
=========  ==============================================================================  ==================================

What a model thinks (up to ``</think>``) is never a call.
"""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from surogate_rl.plain import plain

Schemas = Mapping[str, Mapping[str, Any]]
"""The JSON schema of each tool's parameters, by the tool's name."""


@dataclass(frozen=True)
class ToolCall:
    """Attributes:
    problem: why it cannot be run, in words for the model; None: it can.
    """

    name: str
    arguments: dict[str, Any] = field(default_factory=dict)
    problem: str | None = None


@dataclass(frozen=True)
class Parsed:
    """A turn, taken apart: what is said beside the calls, and the calls in order."""

    content: str
    calls: list[ToolCall]


def parse(text: str, format_name: str, schemas: Schemas) -> Parsed:
    """Reads the calls of a turn.

    Args:
        text: the turn with control tokens, without the one that ended it.
        format_name: a key of `FORMATS`.
        schemas: tells text from numbers where a format writes all values as text.
    """
    thought, closed, rest = text.rpartition("</think>")
    if not closed and "<think>" in text:
        return Parsed(text, [])  # cut short while it was thinking
    content, calls = FORMATS[format_name](rest, schemas)
    return Parsed((thought + closed + content).strip(), calls)


def format_of(chat_template: str) -> str:
    """The format that a chat template teaches its model."""
    if "[TOOL_CALLS]" in chat_template:
        return "mistral"
    if "<tool_call>" in chat_template:
        return "hermes"
    if "<|python_tag|>" in chat_template or ('"parameters": ' in chat_template and "ipython" in chat_template):
        return "llama3"
    return "json"


_Read = tuple[str, list[ToolCall]]

_TAG = re.compile(r"<tool_call>(.*?)(?:</tool_call>|(?=<tool_call>)|\Z)", re.DOTALL)
_FUNCTION = re.compile(r"<function=([^>\s]+)>(.*?)(?:</function>|\Z)", re.DOTALL)
_PARAMETER = re.compile(r"<parameter=([^>\s]+)>(.*?)(?:</parameter>|(?=<parameter=)|\Z)", re.DOTALL)
_FENCE = re.compile(r"```(?:json|tool_call|tool)?\s*\n?(.*?)```", re.DOTALL)
_MISTRAL_CALL = re.compile(r"\s*([\w.\-]+)(?:\[CALL_ID\][^\[]*)?\[ARGS\]")


def _hermes(text: str, schemas: Schemas) -> _Read:
    calls: list[ToolCall] = []
    for match in _TAG.finditer(text):
        body = match.group(1).strip()
        functions = list(_FUNCTION.finditer(body))
        if functions:
            calls += [_from_xml(function, schemas) for function in functions]
        else:
            calls += _from_json(body)
    return _TAG.sub("", text), calls


def _from_xml(function: re.Match[str], schemas: Schemas) -> ToolCall:
    name = function.group(1)
    properties = schemas.get(name, {}).get("properties", {})
    arguments: dict[str, Any] = {}
    for parameter in _PARAMETER.finditer(function.group(2)):
        key, value = parameter.group(1), parameter.group(2).strip("\n")
        if properties.get(key, {}).get("type") != "string":
            try:
                arguments[key] = plain(json.loads(value))
                continue
            except (ValueError, RecursionError):
                pass  # it is text, whatever it should have been; the tool will say so
        arguments[key] = value
    return ToolCall(name, arguments)


def _llama3(text: str, schemas: Schemas) -> _Read:
    body = text.strip()
    tagged = body.startswith("<|python_tag|>")
    body = body.removeprefix("<|python_tag|>").strip()
    if not tagged and not body.startswith(("{", "[{")):
        return text, []
    values, rest = _json_values(body)
    calls = [call for value in values if tagged or _is_call(value) for call in _from_value(value)]
    if rest.strip():
        if not calls and not tagged and not _looks_like_call(body):
            return text, []
        calls.append(_broken(rest))
    elif not calls:
        return text, []
    return "", calls


def _mistral(text: str, schemas: Schemas) -> _Read:
    content, *parts = text.split("[TOOL_CALLS]")
    calls: list[ToolCall] = []
    for part in parts:
        named = list(_MISTRAL_CALL.finditer(part))
        if not named:
            calls += _from_json(part.strip())
            continue
        for match, following in zip(named, [*named[1:], None], strict=True):
            body = part[match.end() : following.start() if following else len(part)].strip()
            values, rest = _json_values(body)
            if len(values) == 1 and isinstance(values[0], dict) and not rest.strip():
                calls.append(ToolCall(match.group(1), values[0]))
            else:
                calls.append(ToolCall(match.group(1), {}, f"the arguments are no JSON object: {_short(body)}"))
    return content, calls


def _json(text: str, schemas: Schemas) -> _Read:
    """Whatever looks like a call."""
    if "[TOOL_CALLS]" in text:
        return _mistral(text, schemas)
    if "<tool_call>" in text:
        return _hermes(text, schemas)
    if _FUNCTION.search(text):
        return _FUNCTION.sub("", text), [_from_xml(function, schemas) for function in _FUNCTION.finditer(text)]
    calls: list[ToolCall] = []

    def take(match: re.Match[str]) -> str:
        values, _ = _json_values(match.group(1))
        found = [call for value in values if _is_call(value) for call in _from_value(value)]
        if not found and _looks_like_call(match.group(1)):
            found = [_broken(match.group(1))]
        calls.extend(found)
        return "" if found else match.group(0)

    content = _FENCE.sub(take, text)
    if calls:
        return content, calls
    return _llama3(text, schemas)


FORMATS: dict[str, Callable[[str, Schemas], _Read]] = {"hermes": _hermes, "llama3": _llama3, "mistral": _mistral, "json": _json}


def _from_json(body: str) -> list[ToolCall]:
    """Calls of a text that ought to be one, or a list of them."""
    values, rest = _json_values(body)
    if not values or rest.strip():
        return [_broken(body)]
    return [call for value in values for call in _from_value(value)]


def _from_value(value: Any) -> Iterator[ToolCall]:
    for item in value if isinstance(value, list) else [value]:
        call = item["function"] if isinstance(item, dict) and isinstance(item.get("function"), dict) else item  # OpenAI's form
        if not isinstance(call, dict) or not isinstance(call.get("name"), str):
            yield ToolCall("", {}, f'a call must be an object with "name" and "arguments", got {_shown(call)}')
            continue
        arguments = call.get("arguments", call.get("parameters", {}))
        if isinstance(arguments, str):
            with contextlib.suppress(ValueError, RecursionError):
                arguments = plain(json.loads(arguments))
        if isinstance(arguments, dict):
            yield ToolCall(call["name"], arguments)
        else:
            yield ToolCall(call["name"], {}, f"the arguments must be a JSON object, got {_shown(arguments)}")


def _is_call(value: Any) -> bool:
    if isinstance(value, list):
        return bool(value) and all(isinstance(item, dict) and _is_call(item) for item in value)
    if not isinstance(value, dict):
        return False
    call = value["function"] if isinstance(value.get("function"), dict) else value
    return isinstance(call.get("name"), str) and ("arguments" in call or "parameters" in call)


def _looks_like_call(text: str) -> bool:
    return '"name"' in text and ('"arguments"' in text or '"parameters"' in text)


def _json_values(text: str) -> tuple[list[Any], str]:
    """JSON values one after the other, divided by white space or ``;``, and what follows the last of them that can be read. Lone
    surrogates in them are replaced, and what is nested beyond reason cannot be read."""
    decoder = json.JSONDecoder(strict=False)
    values: list[Any] = []
    position = 0
    while True:
        while position < len(text) and (text[position].isspace() or (values and text[position] == ";")):
            position += 1
        if position >= len(text):
            return values, ""
        try:
            value, end = decoder.raw_decode(text, position)
            values.append(plain(value))
        except (ValueError, RecursionError):
            return values, text[position:]
        position = end


def _broken(text: str) -> ToolCall:
    return ToolCall("", {}, f"the call is no valid JSON: {_short(text)}")


def _shown(value: Any) -> str:
    try:
        return _short(json.dumps(value, ensure_ascii=False))
    except RecursionError:
        return "something deeply nested"


def _short(text: str) -> str:
    return text if len(text) <= 120 else f"{text[:117]}..."
