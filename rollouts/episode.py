"""Runs one episode: engine and environment in turn, token ids kept as they were sampled."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from surogate_rl.rollouts.seeds import derive_seed
from surogate_rl.rollouts.types import Engine, Environment, Episode, EpisodeLimits, GenerateRequest, SamplingParams, Segment, Task

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


@dataclass(frozen=True)
class EpisodeRunner:
    """What all episodes of a run share."""

    engine: Engine
    make_environment: Callable[[], Environment]
    tokenizer: PreTrainedTokenizerBase
    encode: Callable[[Task], list[int]]
    limits: EpisodeLimits

    async def run(
        self, task: Task, prompt: list[int], sample: int, seed: int, sampling: SamplingParams, limits: EpisodeLimits | None = None
    ) -> Episode:
        """Plays `task`, whose encoded prompt is `prompt`, to its end or to `limits` (default: the run's).

        An environment that raises loses its episode (`error` set, unscored), not the run.

        Raises:
            ValueError: the prompt leaves no room for a completion (such tasks are filtered out before a run starts).
            RuntimeError: the environment wants another turn after its first; or whatever the engine raises.
        """
        episode = Episode(task=task, sample=sample, seed=seed, messages=list(task.messages or []))
        environment = self.make_environment()
        try:
            await environment.reset(task, seed)
            await self._turn(episode, prompt, sampling, limits or self.limits)
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

    async def _turn(self, episode: Episode, prompt: list[int], sampling: SamplingParams, limits: EpisodeLimits) -> None:
        room = min(limits.max_completion_length, limits.sequence_len - len(prompt))
        by_tokens = limits.max_tokens is not None and limits.max_tokens < room
        if limits.max_tokens is not None:
            room = min(room, limits.max_tokens)
        if room < 1:
            raise ValueError(
                f"task {episode.task.index}: its prompt of {len(prompt)} tokens leaves no room for a completion within sequence_len "
                f"{limits.sequence_len}"
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
                turns=[-1] * len(prompt) + [0] * sampled,
            )
        )
        # text is for people, rewards and environments; what is trained are the ids above
        episode.completion = str(self.tokenizer.decode(completion.tokens, skip_special_tokens=True))
        episode.finish_reason = completion.finish_reason
        episode.truncated = completion.finish_reason == "length"
        episode.turns = 1
        if episode.truncated:
            episode.cut = "tokens" if by_tokens else "length"
        if episode.task.messages is not None:
            episode.messages.append({"role": "assistant", "content": episode.completion})
