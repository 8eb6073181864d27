"""Direct preference optimisation over pairs, against the policy that the run started from."""

from __future__ import annotations

import zipfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from surogate_rl.batch import FloatArray
from surogate_rl.config.schema import DatasetConfig, DpoConfig
from surogate_rl.data import Example, Pair, load_pairs
from surogate_rl.data.packing import PackSequence, pack
from surogate_rl.errors import InputError
from surogate_rl.objectives import make_objective
from surogate_rl.trainers.batches import SUPERVISED_STEP, StepOrder
from surogate_rl.trainers.loop import Clock, fingerprint
from surogate_rl.trainers.memory import Demands
from surogate_rl.trainers.schedule import Schedule
from surogate_rl.trainers.session import Session
from surogate_rl.trainers.sft import LOGP
from surogate_rl.trainers.supervised import HeldOut, check_first_gradient, held_out_loss, held_out_sequences

REFERENCE_FILE = "reference_logps.npz"


def micro_batch_tokens(config: DpoConfig) -> int:
    """A pair is never split, and each side may be sequence_len long."""
    return 2 * config.per_device_train_batch_size * config.sequence_len


def demands(config: DpoConfig) -> Demands:
    """The reference is scored by the learner itself, before the first step."""
    return Demands(micro_batch_tokens(config), held_out_sequences(config))


def load(session: Session, config: DpoConfig, datasets: Sequence[DatasetConfig]) -> Sequence[Pair]:
    loaded = load_pairs(
        datasets,
        session.loaded.tokenizer,
        sequence_len=config.sequence_len,
        vocab=session.loaded.spec.vocab,
        overlong=config.overlong,
        seed=config.seed,
    )
    session.progress.note(str(loaded.report))
    return loaded.items


class Dpo:
    def __init__(self, session: Session, config: DpoConfig, held_out: HeldOut | None) -> None:
        self._session, self._config, self._held_out = session, config, held_out
        self.pairs = load(session, config, config.datasets)
        if config.loss.rpo_alpha == 0 and all(pair.identical for pair in self.pairs):
            raise InputError("datasets: chosen and rejected are the same tokens in every pair, which teaches nothing; check the columns")
        per_step = config.per_device_train_batch_size * config.gradient_accumulation_steps
        self._order = StepOrder(len(self.pairs), per_step, config.seed)
        self._objective = make_objective(config.loss, command="dpo")
        self._schedule = Schedule.from_config(config, self.total_steps)
        self._reference: dict[int, tuple[FloatArray, FloatArray]] = {}
        self._num_tokens = self.learned = 0

    @property
    def total_steps(self) -> int:
        return self._order.total_steps(self._config)

    def start(self) -> None:
        """Scores every pair that the run will visit with the initial policy, once; a resumed run reads the scores back."""
        if not self._objective.needs_reference:
            return
        visited = sorted({pair for step in range(1, self.total_steps + 1) for pair in self._order(step)})
        path = self._session.output_dir / REFERENCE_FILE
        pairs = [self.pairs[i] for i in visited]
        tokens = [[pair.chosen.tokens.tolist(), pair.rejected.tokens.tolist()] for pair in pairs]
        key = fingerprint([self._session.learner.digest(), tokens])
        self._reference = read_reference(path, key, visited)
        if not self._reference:
            self._session.progress.note(f"scoring {len(visited)} pairs with the reference policy")
            self._reference = score_pairs(self._session, [(i, self.pairs[i]) for i in visited], micro_batch_tokens(self._config))
            write_reference(path, key, self._reference)

    def step(self, step: int) -> dict[str, float]:
        clock = Clock()
        units = [pair_unit(self.pairs[i], slot, self._reference.get(i)) for slot, i in enumerate(self._order(step))]
        batches = pack(units, micro_batch_tokens(self._config))
        lr = self._schedule(self._session.learner.update_count)
        result = self._session.updater.update(batches, self._objective, lr)
        check_first_gradient(step, result, self._config)
        tokens = sum(batch.num_tokens for batch in batches)
        self._num_tokens += tokens
        self.learned = step
        seconds = clock.lap()
        return {
            "loss": result.loss,
            "grad_norm": result.grad_norm,
            "learning_rate": lr,
            "epoch": self._order.epoch(step),
            "num_tokens": float(self._num_tokens),
            "skipped_steps": float(self._session.updater.skipped),
            "step_time": seconds,
            "tokens_per_second": tokens / seconds,
        }

    def evaluate(self, step: int) -> dict[str, float]:
        return self._held_out(step) if self._held_out else {}

    def state(self) -> tuple[dict[str, NDArray[Any]], dict[str, Any]]:
        return {}, {"num_tokens": self._num_tokens, "order": self._order.state()}

    def restore(self, arrays: Mapping[str, NDArray[Any]], state: Mapping[str, Any]) -> None:
        self._order.require_same(state["order"], SUPERVISED_STEP)
        self._num_tokens = state["num_tokens"]

    def close(self) -> None:
        return None


