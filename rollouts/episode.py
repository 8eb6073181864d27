"""Runs one episode: engine and environment in turn, token ids kept as they were sampled."""

from __future__ import annotations

import logging
import math
import numbers
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

from surogate_rl.errors import RunError
from surogate_rl.plain import TooDeep, plain, plain_text
from surogate_rl.rollouts.conversation import Conversation, Dialect, Said, TemplateRefuses
from surogate_rl.rollouts.environments.calls import EnvironmentCalls, EnvironmentFailure
from surogate_rl.rollouts.seeds import derive_seed
from surogate_rl.rollouts.types import (
    Completion,
    DepthCap,
    Engine,
    Environment,
    Episode,
    EpisodeLimits,
    GenerateRequest,
    Observation,
    SamplingParams,
    Task,
)

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

logger = logging.getLogger("surogate_rl.rollouts")

DEFAULT_TIMEOUT = 60.0


@dataclass
class EpisodeRunner:
    """What all episodes of a run share.

    Attributes:
        make_environment: a fresh environment for each episode.
        encode: the ids of a task's prompt.
        limits: of an episode for which nothing else is said.
        calls: runs the environments, each call with its deadline.
        inline: environments are the project's own and never block: they are called as they are.
        vocab: rows of the model's embedding; None: not known.
    """

    engine: Engine
    make_environment: Callable[[], Environment]
    tokenizer: PreTrainedTokenizerBase
    encode: Callable[[Task], list[int]]
    limits: EpisodeLimits
    calls: EnvironmentCalls = field(default_factory=lambda: EnvironmentCalls(DEFAULT_TIMEOUT))
    inline: bool = False
    vocab: int | None = None

    @cached_property
    def dialect(self) -> Dialect:
        return Dialect(self.tokenizer)

    async def run(
        self, task: Task, prompt: list[int], sample: int, seed: int, sampling: SamplingParams, limits: EpisodeLimits | None = None
    ) -> Episode:
        """Plays `task`, whose encoded prompt is `prompt`, to its end or to `limits` (default: the run's).

        An environment that raises, hangs or gives nonsense loses its episode (`error` set, unscored), not the run. Turn t is sampled with
        the seed derived from `seed` and t, so that a sample does not depend on what else is under way.

        Raises:
            ValueError: the prompt leaves no room for a completion (such tasks are filtered out before a run starts).
            Exception: whatever the engine raises.
        """
        episode = Episode(task=task, sample=sample, seed=seed)
        conversation = Conversation(lambda: self.dialect, task.messages, task.prompt or "", prompt, task.tools)
        episode.messages, episode.segments = conversation.messages, conversation.segments
        environment: Environment | None = None
        try:
            environment = await self._call("make", self.make_environment)
            await self._play(environment, episode, conversation, sampling, limits or self.limits)
        except (EnvironmentFailure, TemplateRefuses) as error:
            episode.error = plain_text(str(error) if isinstance(error, EnvironmentFailure) else f"environment: {error}")
        finally:
            if environment is not None:
                await self._close(environment, episode)
        return episode

    async def _play(
        self, environment: Environment, episode: Episode, conversation: Conversation, sampling: SamplingParams, limits: EpisodeLimits
    ) -> None:
        first = _checked("reset", await self._call("reset", environment.reset, episode.task, episode.seed))
        conversation.begin(first.messages)
        if first.done:
            raise EnvironmentFailure("environment: reset: the episode was over before it began")
        rewards: list[float | None] = []
        while True:
            midst = await self._turn(episode, conversation, sampling, limits)
            observation = _checked("step", await self._call("step", environment.step, episode, episode.completion))
            rewards.append(observation.reward)
            episode.turn_rewards.append(observation.reward or 0.0)
            left = None if limits.max_tokens is None else limits.max_tokens - episode.sampled_tokens
            if midst:  # whatever the environment makes of half a turn
                episode.cut = "tokens"
            elif observation.done and observation.truncated:
                if episode.finish_reason != "length":
                    episode.cut = "turns"
                else:
                    episode.cut = "tokens" if left == 0 else "length"
            elif observation.done:
                pass
            elif limits.max_turns is not None and episode.turns >= limits.max_turns:
                episode.cut = "turns"
            elif left is not None and left < 1:
                episode.cut = "tokens"
            else:
                conversation.answer(observation.turn, observation.messages)
                if len(conversation.context) >= limits.sequence_len:
                    episode.cut = "length"
                elif limits.cap is not None and _stops_at(limits.cap, episode):
                    episode.cut = limits.cap.unit
                else:
                    continue
                break
            conversation.close(observation.turn, observation.messages)
            break
        episode.truncated = episode.cut is not None
        finish = getattr(environment, "finish", None)
        if finish is not None:
            episode.final_reward = _reward("finish", await self._call("finish", finish, episode))
        given = [reward for reward in (*rewards, episode.final_reward) if reward is not None]
        episode.environment_reward = math.fsum(given) if given else None

    async def _turn(self, episode: Episode, conversation: Conversation, sampling: SamplingParams, limits: EpisodeLimits) -> bool:
        """Returns whether a cap on tokens stopped it in its midst."""
        context = conversation.context
        room = min(limits.max_completion_length, limits.sequence_len - len(context))
        if limits.max_tokens is not None:
            room = min(room, limits.max_tokens - episode.sampled_tokens)
        if room < 1:
            problem = f"leaves no room for a completion within sequence_len {limits.sequence_len}"
            if len(conversation.messages) > len(episode.task.messages or [""]):
                raise EnvironmentFailure(f"environment: reset: a prompt of {len(context)} tokens {problem}")
            raise ValueError(f"task {episode.task.index}: its prompt of {len(context)} tokens {problem}")
        if self.vocab is not None and max(context) >= self.vocab:  # tasks are checked before a run, so it is the environment's
            token = self.tokenizer.convert_ids_to_tokens(max(context))
            raise EnvironmentFailure(f"environment: its text has the token {token!r}, which the tokenizer knows and the model does not")
        own, cap = room, limits.cap if limits.cap is not None and limits.cap.unit == "tokens" else None
        if cap is not None and not cap.goes_on:
            room = min(room, cap.depth - episode.sampled_tokens)
        params = replace(sampling, max_tokens=room, seed=derive_seed(episode.seed, episode.turns))
        completion = await self.engine.generate(GenerateRequest(context, params))
        said = self._said(completion, params)
        conversation.say(completion, said, episode.turns)
        episode.turns += 1
        episode.completion, episode.raw_completion = said.text, said.raw
        episode.finish_reason = completion.finish_reason
        episode.truncated = completion.finish_reason == "length"
        if cap is None:
            return False
        # with and without going on the same: the turn was not over after the cap's last token
        if cap.goes_on:
            episode.reached_cap = episode.reached_cap or episode.sampled_tokens > cap.depth
            return False
        episode.reached_cap = room < own and completion.finish_reason == "length"
        return episode.reached_cap

    def _said(self, completion: Completion, params: SamplingParams) -> Said:
        """Text is for people, rewards, environments and templates; what is trained are the ids."""
        ids = completion.tokens
        ended = bool(ids) and ids[-1] in params.stop_ids
        raw = str(self.tokenizer.decode(ids[:-1] if ended else ids, skip_special_tokens=False))
        end = str(self.tokenizer.decode(ids[-1:], skip_special_tokens=False)) if ended else None
        return Said(str(self.tokenizer.decode(ids, skip_special_tokens=True)), raw, end)

    async def _call(self, what: str, function: Callable[..., Any], *args: Any) -> Any:
        if not self.inline:
            return await self.calls(what, function, *args)
        try:
            result = function(*args)
            return await result if hasattr(result, "__await__") else result
        except (EnvironmentFailure, RunError):
            raise
        except Exception as error:
            raise EnvironmentFailure(f"environment: {what}: {type(error).__name__}: {error}") from error

    async def _close(self, environment: Environment, episode: Episode) -> None:
        """A failure here comes after the episode, and takes nothing from it."""
        try:
            await self._call("close", environment.close)
        except (EnvironmentFailure, RunError) as error:  # what cannot go on will say so at the next call
            logger.warning("task %d, sample %d: %s", episode.task.index, episode.sample, error)


