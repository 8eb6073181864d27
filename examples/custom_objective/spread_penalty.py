"""A policy gradient that dislikes sequences far from the others: an objective that does not separate over micro-batches."""

from __future__ import annotations

import torch

from surogate_rl.batch import PackedBatch, Totals
from surogate_rl.objectives import Loss, TokenStats


def spread_penalty(stats: TokenStats, batch: PackedBatch, totals: Totals, penalty: float = 0.1) -> Loss:
    """-mean(advantage x log-ratio) + penalty x variance over the step of the sequences' mean log-ratios.

    The log-ratio of a sequence is the mean of log current - log proximal over its trained tokens. Where one sequence drifts
    ahead of the rest, the variance pulls it back. A variance needs all of the step at once: the sum of the variances of two
    halves is not the variance of the whole. That is what ``unit = "step"`` asks for.
    """
    mask = torch.as_tensor(batch.mask)
    segment = torch.as_tensor(batch.segment_of_token()).long()[mask]
    logp = stats.logp[mask]
    proximal = torch.as_tensor(batch.per_token["proximal_logp"])[mask] if "proximal_logp" in batch.per_token else logp.detach()
    advantage = torch.as_tensor(batch.per_sequence["advantage"])

    sums = torch.zeros(batch.num_sequences).index_add(0, segment, logp - proximal)
    lengths = torch.zeros(batch.num_sequences).index_add(0, segment, torch.ones_like(logp))
    trained = lengths > 0
    drift = sums[trained] / lengths[trained]
    if drift.numel() == 0:
        return Loss(0 * stats.logp.sum())

    policy = -(advantage[trained] * drift).sum() / totals.sequences
    variance = drift.var(unbiased=False)
    return Loss(policy + penalty * variance, {"drift/variance": (float(variance.detach()), 1.0)})


# "step" is the default of an objective of your own; "token", "sequence" or "pair" let the trainer go through the step
# micro-batch by micro-batch, which costs one pass less. Take them if the loss is a sum over those.
spread_penalty.unit = "step"  # type: ignore[attr-defined]
