"""Objects with ``reset`` and ``step`` in the manner of Gym, Gymnasium or OpenEnv.

What they return may be Gymnasium's ``(observation, reward, terminated, truncated, info)`` and ``(observation, info)``, Gym's
``(observation, reward, done, info)`` and ``observation``, OpenEnv's step result (attributes ``observation``, ``reward``, ``done``), or an
observation that has ``reward`` and ``done`` itself, as OpenEnv's environments return in process. Methods may be coroutines.

Observations are text, or are shown as their field ``text``, ``message`` or ``content``, else as JSON. An object says otherwise by a method
``observation_to_text(observation) -> str``; one whose actions are not text makes them by ``text_to_action(text)``.
"""

from __future__ import annotations

import dataclasses
import inspect
import json
from collections.abc import Callable, Mapping
from typing import Any, cast

from surogate_rl.rollouts.environments.named import ByName
from surogate_rl.rollouts.types import Environment, Episode, Message, Observation, Task

TEXT_FIELDS = ("text", "message", "content")


def make_gym_environment(make: Callable[[], Any]) -> Environment:
    """The environment around ``make()``; its methods are coroutines where the object's are."""
    made = make()
    asynchronous = inspect.iscoroutinefunction(made.step) or inspect.iscoroutinefunction(made.reset)
    return AsyncGymEnvironment(made) if asynchronous else cast(Environment, GymEnvironment(made))


class _Translated:
    def __init__(self, made: Any) -> None:
        self._made = made

    def _reset_arguments(self, task: Task) -> dict[str, Any]:
        return ByName.of(self._made.reset).arguments(task)

    def _first(self, returned: Any) -> Observation:
        pair = isinstance(returned, tuple) and len(returned) == 2 and isinstance(returned[1], Mapping)
        observation = returned[0] if pair else getattr(returned, "observation", returned)
        return Observation(self._messages(observation))

    def _action(self, action: str) -> Any:
        convert = getattr(self._made, "text_to_action", None)
        return convert(action) if convert is not None else action

    def _next(self, returned: Any) -> Observation:
        observation, reward, done, truncated = _unpacked(returned)
        return Observation(self._messages(observation), done=done or truncated, reward=reward, truncated=truncated and not done)

    def _messages(self, observation: Any) -> list[Message]:
        convert = getattr(self._made, "observation_to_text", None)
        said = convert(observation) if convert is not None else _text_of(observation)
        return [{"role": "user", "content": said}] if said else []

    def _closing(self) -> Callable[[], Any] | None:
        return getattr(self._made, "close", None)


class GymEnvironment(_Translated):
    """Plain functions."""

    def reset(self, task: Task, seed: int) -> Observation:
        return self._first(self._made.reset(**self._reset_arguments(task)))

    def step(self, episode: Episode, action: str) -> Observation:
        return self._next(self._made.step(self._action(action)))

    def close(self) -> None:
        if (close := self._closing()) is not None:
            close()


class AsyncGymEnvironment(_Translated):
    """Coroutines."""

    async def reset(self, task: Task, seed: int) -> Observation:
        return self._first(await _value(self._made.reset(**self._reset_arguments(task))))

    async def step(self, episode: Episode, action: str) -> Observation:
        return self._next(await _value(self._made.step(self._action(action))))

    async def close(self) -> None:
        if (close := self._closing()) is not None:
            await _value(close())


async def _value(returned: Any) -> Any:
    return await returned if inspect.isawaitable(returned) else returned


def _unpacked(returned: Any) -> tuple[Any, Any, bool, bool]:
    """(observation, reward, done, truncated) of what a step returned."""
    if isinstance(returned, tuple):
        if len(returned) == 5:
            observation, reward, terminated, truncated, _ = returned
            return observation, reward, bool(terminated), bool(truncated)
        if len(returned) == 4:
            observation, reward, done, info = returned
            # how Gym's TimeLimit says that it was the limit
            limit = isinstance(info, Mapping) and bool(info.get("TimeLimit.truncated", False))
            return observation, reward, bool(done) and not limit, bool(done) and limit
        raise TypeError(f"step returned {len(returned)} values, expected Gymnasium's 5 or Gym's 4")
    done = getattr(returned, "done", None)
    if done is None:
        done = getattr(returned, "terminated", None)
    if done is None or not hasattr(returned, "reward"):
        raise TypeError(f"step returned a {type(returned).__name__}, expected a tuple, or an object with reward and done")
    truncated = bool(getattr(returned, "truncated", False))
    return getattr(returned, "observation", returned), returned.reward, bool(done) and not truncated, truncated


def _text_of(observation: Any) -> str:
    if observation is None or isinstance(observation, str):
        return observation or ""
    fields = observation if isinstance(observation, Mapping) else None
    if fields is None and hasattr(observation, "model_dump"):  # pydantic, as OpenEnv's are
        fields = observation.model_dump(mode="json")
    if fields is None and dataclasses.is_dataclass(observation) and not isinstance(observation, type):
        fields = dataclasses.asdict(observation)
    if fields is not None:
        for name in TEXT_FIELDS:
            if isinstance(fields.get(name), str):
                return str(fields[name])
        fields = {name: value for name, value in fields.items() if name not in ("reward", "done", "terminated", "truncated", "metadata")}
    shown = fields if fields is not None else observation
    return json.dumps(shown, default=lambda value: value.tolist() if hasattr(value, "tolist") else repr(value), ensure_ascii=False)
