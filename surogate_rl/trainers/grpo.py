"""Group-relative policy optimisation and its kin: sample, score, weigh, learn."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from surogate_rl.batch import PackedBatch, Totals
from surogate_rl.config.schema import GrpoConfig
from surogate_rl.data import load_tasks
from surogate_rl.data.packing import PackSequence, pack
from surogate_rl.objectives import make_objective
from surogate_rl.objectives.advantages import group_advantages
from surogate_rl.rewards import RewardRunner
from surogate_rl.rollouts.manager import Group
from surogate_rl.rollouts.types import Episode
from surogate_rl.trainers.batches import StepOrder
from surogate_rl.trainers.evaluation import RewardEvaluation
from surogate_rl.trainers.loop import Clock, seeded
from surogate_rl.trainers.reference import Reference
from surogate_rl.trainers.rollout_log import RolloutLog
from surogate_rl.trainers.rollout_metrics import rollout_metrics
from surogate_rl.trainers.sampling import Rollouts
from surogate_rl.trainers.schedule import Schedule
from surogate_rl.trainers.session import Session
from surogate_rl.trainers.sft import require_same_rows
from surogate_rl.trainers.update import LogpSettings, Metrics


def micro_batch_tokens(config: GrpoConfig) -> int:
    return config.per_device_train_batch_size * config.sequence_len


class Grpo:
    def __init__(self, session: Session, config: GrpoConfig, rewards: RewardRunner) -> None:
        self._session, self._config, self._rewards = session, config, rewards
        rollouts = config.rollouts
        context = min(config.sequence_len, session.loaded.spec.max_positions)
        prompt_room = rollouts.max_prompt_length or context - rollouts.max_completion_length
        loaded = load_tasks(config.datasets, session.loaded.tokenizer, max_prompt_length=prompt_room, seed=config.seed)
        session.progress.note(str(loaded.report))
        self.tasks = loaded.items
        rewards.check_columns(self.tasks)
        self._order = StepOrder(len(self.tasks), rollouts.prompts_per_step, config.seed, wrap=True)
        self._updates_per_step = config.loss.num_iterations * config.loss.num_minibatches
        self._schedule = Schedule.from_config(config, self.total_steps * self._updates_per_step)
        self._objective = make_objective(config.loss, command="grpo")
        self._logp = session.updater.logp
        self._reference = Reference(session, config) if config.loss.beta > 0 else None
        self._rollouts = Rollouts(session, rollouts.max_sequences, rollouts.max_completion_length)
        self._manager = self._rollouts.manager(rewards, config.environment, rollouts.max_completion_length, config.seed)
        self._sampling = self._rollouts.sampling(rollouts)
        self._evaluation = RewardEvaluation(session, config.eval, self._rollouts, rewards) if config.eval is not None else None
        self._log = RolloutLog(session.output_dir / "rollouts", session.loaded.tokenizer)
        self._num_tokens = 0

    @property
    def total_steps(self) -> int:
        return self._order.total_steps(self._config)

    def start(self) -> None:
        return None

    def step(self, step: int, metrics: Metrics) -> dict[str, float]:
        config, clock = self._config, Clock()
        tasks = [self.tasks[i] for i in self._order(step)]
        groups = self._rollouts.collect(self._manager, tasks, config.rollouts.num_generations, self._sampling, visit=step)
        generate_seconds = clock.lap()
        values = assign_advantages(groups, config)
        values |= rollout_metrics(groups)
        values |= self._rewards.report().metrics()
        self._log.write(step, groups)
        sequences = trained_sequences(groups, config)
        lr = self._schedule(self._session.learner.update_count)
        values |= self._learn(step, sequences, metrics)
        learn_seconds = clock.lap()
        self._rollouts.weights_changed(step)
        tokens = sum(len(segment.tokens) for group in groups for episode in group.episodes for segment in episode.segments)
        self._num_tokens += tokens
        seconds = generate_seconds + learn_seconds + clock.lap()
        return values | {
            "learning_rate": lr,
            "epoch": self._order.epoch(step),
            "num_tokens": float(self._num_tokens),
            "skipped_steps": float(self._session.updater.skipped),
            "step_time": seconds,
            "time/generate": generate_seconds,
            "time/learn": learn_seconds,
            "tokens_per_second": tokens / seconds,
        }

    def _learn(self, step: int, sequences: Sequence[PackSequence], metrics: Metrics) -> dict[str, float]:
        """All passes over one step's rollouts."""
        if not sequences:
            self._session.progress.note(f"step {step}: no completion could be scored; nothing was learned")
            return {"loss": 0.0, "grad_norm": 0.0}
        session, config = self._session, self._config
        if self._updates_per_step > 1:
            self._score(sequences, "proximal_logp", adapter="live")
        if self._reference is not None:
            self._reference.score_into(sequences, self._score_batches)
        results = []
        for iteration in range(config.loss.num_iterations):
            for minibatch in self._minibatches(step, iteration, sequences):
                batches = pack([[s] for s in minibatch], micro_batch_tokens(config))
                totals = Totals(tokens=sum(b.num_trained for b in batches), sequences=len(minibatch))
                lr = self._schedule(session.learner.update_count)
                results.append(session.updater.update(batches, self._objective, totals, lr, metrics))
        if self._reference is not None:
            self._reference.after_step(step)
        finite = [r for r in results if r.applied]
        return {
            "loss": float(np.mean([r.loss for r in results])),
            "grad_norm": float(np.mean([r.grad_norm for r in finite])) if finite else float("nan"),
        }

    def _minibatches(self, step: int, iteration: int, sequences: Sequence[PackSequence]) -> list[list[PackSequence]]:
        """Mixed anew for every pass; within a minibatch sequences keep their order, by prompt and sample."""
        parts = self._config.loss.num_minibatches
        if parts == 1:
            return [list(sequences)]
        order = seeded(self._config.seed, step, iteration).permutation(len(sequences))
        return [[sequences[i] for i in sorted(part)] for part in np.array_split(order, parts) if len(part)]

    def _score(self, sequences: Sequence[PackSequence], name: str, adapter: str) -> None:
        self._score_batches(self._session.learner, sequences, name, adapter)

    def _score_batches(self, learner: Any, sequences: Sequence[PackSequence], name: str, adapter: str) -> None:
        """Adds the learner's log-probabilities to each sequence as `per_token[name]`, aligned with its tokens."""
        by_id = {s.id: s for s in sequences}
        for batch in pack([[s] for s in sequences], micro_batch_tokens(self._config)):
            stats = learner.score(batch, temperature=self._logp.temperature, valid_vocab=self._logp.valid_vocab, adapter=adapter)
            spread(batch, stats.logp, name, by_id)

    def evaluate(self, step: int) -> dict[str, float]:
        if self._evaluation is None:
            return {}
        values = self._evaluation(step)
        self._rewards.report()  # what evaluation counted is not the next step's
        return values

    def state(self) -> tuple[dict[str, NDArray[Any]], dict[str, Any]]:
        arrays = self._reference.arrays() if self._reference is not None else {}
        return arrays, {"num_tokens": self._num_tokens, "rows": len(self.tasks)}

    def restore(self, arrays: Mapping[str, NDArray[Any]], state: Mapping[str, Any]) -> None:
        require_same_rows(state["rows"], len(self.tasks))
        self._num_tokens = state["num_tokens"]
        if self._reference is not None:
            self._reference.restore(arrays)
        # the engine must not sample from what it cached before the weights were loaded
        self._rollouts.weights_changed(0)

    def close(self) -> None:
        if self._evaluation is not None:
            self._evaluation.close()
        self._rollouts.close()
        self._rewards.close()


