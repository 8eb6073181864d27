"""The task: sort six digits. Demonstrations come from a sloppy teacher who is right 40% of the time and otherwise swaps the last two
digits that differ.

A model that imitates this teacher perfectly is right 40% of the time when it samples, and never when it decodes greedily, however long it
imitates. Rewards can teach it more than its teacher knows.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from pathlib import Path

DIGITS = 6
TEACHER_RIGHT = 0.4
DEMONSTRATIONS = 20_000
TRAINING_PROMPTS = 4_000
HELD_OUT_PROMPTS = 500


def problems(rng: random.Random) -> Iterator[tuple[str, str]]:
    """Endless distinct (question, answer); at least two digits differ, so that a swap can be a mistake."""
    seen: set[str] = set()
    while True:
        digits = [rng.choice("0123456789") for _ in range(DIGITS)]
        question = "".join(digits)
        if question not in seen and len(set(digits)) > 1:
            seen.add(question)
            yield question + "=", "".join(sorted(digits))


def sloppy(answer: str, rng: random.Random) -> str:
    if rng.random() < TEACHER_RIGHT:
        return answer
    last = max(i for i in range(len(answer) - 1) if answer[i] != answer[i + 1])
    return answer[:last] + answer[last + 1] + answer[last] + answer[last + 2 :]


def main(directory: Path, seed: int = 0) -> None:
    rng = random.Random(seed)
    source = problems(rng)
    directory.mkdir(parents=True, exist_ok=True)
    write(directory / "heldout.jsonl", [{"prompt": q, "answer": a} for q, a in take(source, HELD_OUT_PROMPTS)])
    write(directory / "train.jsonl", [{"prompt": q, "answer": a} for q, a in take(source, TRAINING_PROMPTS)])
    write(directory / "demonstrations.jsonl", [{"prompt": q, "completion": sloppy(a, rng)} for q, a in take(source, DEMONSTRATIONS)])


def take(source: Iterator[tuple[str, str]], count: int) -> list[tuple[str, str]]:
    return [next(source) for _ in range(count)]


def write(path: Path, rows: list[dict[str, str]]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


if __name__ == "__main__":
    main(Path("quickstart-output/data"))
