"""The reference policy of a run: what the KL is taken to, and how the reference moves."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch
from safetensors.numpy import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

import surogate_rl

Make = Callable[..., dict[str, Any]]
GROUP = 4


@pytest.fixture
def start(base: Make, tmp_path: Path) -> Path:
    """A model to start from, in Hugging Face form."""
    return surogate_rl.sft(base("sft", output_dir=str(tmp_path / "start"), max_steps=1, learning_rate=1e-12)).final_model


def rows_of(directory: Path, step: int) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = pq.read_table(directory / "rollouts" / f"step-{step:08d}.parquet").to_pylist()
    return rows


def log_ratios(model: torch.nn.Module, tokenizer: Any, rows: list[dict[str, Any]]) -> list[np.ndarray]:
    """log sampled - log `model`, by sampled token."""
    result = []
    for row in rows:
        prompt = tokenizer(row["prompt"]).input_ids
        with torch.no_grad():
            table = model(torch.tensor([prompt + row["tokens"]])).logits[0, len(prompt) - 1 : -1].double().log_softmax(-1)
        logps = table.gather(1, torch.tensor(row["tokens"])[:, None])[:, 0].numpy()
        result.append(np.array(row["logps"]) - logps)
    return result


def others_mean(rewards: np.ndarray) -> np.ndarray:
    by_prompt = rewards.reshape(-1, GROUP)
    return ((by_prompt.sum(axis=1, keepdims=True) - by_prompt) / (GROUP - 1)).reshape(-1)


@pytest.mark.parametrize("lora", [False, True])
def test_rloo_takes_the_kl_off_the_reward(base: Make, start: Path, lora: bool) -> None:
    beta = 0.5
    config = base("grpo", model=str(start), init="pretrained", lora=lora, max_steps=3, learning_rate=1e-2, lr_scheduler_type="constant")
    result = surogate_rl.grpo(config | {"loss": {"loss_type": "rloo", "beta": beta}})
    model, tokenizer = AutoModelForCausalLM.from_pretrained(start, dtype=torch.float32), AutoTokenizer.from_pretrained(start)
    rows = rows_of(result.output_dir, 3)
    ratios = log_ratios(model, tokenizer, rows)
    kl = np.array([ratio.sum() for ratio in ratios])
    rewards = np.array([row["reward"] for row in rows])
    penalised = rewards - beta * kl
    logged = np.array([row["advantage"] for row in rows])
    np.testing.assert_allclose(logged, penalised - others_mean(penalised), atol=1e-3)
    assert np.abs(logged - (rewards - others_mean(rewards))).max() > 0.05  # which is what it would be without
    assert result.history[-1]["kl"] == pytest.approx(np.concatenate(ratios).mean(), rel=1e-3)


@pytest.mark.parametrize("alpha", [0.25, 1.0])
def test_a_synchronised_reference_is_a_mixture(base: Make, start: Path, tmp_path: Path, alpha: float) -> None:
    config = base("grpo", model=str(start), init="pretrained", learning_rate=1e-2, lr_scheduler_type="constant") | {
        "loss": {"beta": 0.1, "sync_ref_model": True, "ref_model_sync_steps": 1, "ref_model_mixup_alpha": alpha}
    }
    one = surogate_rl.grpo(config | {"max_steps": 1, "output_dir": str(tmp_path / "one")})
    two = surogate_rl.grpo(config | {"max_steps": 2, "output_dir": str(tmp_path / "two")})
    before, after = load_file(start / "model.safetensors"), load_file(one.final_model / "model.safetensors")
    model, tokenizer = AutoModelForCausalLM.from_pretrained(start, dtype=torch.float32), AutoTokenizer.from_pretrained(start)
    mixed = {name: torch.from_numpy(alpha * after[name] + (1 - alpha) * before[name]) for name in before}
    missing, unexpected = model.load_state_dict(mixed, strict=False)
    assert not unexpected
    assert set(missing) <= {"lm_head.weight"}  # tied
    difference = -np.concatenate(log_ratios(model, tokenizer, rows_of(two.output_dir, 2)))
    expected = (np.expm1(difference) - difference).mean()
    assert two.history[1]["kl"] == pytest.approx(expected, rel=1e-2, abs=1e-8)
    assert (expected > 1e-4) == (alpha < 1)


@pytest.mark.parametrize("every", [2, 4])
def test_a_step_that_trains_nothing_synchronises_too(base: Make, every: int) -> None:
    def not_in_step_2(completion: str, answer: str, trainer_state: Any) -> float | None:
        if trainer_state.global_step == 2:
            return None
        return sum(a == b for a, b in zip(completion, answer, strict=False)) + 0.01 * len(completion)

    loss = {"beta": 0.1, "sync_ref_model": True, "ref_model_sync_steps": every, "ref_model_mixup_alpha": 1.0}
    config = base("grpo", max_steps=3, learning_rate=1e-2, lr_scheduler_type="constant", rewards=[], loss=loss)
    first, second, third = surogate_rl.grpo(config, rewards=[not_in_step_2]).history
    assert first["grad_norm"] > 0
    assert second["completions/unscored"] == 16
    if every == 2:
        assert third["kl"] == pytest.approx(0.0, abs=1e-9)
    else:
        assert third["kl"] > 1e-4


def test_full_fine_tuning_keeps_the_policy_that_it_started_from(base: Make) -> None:
    still = surogate_rl.grpo(base("grpo", loss={"beta": 0.1}))
    assert still.history[0]["kl"] == pytest.approx(0.0, abs=1e-6)
    assert still.history[-1]["kl"] > 0
