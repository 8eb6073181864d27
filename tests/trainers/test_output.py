"""The output folder: checked before anything is loaded, and one run's alone."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import surogate_rl
from surogate_rl.errors import InputError
from surogate_rl.trainers.output import claimed, drop_later_rollouts

Make = Callable[..., dict[str, Any]]


def refusal(config: dict[str, Any]) -> str:
    with pytest.raises(InputError) as caught:
        surogate_rl.sft(config)
    return str(caught.value)


def test_a_second_run_does_not_overwrite_the_first(base: Make, tmp_path: Path) -> None:
    surogate_rl.sft(base("sft", save_steps=2))
    run = tmp_path / "run"
    # the model does not even exist: it is not looked at
    assert refusal(base("sft", model="nowhere")) == (
        f"output_dir: {run} holds checkpoints of an earlier run (newest: step-00000004); "
        "set resume: auto to go on from it, or choose another output_dir"
    )
    surogate_rl.sft(base("sft", save_steps=0, output_dir=str(tmp_path / "unsaved")))
    assert refusal(base("sft", save_steps=0, output_dir=str(tmp_path / "unsaved"))) == (
        f"output_dir: {tmp_path}/unsaved holds the final model of an earlier run, which this one would overwrite; "
        "choose another output_dir, or move that one away"
    )


def test_folders_that_cannot_be_written(base: Make, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    message = f"output_dir: {tmp_path}/file is a file; choose another folder"
    assert refusal(base("sft", output_dir=str(tmp_path / "file"))) == message
    assert refusal(base("sft", output_dir=str(tmp_path / "file" / "deeper"))) == message
    if os.geteuid() != 0:  # root may write anywhere
        (tmp_path / "locked").mkdir(mode=0o500)
        assert refusal(base("sft", output_dir=str(tmp_path / "locked" / "run"))) == (
            f"output_dir: {tmp_path}/locked/run cannot be written to (no permission for {tmp_path}/locked); choose another folder"
        )


def test_two_runs_do_not_share_a_folder(base: Make, tmp_path: Path) -> None:
    script = f"import surogate_rl; surogate_rl.sft({base('sft', max_steps=100_000)!r})"
    process = subprocess.Popen([sys.executable, "-c", script], stderr=subprocess.DEVNULL)
    try:
        deadline = time.monotonic() + 60
        while time.monotonic() < deadline and not (tmp_path / "run" / "metrics.jsonl").is_file():
            time.sleep(0.05)
        assert refusal(base("sft")) == (
            f"output_dir: another run (process {process.pid}) is writing to {tmp_path}/run; wait until it ends, or choose another "
            "output_dir"
        )
    finally:
        process.kill()
        process.wait()
    assert surogate_rl.sft(base("sft")).steps == 4  # the claim ended with the process


def test_the_claim_ends_with_the_run_however_it_ends(base: Make, tmp_path: Path) -> None:
    config = base("sft", datasets=[{"path": str(tmp_path / "rows.jsonl")}])
    assert refusal(config).startswith("datasets: no such file or directory")
    with claimed(tmp_path / "run"), pytest.raises(InputError, match=f"another run .process {os.getpid()}. is writing"):
        surogate_rl.sft(base("sft"))
    assert surogate_rl.sft(base("sft")).steps == 4


def test_rollouts_of_steps_to_come_are_no_part_of_the_run(base: Make, tmp_path: Path) -> None:
    surogate_rl.grpo(base("grpo", output_dir=str(tmp_path), save_steps=2, save_total_limit=None))
    assert [path.stem for path in sorted((tmp_path / "rollouts").iterdir())] == [f"step-0000000{step}" for step in (1, 2, 3, 4)]
    drop_later_rollouts(tmp_path, 2)
    assert [path.stem for path in sorted((tmp_path / "rollouts").iterdir())] == ["step-00000001", "step-00000002"]
    drop_later_rollouts(tmp_path, 0)
    assert not (tmp_path / "rollouts").exists()
    assert len(list((tmp_path / "rollouts-1").iterdir())) == 2


def test_resuming_with_other_settings_is_refused(base: Make, tmp_path: Path) -> None:
    surogate_rl.sft(base("sft", lora=True, lora_rank=4, save_steps=2))
    newest = tmp_path / "run" / "checkpoints" / "step-00000004"
    message = refusal(base("sft", lora=True, lora_rank=8, resume="auto"))
    assert message.startswith(f"resume: {newest} is of another model or other LoRA settings (load_state: weight/")
    message = refusal(base("sft", resume="auto"))
    assert message.startswith(f"resume: {newest} is of another model or other LoRA settings (load_state: the state belongs to another")


def test_resuming_a_run_that_is_done_already(base: Make) -> None:
    surogate_rl.sft(base("sft", save_steps=2))
    result = surogate_rl.sft(base("sft", max_steps=2, resume="auto"))
    assert result.steps == 4
    assert result.history == []


def test_a_reference_file_cut_short_is_made_again(base: Make, tmp_path: Path) -> None:
    whole = surogate_rl.dpo(base("dpo", output_dir=str(tmp_path / "whole")))
    broken = base("dpo", save_steps=2, save_total_limit=None)
    surogate_rl.dpo(broken)
    with (tmp_path / "run" / "reference_logps.npz").open("r+b") as file:
        file.truncate(100)
    shutil.rmtree(tmp_path / "run" / "checkpoints" / "step-00000004")
    resumed = surogate_rl.dpo(broken | {"resume": "auto"})
    assert (whole.final_model / "model.safetensors").read_bytes() == (resumed.final_model / "model.safetensors").read_bytes()
