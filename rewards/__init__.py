"""Reward functions: the built-in ones, yours from ``path/file.py:fn``, and the worker processes that run them.

Everything is imported on first use, so that a worker process that needs one reward does not pay for the rest.
"""

from __future__ import annotations

if __name__ != "surogate_rl.rewards":
    raise ImportError(f"this package is imported as surogate_rl.rewards, not as {__name__}: write 'import surogate_rl.rewards'")

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from surogate_rl.rewards.call import TrainerState
    from surogate_rl.rewards.registry import BUILTINS, RewardError, reward
    from surogate_rl.rewards.report import FunctionReport, RewardReport
    from surogate_rl.rewards.runner import RewardRunner, load_rewards

_HOME = {
    "BUILTINS": "registry",
    "FunctionReport": "report",
    "RewardError": "registry",
    "RewardReport": "report",
    "RewardRunner": "runner",
    "TrainerState": "call",
    "load_rewards": "runner",
    "reward": "registry",
}

__all__ = [
    "BUILTINS",
    "FunctionReport",
    "RewardError",
    "RewardReport",
    "RewardRunner",
    "TrainerState",
    "load_rewards",
    "reward",
]


def __getattr__(name: str) -> Any:
    if name in _HOME:
        return getattr(import_module(f"surogate_rl.rewards.{_HOME[name]}"), name)
    raise AttributeError(f"module 'surogate_rl.rewards' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
