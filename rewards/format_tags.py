"""format: the completion consists of given tags, in order."""

from __future__ import annotations

import re
from dataclasses import dataclass, field


@dataclass(frozen=True)
class FormatTags:
    """1.0 if the completion is the tags one after the other, each once, with something in them, and nothing else; else 0.0.

    With the default: ``<think>...</think><answer>...</answer>``, white space allowed around them.

    Options:
        tags: their names in order.
        prefill: text that the prompt's end already supplies, e.g. ``<think>`` where the chat template opens it.
        allow_text_after: text may follow the last tag (reasoning models that think in a tag and answer in the open).
        allow_empty: tags may hold nothing but white space.
    """

    tags: list[str] = field(default_factory=lambda: ["think", "answer"])
    prefill: str = ""
    allow_text_after: bool = False
    allow_empty: bool = False

    def __post_init__(self) -> None:
        if not self.tags:
            raise ValueError("tags: at least one is needed")
        for tag in self.tags:
            if not re.fullmatch(r"[\w-]+", tag):
                raise ValueError(f"tags: {tag!r} is no tag's name; write it without brackets")

    def __call__(self, completion: str) -> float:
        rest = (self.prefill + completion).strip()
        for tag in self.tags:
            opening, closing = f"<{tag}>", f"</{tag}>"
            rest = rest.lstrip()
            if not rest.startswith(opening):
                return 0.0
            content, closed, rest = rest[len(opening) :].partition(closing)
            if not closed or (not self.allow_empty and not content.strip()):
                return 0.0
            if any(f"<{other}>" in content or f"</{other}>" in content for other in self.tags):
                return 0.0
        if any(f"<{tag}>" in rest or f"</{tag}>" in rest for tag in self.tags):
            return 0.0
        return 1.0 if self.allow_text_after or not rest.strip() else 0.0
