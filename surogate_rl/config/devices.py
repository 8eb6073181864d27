"""Where a configuration runs."""

from __future__ import annotations

from typing import Literal

from surogate_rl.config.schema import GrpoConfig, TrainConfig


def cuda_unavailable_reason() -> str:
    """Why nothing can run on a GPU here, and what to do; empty if it can."""
    try:
        from surogate_rl import _core
    except ImportError as error:
        return f"the native core cannot be loaded ({error}); install surogate-rl again, or use device: cpu"
    return _core.cuda_unavailable_reason()


def samples(config: TrainConfig) -> bool:
    """Whether the run generates completions, for training or for evaluation."""
    return isinstance(config, GrpoConfig) or (config.eval is not None and bool(config.eval.rewards))


def chosen_device(config: TrainConfig) -> Literal["cpu", "cuda"]:
    """What ``device: auto`` stands for: a GPU where there is one, unless completions are sampled, which is done on the CPU only."""
    if config.device != "auto":
        return config.device
    if config.gpus == 0 or samples(config) or cuda_unavailable_reason():
        return "cpu"
    return "cuda"


def chosen_recipe(config: TrainConfig) -> Literal["float32", "bfloat16"]:
    """What ``recipe: auto`` stands for."""
    if config.recipe != "auto":
        return config.recipe
    return "bfloat16" if chosen_device(config) == "cuda" else "float32"
