"""The policy that the KL term compares with: the one that the run started from, or a slow average of the present one."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from surogate_rl.checkpoint import LazyArray, Saved
from surogate_rl.config.schema import GrpoConfig
from surogate_rl.data.packing import PackSequence
from surogate_rl.learner import AdapterUse, Learner
from surogate_rl.trainers.session import Session

Score = Callable[[Learner, Sequence[PackSequence], str, AdapterUse], None]
NAME = "reference_logp"


class Reference:
    """With LoRA the initial adapter over the same base weights; with full fine-tuning a second, forward-only learner."""

    def __init__(self, session: Session, config: GrpoConfig) -> None:
        self._session, self._config = session, config
        self._learner: Learner | None = None
        if session.memory.reference is not None:
            self._learner = Learner(session.loaded.spec, **session.memory.reference)
            self._learner.load_weights(iter(session.learner.weights()))

    def score_into(self, sequences: Sequence[PackSequence], score: Score) -> None:
        if self._learner is None:
            score(self._session.learner, sequences, NAME, "initial")
        else:
            score(self._learner, sequences, NAME, "live")

    def after_step(self, step: int) -> None:
        """Every `ref_model_sync_steps`: reference = alpha * policy + (1 - alpha) * reference, as TRL's `sync_ref_model`."""
        loss = self._config.loss
        if not loss.sync_ref_model or self._learner is None or step % loss.ref_model_sync_steps:
            return
        alpha = np.float32(loss.ref_model_mixup_alpha)
        old, policy = self._learner, self._session.learner
        old.load_weights((name, alpha * value + (np.float32(1) - alpha) * old.export(name)) for name, value in policy.weights())

    def arrays(self) -> dict[str, Saved]:
        """What a checkpoint must keep: the reference's weights once they may differ from the initial ones."""
        if self._learner is None or not self._config.loss.sync_ref_model:
            return {}
        learner, dtype = self._learner, np.dtype(np.float32)
        weights = [info for info in learner.tensors() if not info.is_adapter]
        return {f"reference/{info.name}": LazyArray(info.shape, dtype, partial(learner.export, info.name)) for info in weights}

    def restore(self, arrays: Mapping[str, NDArray[Any]]) -> None:
        if self._learner is not None and self._config.loss.sync_ref_model:
            self._learner.load_weights((name.removeprefix("reference/"), value) for name, value in arrays.items())

    def close(self) -> None:
        if self._learner is not None:
            self._learner.close()
