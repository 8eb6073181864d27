"""A resumed run takes the rows that the unbroken one would have taken, or refuses to."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest

import surogate_rl
from surogate_rl.errors import InputError

from .outputs import RUN

Base = Callable[..., dict[str, Any]]
DAMAGE = "so that some rows would be repeated and others passed over"
ANEW = "or start anew in another output_dir"


def broken_off(base: Base, command: str, **changes: Any) -> dict[str, Any]:
    """The configuration of a run of two steps that left its checkpoint, ready to go on to the fourth."""
    config = base(command, save_steps=2, max_steps=2, **changes)
    RUN[command](config)
    return config | {"max_steps": 4, "resume": "auto", "output_dir": config["output_dir"]}


def refusal(command: str, config: dict[str, Any]) -> str:
    with pytest.raises(InputError) as caught:
        RUN[command](config)
    return str(caught.value)


@pytest.mark.parametrize("command", ["sft", "dpo", "grpo"])
def test_another_seed_is_another_order(base: Base, command: str) -> None:
    config = broken_off(base, command)
    assert refusal(command, config | {"seed": 4}) == (
        f"resume: the checkpoint's rows are in the order of seed 3, those of seed 4 are in another one, {DAMAGE}; set seed: 3, {ANEW}"
    )
    assert RUN[command](config).steps == 4


@pytest.mark.parametrize("command", ["sft", "dpo"])
@pytest.mark.parametrize("change", [{"gradient_accumulation_steps": 2}, {"per_device_train_batch_size": 16}])
def test_another_number_of_rows_in_a_step(base: Base, command: str, change: dict[str, int]) -> None:
    config = broken_off(base, command, gradient_accumulation_steps=1)
    assert refusal(command, config | change) == (
        "resume: a step took 8 rows when the checkpoint was taken and would take 16 now "
        f"(per_device_train_batch_size x gradient_accumulation_steps), {DAMAGE}; set that back to 8, {ANEW}"
    )


@pytest.mark.parametrize("command", ["sft", "dpo"])
def test_the_same_rows_may_be_cut_otherwise(base: Base, tmp_path: Path, command: str) -> None:
    cut = {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 2}
    plain = {"gradient_accumulation_steps": 1, "lr_scheduler_type": "constant"}
    whole = RUN[command](base(command, output_dir=str(tmp_path / "whole"), **plain))
    resumed = RUN[command](broken_off(base, command, **plain) | cut)
    for line, other in zip(whole.history[2:], resumed.history, strict=True):
        assert line["num_tokens"] == other["num_tokens"]
        assert line["loss"] == pytest.approx(other["loss"], rel=1e-5)


def test_other_data(base: Base, data: Path, tmp_path: Path) -> None:
    config = broken_off(base, "dpo")
    fewer = tmp_path / "fewer.jsonl"
    fewer.write_text("".join((data / "pairs.jsonl").read_text().splitlines(keepends=True)[:60]))
    assert refusal("dpo", config | {"datasets": [{"path": str(fewer)}]}) == (
        "resume: the checkpoint was taken over 64 rows of training data, there are 60 now; "
        f"restore the data and the settings that shape it, {ANEW}"
    )


def test_other_packs(base: Base, tmp_path: Path) -> None:
    """As many packs, but of other examples: packs of 12 are {5, 7}, {5, 5}, {3}, packs of 10 are {5, 5}, {7, 3}, {5}."""
    rows = tmp_path / "rows.jsonl"
    rows.write_text("".join(f'{{"text": "{"1" * (length - 1)}"}}\n' for length in (5, 7, 3, 5, 5)))
    small = {"datasets": [{"path": str(rows)}], "per_device_train_batch_size": 1, "gradient_accumulation_steps": 1}
    config = broken_off(base, "sft", sequence_len=12, **small)
    assert refusal("sft", config | {"sequence_len": 10}) == (
        "resume: examples are packed into rows otherwise than when the checkpoint was taken, so that some would be repeated and others "
        f"passed over; set sequence_len, packing and the data back, {ANEW}"
    )
    assert surogate_rl.sft(config).steps == 4


def test_grpo_by_epochs_counts_steps_by_their_prompts(base: Base) -> None:
    config = broken_off(base, "grpo", num_train_epochs=1) | {"max_steps": -1}
    config["rollouts"] = config["rollouts"] | {"prompts_per_step": 8}
    assert refusal("grpo", config) == (
        "resume: a step took 4 rows when the checkpoint was taken and would take 8 now (rollouts.prompts_per_step), "
        f"{DAMAGE}; set that back to 4, {ANEW}"
    )


def test_grpo_by_steps_goes_on_where_it_was_in_the_data(base: Base, data: Path, tmp_path: Path) -> None:
    """64 tasks in the order of `default_rng([seed, epoch])`: two steps of four, then two of two."""
    config = broken_off(base, "grpo")
    config["rollouts"] = config["rollouts"] | {"prompts_per_step": 2}
    assert surogate_rl.grpo(config).steps == 4
    tasks = [
        [row["task"] for row in pq.read_table(path).to_pylist()] for path in sorted((tmp_path / "run" / "rollouts").glob("step-*.parquet"))
    ]
    visited = [list(dict.fromkeys(step)) for step in tasks]
    order = np.random.default_rng([3, 0]).permutation(64).tolist()
    assert visited == [order[0:4], order[4:8], order[8:10], order[10:12]]
