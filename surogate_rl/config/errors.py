"""Errors about a configuration: what is wrong, at which key, on which line."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from surogate_rl.errors import InputError

KeyPath = tuple[str | int, ...]
"""Where a value lies: ``("datasets", 0, "path")``."""


def path_text(path: KeyPath) -> str:
    """``("datasets", 0, "path")`` -> ``datasets[0].path``."""
    text = ""
    for part in path:
        if isinstance(part, int):
            text += f"[{part}]"
        else:
            text += f".{part}" if text else part
    return text


@dataclass(frozen=True)
class Problem:
    """One thing that is wrong.

    Attributes:
        message: what, and what to do; it names the key itself.
        path: the key to blame, whose line is shown.
        also: other keys that take part. The line shown is the first one that the user wrote.
        line, column: known beforehand for errors of the YAML syntax.
    """

    message: str
    path: KeyPath = ()
    also: tuple[KeyPath, ...] = ()
    line: int | None = None
    column: int | None = None


class ConfigError(InputError):
    """All that is wrong with a configuration, one line each."""

    def __init__(self, lines: Sequence[str]) -> None:
        super().__init__("\n".join(lines))
        self.lines = list(lines)

    def __reduce__(self) -> tuple[type[ConfigError], tuple[list[str]]]:
        return type(self), (self.lines,)


class ConfigWarning(UserWarning):
    """A key that has no effect as the others stand."""