def assign_advantages(groups: Sequence[Group], config: GrpoConfig) -> dict[str, float]:
    """Sets `advantage` of every scored episode. Returns reward metrics, named as in TRL."""
    result = group_advantages(
        [[episode.reward for episode in group.episodes] for group in groups],
        scale_rewards=config.loss.scale_rewards,
        loss_type=config.loss.loss_type,
    )
    for group, advantages in zip(groups, result.advantages, strict=True):
        for episode, advantage in zip(group.episodes, advantages, strict=True):
            episode.advantage = advantage
    return dict(result.metrics)


def trained_sequences(groups: Sequence[Group], config: GrpoConfig) -> list[PackSequence]:
    """Scored completions in the order of (prompt, sample). An unscored one has left its group: it trains nothing and counts nowhere."""
    episodes = [episode for group in groups for episode in group.episodes if episode.reward is not None]
    return [sequence(episode, number, config) for number, episode in enumerate(episodes)]


def sequence(episode: Episode, number: int, config: GrpoConfig) -> PackSequence:
    (segment,) = episode.segments
    masked = config.loss.mask_truncated_completions and episode.truncated
    return PackSequence(
        tokens=segment.tokens,
        mask=[False] * len(segment.tokens) if masked else segment.sampled,
        per_token={"behaviour_logp": np.asarray(segment.logps, dtype=np.float32)},
        per_sequence={"advantage": episode.advantage, "truncated": float(episode.truncated)},
        id=number,
    )


def spread(batch: PackedBatch, logp: NDArray[np.float32], name: str, by_id: Mapping[int, PackSequence]) -> None:
    """Hands each segment's values back to its sequence, shifted from the position that predicts to the token itself."""
    assert batch.ids is not None
    for segment, number in enumerate(batch.ids):
        first, end = int(batch.cu_seqlens[segment]), int(batch.cu_seqlens[segment + 1])
        by_id[int(number)].per_token[name] = np.concatenate([np.zeros(1, np.float32), logp[first : end - 1]])


def logp_settings(config: GrpoConfig, valid_vocab: int) -> LogpSettings:
    """The sampler's definition of a log-probability, so that both sides of the ratio are the same number."""
    return LogpSettings(temperature=config.rollouts.temperature, valid_vocab=valid_vocab)
