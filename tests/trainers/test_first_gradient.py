"""What a run hands to its objective, and what that divides by: the gradients of whole runs beside autograd over transformers."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import surogate_rl

Make = Callable[..., dict[str, Any]]
Tensors = list[torch.Tensor]
GROUP, LENGTH = 4, 8
OWN = """
import torch

def loss(stats, batch, totals, scale):
    mask = torch.as_tensor(batch.mask)
    advantage = torch.as_tensor(batch.per_sequence["advantage"][batch.segment_of_token()])
    return -scale * (advantage * stats.logp)[mask].sum() / totals.tokens
"""


def first_rows(directory: Path) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = pq.read_table(directory / "rollouts" / "step-00000001.parquet").to_pylist()
    return rows


def statistics(model_path: Path, rows: list[dict[str, Any]]) -> tuple[torch.nn.Module, Tensors, Tensors]:
    """Of every row the log-probability of its sampled tokens, and the entropy at their positions."""
    model = AutoModelForCausalLM.from_pretrained(model_path, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(model_path)
    logps, entropies = [], []
    for row in rows:
        prompt = tokenizer(row["prompt"]).input_ids
        table = model(torch.tensor([prompt + row["tokens"]])).logits[0, len(prompt) - 1 : -1].log_softmax(-1)
        logps.append(table.gather(1, torch.tensor(row["tokens"])[:, None])[:, 0])
        entropies.append(-(table.exp() * table).sum(-1))
    return model, logps, entropies


def advantages(rows: list[dict[str, Any]], loss_type: str, scale: str) -> np.ndarray:
    rewards = np.array([row["reward"] for row in rows]).reshape(-1, GROUP)
    if loss_type == "reinforce_plus_plus":
        values = (rewards - rewards.mean()) / (rewards.std(ddof=1) + 1e-4)
    elif loss_type == "rloo":
        values = rewards - (rewards.sum(axis=1, keepdims=True) - rewards) / (GROUP - 1)
    else:
        spread = {
            "group": rewards.std(axis=1, ddof=1, keepdims=True) + 1e-4,
            "batch": rewards.std(ddof=1) + 1e-4,
            "none": 1.0,
        }[scale]
        values = (rewards - rewards.mean(axis=1, keepdims=True)) / spread
    return np.asarray(values).reshape(-1)


def loss_by_hand(rows: list[dict[str, Any]], loss: dict[str, Any], logps: Tensors, entropies: Tensors) -> torch.Tensor:
    """At the weights that sampled: every ratio is 1, so that its derivative is that of the log-probability."""
    loss_type = loss["loss_type"]
    weights = advantages(rows, loss_type, loss.get("scale_rewards", "group"))
    masked = [loss.get("mask_truncated_completions", False) and row["finish_reason"] == "length" for row in rows]
    kept = [(i, weight) for i, weight in enumerate(weights) if not masked[i]]
    tokens = sum(len(rows[i]["tokens"]) for i, _ in kept)
    total = torch.zeros(())
    for i, weight in kept:
        length = len(rows[i]["tokens"])
        divisor = {
            "dapo": tokens, "cispo": tokens, "reinforce_plus_plus": tokens,
            "dr_grpo": len(rows) * LENGTH, "rloo": len(rows),
        }.get(loss_type, len(rows) * length)  # fmt: skip
        total = total - weight * logps[i].sum() / divisor
        total = total - loss.get("entropy_coef", 0.0) * entropies[i].sum() / tokens
    return total


@pytest.mark.parametrize(
    "loss",
    [
        *({"loss_type": name} for name in ("grpo", "dapo", "dr_grpo", "gspo", "cispo", "sapo", "rloo", "reinforce_plus_plus")),
        {"loss_type": "grpo", "scale_rewards": "batch"},
        {"loss_type": "grpo", "scale_rewards": "none"},
        {"loss_type": "grpo", "mask_truncated_completions": True},
        {"loss_type": "dapo", "mask_truncated_completions": True},
        {"loss_type": "rloo", "mask_truncated_completions": True},
        {"loss_type": "dapo", "entropy_coef": 0.5},
    ],
    ids=lambda loss: "-".join(f"{value}" if key == "loss_type" else key for key, value in loss.items()),
)
def test_the_first_gradient_is_that_of_autograd(base: Make, loss: dict[str, Any]) -> None:
    # with so small a rate the final model is the one that sampled
    result = surogate_rl.grpo(base("grpo", max_steps=1, learning_rate=1e-30, loss=loss))
    rows = first_rows(result.output_dir)
    assert {row["finish_reason"] for row in rows} == {"stop", "length"}
    expected = advantages(rows, loss["loss_type"], loss.get("scale_rewards", "group"))
    np.testing.assert_allclose([row["advantage"] for row in rows], expected, atol=1e-5)
    model, logps, entropies = statistics(result.final_model, rows)
    loss_by_hand(rows, loss, logps, entropies).backward()
    norm = torch.sqrt(sum((p.grad.double() ** 2).sum() for p in model.parameters() if p.grad is not None)).item()
    assert result.history[0]["grad_norm"] == pytest.approx(norm, rel=1e-3)
    assert norm > 1e-3


def test_your_own_objective_gets_advantages_and_totals(base: Make, tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text(OWN)
    loss = {"loss_type": f"{tmp_path}/own.py:loss", "args": {"scale": 3.0}}
    result = surogate_rl.grpo(base("grpo", max_steps=1, learning_rate=1e-30, per_device_train_batch_size=1, loss=loss))
    rows = first_rows(result.output_dir)
    model, logps, entropies = statistics(result.final_model, rows)
    (3 * loss_by_hand(rows, {"loss_type": "dapo"}, logps, entropies)).backward()
    norm = torch.sqrt(sum((p.grad.double() ** 2).sum() for p in model.parameters() if p.grad is not None)).item()
    assert result.history[0]["grad_norm"] == pytest.approx(norm, rel=1e-3)


def test_the_second_pass_compares_with_the_policy_before_the_first(base: Make, tmp_path: Path) -> None:
    common = {"max_steps": 1, "learning_rate": 3e-3, "lr_scheduler_type": "constant"}
    one = surogate_rl.grpo(base("grpo", output_dir=str(tmp_path / "one"), loss={"epsilon": 10.0}, **common))
    two = surogate_rl.grpo(base("grpo", output_dir=str(tmp_path / "two"), loss={"epsilon": 10.0, "num_iterations": 2}, **common))
    rows = first_rows(one.output_dir)
    assert [row["tokens"] for row in rows] == [row["tokens"] for row in first_rows(two.output_dir)]
    with torch.no_grad():
        _, logps, _ = statistics(one.final_model, rows)  # after the first pass
    ratios = [np.exp(logp.double().numpy() - np.array(row["logps"])).mean() for logp, row in zip(logps, rows, strict=True)]
    weights = advantages(rows, "grpo", "group")
    second = -np.mean(weights * ratios)
    assert abs(second) > 1e-2
    assert one.history[0]["loss"] == pytest.approx(-np.mean(weights), abs=1e-6)
    assert two.history[0]["loss"] == pytest.approx((second - np.mean(weights)) / 2, rel=1e-3)
