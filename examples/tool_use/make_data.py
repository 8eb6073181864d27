"""The task: sums and products of numbers of two digits, with tools that can add and multiply. Demonstrations come from a sloppy teacher,
who

* in 40% of the questions calls the right tool and reads its result out,
* in 30% guesses an answer from the air,
* in 15% calls the wrong tool,
* in 15% forgets to close the call's JSON, and then guesses.

A model that imitates it perfectly is right about 40% of the time. It is too small to do the sums in its head: only by calling the right
tool, and calling it well, can it be right more often, and nothing but the reward tells it so.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from tools import add, multiply
from transformers.utils.chat_template_utils import get_json_schema

OPERATIONS: dict[str, tuple[str, Callable[[int, int], int]]] = {"plus": ("add", add), "times": ("multiply", multiply)}
SCHEMAS = [get_json_schema(add), get_json_schema(multiply)]
TEACHER_RIGHT, TEACHER_GUESSES, TEACHER_CONFUSES = 0.4, 0.3, 0.15
DEMONSTRATIONS = 6_000
TRAINING_PROMPTS = 2_000
HELD_OUT_PROMPTS = 200

Problem = tuple[str, int, int]


def problems(rng: random.Random) -> Iterator[Problem]:
    """Endless distinct problems, as long as there are any."""
    everything = [(word, a, b) for word in OPERATIONS for a in range(10, 100) for b in range(10, 100)]
    rng.shuffle(everything)
    yield from everything


def question(problem: Problem) -> dict[str, str]:
    word, a, b = problem
    return {"role": "user", "content": f"What is {a} {word} {b}?"}


def answer(problem: Problem) -> str:
    word, a, b = problem
    return str(OPERATIONS[word][1](a, b))


def call(tool: str, a: int, b: int) -> str:
    return f"<tool_call>{json.dumps({'name': tool, 'arguments': {'a': a, 'b': b}})}</tool_call>"


def guess(problem: Problem, rng: random.Random) -> str:
    return str(rng.randint(20, 198) if problem[0] == "plus" else rng.randint(100, 9801))


def demonstration(problem: Problem, rng: random.Random) -> list[dict[str, str]]:
    word, a, b = problem
    tool, _ = OPERATIONS[word]
    mood = rng.random()
    said = [question(problem)]
    if mood < TEACHER_RIGHT:
        turns = [call(tool, a, b), answer(problem), answer(problem)]
    elif mood < TEACHER_RIGHT + TEACHER_GUESSES:
        return [*said, {"role": "assistant", "content": guess(problem, rng)}]
    elif mood < TEACHER_RIGHT + TEACHER_GUESSES + TEACHER_CONFUSES:
        other = "times" if word == "plus" else "plus"
        wrong = answer((other, a, b))
        turns = [call(OPERATIONS[other][0], a, b), wrong, wrong]
    else:
        broken = json.dumps({"name": tool, "arguments": {"a": a, "b": b}})[:-1]
        turns = [f"<tool_call>{broken}</tool_call>", f"Error: the call is no valid JSON: {broken}", guess(problem, rng)]
    return [*said, *({"role": role, "content": text} for role, text in zip(("assistant", "tool", "assistant"), turns, strict=True))]


def main(directory: Path, seed: int = 0, demonstrations: int = DEMONSTRATIONS) -> None:
    rng = random.Random(seed)
    source = problems(rng)

    def take(count: int) -> list[Problem]:
        return [next(source) for _ in range(count)]

    directory.mkdir(parents=True, exist_ok=True)
    for name, count in (("heldout", HELD_OUT_PROMPTS), ("train", TRAINING_PROMPTS)):
        write(directory / f"{name}.jsonl", [{"messages": [question(p)], "answer": answer(p)} for p in take(count)])
    rows = [{"messages": demonstration(problem, rng), "tools": SCHEMAS} for problem in take(demonstrations)]
    write(directory / "demonstrations.jsonl", rows)


def write(path: Path, rows: list[dict[str, Any]]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


if __name__ == "__main__":
    main(Path("tool-use-output/data"))
