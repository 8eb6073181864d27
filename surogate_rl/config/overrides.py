"""``--set rollouts.num_generations=16``: one key of the file replaced from the command line."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from surogate_rl.config.errors import KeyPath, path_text
from surogate_rl.config.yaml_source import parse


class OverrideError(ValueError):
    """The message names the ``--set``."""


def split(text: str) -> tuple[KeyPath, Any]:
    """``datasets.0.path=x.jsonl`` -> ``(("datasets", 0, "path"), "x.jsonl")``. The value is typed as in the YAML."""
    name, equals, value_text = text.partition("=")
    where = f"--set {text}"
    if not equals or not name.strip():
        raise OverrideError(f"{where}: write --set key=value, such as --set rollouts.num_generations=16")
    parts = re.sub(r"\[(\d+)\]", r".\1", name.strip()).split(".")
    if not all(parts):
        raise OverrideError(f"{where}: '{name.strip()}' has an empty part; write keys with single dots, such as rollouts.temperature")
    path: KeyPath = tuple(int(part) if part.isdigit() else part for part in parts)
    source = parse(value_text)
    if source.problems:
        raise OverrideError(f"{where}: the value is {source.problems[0].message}; quote it, such as --set '{name.strip()}=\"...\"'")
    return path, source.data


def apply(data: dict[str, Any], path: KeyPath, value: Any, text: str) -> None:
    """Puts the value in place; sections that are not there yet are made, an index one past the end of a list appends."""
    where = f"--set {text}"
    parent: Any = data
    for depth, part in enumerate(path):
        last = depth == len(path) - 1
        here = path_text(path[:depth]) or "the configuration"
        if isinstance(parent, list):
            if not isinstance(part, int):
                raise OverrideError(f"{where}: {here} is a list; name an item by its number, such as {here}.0.{path_text(path[depth:])}")
            if part > len(parent):
                raise OverrideError(f"{where}: {here} has {len(parent)} items, the next one would be {here}.{len(parent)}")
            if part == len(parent):
                parent.append(value if last else {})
        elif isinstance(parent, dict):
            part = str(part)
            if not last and parent.get(part) is None:
                parent[part] = [] if isinstance(path[depth + 1], int) else {}
        else:
            raise OverrideError(f"{where}: {here} is {parent!r}, which has no keys")
        if last:
            parent[part] = value
        else:
            parent = parent[part]


def origin(path: KeyPath, overrides: Sequence[tuple[KeyPath, str]]) -> str | None:
    """The text of the ``--set`` that decided the value at ``path``, the last one if several did."""
    for where, text in reversed(overrides):
        shorter = min(len(where), len(path))
        if shorter and where[:shorter] == path[:shorter]:
            return text
    return None
