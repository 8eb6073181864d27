"""Policy gradient losses: grpo, dapo, dr_grpo, gspo, cispo, sapo, rloo, reinforce_plus_plus.

With r = current / proximal (per token, or one per sequence), A the advantage, w the mismatch weight, and
``clip(r) = min(max(r, 1 - epsilon), 1 + epsilon_high)``, each trained token's loss is

=====================  =========================================  ==============================  ========
loss_type              policy loss of a token                     divided by                      unit
=====================  =========================================  ==============================  ========
grpo                   -w min(min(r, delta) A, clip(r) A)         own length x sequences          sequence
dapo                   the same                                   tokens of the step              token
dr_grpo                the same                                   sequences x completion limit    token
reinforce_plus_plus    the same, A normalised over the batch      tokens of the step              token
gspo                   the same, r the geometric mean             own length x sequences          sequence
cispo                  -w min(r, epsilon_high) A logp             tokens of the step              token
                       (the weight is a constant)
sapo                   -w sigmoid(t (r - 1)) 4 / t A              own length x sequences          sequence
rloo                   -w min(r A, clip(r) A), r the product      sequences                       sequence
                       over the sequence, once per sequence
=====================  =========================================  ==============================  ========

plus ``beta k3(reference - current)`` under the same divisor (not rloo, see below), minus ``entropy_coef`` times the mean
entropy over the tokens of the step.

Sources: TRL's GRPOTrainer and RLOOTrainer, whose numbers these are when a step is one micro-batch; GRPO arXiv:2402.03300,
DAPO arXiv:2503.14476, Dr. GRPO arXiv:2503.20783, GSPO arXiv:2507.18071 (TRL's ``importance_sampling_level="sequence"``),
CISPO arXiv:2506.13585 (the cap: ScaleRL arXiv:2510.13786), SAPO arXiv:2511.20347, RLOO arXiv:2402.14740, dual clip
arXiv:2505.07291, REINFORCE++ arXiv:2501.03262.

Where they differ from TRL, and why:

* Divisors are the step's (`Totals`), not the micro-batch's.
* Log-ratios are held below 20 before `exp` (see `segments.exp_ratio`), where TRL runs into infinity and NaN.
* rloo takes ``beta`` times the sequence's k1 KL off the reward, as TRL does; so the trainer has to do it before it forms
  advantages (`advantages.penalise`), and says so by carrying ``per_sequence["reward_kl"]``.
* A truncated sequence under ``mask_truncated_completions`` adds exactly 0, in rloo too (TRL's rloo adds the constant -A).
* A mismatch weight of a token cannot apply to rloo, which has no token loss; only sequence and geometric kinds do.
* reinforce_plus_plus with ``beta`` has the k3 term of the others, not the paper's penalty inside of token-wise returns.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar, Literal

import numpy as np
import torch

from surogate_rl.batch import PackedBatch, Totals
from surogate_rl.config.loss import POLICY_LOSSES, SEQUENCE_RATIO_LOSSES
from surogate_rl.objectives.base import Loss, TokenStats, Unit
from surogate_rl.objectives.mismatch import Mismatch
from surogate_rl.objectives.segments import Trained, exp_ratio, field_of, k3, sequence_weight, to_metrics

CISPO_EPSILON_HIGH = 5.0

Divisor = Literal["sequence_mean", "token_mean", "constant"]
_DIVISORS: dict[str, Divisor] = {
    "grpo": "sequence_mean",
    "gspo": "sequence_mean",
    "sapo": "sequence_mean",
    "dapo": "token_mean",
    "cispo": "token_mean",
    "reinforce_plus_plus": "token_mean",
    "dr_grpo": "constant",
}

_Pending = dict[str, tuple[torch.Tensor, float]]


@dataclass(frozen=True)
class PolicyGradient:
    """One of the losses above, as an objective over a packed batch.

    Reads ``per_sequence["advantage"]``, or ``per_token["advantage"]`` when present (losses of tokens alone: gspo and rloo have one
    ratio and thus one advantage per sequence, and refuse it); ``per_token["proximal_logp"]`` (absent: the current
    log-probabilities, detached, which is exact for the first update after sampling); ``per_token["behaviour_logp"]`` (when
    present, sampler and learner are compared; needed for a mismatch correction); ``per_token["reference_logp"]`` when ``beta`` > 0;
    ``per_sequence["truncated"]`` with ``mask_truncated``; ``per_sequence["weight"]`` when present, which multiplies all of a
    sequence's loss and no divisor; ``per_token["importance"]`` when present, how many tokens of its kind each stands for, which
    multiplies the KL and the entropy (advantages contain it already) and counts in the mean entropy's divisor;
    ``per_sequence["share"]`` when present: where a completion has several sequences, "own length"
    is the completion's, and the ratios of gspo and rloo are those of each of its sequences.

    Attributes:
        epsilon_high: the upper clip width, or for cispo the cap of the weight; resolved, never None.
        delta: upper bound of the ratio (dual clip), or None.
        max_completion_length: dr_grpo's constant.
        mask_truncated: leave truncated sequences out of numerators and of the token count (they still count as sequences).
    """

    loss_type: str
    epsilon: float = 0.2
    epsilon_high: float = 0.2
    delta: float | None = None
    beta: float = 0.0
    entropy_coef: float = 0.0
    sapo_temperature_pos: float = 1.0
    sapo_temperature_neg: float = 1.05
    mask_truncated: bool = False
    max_completion_length: int | None = None
    mismatch: Mismatch = field(default_factory=Mismatch)

    # The bonus needs it, and it is the first sign of collapse: TRL logs it always.
    needs_entropy: ClassVar[bool] = True

    def __post_init__(self) -> None:
        if self.loss_type not in POLICY_LOSSES:
            raise ValueError(f"loss_type: {self.loss_type!r} is not a policy gradient loss, expected one of {', '.join(POLICY_LOSSES)}")
        if self.loss_type == "dr_grpo" and (self.max_completion_length is None or self.max_completion_length < 1):
            raise ValueError("loss_type dr_grpo divides by the completion limit: max_completion_length must be given and positive")
        if self.loss_type == "rloo" and self.mismatch.kind.startswith("token_"):
            raise ValueError(f"mismatch: {self.mismatch.kind} weighs tokens, but rloo weighs sequences; use sequence_* or geometric_*")

    @property
    def unit(self) -> Unit:
        """`token` where a token's loss depends on no other token, else `sequence`."""
        if _DIVISORS.get(self.loss_type) in ("token_mean", "constant") and self.mismatch.level == "token":
            return "token"
        return "sequence"

    @property
    def kl_in_reward(self) -> bool:
        """Whether the KL to the reference belongs into the reward (`advantages.penalise`) instead of the loss."""
        return self.loss_type == "rloo" and self.beta > 0

    @property
    def needs_reference(self) -> bool:
        return self.beta > 0

    def __call__(self, stats: TokenStats, batch: PackedBatch, totals: Totals) -> Loss:
        device = stats.logp.device
        trained = Trained.of(batch, device, mask=self._mask(batch))
        current = trained.take(stats.logp)
        proximal = current.detach()
        if "proximal_logp" in batch.per_token:
            proximal = trained.per_token(field_of(batch, "per_token", "proximal_logp", self.loss_type))
        advantage = self._advantage(batch, trained, device)
        weight = sequence_weight(batch, device)
        importance = trained.per_token(batch.per_token["importance"]) if "importance" in batch.per_token else None
        present = float(trained.count) if importance is None else float(importance.sum())
        metrics: _Pending = {}

        correction = self._correction(batch, trained, proximal, metrics)
        if self.loss_type == "rloo":
            policy = self._sequence_policy(trained, current - proximal, advantage, correction, weight, metrics) / max(totals.sequences, 1)
            if self.kl_in_reward:
                reward_kl = torch.as_tensor(field_of(batch, "per_sequence", "reward_kl", "rloo with beta > 0"), device=device).double()
                metrics["kl"] = (reward_kl[trained.lengths > 0].sum(), trained.count)
            share = torch.zeros_like(current)
        else:
            share = self._share(batch, trained, totals) * trained.spread(weight)
            policy = (self._token_policy(trained, current, proximal, advantage, metrics) * correction * share).sum()
        total = policy
        if self.beta > 0 and not self.kl_in_reward:
            kl = k3(trained.per_token(field_of(batch, "per_token", "reference_logp", "beta > 0")) - current)
            kl = kl if importance is None else kl * importance
            total = total + self.beta * (kl * share).sum()
            metrics["kl"] = (kl.sum(), present)
        if stats.entropy is not None:
            entropy = trained.take(stats.entropy)
            entropy = entropy if importance is None else entropy * importance
            metrics["entropy"] = (entropy.sum(), present)
            if self.entropy_coef > 0:
                metrics["policy_loss"] = (total, self._part(batch, trained, totals))  # as in TRL: the KL term included
                everyone = max(totals.tokens, 1) if importance is None else totals.importance or 1.0
                total = total - self.entropy_coef * (entropy * trained.spread(weight)).sum() / everyone
        elif self.entropy_coef > 0:
            raise ValueError("entropy_coef > 0 needs TokenStats.entropy, which the learner was not asked for")
        metrics["loss"] = (total, self._part(batch, trained, totals))
        return Loss(total.float(), to_metrics(metrics))

    def _mask(self, batch: PackedBatch) -> np.ndarray[tuple[int], np.dtype[np.bool_]] | None:
        if not self.mask_truncated:
            return None
        truncated = field_of(batch, "per_sequence", "truncated", "mask_truncated_completions") > 0
        return np.asarray(batch.mask & ~truncated[batch.segment_of_token()], dtype=np.bool_).reshape(-1)

    def _correction(self, batch: PackedBatch, trained: Trained, proximal: torch.Tensor, metrics: _Pending) -> torch.Tensor:
        """float64 [M]: mismatch weights of the trained tokens."""
        if self.mismatch.kind == "none" and "behaviour_logp" not in batch.per_token:
            return torch.ones_like(proximal)
        behaviour = trained.per_token(field_of(batch, "per_token", "behaviour_logp", f"mismatch: {self.mismatch.kind}"))
        correction, measured = self.mismatch.weigh(proximal - behaviour, trained)
        metrics.update(measured)
        return correction

    def _advantage(self, batch: PackedBatch, trained: Trained, device: torch.device) -> torch.Tensor:
        """float64 [M], by trained token; for the losses that have one ratio per sequence [S]."""
        by_sequence = self.loss_type in SEQUENCE_RATIO_LOSSES
        if "advantage" in batch.per_token:
            if by_sequence:
                raise ValueError(
                    f'loss_type {self.loss_type}: per_token["advantage"] cannot be used, its ratio is the whole sequence\'s; use one of '
                    f"{', '.join(loss for loss in POLICY_LOSSES if loss not in SEQUENCE_RATIO_LOSSES)}"
                )
            return trained.per_token(field_of(batch, "per_token", "advantage", self.loss_type))
        advantage = torch.as_tensor(field_of(batch, "per_sequence", "advantage", self.loss_type), device=device).double()
        return advantage if by_sequence else trained.spread(advantage)

    def _share(self, batch: PackedBatch, trained: Trained, totals: Totals) -> torch.Tensor:
        """float64 [M]: what each token's loss is multiplied by."""
        divisor = _DIVISORS[self.loss_type]
        if divisor == "sequence_mean":
            own = 1.0 / (trained.spread(trained.lengths) * max(totals.sequences, 1))
            if "share" not in batch.per_sequence:
                return own
            part = field_of(batch, "per_sequence", "share", self.loss_type)
            return own * trained.spread(torch.as_tensor(part, device=trained.rows.device).double())
        count = totals.tokens if divisor == "token_mean" else totals.sequences * (self.max_completion_length or 1)
        return torch.full((trained.count,), 1.0 / max(count, 1), dtype=torch.float64, device=trained.rows.device)

    def _token_policy(
        self, trained: Trained, current: torch.Tensor, proximal: torch.Tensor, advantage: torch.Tensor, metrics: _Pending
    ) -> torch.Tensor:
        """float64 [M]: policy losses of the trained tokens, before mismatch weights."""
        if self.loss_type == "gspo":
            ratio = exp_ratio(trained.mean(current - proximal))
            loss = self._clipped(ratio, advantage)
            self._clip_metrics(ratio[trained.lengths > 0], advantage[trained.lengths > 0], metrics)
            return trained.spread(loss)
        ratio = exp_ratio(current - proximal)
        if self.loss_type == "cispo":
            metrics["cispo_clip_ratio"] = (((ratio > self.epsilon_high) & (advantage > 0)).sum(), trained.count)
            return -ratio.clamp(max=self.epsilon_high).detach() * advantage * current
        if self.loss_type == "sapo":
            positive, negative = (torch.full_like(advantage, value) for value in (self.sapo_temperature_pos, self.sapo_temperature_neg))
            temperature = torch.where(advantage > 0, positive, negative)
            return -torch.sigmoid(temperature * (ratio - 1)) * 4 / temperature * advantage
        self._clip_metrics(ratio, advantage, metrics)
        return self._clipped(ratio, advantage)

    def _sequence_policy(
        self,
        trained: Trained,
        log_ratio: torch.Tensor,
        advantage: torch.Tensor,
        correction: torch.Tensor,
        weight: torch.Tensor,
        metrics: _Pending,
    ) -> torch.Tensor:
        """Scalar: rloo's sum over sequences."""
        present = trained.lengths > 0
        ratio = exp_ratio(trained.sum(log_ratio))[present]
        self._clip_metrics(ratio, advantage[present], metrics)
        # Sequence and geometric weights are the same for all of a sequence's tokens, so their mean is the weight.
        return (self._clipped(ratio, advantage[present]) * (trained.mean(correction) * weight)[present]).sum()

    def _clipped(self, ratio: torch.Tensor, advantage: torch.Tensor) -> torch.Tensor:
        clipped = ratio.clamp(1 - self.epsilon, 1 + self.epsilon_high)
        bounded = ratio if self.delta is None else ratio.clamp(max=self.delta)
        return -torch.min(bounded * advantage, clipped * advantage)

    def _clip_metrics(self, ratio: torch.Tensor, advantage: torch.Tensor, metrics: _Pending) -> None:
        low = (ratio < 1 - self.epsilon) & (advantage < 0)
        high = (ratio > 1 + self.epsilon_high) & (advantage > 0)
        count = ratio.shape[0]
        metrics["clip_ratio/low_mean"] = (low.sum(), count)
        metrics["clip_ratio/high_mean"] = (high.sum(), count)
        metrics["clip_ratio/region_mean"] = ((low | high).sum(), count)

    def _part(self, batch: PackedBatch, trained: Trained, totals: Totals) -> float:
        """Which part of the step this batch is: the parts of a step add up to 1, so that a share of the loss / its part
        adds up to the loss."""
        if totals.tokens > 0 and _DIVISORS.get(self.loss_type) == "token_mean":
            return trained.count / totals.tokens
        present = batch.trained_per_sequence() > 0
        count = float(batch.per_sequence["share"][present].sum(dtype=np.float64)) if "share" in batch.per_sequence else float(present.sum())
        return count / max(totals.sequences, 1)
