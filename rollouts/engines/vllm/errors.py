"""What can go wrong with an engine that is another process."""

from __future__ import annotations

from surogate_rl.errors import RunError


class EngineFailed(RunError):
    """The engine cannot serve, and starting it again did not help (or cannot). The message says what happened."""


class EngineGone(ConnectionError):
    """The engine's process or its connection ended, or it fell silent. It can be started again."""


class EngineBusy(EngineGone):
    """Another run has the engine: a server that the user has started. It can be asked again."""


class SyncFailed(EngineFailed):
    """After a weight update the engine does not have the learner's weights. The message names the tensors."""
