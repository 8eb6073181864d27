"""Evaluation on held-out data: by rewards over completions, or by the loss."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from surogate_rl.config.schema import EvalConfig, GrpoConfig
from surogate_rl.data import load_tasks
from surogate_rl.errors import InputError
from surogate_rl.objectives.advantages import standard_deviation
from surogate_rl.rewards import RewardRunner, load_rewards
from surogate_rl.rollouts.environments import gives_rewards
from surogate_rl.rollouts.manager import Group, RolloutManager
from surogate_rl.rollouts.types import Episode, Task
from surogate_rl.trainers.rollout_metrics import episode_metrics
from surogate_rl.trainers.sampling import Rollouts
from surogate_rl.trainers.session import Session

DEFAULT_COMPLETION_LENGTH = 256


class Uncounted:
    """The training's rewards, whose report says nothing of what is scored here: training may go on meanwhile, with the same functions."""

    def __init__(self, runner: RewardRunner) -> None:
        self._runner = runner

    async def score(self, episodes: Sequence[Episode]) -> None:
        await self._runner.score(episodes, counted=False)


class RewardEvaluation:
    """Samples completions of held-out prompts, in the environment that `rollouts` trains in, and scores them with the rewards that
    ``eval.rewards`` names, else with those of the training, `rewards`.

    The same prompts get the same seeds at every evaluation, so that two of them differ by the weights alone.
    """

    def __init__(self, session: Session, config: EvalConfig, rollouts: Rollouts, rewards: RewardRunner | None = None) -> None:
        self._config = config
        self._rollouts = rollouts
        self._owned = load_rewards(config.rewards, workers=2, environment_weight=environment_weight(session)) if config.rewards else None
        runner = self._owned or rewards
        if runner is None:
            raise InputError("eval.rewards: there is nothing to score completions with; name at least one reward")
        try:
            self._prepare(session, config, runner)
        except BaseException:
            self.close()
            raise

    def _prepare(self, session: Session, config: EvalConfig, runner: RewardRunner) -> None:
        rollouts = self._rollouts
        loaded = load_tasks(
            config.datasets,
            session.loaded.tokenizer,
            max_prompt_length=min(session.config.sequence_len, session.loaded.spec.max_positions) - 1,
            vocab=session.loaded.spec.vocab,
            seed=session.config.seed,
            prepare=rollouts.environments.prepare,
        )
        self.tasks: list[Task] = list(loaded.items)
        runner.check_columns(task.columns for task in self.tasks)
        rollouts.environments.check_columns(self.tasks)
        self._manager: RolloutManager = rollouts.manager(Uncounted(runner), completion_length(session, config), session.config.seed)

    def __call__(self, step: int) -> dict[str, float]:
        """Metrics named as TRL names them, ``eval_`` before each; ``mean@k`` and ``pass@k`` over k completions of a prompt."""
        config = self._config
        groups = self._rollouts.collect(self._manager, self.tasks, config.samples, self._rollouts.sampling(config), visit=0)
        self.groups: list[Group] = groups
        values = summarise(groups, config.samples, config.pass_threshold)
        if self._rollouts.environments.several_turns:
            values |= episode_metrics(groups)
        return {f"eval_{name}": value for name, value in values.items()}

    def close(self) -> None:
        if self._owned is not None:
            self._owned.close()


def environment_weight(session: Session) -> float | None:
    config = session.config
    return config.environment.weight if isinstance(config, GrpoConfig) and gives_rewards(config.environment.name) else None


def completion_length(session: Session, config: EvalConfig) -> int:
    if config.max_completion_length is not None:
        return config.max_completion_length
    training = session.config
    return training.rollouts.max_completion_length if isinstance(training, GrpoConfig) else DEFAULT_COMPLETION_LENGTH


def summarise(groups: Sequence[Group], samples: int, pass_threshold: float) -> dict[str, float]:
    """Means over prompts. A completion that could not be scored counts in no mean and as not passed, and is reported."""
    episodes = [episode for group in groups for episode in group.episodes]
    scored = [[e.reward for e in group.episodes if e.reward is not None] for group in groups]
    means = [float(np.mean(rewards)) for rewards in scored if rewards]
    passed = [any(reward >= pass_threshold for reward in rewards) for rewards in scored]
    rewards = [reward for group in scored for reward in group]
    lengths = [sum(segment.sampled.count(True) for segment in episode.segments) for episode in episodes]
    result = {
        "num_prompts": float(len(groups)),
        "completions/mean_length": float(np.mean(lengths)) if lengths else 0.0,
        "completions/clipped_ratio": float(np.mean([episode.truncated for episode in episodes])) if episodes else 0.0,
        "unscored": float(len(episodes) - len(rewards)),
        f"pass@{samples}": float(np.mean(passed)) if passed else 0.0,
    }
    if means:
        result["reward"] = float(np.mean(rewards))
        result["reward_std"] = standard_deviation(np.array(rewards))
        result[f"mean@{samples}"] = float(np.mean(means))
    names = sorted({name for episode in episodes for name in episode.rewards})
    for name in names:
        values = [value for episode in episodes if (value := episode.rewards.get(name)) is not None]
        if values:
            result[f"rewards/{name}/mean"] = float(np.mean(values))
    return result
