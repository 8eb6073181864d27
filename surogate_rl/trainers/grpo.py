"""Group-relative policy optimisation and its kin: sample, score, weigh, learn."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from typing import Any

import numpy as np
from numpy.typing import NDArray

from surogate_rl.batch import FloatArray, PackedBatch
from surogate_rl.checkpoint import Saved
from surogate_rl.config.schema import GrpoConfig
from surogate_rl.data import load_tasks
from surogate_rl.data.packing import PackSequence, pack
from surogate_rl.learner import AdapterUse, Learner
from surogate_rl.objectives import Objective, PolicyGradient, group_advantages, make_objective, mean_metrics, penalise, reference_kl
from surogate_rl.rewards import RewardRunner
from surogate_rl.rollouts.manager import Group
from surogate_rl.rollouts.plan import Budget, Credit
from surogate_rl.rollouts.types import Episode, Task
from surogate_rl.trainers.batches import StepOrder
from surogate_rl.trainers.budgeting import make_budget, restore_budget
from surogate_rl.trainers.evaluation import RewardEvaluation
from surogate_rl.trainers.loop import Clock, seeded
from surogate_rl.trainers.memory import Demands
from surogate_rl.trainers.reference import Reference
from surogate_rl.trainers.rollout_log import RolloutLog
from surogate_rl.trainers.rollout_metrics import episode_metrics, rollout_metrics
from surogate_rl.trainers.sampling import Rollouts, open_environments, stream_settings
from surogate_rl.trainers.schedule import Schedule
from surogate_rl.trainers.session import Session
from surogate_rl.trainers.turn_credit import credit_turns
from surogate_rl.trainers.unscored import EqualRewards, UnscoredSteps
from surogate_rl.trainers.update import LogpSettings


def micro_batch_tokens(config: GrpoConfig) -> int:
    return config.per_device_train_batch_size * config.sequence_len


def sequences_together(config: GrpoConfig) -> int:
    """Never more than may be under way at a time; evaluation shares the same places."""
    rollouts = config.rollouts
    assert rollouts.max_sequences is not None
    return min(rollouts.max_sequences, stream_settings(rollouts, 1).waiting * rollouts.num_generations)


def objective_of(config: GrpoConfig) -> Objective:
    return make_objective(
        config.loss,
        command="grpo",
        max_completion_length=config.rollouts.max_completion_length,
        engine_is_learner=engine_is_learner(config),
    )


def demands(config: GrpoConfig, objective: Objective) -> Demands:
    return Demands(micro_batch_tokens(config), sequences_together(config), objective.needs_reference)


class Grpo:
    """What is opened here is closed by `close`, or at once if the rest cannot be opened."""

    def __init__(self, session: Session, config: GrpoConfig, rewards: RewardRunner, objective: Objective) -> None:
        with ExitStack() as opened:
            self._open(opened, session, config, rewards, objective)
            self._opened = opened.pop_all()

    def _open(self, opened: ExitStack, session: Session, config: GrpoConfig, rewards: RewardRunner, objective: Objective) -> None:
        self._session, self._config, self._rewards = session, config, rewards
        rollouts = config.rollouts
        context = min(config.sequence_len, session.loaded.spec.max_positions)
        prompt_room = rollouts.max_prompt_length or context - rollouts.max_completion_length
        environments = open_environments(config.environment, session.loaded.tokenizer)
        closes_environments = opened.enter_context(ExitStack())  # until the rollouts do
        closes_environments.callback(environments.close)
        loaded = load_tasks(
            config.datasets,
            session.loaded.tokenizer,
            max_prompt_length=prompt_room,
            vocab=session.loaded.spec.vocab,
            seed=config.seed,
            prepare=environments.prepare,
        )
        session.progress.note(str(loaded.report))
        self.tasks = loaded.items
        rewards.check_columns(task.columns for task in self.tasks)
        environments.check_columns(self.tasks)
        self._order = StepOrder(len(self.tasks), rollouts.prompts_per_step, config.seed, wrap=True)
        self._updates_per_step = config.loss.num_iterations * config.loss.num_minibatches
        self._schedule = Schedule.from_config(config, self.total_steps * self._updates_per_step)
        self._objective = objective
        self._logp = session.updater.logp
        self._reference: Reference | None = None
        if objective.needs_reference:
            self._reference = Reference(session, config)
            opened.callback(self._reference.close)
        self._rollouts = Rollouts(session, environments)
        closes_environments.pop_all()
        opened.callback(self._rollouts.close)
        manager = self._rollouts.manager(rewards, rollouts.max_completion_length, config.seed)
        self._budget: Budget | None = make_budget(config, manager.runner.limits)
        self._rollouts.stream(manager, self._task, rollouts, self.total_steps, self._budget)
        self._evaluation: RewardEvaluation | None = None
        if config.eval is not None:
            self._evaluation = RewardEvaluation(session, config.eval, self._rollouts, rewards)
            opened.callback(self._evaluation.close)
        self._log = RolloutLog(session.output_dir / "rollouts", session.loaded.tokenizer)
        self._num_tokens = self.learned = 0
        self._unscored, self._equal = UnscoredSteps(config.max_skipped_steps), EqualRewards()

    @property
    def total_steps(self) -> int:
        return self._order.total_steps(self._config)

    def start(self) -> None:
        return None

    def _task(self, number: int) -> Task:
        return self.tasks[self._order.row(number)]

    def step(self, step: int) -> dict[str, float]:
        clock, busy = Clock(), self._rollouts.engine.busy_seconds
        self._rewards.set_state(global_step=step, max_steps=self.total_steps, epoch=self._order.epoch(step))
        batch = self._rollouts.batch(step)
        groups = batch.groups
        times = {"time/wait": clock.lap()}
        values = dict(batch.metrics)
        if groups:
            sequences = trained_sequences(groups)
            values |= self._prepare(groups, sequences)
            values |= rollout_metrics(groups)
            if self._rollouts.environments.several_turns:
                values |= episode_metrics(groups)
            self._log.write(step, groups)
        else:
            sequences = {}
        values |= self._rewards.report().metrics()
        if note := self._unscored(step, [episode for group in batch.used for episode in group.episodes]):
            self._session.progress.note(note)
        elif equal := self._equal(step, values.get("frac_reward_zero_std")):
            self._session.progress.note(equal)
        elif not groups:
            self._session.progress.note(f"step {step}: rewards were equal within all {len(batch.used)} groups sampled; nothing was learned")
        if self._budget is not None:
            self._budget.observe(batch.used)
        values |= self._learn(step, list(sequences.values()))
        if self._reference is not None:  # also of a step that trained nothing, which may be the one that synchronises
            self._reference.after_step(step)
        tokens = sum(len(segment.tokens) for group in groups for episode in group.episodes for segment in episode.segments)
        self._num_tokens += tokens
        self.learned = step
        times["time/learn"] = clock.lap()
        self._rollouts.weights_changed(step)
        times["time/sync"] = clock.lap()
        values |= self._rollouts.engine_metrics()
        seconds = sum(times.values())
        if self._budget is not None:
            values |= self._budget.metrics(seconds)
        # while requests wait for the learner the engine is idle too
        times["time/generate"] = min(self._rollouts.engine.busy_seconds - busy, seconds)
        times["time/engine_idle"] = seconds - times["time/generate"]
        return (
            values
            | times
            | {
                "epoch": batch.position / len(self.tasks),
                "num_tokens": float(self._num_tokens),
                "skipped_steps": float(self._session.updater.skipped),
                "step_time": seconds,
                "tokens_per_second": tokens / seconds,
            }
        )

    def _prepare(self, groups: Sequence[Group], sequences: Mapping[tuple[int, int], list[PackSequence]]) -> dict[str, float]:
        """Adds to the sequences all that the objective wants beside the present log-probabilities: the proximal and the reference's, and
        advantages. Returns the reward metrics."""
        trained = [sequence for unit in sequences.values() for sequence in unit]
        if self._updates_per_step > 1 or (self._config.rollouts.max_staleness > 0 and self._kl_in_reward):
            self._score(self._session.learner, trained, "proximal_logp", "live")
        if self._reference is not None:
            self._reference.score_into(trained, self._score)
        rewards: list[list[float | None]] = [[episode.reward for episode in group.episodes] for group in groups]
        if self._kl_in_reward:
            kl = self._kl_of(groups, sequences)
            rewards = penalise(rewards, kl, self._config.loss.beta)
        credit = self._credit(groups, rewards)
        for place, group in enumerate(groups):
            for sample, episode in enumerate(group.episodes):
                episode.advantage = float(credit.advantages[place][sample])
                if credit.weights is not None:
                    episode.weight = float(credit.weights[place][sample])
                for sequence in sequences.get((place, sample), []):
                    sequence.per_sequence["advantage"] = episode.advantage
                    if credit.weights is not None:
                        sequence.per_sequence["weight"] = episode.weight
        token_values(groups, sequences)
        return mean_metrics([credit.metrics])

    def _credit(self, groups: Sequence[Group], rewards: list[list[float | None]]) -> Credit:
        if self._budget is not None:
            return self._budget.credit(groups, rewards)
        loss = self._config.loss
        result = group_advantages(rewards, scale_rewards=loss.scale_rewards, loss_type=loss.loss_type)
        if self._config.environment.turn_credit == "reward_to_go":
            credit_turns(groups, self._config.environment, loss)
        return Credit(result.values, metrics=result.metrics)

    @property
    def _kl_in_reward(self) -> bool:
        return isinstance(self._objective, PolicyGradient) and self._objective.kl_in_reward

    def _kl_of(self, groups: Sequence[Group], sequences: Mapping[tuple[int, int], list[PackSequence]]) -> list[list[float]]:
        """KL to the reference of every completion, in nats; 0 for an unscored one."""
        by_id = {s.id: s for unit in sequences.values() for s in unit}
        for batch in pack([[s] for s in by_id.values()], micro_batch_tokens(self._config)):
            assert batch.ids is not None
            for number, kl in zip(batch.ids, reference_kl(batch), strict=True):
                by_id[int(number)].per_sequence["reward_kl"] = float(kl)
        return [
            [
                sum(sequence.per_sequence["reward_kl"] for sequence in sequences.get((place, sample), []))
                for sample in range(len(group.episodes))
            ]
            for place, group in enumerate(groups)
        ]

    def _learn(self, step: int, sequences: Sequence[list[PackSequence]]) -> dict[str, float]:
        """All passes over one step's rollouts, a list of sequences for each completion."""
        session, config = self._session, self._config
        lr = self._schedule(session.learner.update_count)
        if not sequences:
            return {"learning_rate": lr, "grad_norm": 0.0}
        norms = []
        for iteration in range(config.loss.num_iterations):
            for minibatch in self._minibatches(step, iteration, sequences):
                batches = pack([[s] for s in minibatch], micro_batch_tokens(config))
                lr = self._schedule(session.learner.update_count)
                result = session.updater.update(batches, self._objective, lr)
                if result.applied:
                    norms.append(result.grad_norm)
        return {"learning_rate": lr} | ({"grad_norm": float(np.mean(norms))} if norms else {})

    def _minibatches(self, step: int, iteration: int, sequences: Sequence[list[PackSequence]]) -> list[list[PackSequence]]:
        """Mixed anew for every pass; within a minibatch sequences keep their order, by prompt and sample. All of a completion's are in
        the same one."""
        parts = self._config.loss.num_minibatches
        if parts == 1:
            return [[sequence for unit in sequences for sequence in unit]]
        order = seeded(self._config.seed, step, iteration).permutation(len(sequences))
        return [[sequence for i in sorted(part) for sequence in sequences[i]] for part in np.array_split(order, parts) if len(part)]

    def _score(self, learner: Learner, sequences: Sequence[PackSequence], name: str, adapter: AdapterUse) -> None:
        """Adds a learner's log-probabilities to each sequence as `per_token[name]`, aligned with its tokens."""
        by_id = {s.id: s for s in sequences}
        for batch in pack([[s] for s in sequences], micro_batch_tokens(self._config)):
            stats = learner.score(batch, temperature=self._logp.temperature, valid_vocab=self._logp.valid_vocab, adapter=adapter)
            spread(batch, stats.logp, name, by_id)

    def evaluate(self, step: int) -> dict[str, float]:
        return self._evaluation(step) if self._evaluation is not None else {}

    def state(self) -> tuple[Mapping[str, Saved], dict[str, Any]]:
        arrays = self._reference.arrays() if self._reference is not None else {}
        state: dict[str, Any] = {"num_tokens": self._num_tokens, "order": self._order.state(), "rollouts": self._rollouts.state()}
        if self._budget is not None:
            state["budget"] = self._budget.state()
        return arrays, state

    def restore(self, arrays: Mapping[str, NDArray[Any]], state: Mapping[str, Any]) -> None:
        # the position in the data is the rollouts', but the number of steps may be counted in epochs
        self._order.require_same(state["order"], "rollouts.prompts_per_step" if self._config.max_steps <= 0 else None)
        restore_budget(self._budget, state.get("budget"))
        self._num_tokens = state["num_tokens"]
        if self._reference is not None:
            self._reference.restore(arrays)
        self._rollouts.restore(state["rollouts"])

    def close(self) -> None:
        self._opened.close()


