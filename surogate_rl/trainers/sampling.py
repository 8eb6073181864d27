"""Engine, rewards and rollout managers of a run, for training and evaluation alike."""

from __future__ import annotations

from collections.abc import Sequence

from surogate_rl.config.schema import SamplingConfig
from surogate_rl.data import encode_prompt
from surogate_rl.rewards import RewardRunner
from surogate_rl.rollouts.engines.native import NativeEngine
from surogate_rl.rollouts.environments import environment_factory
from surogate_rl.rollouts.episode import EpisodeRunner
from surogate_rl.rollouts.manager import Group, RolloutManager
from surogate_rl.rollouts.types import EpisodeLimits, SamplingParams, Task
from surogate_rl.trainers.event_loop import EventLoop
from surogate_rl.trainers.kv_cache import cache_tokens
from surogate_rl.trainers.session import Session


class Rollouts:
    """Samples with the session's learner. One engine serves every manager made here.

    Args:
        sequences: decoded together, at the most.
        kv_cache_gb: bound of the cache; None: a part of what is free.
    """

    def __init__(self, session: Session, sequences: int, kv_cache_gb: float | None = None) -> None:
        config, loaded = session.config, session.loaded
        self._session = session
        self.loop = EventLoop()
        self.engine = NativeEngine(
            session.learner,
            tokenizer=loaded.tokenizer,
            max_sequences=sequences,
            cache_tokens=cache_tokens(loaded.spec, sequences, min(config.sequence_len, loaded.spec.max_positions), kv_cache_gb),
            valid_vocab=loaded.valid_vocab,
        )

    def manager(self, rewards: RewardRunner, environment: str, max_completion_length: int, seed: int) -> RolloutManager:
        loaded, config = self._session.loaded, self._session.config
        runner = EpisodeRunner(
            engine=self.engine,
            make_environment=environment_factory(environment),
            tokenizer=loaded.tokenizer,
            encode=lambda task: encode_prompt(task, loaded.tokenizer),
            limits=EpisodeLimits(max_completion_length, min(config.sequence_len, loaded.spec.max_positions)),
        )
        return RolloutManager(runner, rewards, seed)

    def sampling(self, config: SamplingConfig) -> SamplingParams:
        """`max_tokens` and `seed` are set for each episode."""
        return SamplingParams(
            max_tokens=1,
            temperature=config.temperature,
            top_p=config.top_p,
            top_k=config.top_k,
            min_p=config.min_p,
            stop_ids=self._session.loaded.stop_ids,
            stop=tuple(config.stop),
        )

    def collect(self, manager: RolloutManager, tasks: Sequence[Task], samples: int, sampling: SamplingParams, visit: int) -> list[Group]:
        return self.loop.run(manager.collect(tasks, samples, sampling, visit))

    def weights_changed(self, version: int) -> None:
        self.loop.run(self.engine.update_weights(self._session.learner, version))

    def close(self) -> None:
        try:
            self.loop.run(self.engine.close())
        finally:
            self.loop.close()
