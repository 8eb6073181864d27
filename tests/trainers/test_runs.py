"""Whole runs of the three commands on the tiny model."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import surogate_rl

from .outputs import RUN, lines, rows_by_step, same, weights

Make = Callable[..., dict[str, Any]]
COMMANDS = ["sft", "dpo", "grpo"]


def untimed(directory: Path) -> list[dict[str, Any]]:
    """The metrics without what a clock says."""
    clocks = ("time", "step_time", "tokens_per_second")
    return [
        {k: v for k, v in line.items() if k not in clocks and not k.startswith("time/") and not k.endswith("/seconds")}
        for line in lines(directory)
    ]


@pytest.mark.parametrize("command", COMMANDS)
@pytest.mark.parametrize("lora", [False, True])
def test_a_run_is_reproducible_and_changes_the_model(base: Make, tmp_path: Path, command: str, lora: bool) -> None:
    results = [RUN[command](base(command, output_dir=str(tmp_path / name), lora=lora)) for name in "ab"]
    assert same(weights(results[0].final_model), weights(results[1].final_model))
    other = RUN[command](base(command, output_dir=str(tmp_path / "c"), lora=lora, learning_rate=1e-9))
    assert not same(weights(results[0].final_model), weights(other.final_model))
    logged = lines(tmp_path / "a")
    assert [line["step"] for line in logged] == [1, 2, 3, 4]
    assert all(line["grad_norm"] > 0 for line in logged)


@pytest.mark.parametrize("command", COMMANDS)
@pytest.mark.parametrize("extra", [{}, {"lora": True}])
def test_a_resumed_run_ends_as_an_unbroken_one(base: Make, tmp_path: Path, command: str, extra: dict[str, Any]) -> None:
    if command == "grpo":
        # the reference moves in step 3, before the checkpoint that is resumed from (with LoRA it cannot)
        sync = {} if extra else {"sync_ref_model": True, "ref_model_sync_steps": 3, "ref_model_mixup_alpha": 0.5}
        extra = extra | {"loss": {"beta": 0.05, "num_iterations": 2, "num_minibatches": 2, **sync}}
    whole = RUN[command](base(command, output_dir=str(tmp_path / "whole"), max_steps=6, **extra))
    broken = base(command, output_dir=str(tmp_path / "broken"), max_steps=6, save_steps=2, save_total_limit=None, **extra)
    RUN[command](broken)
    # what a kill after step 4 leaves
    import shutil

    shutil.rmtree(tmp_path / "broken" / "checkpoints" / "step-00000006")
    shutil.rmtree(tmp_path / "broken" / "final")
    resumed = RUN[command](broken | {"resume": "auto"})
    assert resumed.steps == 6
    assert same(weights(whole.final_model), weights(resumed.final_model))
    assert [line["step"] for line in lines(tmp_path / "broken")] == [1, 2, 3, 4, 5, 6]
    assert untimed(tmp_path / "whole") == untimed(tmp_path / "broken")


def test_killed_at_any_moment_it_resumes_to_the_same_weights(base: Make, tmp_path: Path) -> None:
    whole = surogate_rl.grpo(base("grpo", output_dir=str(tmp_path / "whole"), max_steps=60))
    config = base("grpo", output_dir=str(tmp_path / "killed"), max_steps=60, save_steps=1, resume="auto")
    script = f"import surogate_rl; surogate_rl.grpo({config!r})"
    # the same with a brake: the run cannot end before a busy machine finds the time to kill it
    braked = f"""
import itertools, time
from surogate_rl.learner import Learner
step, count = Learner.step, itertools.count(1)
def brake(*arguments, **options):
    time.sleep(0.5 if next(count) > 20 else 0.0)
    return step(*arguments, **options)