class HeldOutPairs:
    """The objective of held-out pairs; their reference is scored when this is made, with the initial policy."""

    def __init__(self, session: Session, config: DpoConfig) -> None:
        assert config.eval is not None
        self._session = session
        self._objective = make_objective(config.loss, command="dpo")
        pairs = load(session, config, config.eval.datasets)
        capacity = micro_batch_tokens(config)
        reference = score_pairs(session, list(enumerate(pairs)), capacity) if self._objective.needs_reference else {}
        self._batches = pack([pair_unit(pair, i, reference.get(i)) for i, pair in enumerate(pairs)], capacity)

    def __call__(self) -> dict[str, float]:
        return held_out_loss(self._session, self._objective, self._batches)


def pair_unit(pair: Pair, number: int, reference: tuple[FloatArray, FloatArray] | None) -> list[PackSequence]:
    """Chosen first. `reference` holds log-probabilities per token of either side, aligned with its tokens."""
    sides: tuple[Example, Example] = (pair.chosen, pair.rejected)
    return [
        PackSequence(
            tokens=side.tokens,
            mask=side.mask,
            per_token={"reference_logp": reference[k]} if reference is not None else {},
            pair=number,
            id=2 * number + k,
        )
        for k, side in enumerate(sides)
    ]


def score_pairs(session: Session, pairs: Sequence[tuple[int, Pair]], capacity: int) -> dict[int, tuple[FloatArray, FloatArray]]:
    """Log-probabilities by token of both sides under the learner's present weights: index -> (chosen, rejected)."""
    scores: dict[int, list[FloatArray]] = {index: [] for index, _ in pairs}
    batches = pack([pair_unit(pair, slot, None) for slot, (_, pair) in enumerate(pairs)], capacity)
    for batch in batches:
        assert batch.pair is not None
        logp = session.learner.score(batch, temperature=LOGP.temperature, valid_vocab=LOGP.valid_vocab).logp
        for segment, slot in enumerate(batch.pair):
            first, end = int(batch.cu_seqlens[segment]), int(batch.cu_seqlens[segment + 1])
            # position t predicts token t + 1: back to the tokens' own places
            scores[pairs[int(slot)][0]].append(np.concatenate([np.zeros(1, np.float32), logp[first : end - 1]]))
    return {index: (sides[0], sides[1]) for index, sides in scores.items()}


def write_reference(path: Path, key: str, scores: Mapping[int, tuple[FloatArray, FloatArray]]) -> None:
    flat = [side for index in sorted(scores) for side in scores[index]]
    aside = path.with_suffix(".partial.npz")
    np.savez(aside, key=np.array(key), lengths=np.array([len(side) for side in flat]), logps=np.concatenate(flat))
    aside.replace(path)


def read_reference(path: Path, key: str, indices: Sequence[int]) -> dict[int, tuple[FloatArray, FloatArray]]:
    """What `write_reference` wrote for the same policy and pairs; empty if there is none."""
    if not path.is_file():
        return {}
    try:
        with np.load(path) as saved:
            if str(saved["key"]) != key:
                return {}
            sides = np.split(saved["logps"].astype(np.float32), np.cumsum(saved["lengths"])[:-1])
    except (OSError, ValueError, KeyError, zipfile.BadZipFile):  # cut short, or not ours: it is made again
        return {}
    return {index: (sides[2 * slot], sides[2 * slot + 1]) for slot, index in enumerate(indices)}
