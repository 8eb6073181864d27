"""Losses over pairs of a chosen and a rejected answer: direct preference optimisation and its variants.

With ``s = log policy - log reference`` summed over an answer's trained tokens (reference_free: ``s = log policy``),
``n`` its number of trained tokens, ``d = s_chosen - s_rejected`` and e the label smoothing:

================  ==================================================================================
sigmoid           -(1 - e) log sigmoid(beta d) - e log sigmoid(-beta d)
robust            [-(1 - e) log sigmoid(beta d) + e log sigmoid(-beta d)] / (1 - 2 e)
hinge             max(0, 1 - beta d)
ipo               (s_chosen / n_chosen - s_rejected / n_rejected - 1 / (2 beta))^2
sigmoid_norm      -log sigmoid(beta (s_chosen / n_chosen - s_rejected / n_rejected))
================  ==================================================================================

averaged over the pairs of the step, plus ``rpo_alpha`` times the mean negative log-likelihood of the chosen answers'
tokens over the step (RPO arXiv:2404.19733; TRL's ``loss_type=[..., "sft"]`` with ``loss_weights=[1, rpo_alpha]``).

Sources: TRL's DPOTrainer, whose numbers these are; DPO arXiv:2305.18290, label smoothing of sigmoid (conservative DPO)
https://ericmitchell.ai/cdpo.pdf, robust arXiv:2403.00409, hinge (SLiC) arXiv:2305.10425, ipo arXiv:2310.12036.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch.nn.functional import logsigmoid

from surogate_rl.batch import PackedBatch, Totals
from surogate_rl.config.loss import PREFERENCE_LOSSES
from surogate_rl.objectives.base import Loss, TokenStats, Unit
from surogate_rl.objectives.segments import Trained, field_of, sequence_weight, to_metrics


@dataclass(frozen=True)
class Preference:
    """One of the losses above, as an objective over a packed batch of pairs.

    Reads ``batch.pair`` and, unless `reference_free`, ``per_sequence["reference_logp_sum"]`` (the reference's
    log-probability of each sequence's trained tokens) or else ``per_token["reference_logp"]``. A pair without any trained
    token takes no part; one with equal answers has the loss of indifference and no gradient (but for `rpo_alpha`).
    ``per_sequence["weight"]`` of the chosen answer weighs its pair where the batch carries it.
    """

    loss_type: str = "sigmoid"
    beta: float = 0.1
    label_smoothing: float = 0.0
    reference_free: bool = False
    rpo_alpha: float = 0.0

    unit: ClassVar[Unit] = "pair"
    needs_entropy: ClassVar[bool] = False
    mask_truncated: ClassVar[bool] = False

    def __post_init__(self) -> None:
        if self.loss_type not in PREFERENCE_LOSSES:
            raise ValueError(f"loss_type: {self.loss_type!r} is not a preference loss, expected one of {', '.join(PREFERENCE_LOSSES)}")

    @property
    def needs_reference(self) -> bool:
        return not self.reference_free

    def __call__(self, stats: TokenStats, batch: PackedBatch, totals: Totals) -> Loss:
        device = stats.logp.device
        trained = Trained.of(batch, device)
        rows = torch.as_tensor(batch.pairs(), device=device)
        rows = rows[trained.lengths[rows].sum(dim=1) > 0]
        logp = trained.sum(trained.take(stats.logp))
        score = logp - self._reference(batch, trained)
        weight = sequence_weight(batch, device)[rows[:, 0]]
        loss = (self._pair_loss(score[rows], trained.lengths[rows]) * weight).sum()
        total = loss / max(totals.pairs, 1)

        pairs = rows.shape[0]
        reward = self.beta * score.detach()[rows]
        logps = logp.detach()[rows]
        metrics: dict[str, tuple[torch.Tensor, float]] = {
            "rewards/chosen": (reward[:, 0].sum(), pairs),
            "rewards/rejected": (reward[:, 1].sum(), pairs),
            "rewards/accuracies": ((reward[:, 0] > reward[:, 1]).sum(), pairs),
            "rewards/margins": ((reward[:, 0] - reward[:, 1]).sum(), pairs),
            "logps/chosen": (logps[:, 0].sum(), pairs),
            "logps/rejected": (logps[:, 1].sum(), pairs),
        }
        if self.rpo_alpha > 0:
            nll = -(logp[rows[:, 0]] * weight).sum()
            total = total + self.rpo_alpha * nll / max(totals.chosen_tokens, 1)
            metrics["nll_loss"] = (nll, float(trained.lengths[rows[:, 0]].sum()))
        metrics["loss"] = (total, pairs / max(totals.pairs, 1))
        return Loss(total.float(), to_metrics(metrics))

    def _reference(self, batch: PackedBatch, trained: Trained) -> torch.Tensor:
        """float64 [S]."""
        if self.reference_free:
            return torch.zeros_like(trained.lengths)
        if "reference_logp_sum" in batch.per_sequence:
            sums = field_of(batch, "per_sequence", "reference_logp_sum", self.loss_type)
            return torch.as_tensor(sums, device=trained.rows.device).double()
        return trained.sum(trained.per_token(field_of(batch, "per_token", "reference_logp", f"{self.loss_type} without reference_free")))

    def _pair_loss(self, score: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
        """float64 [P] of [P, 2] scores and lengths, chosen first."""
        if self.loss_type in ("ipo", "sigmoid_norm"):
            score = score / lengths.clamp(min=1.0)
        difference = score[:, 0] - score[:, 1]
        if self.loss_type == "ipo":
            return (difference - 1 / (2 * self.beta)) ** 2
        margin = self.beta * difference
        if self.loss_type == "hinge":
            return torch.relu(1 - margin)
        smoothing = self.label_smoothing
        if self.loss_type == "robust":
            return (-(1 - smoothing) * logsigmoid(margin) + smoothing * logsigmoid(-margin)) / (1 - 2 * smoothing)
        if self.loss_type == "sigmoid":
            return -(1 - smoothing) * logsigmoid(margin) - smoothing * logsigmoid(-margin)
        return -logsigmoid(margin)
