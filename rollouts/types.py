"""What engines, environments, rewards and the trainer say to each other about rollouts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, Protocol

if TYPE_CHECKING:
    from surogate_rl.learner import Learner

FinishReason = Literal["stop", "length", "aborted"]
Message = dict[str, Any]


@dataclass(frozen=True)
class SamplingParams:
    """How to sample. top-p, top-k, min-p and temperature 0 (greedy) are for evaluation: they bias the ratio in training.

    Attributes:
        max_tokens: new tokens at the most.
        temperature: 0 is greedy.
        stop_ids: token ids that end a completion (kept as its last token).
        stop: strings that end a completion (the token that completes one is kept).
        seed: with prompt and parameters this alone decides the sample.
    """

    max_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    stop_ids: tuple[int, ...] = ()
    stop: tuple[str, ...] = ()
    seed: int = 0


@dataclass(frozen=True)
class GenerateRequest:
    prompt: Sequence[int]
    params: SamplingParams


@dataclass(frozen=True)
class Completion:
    """What an engine sampled. `tokens`, `logps` and `versions` are of equal length.

    Attributes:
        logps: at the sampling temperature, over the ids that the tokenizer has.
        versions: the weight version that each token was sampled with.
    """

    tokens: list[int]
    logps: list[float]
    finish_reason: FinishReason
    versions: list[int]


class Engine(Protocol):
    """Generates completions; in process or behind a server."""

    @property
    def version(self) -> int: ...
    async def generate(self, request: GenerateRequest) -> Completion:
        """Cancelling the awaiting task aborts the request."""
        ...

    async def update_weights(self, learner: Learner, version: int) -> None: ...
    async def pause(self) -> None:
        """Returns when no decode step is under way and none will start before `resume`."""
        ...

    async def resume(self) -> None: ...
    async def health(self) -> None:
        """Raises if the engine cannot serve."""
        ...

    async def close(self) -> None: ...


@dataclass(frozen=True)
class Task:
    """One row to solve.

    Attributes:
        index: the row's number in its data set.
        messages: the chat so far, or None when `prompt` is plain text.
        prompt: plain text, or None when `messages` holds the prompt.
        columns: every other column of the row (``answer``...), for the rewards.
        tools: JSON schemas shown to the chat template, if any.
    """

    index: int
    messages: list[Message] | None
    prompt: str | None
    columns: Mapping[str, Any]
    tools: list[dict[str, Any]] | None = None


@dataclass(frozen=True)
class Observation:
    """What an environment answers: messages to append before the policy acts again."""

    messages: list[Message] = field(default_factory=list)
    done: bool = False
    reward: float | None = None


@dataclass
class Segment:
    """One trained sequence of an episode: token ids with what the policy sampled marked.

    `tokens`, `sampled`, `logps` and `versions` are of equal length; logps are 0 and versions -1 where the policy did not sample.
    """

    tokens: list[int]
    sampled: list[bool]
    logps: list[float]
    versions: list[int]

    @property
    def prompt_length(self) -> int:
        """Tokens before the first sampled one."""
        return self.sampled.index(True) if True in self.sampled else len(self.tokens)


@dataclass
class Episode:
    """One completion of a task (several turns in a multi-turn environment).

    Attributes:
        sample: its number within the group.
        segments: what is trained; one unless the chat template rewrote history.
        messages: the whole conversation, the policy's turns included.
        completion: text of what the policy said (of all turns, in order).
        truncated: ended by a limit on length, not by the policy or the environment.
        rewards: by function, None where a function does not apply.
        reward: the weighted sum, or None: unscored.
    """

    task: Task
    sample: int
    seed: int
    segments: list[Segment] = field(default_factory=list)
    messages: list[Message] = field(default_factory=list)
    completion: str = ""
    finish_reason: FinishReason = "stop"
    truncated: bool = False
    environment_reward: float | None = None
    rewards: dict[str, float | None] = field(default_factory=dict)
    reward: float | None = None
    advantage: float = 0.0
    error: str | None = None


class Environment(Protocol):
    """Made by a factory, one per episode."""

    async def reset(self, task: Task, seed: int) -> Observation: ...
    async def step(self, episode: Episode, action: str) -> Observation: ...
    async def close(self) -> None: ...
