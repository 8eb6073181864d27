"""Engine, rewards and rollout managers of a run, for training and evaluation alike."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

from surogate_rl.config.schema import EnvironmentConfig, GrpoConfig, RolloutsConfig, SamplingConfig
from surogate_rl.data import encode_prompt
from surogate_rl.rollouts.engines.native import NativeEngine
from surogate_rl.rollouts.engines.timed import TimedEngine
from surogate_rl.rollouts.environments import Environments, make_environments
from surogate_rl.rollouts.environments.calls import EnvironmentCalls
from surogate_rl.rollouts.episode import EpisodeRunner
from surogate_rl.rollouts.manager import Group, RolloutManager, Scorer
from surogate_rl.rollouts.plan import Budget
from surogate_rl.rollouts.stream import Batch, RolloutStream, StreamSettings
from surogate_rl.rollouts.types import Engine, EpisodeLimits, SamplingParams, Task
from surogate_rl.trainers.event_loop import EventLoop
from surogate_rl.trainers.memory import device_memory, smaller
from surogate_rl.trainers.session import Session

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


class Rollouts:
    """Samples with the session's weights. One engine serves every manager and the stream of training groups that are made here.

    Args:
        environments: that training and evaluation play in; None: single_turn. Closed with it.
    """

    def __init__(self, session: Session, environments: Environments | None = None) -> None:
        self._session = session
        with ExitStack() as undo:
            self.environments = environments or open_environments(EnvironmentConfig(max_turns=1), session.loaded.tokenizer)
            if environments is None:
                undo.callback(self.environments.close)
            self._calls = EnvironmentCalls(self.environments.timeout, name=self.environments.name)
            undo.callback(self._calls.close)
            self.loop = EventLoop()
            undo.callback(self.loop.close)
            self.engine = TimedEngine(make_engine(session, self.loop))
            undo.pop_all()
        self._stream: RolloutStream | None = None
        self._held = False

    def manager(self, rewards: Scorer, max_completion_length: int, seed: int) -> RolloutManager:
        loaded, config = self._session.loaded, self._session.config
        context = min(config.sequence_len, loaded.spec.max_positions)
        runner = EpisodeRunner(
            engine=self.engine,
            make_environment=self.environments.make,
            tokenizer=loaded.tokenizer,
            encode=lambda task: encode_prompt(task, loaded.tokenizer),
            limits=EpisodeLimits(max_completion_length, context, max_turns=self.environments.max_turns),
            calls=self._calls,
            inline=self.environments.inline,
            vocab=loaded.spec.vocab,
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
            stop=tuple(config.stop or ()),
        )

    def stream(
        self, manager: RolloutManager, task_of: Callable[[int], Task], config: RolloutsConfig, total_steps: int, budget: Budget | None
    ) -> None:
        """Opens the stream that `batch` takes from: the training groups of the whole run."""
        self._stream = RolloutStream(manager, task_of, stream_settings(config, total_steps), self.sampling(config), budget)
        if config.max_staleness > 0 and self.engine.shares_weights:
            self._session.updater.before_step = self._hold

    def collect(self, manager: RolloutManager, tasks: Sequence[Task], samples: int, sampling: SamplingParams, visit: int) -> list[Group]:
        return self.loop.run(manager.collect(tasks, samples, sampling, visit))

    def batch(self, step: int) -> Batch:
        """The groups that step `step` trains."""
        assert self._stream is not None
        return self.loop.run(self._stream.collect(step))

    def weights_changed(self, version: int) -> None:
        """The learner holds `version`: hands it to the engine. Requests under way wait meanwhile and go on with the new weights."""
        self.loop.run(self._change_weights(version))

    def engine_metrics(self) -> dict[str, float]:
        """What the engine measured about itself since the last call (of updates, restarts...), and calls of environments that hang."""
        values = self.engine.take_metrics()
        return values if self.environments.inline else values | {"episodes/hung_calls": float(self._calls.hung)}

    def state(self) -> dict[str, Any]:
        """Of the stream, as JSON."""
        assert self._stream is not None
        return self._stream.state()

    def restore(self, state: Mapping[str, Any]) -> None:
        assert self._stream is not None
        self._stream.restore(state)
        # the engine must not sample from what it cached before the weights were loaded
        self.weights_changed(state["version"])

    def close(self) -> None:
        try:
            self.loop.run(self._close())
        finally:
            self.loop.close()
            self._calls.close()
            self.environments.close()

    def _hold(self) -> None:
        """An update writes to the weights that the engine reads: nothing is decoded until `weights_changed`."""
        if not self._held:
            self._held = True
            self.loop.run(self.engine.pause())

    async def _change_weights(self, version: int) -> None:
        # an engine with weights of its own holds its requests by itself, and only while it takes the new ones
        alive = self.engine.shares_weights and self._stream is not None and self._stream.under_way > 0
        if alive and not self._held:
            await self.engine.pause()
        try:
            await self.engine.update_weights(self._session.learner, version)
            if alive or self._held:
                await self.engine.resume()
        finally:  # also for a checkpoint of a run whose engine cannot take them: the learner has them
            self._held = False
            if self._stream is not None:
                self._stream.weights_changed(version)

    async def _close(self) -> None:
        try:
            if self._stream is not None:
                await self._stream.close()
        finally:
            await self.engine.close()


def open_environments(config: EnvironmentConfig, tokenizer: PreTrainedTokenizerBase) -> Environments:
    """What ``environment`` names. Raises EnvironmentConfigError where it cannot be used."""
    made = make_environments(config.name, config.args, tokenizer)
    made.name, made.timeout, made.max_turns = config.name, config.timeout, config.max_turns
    return made


def make_engine(session: Session, loop: EventLoop) -> Engine:
    """The engine that the configuration names, as large as was planned. vLLM gets ready in the background of `loop`."""
    config, loaded, memory = session.config, session.loaded, session.memory
    if isinstance(config, GrpoConfig) and config.rollouts.engine == "vllm":
        from surogate_rl.rollouts.engines.vllm.factory import Launched, make_vllm_engine

        launched = session.launched or Launched(config)
        engine = make_vllm_engine(
            config,
            loaded,
            session.learner,
            launched,
            sequences=memory.demands.sequences,
            free=smaller(device_memory(config), memory.engine_room),
            cache_bytes=memory.engine.cache_bytes if config.device == "cpu" else 0,
            output_dir=session.output_dir,
        )
        loop.run(engine.begin())
        return engine
    return NativeEngine(
        session.learner,
        tokenizer=loaded.tokenizer,
        max_sequences=memory.demands.sequences,
        cache_tokens=memory.engine.cache_tokens,
        valid_vocab=loaded.valid_vocab,
    )


def stream_settings(config: RolloutsConfig, total_steps: int) -> StreamSettings:
    dynamic = config.dynamic_sampling
    return StreamSettings(
        groups=config.prompts_per_step,
        completions=config.num_generations,
        total_steps=total_steps,
        max_staleness=config.max_staleness,
        oversample=config.oversample,
        max_rounds=dynamic.max_rounds if dynamic.enabled else None,
        carry_over=config.stragglers == "carry_over",
    )