def _stops_at(cap: DepthCap, episode: Episode) -> bool:
    """For an episode that would go on, the task's limits and the context allowing: whether the cap ends it. Asked only then, so that an
    episode that ends by other means just where its cap is has not reached it, whether it was drawn to go on or not."""
    episode.reached_cap = episode.reached_cap or episode.depth(cap.unit) >= cap.depth
    return episode.reached_cap and not cap.goes_on


def _checked(what: str, value: Any) -> Observation:
    if not isinstance(value, Observation):
        raise EnvironmentFailure(f"environment: {what}: returned a {type(value).__name__}, expected an Observation")
    messages = [*value.messages] if isinstance(value.messages, list | tuple) else [None]
    for message in [*messages, *([value.turn] if value.turn is not None else [])]:
        if not isinstance(message, dict) or not isinstance(message.get("role"), str) or not isinstance(message.get("content"), str):
            raise EnvironmentFailure(f"environment: {what}: a message is {message!r:.80}, expected a dict with role and content as text")
    try:
        messages, turn = plain(messages), plain(value.turn)
    except TooDeep as error:
        raise EnvironmentFailure(f"environment: {what}: a message: {error}") from None
    return replace(value, messages=messages, turn=turn, reward=_reward(what, value.reward))


def _reward(what: str, value: Any) -> float | None:
    if value is None:
        return None
    if not isinstance(value, numbers.Real) and getattr(value, "shape", None) == () and hasattr(value, "item"):
        value = value.item()  # a scalar of numpy or torch
    if not isinstance(value, numbers.Real) or not math.isfinite(float(value)):
        raise EnvironmentFailure(f"environment: {what}: a reward is {value!r:.80}, expected a finite number or None")
    return float(value)
