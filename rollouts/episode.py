"""Runs one episode: engine and environment in turn, token ids kept as they were sampled."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from surogate_rl.rollouts.seeds import derive_seed
from surogate_rl.rollouts.types import Engine, Environment, Episode, GenerateRequest, SamplingParams, Segment, Task

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


@dataclass(frozen=True)
class Limits:
    """Attributes:
    max_completion_length: sampled tokens of a turn, at the most.
    sequence_len: tokens of prompt and completion together, at the most.
    """

    max_completion_length: int
    sequence_len: int


@dataclass(frozen=True)
class EpisodeRunner:
    """What all episodes of a run share."""

    engine: Engine
    make_environment: Callable[[], Environment]
    tokenizer: PreTrainedTokenizerBase
    encode: Callable[[Task], list[int]]
    limits: Limits

    async def run(self, task: Task, prompt: list[int], sample: int, seed: int, sampling: SamplingParams) -> Episode:
        """Plays `task`, whose encoded prompt is `prompt`, to its end.

        An environment that raises loses its episode (`error` set, unscored), not the run.

        Raises:
            ValueError: the prompt leaves no room for a completion (such tasks are filtered out before a run starts).
            RuntimeError: the environment wants another turn after its first; or whatever the engine raises.
        """
        episode = Episode(task=task, sample=sample, seed=seed, messages=list(task.messages or []))
        environment = self.make_environment()
        try:
            await environment.reset(task, seed)
            await self._turn(episode, prompt, sampling)
            try:
                observation = await environment.step(episode, episode.completion)
            except Exception as error:
                episode.error = f"environment: {type(error).__name__}: {error}"
                return episode
            if not observation.done:
                raise RuntimeError(f"{type(environment).__name__} asked for a second turn; only single-turn environments can be run")
            episode.environment_reward = observation.reward
        finally:
            await environment.close()
        return episode

    async def _turn(self, episode: Episode, prompt: list[int], sampling: SamplingParams) -> None:
        room = min(self.limits.max_completion_length, self.limits.sequence_len - len(prompt))
        if room < 1:
            raise ValueError(
                f"task {episode.task.index}: its prompt of {len(prompt)} tokens leaves no room for a completion within sequence_len "
                f"{self.limits.sequence_len}"
            )
        params = replace(sampling, max_tokens=room, seed=derive_seed(episode.seed, 0))
        completion = await self.engine.generate(GenerateRequest(prompt, params))
        sampled = len(completion.tokens)
        episode.segments.append(
            Segment(
                tokens=[*prompt, *completion.tokens],
                sampled=[False] * len(prompt) + [True] * sampled,
                logps=[0.0] * len(prompt) + completion.logps,
                versions=[-1] * len(prompt) + completion.versions,
            )
        )
        # text is for people, rewards and environments; what is trained are the ids above
        episode.completion = str(self.tokenizer.decode(completion.tokens, skip_special_tokens=True))
        episode.finish_reason = completion.finish_reason
        episode.truncated = completion.finish_reason == "length"
        if episode.task.messages is not None:
            episode.messages.append({"role": "assistant", "content": episode.completion})
