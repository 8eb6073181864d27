"""One optimiser step from packed micro-batches: the part that SFT, DPO and GRPO share."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from surogate_rl.batch import PackedBatch, Totals
from surogate_rl.config.schema import TrainConfig
from surogate_rl.errors import RunError
from surogate_rl.learner import Learner
from surogate_rl.objectives import LinearObjective, Objective, mean_metrics, seeds, step_seeds, totals_of


class TooManySkippedSteps(RunError):
    """So many updates in a row had a gradient that is not finite that the run cannot be saved by skipping."""


class MetricSums:
    """What objectives reported since it was last read, added up over micro-batches, minibatches and steps."""

    def __init__(self) -> None:
        self._parts: list[Mapping[str, tuple[float, float]]] = []

    def add(self, metrics: Mapping[str, tuple[float, float]]) -> None:
        self._parts.append(metrics)

    def take(self) -> dict[str, float]:
        """The means (extremes of ``/max`` and ``/min``); starts anew."""
        means = mean_metrics(self._parts)
        self._parts = []
        return means


@dataclass(frozen=True)
class LogpSettings:
    """The one definition of a log-probability in a run: temperature, and the ids that count (0: all)."""

    temperature: float = 1.0
    valid_vocab: int = 0


@dataclass(frozen=True)
class UpdateResult:
    loss: float
    grad_norm: float
    applied: bool


class Updater:
    """Runs micro-batches through learner and objective and applies the optimiser. Counts skipped updates in a row.

    Attributes:
        before_step: called before the optimiser writes to the weights; None: nobody else reads them.
    """

    def __init__(self, learner: Learner, config: TrainConfig, logp: LogpSettings) -> None:
        self.learner = learner
        self.config = config
        self.logp = logp
        self.metrics = MetricSums()
        self.skipped_in_a_row = 0
        self.skipped = 0
        self.before_step: Callable[[], None] | None = None

    def update(self, batches: Sequence[PackedBatch], objective: Objective, lr: float) -> UpdateResult:
        """Gradients of all `batches`, summed, then one step of the optimiser at rate `lr`. What the objective reports goes to `metrics`.

        A loss or gradient that is not finite changes no weight and no optimiser state: it is counted, and after
        `max_skipped_steps` in a row `TooManySkippedSteps` is raised.
        """
        totals = totals_of(objective, batches)
        if objective.unit == "step":
            loss, finite = self._backward_whole_step(batches, objective, totals)
        else:
            loss, finite = self._backward_each(batches, objective, totals)
        config = self.config
        if finite:
            if self.before_step is not None:
                self.before_step()
            stats = self.learner.step(
                lr,
                max_grad_norm=config.max_grad_norm,
                betas=(config.adam_beta1, config.adam_beta2),
                epsilon=config.adam_epsilon,
                weight_decay=config.weight_decay,
            )
            applied, grad_norm = stats.applied, stats.grad_norm
        else:
            self.learner.zero_gradients()
            applied, grad_norm = False, float("nan")
        self._count_skips(applied, loss)
        return UpdateResult(loss, grad_norm, applied)

    def _backward_each(self, batches: Sequence[PackedBatch], objective: Objective, totals: Totals) -> tuple[float, bool]:
        loss = 0.0
        temperature, valid_vocab = self.logp.temperature, self.logp.valid_vocab
        for batch in batches:
            if isinstance(objective, LinearObjective):
                known = objective.known_seeds(batch, totals)
                stats = self.learner.forward_backward(batch, known, temperature=temperature, valid_vocab=valid_vocab)
                result = seeds(objective, stats.logp, None, batch, totals)
            else:
                stats = self.learner.forward(batch, temperature=temperature, valid_vocab=valid_vocab, entropy=objective.needs_entropy)
                result = seeds(objective, stats.logp, stats.entropy, batch, totals)
                if result.finite:
                    self.learner.backward(result.dlogp, result.dentropy)
                else:
                    self.learner.discard_pending()
            if not result.finite:
                return result.loss, False
            loss += result.loss
            self.metrics.add(result.metrics)
        return loss, True

    def _backward_whole_step(self, batches: Sequence[PackedBatch], objective: Objective, totals: Totals) -> tuple[float, bool]:
        """Score everything, ask the objective once, then run each micro-batch with its share of the seeds."""
        temperature, valid_vocab = self.logp.temperature, self.logp.valid_vocab
        scored = [
            self.learner.score(batch, temperature=temperature, valid_vocab=valid_vocab, entropy=objective.needs_entropy)
            for batch in batches
        ]
        result = step_seeds(objective, [stats.logp for stats in scored], [stats.entropy for stats in scored], batches, totals)
        if not result.finite:
            return result.loss, False
        for batch, dlogp, dentropy in zip(batches, result.dlogp, result.dentropy, strict=True):
            self.learner.forward_backward(batch, dlogp, dentropy, temperature=temperature, valid_vocab=valid_vocab)
        self.metrics.add(result.metrics)
        return result.loss, True

    def _count_skips(self, applied: bool, loss: float) -> None:
        if applied:
            self.skipped_in_a_row = 0
            return
        self.skipped += 1
        self.skipped_in_a_row += 1
        if self.skipped_in_a_row >= self.config.max_skipped_steps:
            raise TooManySkippedSteps(
                f"{self.skipped_in_a_row} optimiser updates in a row had a loss or gradient that is not finite (last loss: {loss}); "
                "weights and optimiser state are as before the first of them. "
                "Lower learning_rate or max_grad_norm, or look for broken rows or rewards."
            )
