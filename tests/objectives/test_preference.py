"""Preference losses against TRL's DPOTrainer, and by hand where it has none."""

from __future__ import annotations

import math
from collections import defaultdict
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from surogate_rl.batch import NO_TARGET, PackedBatch, Totals
from surogate_rl.config.schema import PreferenceLossConfig
from surogate_rl.objectives import make_objective, mean_metrics, seeds, totals_of


def pairs_of(lengths: list[tuple[int, int]], seed: int = 0) -> tuple[list[np.ndarray], list[np.ndarray]]:
    """Log-probabilities of policy and reference for chosen, rejected, chosen, rejected..."""
    rng = np.random.default_rng(seed)
    flat = [length for pair in lengths for length in pair]
    policy = [-rng.gamma(2.0, 0.7, size=n).astype(np.float32) for n in flat]
    return policy, [(p + 0.6 * rng.normal(size=p.size)).astype(np.float32) for p in policy]


def pack_pairs(policy: list[np.ndarray], reference: list[np.ndarray] | None, *, as_sum: bool = False) -> tuple[PackedBatch, np.ndarray]:
    tokens, targets, mask, logp, ref, positions, ends = [], [], [], [], [], [], [0]
    for index, values in enumerate(policy):
        n = values.size
        ids = np.arange(5, 5 + n + 2, dtype=np.int32)  # two prompt tokens
        spot = slice(1, 1 + n)
        own = np.zeros(n + 2, bool)
        own[spot] = True
        tokens.append(ids)
        mask.append(own)
        targets.append(np.where(own, np.append(ids[1:], 0), NO_TARGET).astype(np.int32))
        positions.append(np.arange(n + 2, dtype=np.int32))
        for into, source in ((logp, values), (ref, np.zeros(n, np.float32) if reference is None else reference[index])):
            row = np.zeros(n + 2, np.float32)
            row[spot] = source
            into.append(row)
        ends.append(ends[-1] + n + 2)
    per_token, per_sequence = {}, {}
    if reference is not None and as_sum:
        per_sequence["reference_logp_sum"] = np.array([r.sum() for r in reference], np.float32)
    elif reference is not None:
        per_token["reference_logp"] = np.concatenate(ref)
    batch = PackedBatch(
        tokens=np.concatenate(tokens),
        positions=np.concatenate(positions),
        cu_seqlens=np.array(ends, np.int32),
        targets=np.concatenate(targets),
        mask=np.concatenate(mask),
        per_token=per_token,
        per_sequence=per_sequence,
        pair=np.repeat(np.arange(len(policy) // 2), 2).astype(np.int32),
    )
    batch.validate()
    return batch, np.concatenate(logp)


def run_trl(
    policy: list[np.ndarray], reference: list[np.ndarray], loss_types: list[str], weights: list[float], beta: float, smoothing: float
) -> tuple[float, list[np.ndarray], dict[str, float]]:
    """DPOTrainer._compute_loss over a model that answers with the given log-probabilities."""
    from trl import DPOTrainer

    order = list(range(0, len(policy), 2)) + list(range(1, len(policy), 2))
    width = max(p.size for p in policy)
    log_probs = torch.zeros(len(policy), width)
    completion_mask = torch.zeros(len(policy), width + 1, dtype=torch.long)
    for row, index in enumerate(order):
        log_probs[row, : policy[index].size] = torch.from_numpy(policy[index])
        completion_mask[row, 1 : 1 + policy[index].size] = 1
    log_probs.requires_grad_()
    reference_sums = torch.tensor([float(reference[index].astype(np.float64).sum()) for index in order])
    other = torch.zeros(len(policy), width)
    outputs = SimpleNamespace(log_probs=log_probs, entropy=other, mean_logits=other, is_top1=other.bool())
    trainer = object.__new__(DPOTrainer)
    attributes = {
        "accelerator": SimpleNamespace(device=torch.device("cpu"), gather=lambda x: x, gather_for_metrics=lambda x: x),
        "model": SimpleNamespace(training=True),
        "aux_loss_enabled": False,
        "ld_alpha": None,
        "precompute_ref_logps": True,
        "f_divergence_type": "reverse_kl",
        "loss_types": loss_types,
        "loss_weights": weights,
        "beta": beta,
        "label_smoothing": smoothing,
        "use_weighting": False,
        "_metrics": {"train": defaultdict(list)},
        "_total_train_tokens": 0,
        "_tp_size": 1,
    }
    for name, value in attributes.items():
        setattr(trainer, name, value)
    half = len(policy) // 2
    inputs = {
        "input_ids": torch.zeros(len(policy), width + 1, dtype=torch.long),
        "attention_mask": torch.ones(len(policy), width + 1, dtype=torch.long),
        "completion_mask": completion_mask,
        "ref_chosen_logps": reference_sums[:half],
        "ref_rejected_logps": reference_sums[half:],
    }
    loss = trainer._compute_loss(lambda **_: outputs, inputs, False)
    loss.backward()
    assert log_probs.grad is not None
    gradients: list[np.ndarray] = [np.zeros(0)] * len(policy)
    for row, index in enumerate(order):
        gradients[index] = log_probs.grad[row, : policy[index].size].numpy()
    return float(loss.detach()), gradients, {k: float(np.mean(v)) for k, v in trainer._metrics["train"].items()}


LENGTHS = [(3, 5), (7, 2), (1, 4), (6, 6)]
CASES: list[tuple[dict[str, Any], list[str], list[float], float]] = [
    ({"loss_type": "sigmoid"}, ["sigmoid"], [1.0], 0.0),
    ({"loss_type": "ipo"}, ["ipo"], [1.0], 0.0),
    ({"loss_type": "hinge"}, ["hinge"], [1.0], 0.0),
    ({"loss_type": "robust", "label_smoothing": 0.2}, ["robust"], [1.0], 0.2),
    ({"loss_type": "sigmoid_norm"}, ["sigmoid_norm"], [1.0], 0.0),
    ({"loss_type": "sigmoid", "rpo_alpha": 0.4}, ["sigmoid", "sft"], [1.0, 0.4], 0.0),
    ({"loss_type": "ipo", "rpo_alpha": 1.5}, ["ipo", "sft"], [1.0, 1.5], 0.0),
]


@pytest.mark.parametrize(
    ("ours", "types", "weights", "smoothing"), CASES, ids=[" ".join(f"{k}={v}" for k, v in c[0].items()) for c in CASES]
)
@pytest.mark.parametrize("beta", [0.1, 0.7])
@pytest.mark.parametrize("as_sum", [False, True])
def test_against_trl(ours: dict[str, Any], types: list[str], weights: list[float], smoothing: float, beta: float, as_sum: bool) -> None:
    policy, reference = pairs_of(LENGTHS)
    batch, logp = pack_pairs(policy, reference, as_sum=as_sum)
    objective = make_objective(PreferenceLossConfig(**ours, beta=beta), command="dpo")
    result = seeds(objective, logp, None, batch, totals_of(objective, [batch]))
    loss, gradients, metrics = run_trl(policy, reference, types, weights, beta, smoothing)
    assert result.loss == pytest.approx(loss, rel=1e-5)
    segment = batch.segment_of_token()
    for index, gradient in enumerate(gradients):
        np.testing.assert_allclose(result.dlogp[batch.mask & (segment == index)], gradient, rtol=1e-4, atol=1e-7)
    assert np.abs(np.concatenate(gradients)).max() > 1e-3, "a comparison of zeros shows nothing"
    shown = mean_metrics([result.metrics])
    for name in ("rewards/chosen", "rewards/rejected", "rewards/accuracies", "rewards/margins", "logps/chosen", "logps/rejected"):
        assert shown[name] == pytest.approx(metrics[name], rel=1e-4, abs=1e-6), name


@pytest.mark.parametrize("smoothing", [0.05, 0.3])
def test_label_smoothing_of_sigmoid_against_trls_form(smoothing: float) -> None:
    """TRL keeps conservative DPO's formula in aot, which sorts within the batch: of a single pair the two are one."""
    policy, reference = pairs_of([(4, 3)], seed=2)
    batch, logp = pack_pairs(policy, reference)
    objective = make_objective(PreferenceLossConfig(loss_type="sigmoid", label_smoothing=smoothing, beta=0.5), command="dpo")
    result = seeds(objective, logp, None, batch, totals_of(objective, [batch]))
    loss, gradients, _ = run_trl(policy, reference, ["aot"], [1.0], 0.5, smoothing)
    assert result.loss == pytest.approx(loss, rel=1e-5)
    np.testing.assert_allclose(result.dlogp[batch.mask], np.concatenate(gradients), rtol=1e-4)


def spread(total: float, length: int) -> np.ndarray:
    return np.full(length, total / length, np.float32)


@pytest.mark.parametrize(("loss_type", "lengths", "expected"), [("sigmoid", (5, 4), 0.598139), ("ipo", (5, 4), 20.7025)])
def test_right_values(loss_type: str, lengths: tuple[int, int], expected: float) -> None:
    policy = [spread(-10, lengths[0]), spread(-12, lengths[1])]
    reference = [spread(-11, lengths[0]), spread(-11, lengths[1])]
    batch, logp = pack_pairs(policy, reference)
    objective = make_objective(PreferenceLossConfig(loss_type=loss_type, beta=0.1), command="dpo")
    assert seeds(objective, logp, None, batch, Totals(9, 2, 1, lengths[0])).loss == pytest.approx(expected, abs=1e-5 * expected)


@pytest.mark.parametrize("loss_type", ["sigmoid", "sigmoid_norm"])
def test_equal_answers_sit_at_log_2_and_cancel(loss_type: str) -> None:
    one = spread(-10, 5)
    batch, logp = pack_pairs([one, one], [one - 0.1, one - 0.1])
    objective = make_objective(PreferenceLossConfig(loss_type=loss_type), command="dpo")
    result = seeds(objective, logp, None, batch, totals_of(objective, [batch]))
    assert result.loss == pytest.approx(0.693147, abs=1e-6)
    # The two answers are the same tokens, so that what the model's weights see is the sum of the two gradients.
    segment = batch.segment_of_token()
    np.testing.assert_array_equal(result.dlogp[batch.mask & (segment == 0)] + result.dlogp[batch.mask & (segment == 1)], 0)


def test_reference_free_by_hand() -> None:
    policy = [np.array([-1.0, -2.0], np.float32), np.array([-4.0], np.float32)]
    batch, logp = pack_pairs(policy, None)
    beta = 0.5
    expected = {
        "sigmoid": -math.log(1 / (1 + math.exp(-beta * (-3 + 4)))),
        "ipo": (-1.5 + 4 - 1 / (2 * beta)) ** 2,
        "hinge": 1 - beta * 1,
        "sigmoid_norm": -math.log(1 / (1 + math.exp(-beta * (-1.5 + 4)))),
    }
    for loss_type, value in expected.items():
        objective = make_objective(PreferenceLossConfig(loss_type=loss_type, beta=beta, reference_free=True), command="dpo")
        assert not objective.needs_reference
        result = seeds(objective, logp, None, batch, totals_of(objective, [batch]))
        assert result.loss == pytest.approx(value, rel=1e-6), loss_type
        shown = mean_metrics([result.metrics])
        assert shown["rewards/chosen"] == pytest.approx(-1.5)
        assert shown["rewards/rejected"] == pytest.approx(-2.0)
    # d/dlogp of -log sigmoid(beta d) is -beta sigmoid(-beta d) for each chosen token.
    objective = make_objective(PreferenceLossConfig(beta=beta, reference_free=True), command="dpo")
    slope = beta / (1 + math.exp(beta))
    np.testing.assert_allclose(seeds(objective, logp, None, batch, Totals(3, 2, 1)).dlogp[batch.mask], [-slope, -slope, slope], rtol=1e-6)


def test_every_loss_type_differs() -> None:
    policy, reference = pairs_of(LENGTHS)
    batch, logp = pack_pairs(policy, reference)
    configs = [
        PreferenceLossConfig(),
        PreferenceLossConfig(loss_type="ipo"),
        PreferenceLossConfig(loss_type="hinge"),
        PreferenceLossConfig(loss_type="robust", label_smoothing=0.1),
        PreferenceLossConfig(loss_type="sigmoid_norm"),
        PreferenceLossConfig(label_smoothing=0.1),
        PreferenceLossConfig(reference_free=True),
        PreferenceLossConfig(rpo_alpha=1.0),
    ]
    losses = []
    for config in configs:
        objective = make_objective(config, command="dpo")
        losses.append(round(seeds(objective, logp, None, batch, totals_of(objective, [batch])).loss, 5))
    assert len(set(losses)) == len(losses)


def test_the_reference_must_be_there() -> None:
    policy, _ = pairs_of([(2, 2)])
    batch, logp = pack_pairs(policy, None)
    with pytest.raises(ValueError, match=r"sigmoid without reference_free needs PackedBatch.per_token\['reference_logp'\]"):
        seeds(make_objective(PreferenceLossConfig(), command="dpo"), logp, None, batch, Totals(4, 2, 1))


def test_pairs_without_a_trained_token_take_no_part() -> None:
    policy, reference = pairs_of([(2, 3)])
    batch, logp = pack_pairs(policy, reference)
    batch = PackedBatch(
        batch.tokens, batch.positions, batch.cu_seqlens, batch.targets, np.zeros_like(batch.mask), batch.per_token, {}, batch.pair
    )
    objective = make_objective(PreferenceLossConfig(rpo_alpha=1.0), command="dpo")
    totals = totals_of(objective, [batch])
    assert totals == Totals(0, 0, 0, 0)
    result = seeds(objective, logp, None, batch, totals)
    assert result.loss == 0.0
    assert (result.dlogp == 0).all()
