"""What SFT and DPO share: held-out evaluation, and a check that training trains."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack

from surogate_rl.batch import PackedBatch
from surogate_rl.config.schema import TrainConfig
from surogate_rl.errors import RunError
from surogate_rl.objectives import Objective, mean_metrics, step_seeds, totals_of
from surogate_rl.trainers.evaluation import RewardEvaluation
from surogate_rl.trainers.sampling import Rollouts
from surogate_rl.trainers.session import Session
from surogate_rl.trainers.update import UpdateResult

MAX_EVAL_SEQUENCES = 64
HeldOutLoss = Callable[[], dict[str, float]]
"""Gives `loss`, and what else the objective reports."""


def held_out_sequences(config: TrainConfig) -> int:
    """Sampled together by the evaluation of SFT and DPO; 0 where it is by the loss."""
    return MAX_EVAL_SEQUENCES if config.eval is not None and config.eval.rewards else 0


class HeldOut:
    """Held-out loss, or rewards over sampled completions where `eval.rewards` names some."""

    def __init__(self, session: Session, make_loss: Callable[[], HeldOutLoss]) -> None:
        config = session.config.eval
        assert config is not None
        self._loss: HeldOutLoss | None = None
        self._rollouts: Rollouts | None = None
        self._rewards: RewardEvaluation | None = None
        if config.rewards:
            with ExitStack() as undo:
                self._rollouts = Rollouts(session)
                undo.callback(self._rollouts.close)
                self._rewards = RewardEvaluation(session, config, self._rollouts)
                undo.pop_all()
        else:
            self._loss = make_loss()

    def __call__(self, step: int) -> dict[str, float]:
        if self._loss is not None:
            return {f"eval_{name}": value for name, value in self._loss().items()}
        assert self._rollouts is not None
        assert self._rewards is not None
        self._rollouts.weights_changed(step)
        return self._rewards(step)

    def close(self) -> None:
        if self._rewards is not None:
            self._rewards.close()
        if self._rollouts is not None:
            self._rollouts.close()


def held_out_loss(session: Session, objective: Objective, batches: Sequence[PackedBatch]) -> dict[str, float]:
    """The objective of all of `batches`, taken as one step: `loss`, and what else it reports."""
    logp = session.updater.logp
    scored = [
        session.learner.score(batch, temperature=logp.temperature, valid_vocab=logp.valid_vocab, entropy=objective.needs_entropy)
        for batch in batches
    ]
    totals = totals_of(objective, batches)
    result = step_seeds(objective, [stats.logp for stats in scored], [stats.entropy for stats in scored], batches, totals)
    return mean_metrics([result.metrics]) | {"loss": result.loss}


def check_first_gradient(step: int, result: UpdateResult, config: TrainConfig) -> None:
    """Raises RunError if the very first gradient is exactly zero: nothing would ever be learned."""
    if step == 1 and result.applied and result.grad_norm == 0.0:
        what = "the adapter" if config.lora else "the model"
        raise RunError(
            f"the first step gave {what} a gradient of exactly zero, so it would never learn; "
            "look at the data (are all pairs identical, is every label masked?) and at lora_target_modules"
        )
