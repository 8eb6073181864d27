"""Where a configuration runs."""

from __future__ import annotations

import shutil
from typing import Literal

from surogate_rl.config.schema import GrpoConfig, TrainConfig, VllmConfig


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
    """What ``device: auto`` stands for: a GPU where there is one, unless completions are sampled by the native engine, which does so on the
    CPU only."""
    if config.device != "auto":
        return config.device
    if config.gpus == 0 or (samples(config) and not may_use_vllm(config)) or cuda_unavailable_reason():
        return "cpu"
    return "cuda"


def may_use_vllm(config: TrainConfig) -> bool:
    """Whether the run's completions can come from vLLM."""
    return isinstance(config, GrpoConfig) and config.rollouts.engine != "native" and not vllm_missing_reason(config.rollouts.vllm)


def chosen_engine(config: GrpoConfig) -> Literal["native", "vllm"]:
    """What ``rollouts.engine: auto`` stands for: vLLM on a GPU, the native engine on the CPU."""
    if config.rollouts.engine != "auto":
        return config.rollouts.engine
    return "vllm" if chosen_device(config) == "cuda" else "native"


def vllm_missing_reason(vllm: VllmConfig) -> str:
    """Why vLLM cannot be started, and what to do; empty if it seems that it can. What another interpreter or a server has is seen when it
    starts."""
    from surogate_rl.rollouts.engines.vllm.host.surogate_vllm.compat import UnsupportedVersion, installed

    if vllm.base_url is not None:
        return ""
    if vllm.python is not None:
        return "" if shutil.which(vllm.python) else f"there is no interpreter '{vllm.python}'"
    try:
        installed()
    except UnsupportedVersion as error:
        return f"{error}; install surogate-rl[vllm], or name an interpreter that has it in rollouts.vllm.python"
    return ""


def chosen_recipe(config: TrainConfig) -> Literal["float32", "bfloat16"]:
    """What ``recipe: auto`` stands for."""
    if config.recipe != "auto":
        return config.recipe
    return "bfloat16" if chosen_device(config) == "cuda" else "float32"
