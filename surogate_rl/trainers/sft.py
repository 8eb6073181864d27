"""Supervised fine-tuning: the degenerate case, a constant objective over given tokens."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from surogate_rl.config.schema import SftConfig
from surogate_rl.data import Example, load_examples
from surogate_rl.data.packing import PackSequence, first_fit, pack
from surogate_rl.errors import InputError
from surogate_rl.objectives import make_objective
from surogate_rl.trainers.batches import SUPERVISED_STEP, StepOrder
from surogate_rl.trainers.loop import Clock, fingerprint
from surogate_rl.trainers.memory import Demands
from surogate_rl.trainers.schedule import Schedule
from surogate_rl.trainers.session import Session
from surogate_rl.trainers.supervised import HeldOut, check_first_gradient, held_out_loss, held_out_sequences
from surogate_rl.trainers.update import LogpSettings

LOGP = LogpSettings(temperature=1.0, valid_vocab=0)


def micro_batch_tokens(config: SftConfig) -> int:
    return config.per_device_train_batch_size * config.sequence_len


def demands(config: SftConfig) -> Demands:
    return Demands(micro_batch_tokens(config), held_out_sequences(config))


class Sft:
    def __init__(self, session: Session, config: SftConfig, held_out: HeldOut | None) -> None:
        self._session, self._config, self._held_out = session, config, held_out
        loaded = load_examples(
            config.datasets,
            session.loaded.tokenizer,
            sequence_len=config.sequence_len,
            vocab=session.loaded.spec.vocab,
            overlong=config.overlong,
            seed=config.seed,
            assistant_only_loss=config.assistant_only_loss,
            completion_only_loss=config.completion_only_loss,
        )
        session.progress.note(str(loaded.report))
        self.examples: Sequence[Example] = loaded.items
        # a row is what TRL counts as one: a pack of sequence_len tokens, or one example where packing is off
        lengths = [len(example.tokens) for example in self.examples]
        self._rows = packed_rows(lengths, config.sequence_len, config.seed) if config.packing else [[i] for i in range(len(lengths))]
        per_step = config.per_device_train_batch_size * config.gradient_accumulation_steps
        self._order = StepOrder(len(self._rows), per_step, config.seed)
        self._objective = make_objective(config.loss, command="sft")
        self._schedule = Schedule.from_config(config, self.total_steps)
        self._num_tokens = self.learned = 0

    @property
    def total_steps(self) -> int:
        return self._order.total_steps(self._config)

    @cached_property
    def _packs(self) -> str:
        return fingerprint(self._rows)

    def start(self) -> None:
        return None

    def step(self, step: int) -> dict[str, float]:
        clock = Clock()
        members = [i for row in self._order(step) for i in self._rows[row]]
        units = [[sequence(self.examples[i], i)] for i in members]
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
        return {}, {"num_tokens": self._num_tokens, "order": self._order.state(), "packs": self._packs}

    def restore(self, arrays: Mapping[str, NDArray[Any]], state: Mapping[str, Any]) -> None:
        self._order.require_same(state["order"], SUPERVISED_STEP)
        if state["packs"] != self._packs:
            raise InputError(
                "resume: examples are packed into rows otherwise than when the checkpoint was taken, so that some would be repeated and "
                "others passed over; set sequence_len, packing and the data back, or start anew in another output_dir"
            )
        self._num_tokens = state["num_tokens"]

    def close(self) -> None:
        return None


def sequence(example: Example, number: int) -> PackSequence:
    return PackSequence(tokens=example.tokens, mask=example.mask, id=number)


def packed_rows(lengths: Sequence[int], capacity: int, seed: int) -> list[list[int]]:
    """Packs of example numbers, first-fit over a seeded order: in the file's own, neighbours of a sorted one would share packs."""
    order = np.random.default_rng([seed, 0, 1]).permutation(len(lengths))
    return [[int(order[i]) for i in row] for row in first_fit([lengths[i] for i in order], capacity)]


class HeldOutExamples:
    """The objective of the evaluation data; of the built-in one the mean negative log-likelihood in nats per trained token."""

    def __init__(self, session: Session, config: SftConfig) -> None:
        assert config.eval is not None
        loaded = load_examples(
            config.eval.datasets,
            session.loaded.tokenizer,
            sequence_len=config.sequence_len,
            vocab=session.loaded.spec.vocab,
            overlong=config.overlong,
            seed=config.seed,
            assistant_only_loss=config.assistant_only_loss,
            completion_only_loss=config.completion_only_loss,
        )
        self._session = session
        self._objective = make_objective(config.loss, command="sft")
        self._batches = pack([[sequence(example, i)] for i, example in enumerate(loaded.items)], micro_batch_tokens(config))

    def __call__(self) -> dict[str, float]:
        return held_out_loss(self._session, self._objective, self._batches)
