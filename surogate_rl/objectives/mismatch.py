"""Correction of the difference between the sampler and the learner.

A sampler with other kernels, another precision or older weights gives tokens other probabilities than the learner does
before its first update. Importance sampling corrects that with ``w = proximal / behaviour``, a constant for autograd:

======================  ==========================================================================
``token_*``             w of each token
``sequence_*``          the product over the sequence's trained tokens, for all of them
``geometric_*``         its geometric mean, for all of them
``*_truncate``          w held in [floor, cap]
``*_mask``              0 where w is outside [floor, cap], else w
======================  ==========================================================================

Masking changes the numerator only: a step with many masked tokens learns less, it does not learn louder.
The semantics of token and sequence are TRL's ``vllm_importance_sampling_mode``.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

import torch

from surogate_rl.batch import PackedBatch
from surogate_rl.objectives.base import Metrics, TokenStats
from surogate_rl.objectives.segments import Trained, exp_ratio, field_of, k3, to_metrics

MismatchKind = Literal["none", "token_truncate", "token_mask", "sequence_truncate", "sequence_mask", "geometric_truncate", "geometric_mask"]
MISMATCH_KINDS: tuple[str, ...] = get_args(MismatchKind)


@dataclass(frozen=True)
class Mismatch:
    """How to correct. The measurements are taken whatever the kind.

    Attributes:
        kind: ``none`` or ``<level>_<truncate|mask>``.
        cap: upper bound of the weight.
        floor: lower bound of the weight.
    """

    kind: MismatchKind = "none"
    cap: float = 3.0
    floor: float = 0.0

    @property
    def level(self) -> str:
        return "token" if self.kind == "none" else self.kind.split("_")[0]

    def weigh(self, log_ratio: torch.Tensor, trained: Trained) -> tuple[torch.Tensor, dict[str, tuple[torch.Tensor, float]]]:
        """Weights of the trained tokens, and how far apart sampler and learner are.

        Args:
            log_ratio: float64 [M], proximal - behaviour of each trained token.
            trained: the M positions.

        Returns:
            float64 [M] without gradient (all 1 for ``none``), and metrics under ``sampling/``: TRL's
            ``sampling_logp_difference/{mean,max}`` and ``importance_sampling_ratio/{mean,min,max}`` (the weight as applied;
            for ``none`` the bare ratio), ``kl`` (k3 estimate of KL(behaviour, proximal) in nats per token) and
            ``clip_fraction``, the share of weights outside [floor, cap].
        """
        log_ratio = log_ratio.detach()
        present = trained.lengths > 0
        if self.level == "token":
            raw = exp_ratio(log_ratio)
        elif self.level == "sequence":
            raw = exp_ratio(trained.sum(log_ratio))[present]
        else:
            raw = exp_ratio(trained.mean(log_ratio))[present]
        outside = (raw > self.cap) | (raw < self.floor)
        weight = raw
        if self.kind.endswith("_truncate"):
            weight = raw.clamp(min=self.floor, max=self.cap)
        elif self.kind.endswith("_mask"):
            weight = raw.masked_fill(outside, 0.0)
        metrics = _measure(log_ratio, weight, outside)
        if self.kind == "none":
            return torch.ones_like(log_ratio), metrics
        if self.level != "token":
            full = torch.ones_like(trained.lengths)
            full[present] = weight
            weight = trained.spread(full)
        return weight, metrics


def measured(stats: TokenStats, batch: PackedBatch) -> Metrics:
    """The metrics of `Mismatch.weigh` for an objective that does not correct; none for a batch without ``behaviour_logp``."""
    if "behaviour_logp" not in batch.per_token:
        return {}
    trained = Trained.of(batch, stats.logp.device)
    proximal = trained.take(stats.logp).detach()
    if "proximal_logp" in batch.per_token:
        proximal = trained.per_token(field_of(batch, "per_token", "proximal_logp", "the mismatch"))
    behaviour = trained.per_token(field_of(batch, "per_token", "behaviour_logp", "the mismatch"))
    return to_metrics(Mismatch().weigh(proximal - behaviour, trained)[1])


def _measure(log_ratio: torch.Tensor, weight: torch.Tensor, outside: torch.Tensor) -> dict[str, tuple[torch.Tensor, float]]:
    tokens, weights = log_ratio.shape[0], weight.shape[0]
    if tokens == 0:
        return {}
    difference = log_ratio.abs()
    return {
        "sampling/sampling_logp_difference/mean": (difference.sum(), tokens),
        "sampling/sampling_logp_difference/max": (difference.max(), 1),
        "sampling/importance_sampling_ratio/mean": (weight.sum(), weights),
        "sampling/importance_sampling_ratio/min": (weight.min(), 1),
        "sampling/importance_sampling_ratio/max": (weight.max(), 1),
        "sampling/kl": (k3(log_ratio).sum(), tokens),
        "sampling/clip_fraction": (outside.sum(), weights),
    }