def trained_sequences(groups: Sequence[Group]) -> dict[tuple[int, int], list[PackSequence]]:
    """The sequences of scored completions by (place of the prompt, sample), in that order. An unscored one has left its group: it trains
    nothing and counts nowhere.

    Where a completion has several segments, every sequence says which share of its completion's sampled tokens it holds, so that a
    completion counts once however many segments it has.
    """
    scored = {
        (place, sample): episode
        for place, group in enumerate(groups)
        for sample, episode in enumerate(group.episodes)
        if episode.reward is not None or episode.cut_by_budget  # a cut one is credited with what is expected of it
    }
    result: dict[tuple[int, int], list[PackSequence]] = {}
    number = 0
    for key, episode in scored.items():
        result[key] = sequences_of(episode, number)
        number += len(result[key])
    if number > len(result):
        for key, unit in result.items():
            sampled = max(scored[key].sampled_tokens, 1)
            for sequence, segment in zip(unit, scored[key].segments, strict=True):
                sequence.per_sequence["share"] = segment.sampled.count(True) / sampled if len(unit) > 1 else 1.0
    return result


def sequences_of(episode: Episode, first: int) -> list[PackSequence]:
    """One sequence for each segment, numbered from `first`."""
    return [
        PackSequence(
            tokens=segment.tokens,
            mask=segment.sampled,
            per_token={"behaviour_logp": np.asarray(segment.logps, dtype=np.float32)},
            per_sequence={"truncated": float(episode.truncated)},
            id=first + place,
        )
        for place, segment in enumerate(episode.segments)
    ]


