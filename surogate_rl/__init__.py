"""Post-training of language models: GRPO, DPO and SFT.

    import surogate_rl

    result = surogate_rl.grpo("config.yaml", rewards=[my_reward])

Importing the package is light; torch and the native core are loaded when a run starts.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from surogate_rl.config import DpoConfig, GrpoConfig, SftConfig
    from surogate_rl.rewards import reward
    from surogate_rl.trainers import RunResult

__version__ = "0.1.0"
__all__ = ["__version__", "dpo", "grpo", "reward", "sft"]

Path = str | os.PathLike[str]


def sft(config: Mapping[str, Any] | SftConfig | Path, *, overrides: Sequence[str] = ()) -> RunResult:
    """Supervised fine-tuning.

    Args:
        config: a dict with the keys of the YAML, an `SftConfig`, or the path of a YAML file.
        overrides: ``key=value`` texts, as of ``--set``.

    Raises:
        ConfigError: all that is wrong with the configuration.
    """
    from surogate_rl.config import load_config, parse_config

    checked = load_config(config, "sft", overrides) if isinstance(config, str | os.PathLike) else parse_config(config, "sft", overrides)
    from surogate_rl.trainers import run_sft

    return run_sft(checked)


def dpo(config: Mapping[str, Any] | DpoConfig | Path, *, overrides: Sequence[str] = ()) -> RunResult:
    """Direct preference optimisation; arguments and errors as of `sft`."""
    from surogate_rl.config import load_config, parse_config

    checked = load_config(config, "dpo", overrides) if isinstance(config, str | os.PathLike) else parse_config(config, "dpo", overrides)
    from surogate_rl.trainers import run_dpo

    return run_dpo(checked)


def grpo(
    config: Mapping[str, Any] | GrpoConfig | Path,
    rewards: Sequence[Callable[..., Any]] | Callable[..., Any] | None = None,
    *,
    overrides: Sequence[str] = (),
) -> RunResult:
    """Reinforcement learning with group-relative advantages; ``config``, ``overrides`` and errors as of `sft`.

    Args:
        rewards: functions besides those that the configuration names (see `reward`). Parameters are filled by name:
            ``completion``, ``prompt``, ``messages``, ``tokens``, ``episode`` and any column of the data set.
    """
    from surogate_rl.config import load_config, parse_config

    functions = [rewards] if callable(rewards) else list(rewards or [])
    for function in functions:
        if not callable(function):
            raise TypeError(f"rewards takes functions, got {function!r}; built-in rewards are named in the configuration")
    given = bool(functions)
    if isinstance(config, str | os.PathLike):
        checked = load_config(config, "grpo", overrides, rewards_given=given)
    else:
        checked = parse_config(config, "grpo", overrides, rewards_given=given)
    from surogate_rl.trainers import run_grpo

    return run_grpo(checked, rewards=functions)


def __getattr__(name: str) -> Any:
    if name == "reward":
        from surogate_rl.rewards import reward

        return reward
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
