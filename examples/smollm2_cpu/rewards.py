"""The task's reward: who did it?"""

from __future__ import annotations

import re


def people(question: str) -> list[str]:
    """The persons that a needle_haystack question speaks of: each statement begins with one."""
    statements = question.split("\n")[0].split(". ")
    return [statement.split()[0] for statement in statements if statement.strip()]


def mentioned(text: str, names: list[str]) -> set[str]:
    return {name for name in names if re.search(rf"(?<![\w-]){re.escape(name)}(?![\w-])", text)}


def names_the_right_person(completion: str, question: str, answer: str) -> float:
    """1 if the completion names the right person and no other one of the story, however worded; a bare, exact answer earns 0.5 more."""
    right = mentioned(completion, people(question)) == {answer}
    return float(right) + 0.5 * float(completion.strip() == answer)
