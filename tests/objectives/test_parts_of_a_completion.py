"""A completion of several sequences counts as one, and advantages may be given by token."""

from __future__ import annotations

import numpy as np
import pytest

from surogate_rl.batch import FloatArray, PackedBatch
from surogate_rl.config.loss import POLICY_LOSSES, SEQUENCE_RATIO_LOSSES
from surogate_rl.data.packing import PackSequence, pack
from surogate_rl.objectives import PolicyGradient, seeds, totals_of

TOKEN_LOSSES = [loss for loss in POLICY_LOSSES if loss not in SEQUENCE_RATIO_LOSSES]
LENGTHS = [5, 3, 4]
ADVANTAGES = [1.5, -0.5, 0.75]


def objective(loss_type: str) -> PolicyGradient:
    return PolicyGradient(loss_type, max_completion_length=7, epsilon_high=5.0 if loss_type == "cispo" else 0.2)


def one(length: int, number: int, advantage: float, rng: np.random.Generator, **per_sequence: float) -> PackSequence:
    """A prompt token and `length` trained ones."""
    mask = [False] + [True] * length
    proximal = np.concatenate([[0.0], rng.normal(-1.0, 0.2, length)])
    per_token = {"proximal_logp": proximal, "behaviour_logp": proximal}
    return PackSequence([1] * (length + 1), mask, dict(per_token), {"advantage": advantage, "truncated": 0.0, **per_sequence}, id=number)


def logps(batch: PackedBatch, shift: FloatArray) -> FloatArray:
    result = np.zeros(batch.num_tokens, np.float32)
    result[batch.mask] = batch.per_token["proximal_logp"][batch.mask] + shift
    return result


@pytest.mark.parametrize("loss_type", TOKEN_LOSSES)
def test_a_completion_in_parts_gives_the_gradient_of_the_whole(loss_type: str) -> None:
    rng = np.random.default_rng(0)
    whole = [one(length, number, ADVANTAGES[number], rng) for number, length in enumerate(LENGTHS)]
    parts: list[PackSequence] = []
    for number, sequence in enumerate(whole):
        cuts = [(0, 2), (2, LENGTHS[number])] if number != 1 else [(0, LENGTHS[number])]
        for start, end in cuts:
            values = {name: np.concatenate([[0.0], np.asarray(array)[1 + start : 1 + end]]) for name, array in sequence.per_token.items()}
            share = (end - start) / LENGTHS[number]
            mask = [False] + [True] * (end - start)
            parts.append(PackSequence([1] * len(mask), mask, values, {**sequence.per_sequence, "share": share}, id=len(parts)))
    shift = rng.normal(0.0, 0.3, sum(LENGTHS)).astype(np.float32)
    gradients, losses = [], []
    for sequences in (whole, parts):
        (batch,) = pack([[s] for s in sequences], 100)
        totals = totals_of(objective(loss_type), [batch])
        assert (totals.sequences, totals.tokens) == (3, 12)
        result = seeds(objective(loss_type), logps(batch, shift), np.zeros(batch.num_tokens, np.float32), batch, totals)
        gradients.append(result.dlogp[batch.mask])
        losses.append(result.metrics["loss"][0] / result.metrics["loss"][1])
    np.testing.assert_allclose(gradients[0], gradients[1], rtol=1e-6)
    assert losses[0] == pytest.approx(losses[1])


@pytest.mark.parametrize("loss_type", TOKEN_LOSSES)
def test_advantages_by_token_scale_each_tokens_own_gradient(loss_type: str) -> None:
    """On-policy the gradient of a token is its advantage times what it is for an advantage of 1."""
    rng = np.random.default_rng(1)
    sequences = [one(length, number, 1.0, rng) for number, length in enumerate(LENGTHS)]
    own = rng.normal(0.0, 1.0, sum(LENGTHS)).astype(np.float32)
    (unit,) = pack([[s] for s in sequences], 100)
    position = 0
    for sequence, length in zip(sequences, LENGTHS, strict=True):
        sequence.per_token["advantage"] = np.concatenate([[9e9], own[position : position + length]])  # the prompt's is never read
        position += length
    (batch,) = pack([[s] for s in sequences], 100)
    totals = totals_of(objective(loss_type), [batch])
    still = np.zeros(12, np.float32)
    plain = seeds(objective(loss_type), logps(unit, still), np.zeros(unit.num_tokens, np.float32), unit, totals).dlogp[unit.mask]
    given = seeds(objective(loss_type), logps(batch, still), np.zeros(batch.num_tokens, np.float32), batch, totals).dlogp[batch.mask]
    np.testing.assert_allclose(given, plain * own, rtol=1e-5)


@pytest.mark.parametrize("loss_type", SEQUENCE_RATIO_LOSSES)
def test_losses_of_sequences_refuse_advantages_by_token(loss_type: str) -> None:
    sequence = one(3, 0, 1.0, np.random.default_rng(2))
    sequence.per_token["advantage"] = np.ones(4)
    (batch,) = pack([[sequence]], 100)
    with pytest.raises(ValueError, match=rf'loss_type {loss_type}: per_token\["advantage"\] cannot be used'):
        seeds(objective(loss_type), np.zeros(4, np.float32), np.zeros(4, np.float32), batch, totals_of(objective(loss_type), [batch]))
