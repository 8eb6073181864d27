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
    @property
    def shares_weights(self) -> bool:
        """Whether it samples with the learner's own memory, so that it has to be paused before an update writes there."""
        ...

    async def generate(self, request: GenerateRequest) -> Completion:
        """Cancelling the awaiting task aborts the request."""
        ...

    async def update_weights(self, learner: Learner, version: int) -> None:
        """Takes the learner's present weights as `version`. Requests under way stay, keep the keys and values of the tokens that they
        have, and go on with the new weights; each token says which version it was sampled with."""
        ...

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


DepthUnit = Literal["turns", "tokens"]


@dataclass(frozen=True)
class DepthCap:
    """A budget's cap on an episode, see `surogate_rl.rollouts.budget`. It is no limit of the task: what the task's own limits end is over
    with and without it.

    Attributes:
        unit: what `depth` counts: turns of the policy, or tokens that it sampled.
        depth: after which the episode is cut, if it would go on.
        goes_on: drawn beforehand: it is not cut, and the runner only notes that it came so far.
    """

    unit: DepthUnit
    depth: int
    goes_on: bool


@dataclass(frozen=True)
class EpisodeLimits:
    """How far an episode may go; fixed before it starts.

    Attributes:
        max_completion_length: sampled tokens of one turn, at the most. A turn that ends so does not end the episode.
        sequence_len: tokens of a segment, at the most: what the model's context and a micro-batch hold.
        max_turns: turns of the policy; None: no limit.
        max_tokens: sampled tokens of the whole episode; None: no limit.
        cap: of a budget, beside these limits; None: there is none.
    """

    max_completion_length: int
    sequence_len: int
    max_turns: int | None = None
    max_tokens: int | None = None
    cap: DepthCap | None = None


Cut = Literal["turns", "tokens", "length"]
"""Which limit ended an episode: turns, sampled tokens, or the length of a turn or of the context."""


@dataclass(frozen=True)
class Observation:
    """What an environment answers: messages to append before the policy acts again.

    Attributes:
        done: the episode is over.
        truncated: it is over because of a limit (of length, or the environment's own on turns), neither won nor lost.
        reward: of the policy's last turn; None: nothing to say.
        turn: the policy's last turn as a message with its parts (``tool_calls``...), where the environment has taken it apart.
    """

    messages: list[Message] = field(default_factory=list)
    done: bool = False
    reward: float | None = None
    truncated: bool = False
    turn: Message | None = None


@dataclass
class Segment:
    """One trained sequence of an episode: token ids with what the policy sampled marked.

    All lists are of equal length. Where the policy did not sample, `logps` are 0, `versions` and `turns` -1 (a segment without turn
    numbers has none at all).

    Attributes:
        turns: for each sampled token the turn of the policy that it belongs to, counted from 0 over the whole episode.
        advantages: by token; None: the episode's scalar.
        importance: by token, how many of its kind it stands for (more than 1 where it had a chance of not being sampled); None: all 1.
    """

    tokens: list[int]
    sampled: list[bool]
    logps: list[float]
    versions: list[int]
    turns: list[int] = field(default_factory=list)
    advantages: list[float] | None = None
    importance: list[float] | None = None

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
        completion: text of the policy's last turn: its answer.
        raw_completion: the same with control tokens, but for the one that ended it.
        truncated: ended by a limit, not by the policy or the environment.
        turns: turns that the policy has taken.
        turn_rewards: what the environment gave for each of them; 0 where it said nothing.
        final_reward: what the environment gave for the episode as a whole (`finish`), or None.
        environment_reward: the sum of all these, or None if the environment never gave any.
        cut: which limit ended it; None: it ended by itself.
        depth_cap: the cap on depth that was in force for it; None: none was.
        went_on: whether it had been drawn to go on past the cap; None: there was no cap.
        reached_cap: it came to the cap and would have gone on there: none of the task's own limits and no end of its own was in the way.
        explore, value: with which probability it was to go on past the cap, and what going on was held to be worth; None: there was no cap.
        info: counts that the environment keeps (``tool_calls``...), by name.
        rewards: by function, None where a function does not apply.
        reward: the weighted sum, or None: unscored.
        advantage: of its tokens, up to the cap where it went on past one.
        advantage_after_cap: of those after it; None: there are none.
        weight: what multiplies all of its loss.
    """

    task: Task
    sample: int
    seed: int
    segments: list[Segment] = field(default_factory=list)
    messages: list[Message] = field(default_factory=list)
    completion: str = ""
    raw_completion: str = ""
    finish_reason: FinishReason = "stop"
    truncated: bool = False
    turns: int = 0
    turn_rewards: list[float] = field(default_factory=list)
    final_reward: float | None = None
    environment_reward: float | None = None
    cut: Cut | None = None
    depth_cap: int | None = None
    went_on: bool | None = None
    reached_cap: bool = False
    explore: float | None = None
    value: float | None = None
    info: dict[str, float] = field(default_factory=dict)
    rewards: dict[str, float | None] = field(default_factory=dict)
    reward: float | None = None
    advantage: float = 0.0
    advantage_after_cap: float | None = None
    weight: float = 1.0
    error: str | None = None

    @property
    def cut_by_budget(self) -> bool:
        """Whether a cap on depth ended it, and not one of the run's own limits."""
        return self.reached_cap and self.went_on is False

    @property
    def sampled_tokens(self) -> int:
        """Over all turns."""
        return sum(segment.sampled.count(True) for segment in self.segments)

    def depth(self, unit: DepthUnit) -> int:
        """How far it has come."""
        return self.turns if unit == "turns" else self.sampled_tokens


class Environment(Protocol):
    """Made by a factory, one per episode. The methods of a user's own may also be plain functions.

    Besides these, an environment may have ``finish(episode) -> float | None``, which is asked for a final reward once the episode is over,
    by itself or by a limit.
    """

    async def reset(self, task: Task, seed: int) -> Observation:
        """What it says before the policy's first turn, behind the task's prompt. `seed` is the episode's own."""
        ...

    async def step(self, episode: Episode, action: str) -> Observation:
        """Its answer to the policy's turn `action` (the turn's text; `episode` has the rest of what there is)."""
        ...

    async def close(self) -> None: ...
