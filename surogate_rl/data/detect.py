"""Recognises what a row looks like from its columns and the values of one row."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from surogate_rl.data.report import DataError
from surogate_rl.data.sources import Source

Purpose = Literal["sft", "dpo", "grpo"]
RowType = Literal["messages", "prompt_completion", "prompt", "text", "instruction", "sharegpt", "preference", "reasoning_gym"]

KNOWN_TYPES: Mapping[RowType, str] = {
    "messages": "`messages` (or `conversations`): a list of {role, content}",
    "sharegpt": "`conversations`: a list of {from, value}",
    "prompt_completion": "`prompt` and `completion`: text or lists of messages",
    "instruction": "`instruction` and `output`, `input` if there is one",
    "text": "`text`",
    "prompt": "`prompt`: text or a list of messages",
    "preference": "`chosen` and `rejected`, text or lists of messages, `prompt` or a shared beginning",
}

# What a command can use, the first that fits wins. A row often fits several: ultrafeedback has prompt, chosen, rejected and messages.
USABLE: Mapping[Purpose, tuple[RowType, ...]] = {
    "sft": ("messages", "sharegpt", "prompt_completion", "instruction", "text"),
    "dpo": ("preference",),
    "grpo": ("prompt_completion", "preference", "prompt", "messages", "sharegpt", "instruction"),
}

REQUIRED: Mapping[RowType, tuple[str, ...]] = {
    "messages": ("messages",),
    "sharegpt": ("conversations",),
    "prompt_completion": ("prompt", "completion"),
    "prompt": ("prompt",),
    "text": ("text",),
    "instruction": ("instruction", "output"),
    "preference": ("chosen", "rejected"),
    "reasoning_gym": ("question", "answer"),
}

CHAT_COLUMNS = ("messages", "conversations")
# columns that people mean as ours
LIKELY_PROMPTS = ("question", "problem", "query", "user", "instruction", "input")
LIKELY_COMPLETIONS = ("answer", "response", "output", "solution", "assistant")


def detect(source: Source, wanted: str, purpose: Purpose) -> RowType:
    """The type of the rows of `source`.

    Args:
        wanted: a type, or ``auto``.
        purpose: the command; decides between types where a row fits several.

    Raises:
        DataError: nothing fits (lists the columns and the known types), the command cannot use the type, or a column is missing.
    """
    if len(source) == 0:
        raise DataError(f"{source.label}: the data set is empty (0 rows); check the path and the split")
    if source.kind == "gym":
        if purpose == "dpo":
            raise DataError(f"{source.label}: dpo needs preference rows (chosen and rejected); reasoning_gym has none")
        return "reasoning_gym"
    row = source.rows[0]
    fits = [name for name in REQUIRED if name != "reasoning_gym" and _fits(name, row, purpose)]
    if wanted != "auto":
        return _given(source, wanted, purpose)
    for name in USABLE[purpose]:
        if name in fits:
            return name
    usable = "\n".join(f"    {name}: {KNOWN_TYPES[name]}" for name in USABLE[purpose])
    if fits:
        raise DataError(f"{source.label}: its rows are of type {' or '.join(fits)}, which {purpose} cannot use; it can use\n{usable}")
    seen = ", ".join(f"{name} ({_describe(value)})" for name, value in row.items())
    raise DataError(
        f"{source.label}: cannot tell what its rows are; the columns are {seen}; {purpose} can use\n{usable}\n"
        f"  name columns with `columns`, {_suggestion(source.columns, purpose)}"
    )


def _given(source: Source, wanted: str, purpose: Purpose) -> RowType:
    name = next((known for known in KNOWN_TYPES if known == wanted), None)
    if name is None:
        raise DataError(f"{source.label}: unknown type '{wanted}'; known types: {', '.join(KNOWN_TYPES)}")
    if name not in USABLE[purpose]:
        raise DataError(f"{source.label}: {purpose} cannot use rows of type {name}; it can use {', '.join(USABLE[purpose])}")
    for column in required_columns(name, purpose):
        if column in source.columns or (column in CHAT_COLUMNS and any(c in source.columns for c in CHAT_COLUMNS)):
            continue
        raise DataError(
            f"{source.label}: rows of type {name} need a column '{column}'; the columns are {', '.join(source.columns)}; "
            f"name it with `columns: {{{column}: ...}}`"
        )
    return name


def required_columns(name: RowType, purpose: Purpose) -> tuple[str, ...]:
    """Columns that a row of type `name` must have; a prompt needs no answer beside it."""
    if purpose == "grpo" and name in ("instruction", "prompt_completion"):
        return REQUIRED[name][:1]
    if purpose == "grpo" and name == "preference":
        return ("prompt",)
    return REQUIRED[name]


def _fits(name: RowType, row: Mapping[str, Any], purpose: Purpose) -> bool:
    if name == "messages":
        return any(_chat_keys(row.get(column)) == "role" for column in CHAT_COLUMNS)
    if name == "sharegpt":
        return any(_chat_keys(row.get(column)) == "from" for column in CHAT_COLUMNS)
    # in `auto`, rows with a prompt alone are of type prompt, also for grpo
    columns = ("instruction",) if name == "instruction" and purpose == "grpo" else REQUIRED[name]
    if name == "preference" and purpose == "grpo":
        columns = ("prompt", *columns)
    return all(column in row for column in columns)


def _chat_keys(value: Any) -> str | None:
    """``role`` or ``from``: how the messages of `value` name their speaker; None if it is no list of messages."""
    value = parse_json_list(value)
    if not isinstance(value, Sequence) or isinstance(value, str) or not value or not isinstance(value[0], Mapping):
        return None
    return next((key for key in ("role", "from") if key in value[0]), None)


def parse_json_list(value: Any) -> Any:
    """A list written as JSON text (CSV has no lists) as the list; anything else as it is."""
    if isinstance(value, str) and value.lstrip().startswith("["):
        try:
            parsed = json.loads(value)
        except json.JSONDecodeError:
            return value
        return parsed if isinstance(parsed, list) else value
    return value


def _describe(value: Any) -> str:
    if isinstance(value, Mapping):
        return f"object with {', '.join(map(str, value))}"
    if isinstance(value, Sequence) and not isinstance(value, str):
        return f"list of {_describe(value[0])}" if value else "empty list"
    return {str: "text", type(None): "null"}.get(type(value), type(value).__name__)


def _suggestion(columns: Sequence[str], purpose: Purpose) -> str:
    if purpose == "dpo":
        return "e.g. `columns: {chosen: ..., rejected: ...}`"
    prompt = next((name for name in LIKELY_PROMPTS if name in columns), "...")
    if purpose == "grpo":
        return f"e.g. `columns: {{prompt: {prompt}}}`"
    completion = next((name for name in LIKELY_COMPLETIONS if name in columns), "...")
    return f"e.g. `columns: {{prompt: {prompt}, completion: {completion}}}`"