Learner.step = brake
{script}
"""
    steps = tmp_path / "killed" / "checkpoints"
    for kill in range(2):
        before = {path.name for path in steps.glob("step-*")}
        process = subprocess.Popen([sys.executable, "-c", braked], start_new_session=True, stderr=subprocess.DEVNULL)
        deadline = time.monotonic() + 120
        while time.monotonic() < deadline and {path.name for path in steps.glob("step-*")} <= before and process.poll() is None:
            time.sleep(0.02)
        time.sleep(0.05 * kill)
        assert process.poll() is None, "it ended before it could be killed"
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    subprocess.run([sys.executable, "-c", script], check=True, stderr=subprocess.DEVNULL)
    assert same(weights(whole.final_model), weights(tmp_path / "killed" / "final"))


def test_interrupt_saves_and_says_so(base: Make, tmp_path: Path) -> None:
    config = base("sft", max_steps=100000, num_train_epochs=1000)
    script = textwrap.dedent(f"""
        import surogate_rl
        try:
            surogate_rl.sft({config!r})
        except KeyboardInterrupt as stop:
            print("STOPPED", stop, flush=True)
    """)
    process = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    metrics = tmp_path / "run" / "metrics.jsonl"
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline and not (metrics.is_file() and metrics.read_text()):
        time.sleep(0.05)
    process.send_signal(signal.SIGINT)
    out, _ = process.communicate(timeout=60)
    assert "STOPPED stopped after step" in out
    assert "go on with --set resume=auto" in out
    (checkpoint,) = (tmp_path / "run" / "checkpoints").glob("step-*")
    assert str(int(checkpoint.name.removeprefix("step-"))) in out


def test_a_checkpoint_of_another_command_is_refused(base: Make, tmp_path: Path) -> None:
    surogate_rl.sft(base("sft", save_steps=4, output_dir=str(tmp_path / "sft")))
    checkpoint = str(tmp_path / "sft" / "checkpoints" / "step-00000004")
    with pytest.raises(ValueError, match="is a checkpoint of 'sft', this command is 'dpo'"):
        surogate_rl.dpo(base("dpo", output_dir=str(tmp_path / "dpo"), resume=checkpoint))


@pytest.mark.parametrize(
    "change",
    [
        {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 8},
        {"per_device_train_batch_size": 16, "sequence_len": 64},
        {"recompute": "block"},
        {"threads": 2},
    ],
)
def test_how_a_step_is_cut_does_not_change_it(base: Make, tmp_path: Path, change: dict[str, Any]) -> None:
    one = {"per_device_train_batch_size": 16, "packing": False}
    plain = surogate_rl.sft(base("sft", output_dir=str(tmp_path / "plain"), **one))
    other = surogate_rl.sft(base("sft", output_dir=str(tmp_path / "other"), **(one | change)))
    a, b = weights(plain.final_model), weights(other.final_model)
    if change.keys() <= {"recompute", "threads"}:
        assert same(a, b)
    for one_line, other_line in zip(plain.history, other.history, strict=True):
        assert one_line["loss"] == pytest.approx(other_line["loss"], rel=1e-5)
        assert one_line["grad_norm"] == pytest.approx(other_line["grad_norm"], rel=1e-5)
    # of single elements Adam divides rounding by rounding where a gradient is next to nothing, so weights are compared as a whole
    for name in a:
        assert np.linalg.norm(a[name] - b[name]) <= 1e-4 * np.linalg.norm(a[name])


def test_sft_follows_a_reference_loop_in_torch(base: Make, data: Path, tmp_path: Path) -> None:
    """Losses of eight steps beside transformers, torch.optim.AdamW and torch's clipping, on the same batches in the same order."""
    steps, size = 8, 16
    start = surogate_rl.sft(base("sft", output_dir=str(tmp_path / "start"), max_steps=1, learning_rate=1e-12))
    common = {"model": str(start.final_model), "init": "pretrained", "packing": False, "per_device_train_batch_size": size}
    result = surogate_rl.sft(
        base("sft", max_steps=steps, learning_rate=1e-3, weight_decay=0.1, lr_scheduler_type="constant", max_grad_norm=0.5, **common)
    )
    from surogate_rl.trainers.batches import StepOrder

    rows = [json.loads(line) for line in (data / "demonstrations.jsonl").read_text().splitlines()]
    tokenizer = AutoTokenizer.from_pretrained(start.final_model)
    model = AutoModelForCausalLM.from_pretrained(start.final_model, dtype=torch.float32)
    decayed = [p for p in model.parameters() if p.ndim >= 2]
    rest = [p for p in model.parameters() if p.ndim < 2]
    optimizer = torch.optim.AdamW([{"params": decayed, "weight_decay": 0.1}, {"params": rest, "weight_decay": 0.0}], lr=1e-3)
    order = StepOrder(len(rows), size, seed=3)
    for step in range(1, steps + 1):
        batch = [[*tokenizer(rows[i]["prompt"] + rows[i]["completion"]).input_ids, tokenizer.eos_token_id] for i in order(step)]
        ids = torch.tensor(batch)
        labels = ids.clone()
        labels[:, : len(rows[0]["prompt"])] = -100
        loss = model(ids, labels=labels).loss
        optimizer.zero_grad()
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        assert result.history[step - 1]["loss"] == pytest.approx(loss.item(), abs=2e-5)
        assert result.history[step - 1]["grad_norm"] == pytest.approx(norm.item(), rel=2e-4)


