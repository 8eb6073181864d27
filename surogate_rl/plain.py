"""Text and values from outside (environments, tools, JSON that a model wrote) as everything behind can hold them.

A lone surrogate is a character of Python's and of no encoding: JSON has it as ``"\\ud83d"``, file names of other encodings are decoded to
it. Tokenizers, Arrow and files refuse it, so it becomes U+FFFD, the replacement character, where text comes in.
"""

from __future__ import annotations

from typing import Any

DEEPEST = 64


class TooDeep(ValueError):
    """A value is nested deeper than `DEEPEST` levels, or holds itself."""


def plain_text(text: str) -> str:
    """`text` in which surrogates that make a pair are the character that they stand for, and lone ones U+FFFD."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")
    return text


def plain(value: Any, levels: int = DEEPEST) -> Any:
    """A copy of dictionaries and lists with `plain_text` in all of their keys and values; anything else is left as it is.

    Raises:
        TooDeep: there are more than `levels` of them, one within another.
    """
    if isinstance(value, str):
        return plain_text(value)
    if not isinstance(value, dict | list | tuple):
        return value
    if levels == 0:
        raise TooDeep(f"it is nested more than {DEEPEST} levels deep")
    if isinstance(value, dict):
        return {plain_text(key) if isinstance(key, str) else key: plain(item, levels - 1) for key, item in value.items()}
    return [plain(item, levels - 1) for item in value]
