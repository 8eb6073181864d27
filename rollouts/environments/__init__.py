"""How an episode unfolds: one module per environment."""

from __future__ import annotations

from collections.abc import Callable

from surogate_rl.rollouts.environments.single_turn import SingleTurn
from surogate_rl.rollouts.types import Environment

ENVIRONMENTS: dict[str, Callable[[], Environment]] = {"single_turn": SingleTurn}


def environment_factory(name: str) -> Callable[[], Environment]:
    """A factory of fresh environments, one per episode.

    Raises:
        ValueError: no environment has this name.
    """
    try:
        return ENVIRONMENTS[name]
    except KeyError:
        raise ValueError(f"environment: unknown environment {name!r}; known: {', '.join(sorted(ENVIRONMENTS))}") from None
