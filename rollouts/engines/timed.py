"""An engine that knows how long it had work."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from surogate_rl.rollouts.types import Completion, Engine, GenerateRequest

if TYPE_CHECKING:
    from surogate_rl.learner import Learner


class TimedEngine:
    """Passes everything on to `engine`, and adds up the seconds in which a request was under way and the engine was not paused.

    Args:
        now: a clock, in seconds.
    """

    def __init__(self, engine: Engine, now: Callable[[], float] = time.perf_counter) -> None:
        self.engine = engine
        self._now = now
        self._lock = threading.Lock()
        self._requests = 0
        self._paused = False
        self._busy = 0.0
        self._since: float | None = None

    @property
    def busy_seconds(self) -> float:
        """Since the engine was made. May be read from any thread."""
        with self._lock:
            return self._busy + (0.0 if self._since is None else self._now() - self._since)

    @property
    def version(self) -> int:
        return self.engine.version

    @property
    def shares_weights(self) -> bool:
        return self.engine.shares_weights

    def take_metrics(self) -> dict[str, float]:
        """The engine's own, if it has any."""
        take: Callable[[], dict[str, float]] | None = getattr(self.engine, "take_metrics", None)
        return take() if take is not None else {}

    async def generate(self, request: GenerateRequest) -> Completion:
        self._change(1)
        try:
            return await self.engine.generate(request)
        finally:
            self._change(-1)

    async def update_weights(self, learner: Learner, version: int) -> None:
        await self.engine.update_weights(learner, version)

    async def pause(self) -> None:
        await self.engine.pause()
        self._change(paused=True)

    async def resume(self) -> None:
        self._change(paused=False)
        await self.engine.resume()

    async def health(self) -> None:
        await self.engine.health()

    async def close(self) -> None:
        await self.engine.close()

    def _change(self, requests: int = 0, paused: bool | None = None) -> None:
        with self._lock:
            self._requests += requests
            if paused is not None:
                self._paused = paused
            busy = self._requests > 0 and not self._paused
            if busy and self._since is None:
                self._since = self._now()
            elif not busy and self._since is not None:
                self._busy += self._now() - self._since
                self._since = None
