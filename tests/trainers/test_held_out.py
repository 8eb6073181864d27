"""The held-out loss of sft and dpo is the run's own objective over all held-out rows, beside transformers."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import surogate_rl

Make = Callable[..., dict[str, Any]]
# Neither a mean over tokens nor without the entropy, and its variance does not separate into micro-batches.
OWN = """
import torch

def loss(stats, batch, totals):
    mask = torch.as_tensor(batch.mask)
    return stats.logp[mask].var(unbiased=False) + 0.5 * stats.entropy[mask].mean()

loss.needs_entropy = True

def referenced(stats, batch, totals):
    return stats.logp.sum()

referenced.needs_reference = True
"""


@pytest.fixture
def own(tmp_path: Path) -> str:
    (tmp_path / "own.py").write_text(OWN)
    return f"{tmp_path}/own.py"


def trained_positions(model_path: Path, texts: list[tuple[str, str]]) -> tuple[torch.Tensor, torch.Tensor]:
    """Log-probabilities and entropies at the completions' tokens (the end included), over all (prompt, completion)."""
    model = AutoModelForCausalLM.from_pretrained(model_path, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(model_path)
    logps, entropies = [], []
    for prompt, completion in texts:
        first = len(tokenizer(prompt).input_ids)
        ids = torch.tensor([*tokenizer(prompt + completion).input_ids, tokenizer.eos_token_id])
        with torch.no_grad():
            table = model(ids[None]).logits[0, first - 1 : -1].double().log_softmax(-1)
        logps.append(table.gather(1, ids[first:, None])[:, 0])
        entropies.append(-(table.exp() * table).sum(-1))
    return torch.cat(logps), torch.cat(entropies)


@pytest.mark.parametrize("command", ["sft", "dpo"])
def test_your_own_objective_is_evaluated_as_one_step(base: Make, data: Path, own: str, command: str) -> None:
    name = "demonstrations" if command == "sft" else "pairs"
    rows = [json.loads(line) for line in (data / f"{name}.jsonl").read_text().splitlines()][:10]
    held_out = Path(own).parent / "held.jsonl"
    held_out.write_text("".join(json.dumps(row) + "\n" for row in rows))
    config = base(
        command,
        max_steps=1,
        learning_rate=1e-30,
        per_device_train_batch_size=1,
        loss=f"{own}:loss",
        eval={"datasets": [{"path": str(held_out)}]},
    )
    result = {"sft": surogate_rl.sft, "dpo": surogate_rl.dpo}[command](config)
    answers = ["completion"] if command == "sft" else ["chosen", "rejected"]
    logp, entropy = trained_positions(result.final_model, [(row["prompt"], row[answer]) for row in rows for answer in answers])
    expected = (logp.var(unbiased=False) + 0.5 * entropy.mean()).item()
    assert [line["eval_loss"] for line in result.history if "eval_loss" in line] == pytest.approx([expected, expected], rel=1e-4)


def test_the_built_in_loss_of_sft_is_a_mean_over_tokens(base: Make, data: Path) -> None:
    held_out = {"datasets": [{"path": str(data / "demonstrations.jsonl"), "size": 10}], "steps": 2}
    result = surogate_rl.sft(base("sft", per_device_train_batch_size=1, eval=held_out))
    losses = [line["eval_loss"] for line in result.history if "eval_loss" in line]
    assert len(losses) == 3
    rows = [json.loads(line) for line in (data / "demonstrations.jsonl").read_text().splitlines()][:10]
    logp, _ = trained_positions(result.final_model, [(row["prompt"], row["completion"]) for row in rows])
    assert losses[-1] == pytest.approx(-logp.mean().item(), rel=1e-5)
    assert losses[0] > losses[1] > losses[2]


def test_dpo_tells_of_held_out_pairs_what_it_tells_of_trained_ones(base: Make, data: Path) -> None:
    result = surogate_rl.dpo(base("dpo", learning_rate=1e-2, eval={"datasets": [{"path": str(data / "pairs.jsonl")}]}))
    before, after = (line for line in result.history if "eval_loss" in line)
    assert before["eval_loss"] == pytest.approx(math.log(2), abs=1e-6)  # the policy is the reference
    assert before["eval_rewards/margins"] == pytest.approx(0.0, abs=1e-6)
    assert after["eval_loss"] < before["eval_loss"]
    assert after["eval_rewards/margins"] > 0
    assert after["eval_rewards/accuracies"] > 0.5


def test_sft_has_no_reference_for_your_objective(base: Make, own: str) -> None:
    with pytest.raises(ValueError, match=r"own.py:referenced: attribute needs_reference is True, but sft keeps no reference policy;"):
        surogate_rl.sft(base("sft", loss=f"{own}:referenced"))