def token_values(groups: Sequence[Group], sequences: Mapping[tuple[int, int], list[PackSequence]]) -> None:
    """Hands the advantages and the importance that segments have by token to their sequences; if there are any, all sequences get them."""
    parts = [
        (groups[place].episodes[sample], segment, sequence)
        for (place, sample), unit in sequences.items()
        for segment, sequence in zip(groups[place].episodes[sample].segments, unit, strict=True)
    ]
    if any(segment.advantages is not None for _, segment, _ in parts):
        for episode, segment, sequence in parts:
            own = [episode.advantage] * len(segment.tokens) if segment.advantages is None else segment.advantages
            sequence.per_token["advantage"] = np.asarray(own, dtype=np.float32)
    if any(segment.importance is not None for _, segment, _ in parts):
        for _, segment, sequence in parts:
            own = [1.0] * len(segment.tokens) if segment.importance is None else segment.importance
            sequence.per_token["importance"] = np.asarray(own, dtype=np.float32)


def spread(batch: PackedBatch, logp: FloatArray, name: str, by_id: Mapping[int, PackSequence]) -> None:
    """Hands each segment's values back to its sequence, shifted from the position that predicts to the token itself."""
    assert batch.ids is not None
    for segment, number in enumerate(batch.ids):
        first, end = int(batch.cu_seqlens[segment]), int(batch.cu_seqlens[segment + 1])
        by_id[int(number)].per_token[name] = np.concatenate([np.zeros(1, np.float32), logp[first : end - 1]])


def engine_is_learner(config: GrpoConfig) -> bool:
    """Whether completions come from the very weights and code that they are trained with."""
    return config.rollouts.engine in ("auto", "native") and config.rollouts.max_staleness == 0


def logp_settings(config: GrpoConfig, valid_vocab: int) -> LogpSettings:
    """The sampler's definition of a log-probability, so that both sides of the ratio are the same number."""
    return LogpSettings(temperature=config.rollouts.temperature, valid_vocab=valid_vocab)
