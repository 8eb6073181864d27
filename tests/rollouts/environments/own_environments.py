"""Environments and games of a user's, for tests."""

from dataclasses import dataclass, field
from typing import Any

from surogate_rl.rollouts.types import Episode, Observation, Task


class Echo:
    """The project's own protocol; it also says what it was made with."""

    def __init__(self, turns: int = 2, prefix: str = "") -> None:
        self.turns, self.prefix = turns, prefix

    async def reset(self, task: Task, seed: int) -> Observation:
        return Observation([{"role": "user", "content": f"{self.prefix}{task.columns.get('word', '')}"}])

    async def step(self, episode: Episode, action: str) -> Observation:
        return Observation([{"role": "user", "content": action}], done=episode.turns >= self.turns, reward=float(len(action)))

    async def close(self) -> None:
        return None


class Undecodable(Echo):
    """Says, is given and raises text that no encoding can hold, as names of files in another encoding are."""

    async def reset(self, task: Task, seed: int) -> Observation:
        return Observation([{"role": "user", "content": "name-\udcff"}])

    async def step(self, episode: Episode, action: str) -> Observation:
        if action == "raise":
            raise FileNotFoundError("no such file: name-\udcff")
        episode.info["files-\udcff"] = 1.0
        call = {"type": "function", "function": {"name": "list-\udcff", "arguments": {"in\ud83d": ["\ud83d"]}}}
        turn = {"role": "assistant", "content": f"{action}\ud83d", "tool_calls": [call]} if action == "parts" else None
        return Observation([{"role": "user", "content": "\ud83d!"}], done=episode.turns >= self.turns, reward=1.0, turn=turn)


class Nested(Echo):
    """Its messages hold themselves."""

    async def step(self, episode: Episode, action: str) -> Observation:
        message: dict[str, Any] = {"role": "user", "content": "so"}
        message["self"] = message
        return Observation([message], reward=1.0)


class NoStep:
    def reset(self) -> str:
        return ""


class Countdown:
    """A text game whose start is a column of the data set."""

    def reset(self, start: int, seed: int) -> str:
        self.left = start
        self.seed = seed
        return f"{start} ({seed})"

    def step(self, action: str) -> tuple[str, float, bool]:
        self.left -= 1
        return str(self.left), 0.5, self.left == 0


class BadGame(Countdown):
    def step(self, action: str) -> Any:
        return "only text"


class Gymnasium:
    """In the manner of Gymnasium: five values, and a limit on time."""

    def __init__(self, limit: int = 3) -> None:
        self.limit = limit

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[dict[str, Any], dict[str, Any]]:
        self.count, self.seed = 0, seed
        return {"text": f"seed {seed}", "ignored": [1]}, {}

    def text_to_action(self, text: str) -> int:
        return len(text)

    def step(self, action: int) -> tuple[dict[str, Any], float, bool, bool, dict[str, Any]]:
        self.count += 1
        won = action == 42
        return {"place": [self.count, action]}, 1.0 if won else -0.1, won, not won and self.count >= self.limit, {}


class OldGym:
    """In the manner of Gym before 0.26."""

    def reset(self) -> str:
        self.count = 0
        return "start"

    def step(self, action: str) -> tuple[str, float, bool, dict[str, Any]]:
        self.count += 1
        return action, 1.0, self.count == 2, {"TimeLimit.truncated": action == "late"}


@dataclass
class Result:
    """OpenEnv's step result."""

    observation: Any
    reward: float | None = None
    done: bool = False


@dataclass
class Seen:
    message: str
    reward: float | None = None
    done: bool = False
    metadata: dict[str, Any] = field(default_factory=dict)


class OpenEnvClient:
    """In the manner of OpenEnv's clients, asynchronous."""

    closed = 0

    async def reset(self) -> Result:
        self.count = 0
        return Result(Seen("ready"))

    async def step(self, action: str) -> Result:
        self.count += 1
        return Result(Seen(f"{action}!"), reward=0.5, done=self.count == 2)

    async def close(self) -> None:
        type(self).closed += 1


class OpenEnvInProcess:
    """In the manner of OpenEnv's environments: the observation itself has reward and done."""

    def reset(self) -> Seen:
        return Seen("ready")

    def step(self, action: str) -> Seen:
        return Seen(action, reward=3.0, done=True)


def make_client() -> OpenEnvClient:
    return OpenEnvClient()