def test_grpo_leaves_what_it_says(base: Make, tmp_path: Path) -> None:
    result = surogate_rl.grpo(base("grpo", save_steps=2))
    run = tmp_path / "run"
    assert result.output_dir == run
    assert (run / "config.yaml").is_file()
    tables = rows_by_step(run)
    assert len(tables) == 4
    tokenizer = AutoTokenizer.from_pretrained(result.final_model)
    logged = lines(run)
    for rows, line in zip(tables, logged, strict=True):
        assert len(rows) == 16
        assert line["reward"] == pytest.approx(np.mean([row["reward"] for row in rows]))
        assert line["completions/mean_length"] == pytest.approx(np.mean([len(row["tokens"]) for row in rows]))
        for group in range(4):
            advantages = [row["advantage"] for row in rows[4 * group : 4 * group + 4]]
            assert sum(advantages) == pytest.approx(0, abs=1e-4)
        assert all(len(row["tokens"]) == len(row["logps"]) for row in rows)
        assert all(row["token_texts"] == [tokenizer.decode([token]) for token in row["tokens"]] for row in rows)
        # sampler and learner are the same model: what they say of a token differs by rounding
        assert line["sampling/sampling_logp_difference/max"] < 1e-4


def test_the_final_model_is_what_the_learner_held(base: Make) -> None:
    """transformers gives the log-probabilities that the rollouts file recorded for weights that did not move any more."""
    first = surogate_rl.sft(base("sft", max_steps=4))
    frozen = base("grpo", model=str(first.final_model), init="pretrained", max_steps=1, learning_rate=1e-30)
    result = surogate_rl.grpo(frozen | {"output_dir": str(first.output_dir.parent / "grpo")})
    model = AutoModelForCausalLM.from_pretrained(result.final_model, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(result.final_model)
    for row in rows_by_step(result.output_dir)[0]:
        prompt = tokenizer(row["prompt"]).input_ids
        with torch.no_grad():
            logits = model(torch.tensor([prompt + row["tokens"]])).logits[0]
        logps = logits.log_softmax(-1)[len(prompt) - 1 : -1].gather(1, torch.tensor(row["tokens"])[:, None])[:, 0]
        np.testing.assert_allclose(logps.numpy(), row["logps"], atol=1e-4)


def test_equal_rewards_teach_nothing(base: Make) -> None:
    def constant(completion: str) -> float:
        return 0.35

    config = base("grpo", max_steps=2)
    config["rewards"] = []
    result = surogate_rl.grpo(config, rewards=[constant])
    assert all(line["grad_norm"] == 0.0 for line in result.history)
    assert all(line["frac_reward_zero_std"] == 1.0 for line in result.history)


def test_unscored_completions_leave_the_group(base: Make, tmp_path: Path) -> None:
    def sometimes(completions: list[str], **columns: Any) -> list[float | None]:
        return [None if index == 1 else float(index) for index in range(len(completions))]

    config = base("grpo", max_steps=1)
    config["rewards"] = []
    result = surogate_rl.grpo(config, rewards=[sometimes])
    rows = rows_by_step(tmp_path / "run")[0]
    assert [row["reward"] for row in rows[:4]] == [0.0, None, 2.0, 3.0]
    assert rows[1]["advantage"] == 0.0
    assert result.metrics["reward"] == pytest.approx(5 / 3)
    assert result.metrics["completions/unscored"] == 4


def test_a_reward_that_always_fails_leaves_the_weights_alone(base: Make) -> None:
    def broken(completion: str) -> float:
        raise RuntimeError("no")

    config = base("grpo", max_steps=2)
    config["rewards"] = []
    result = surogate_rl.grpo(config, rewards=[broken])
    assert result.metrics["completions/unscored"] == 16
    assert result.metrics["grad_norm"] == 0.0


def test_a_run_of_nothing_but_broken_steps_ends(base: Make) -> None:
    from surogate_rl.trainers.update import TooManySkippedSteps

    config = base("sft", learning_rate=1e30, max_steps=50, lr_scheduler_type="constant", max_grad_norm=0.0)
    with pytest.raises(TooManySkippedSteps, match="5 optimiser updates in a row had a loss or gradient that is not finite"):
        surogate_rl.sft(config)
