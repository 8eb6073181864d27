"""Finding the answer within a completion."""

from __future__ import annotations

from typing import Literal

Extract = Literal["auto", "whole", "answer_tag", "last_line", "boxed"]


def last_tag(text: str, tag: str) -> str | None:
    """Content of the last closed ``<tag>...</tag>``, stripped; None if there is none."""
    end = text.rfind(f"</{tag}>")
    start = text.rfind(f"<{tag}>", 0, end) if end >= 0 else -1
    return text[start + len(tag) + 2 : end].strip() if start >= 0 else None


def after_thinking(text: str) -> str:
    """What follows the last ``</think>``; all of it where there is none."""
    return text.rpartition("</think>")[2]


def last_boxed(text: str) -> str | None:
    """Content of the last ``\\boxed{...}``, braces balanced; None if there is none."""
    start = text.rfind("\\boxed{")
    if start < 0:
        return None
    depth = 0
    for position in range(start + len("\\boxed"), len(text)):
        depth += {"{": 1, "}": -1}.get(text[position], 0)
        if depth == 0:
            return text[start + len("\\boxed{") : position].strip()
    return None


def find_answer(completion: str, how: Extract) -> str | None:
    """The answer, stripped, or None if the completion has none of this form.

    Args:
        how: ``auto``: in the last <answer> tag if there is one, else all that follows the thinking; ``whole``: the completion as it is;
            ``answer_tag``, ``boxed``: in the last of these, which must be there; ``last_line``: the last line that is not blank.
    """
    if how == "whole":
        return completion.strip()
    if how == "boxed":
        return last_boxed(completion)
    tagged = last_tag(completion, "answer")
    if how == "answer_tag":
        return tagged
    if how == "last_line":
        lines = [line.strip() for line in completion.splitlines() if line.strip()]
        return lines[-1] if lines else None
    return tagged if tagged is not None else after_thinking(completion).strip()
