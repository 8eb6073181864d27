"""Paths in a configuration file: they count from its own folder where there is something, else from the folder the command starts in.

So a folder with a configuration, its data and its functions works wherever it lies and wherever it is started from. What a run writes
(output_dir) and what is typed on the command line (--set) count from the folder it is started in.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from surogate_rl.config import overrides
from surogate_rl.config.errors import KeyPath
from surogate_rl.files import user_path

WHERE = "paths count from the configuration's folder, then from the folder you start in"
_TOP = ("model", "tokenizer", "chat_template", "adapter")
_KIND = re.compile(r"(text_game|gym):")
_ITEMS = (("datasets", "path"), ("rewards", "name"))


def anchor(data: dict[str, Any], folder: Path, applied: Sequence[tuple[KeyPath, str]]) -> None:
    """Replaces, in place, relative paths of what exists in `folder` by absolute ones.

    Args:
        data: the configuration, shorthands expanded; values may still be of wrong types.
        folder: that of the file.
        applied: the keys that ``--set`` decided, which are left as they are.
    """
    if folder.resolve() == Path.cwd():
        return
    for section, key, path in _file_keys(data):
        text = section.get(key) if isinstance(section, dict) else section[int(key)]
        if isinstance(text, str) and overrides.origin(path, applied) is None:
            section[key] = _anchored(text, folder)


def _file_keys(data: dict[str, Any]) -> Iterator[tuple[Any, str | int, KeyPath]]:
    for key in _TOP:
        yield data, key, (key,)
    for section, path in ((data, ()), (data.get("eval"), ("eval",))):
        for key, field in _ITEMS:
            items = section.get(key) if isinstance(section, dict) else None
            for index, item in enumerate(items if isinstance(items, list) else ()):
                if isinstance(item, dict):
                    yield item, field, (*path, key, index, field)
    if isinstance(loss := data.get("loss"), dict):
        yield loss, "loss_type", ("loss", "loss_type")
    if isinstance(environment := data.get("environment"), dict):
        yield environment, "name", ("environment", "name")
        if isinstance(args := environment.get("args"), dict):
            yield args, "tools", ("environment", "args", "tools")
            tools = args.get("tools")
            for index in range(len(tools) if isinstance(tools, list) else 0):
                yield tools, index, ("environment", "args", "tools", index)


def _anchored(text: str, folder: Path) -> str:
    kind, path, colon, function = "", text, "", ""
    if ".py:" in text:  # path/file.py:function, perhaps with the kind of an environment before it
        path, colon, function = text.rpartition(":")
        if match := _KIND.match(path):
            kind, path = match.group(), path[match.end() :]
    expanded = user_path(path)
    try:
        there = not expanded.is_absolute() and (folder / expanded).exists()
    except OSError:  # such as a chat template's text, too long for a name
        return text
    return kind + os.path.abspath(folder / expanded) + colon + function if there else text
