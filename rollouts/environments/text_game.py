"""Games in text: a class with ``reset() -> str`` and ``step(action) -> (observation, reward, done)``."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

from surogate_rl.rollouts.environments.named import ByName
from surogate_rl.rollouts.types import Episode, Observation, Task


class TextGame(Protocol):
    """What a game has. `reset` may name parameters: ``seed`` (the task's: all episodes of a group play the same game), ``task``, and any
    column of the data set."""

    def reset(self) -> str: ...
    def step(self, action: str) -> tuple[str, float, bool]: ...


class TextGameEnvironment:
    """Plays one game: what it says are the user's turns. ``close()`` of the game is called if it has one."""

    def __init__(self, make: Callable[[], TextGame]) -> None:
        self._game = make()

    def reset(self, task: Task, seed: int) -> Observation:
        said = self._game.reset(**ByName.of(self._game.reset).arguments(task))
        if not isinstance(said, str):
            raise TypeError(f"reset returned a {type(said).__name__}, expected the first observation as text")
        return Observation([{"role": "user", "content": said}] if said else [])

    def step(self, episode: Episode, action: str) -> Observation:
        result: Any = self._game.step(action)
        if not isinstance(result, tuple) or len(result) != 3 or not isinstance(result[0], str):
            raise TypeError(f"step returned {result!r:.80}, expected (observation as text, reward, done)")
        said, reward, done = result
        return Observation([{"role": "user", "content": said}], done=bool(done), reward=reward)

    def close(self) -> None:
        close = getattr(self._game, "close", None)
        if close is not None:
            close()
