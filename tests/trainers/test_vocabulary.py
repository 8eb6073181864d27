"""Tokens that the tokenizer has and the model does not are found before the first step."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from surogate_rl.config.schema import DatasetConfig
from surogate_rl.data import DataError, load_examples, load_pairs, load_tasks

from .outputs import RUN

Base = Callable[..., dict[str, Any]]
TINY = Path(__file__).parents[2] / "examples" / "quickstart" / "tiny"
ROWS = 13  # of the tiny model's embedding


@pytest.fixture
def extended(tmp_path: Path) -> str:
    """The tiny model's tokenizer with one token more than its embedding has rows."""
    tokenizer = AutoTokenizer.from_pretrained(TINY)
    assert tokenizer.add_tokens(["<more>"]) == 1
    assert tokenizer.convert_tokens_to_ids("<more>") == ROWS
    tokenizer.save_pretrained(tmp_path / "extended")
    return str(tmp_path / "extended")


def write(path: Path, rows: list[dict[str, str]]) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def said(place: str) -> str:
    return (
        f"{place}: the token '<more>' has id 13, but the model has ids below 13 only; use the tokenizer that belongs to the model "
        "(`tokenizer`), or take the token out of the data and the chat template"
    )


GOOD = {
    "sft": {"prompt": "12=", "completion": "12"},
    "dpo": {"prompt": "12=", "chosen": "12", "rejected": "21"},
    "grpo": {"prompt": "12=", "answer": "12"},
}
BAD = {
    "sft": [{"prompt": "12=", "completion": "1<more>"}, {"prompt": "<more>=", "completion": "1"}],
    "dpo": [
        {"prompt": "12=", "chosen": "<more>", "rejected": "21"},
        {"prompt": "12=", "chosen": "12", "rejected": "<more>"},
        {"prompt": "<more>", "chosen": "12", "rejected": "21"},
    ],
    "grpo": [{"prompt": "12<more>=", "answer": "12"}],
}


@pytest.mark.parametrize(("command", "bad"), [(command, bad) for command, rows in BAD.items() for bad in rows])
def test_a_run_names_the_row_before_it_begins(base: Base, tmp_path: Path, extended: str, command: str, bad: dict[str, str]) -> None:
    """The bad row is one that two steps would not have come to."""
    rows = [GOOD[command]] * 200
    config = base(command, tokenizer=extended, max_steps=2)
    fine = config | {"datasets": [{"path": write(tmp_path / "good.jsonl", rows)}], "output_dir": str(tmp_path / "good")}
    assert RUN[command](fine).steps == 2
    path = write(tmp_path / "rows.jsonl", [*rows, bad])
    with pytest.raises(DataError) as caught:
        RUN[command](config | {"datasets": [{"path": path}]})
    assert str(caught.value) == said(f"{path}:201")
    assert not (tmp_path / "run" / "metrics.jsonl").exists()


@pytest.mark.parametrize("command", ["sft", "dpo", "grpo"])
def test_held_out_rows_are_looked_at_too(base: Base, tmp_path: Path, extended: str, command: str) -> None:
    path = write(tmp_path / "held.jsonl", [GOOD[command], BAD[command][0]])
    good = write(tmp_path / "rows.jsonl", [GOOD[command]] * 8)
    with pytest.raises(DataError) as caught:
        RUN[command](base(command, tokenizer=extended, datasets=[{"path": good}], eval={"datasets": [{"path": path}]}))
    assert str(caught.value) == said(f"{path}:2")


def test_a_row_that_is_dropped_anyway_does_no_harm(tmp_path: Path, extended: str) -> None:
    tokenizer = AutoTokenizer.from_pretrained(extended)
    long = "1" * 40 + "<more>"
    examples = write(tmp_path / "sft.jsonl", [GOOD["sft"], {"prompt": "1=", "completion": long}])
    assert len(load_examples([DatasetConfig(path=examples)], tokenizer, sequence_len=16, vocab=ROWS).items) == 1
    assert len(load_examples([DatasetConfig(path=examples)], tokenizer, sequence_len=16, vocab=ROWS, overlong="truncate").items) == 2
    pairs = write(tmp_path / "dpo.jsonl", [GOOD["dpo"], {"prompt": "1=", "chosen": long, "rejected": "1"}])
    assert len(load_pairs([DatasetConfig(path=pairs)], tokenizer, sequence_len=16, vocab=ROWS).items) == 1
    tasks = write(tmp_path / "grpo.jsonl", [GOOD["grpo"], {"prompt": long, "answer": "1"}])
    assert len(load_tasks([DatasetConfig(path=tasks)], tokenizer, max_prompt_length=16, vocab=ROWS).items) == 1
    with pytest.raises(DataError, match="'<more>' has id 13"):
        load_tasks([DatasetConfig(path=tasks)], tokenizer, max_prompt_length=None, vocab=ROWS)
