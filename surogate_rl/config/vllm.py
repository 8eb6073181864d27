"""What vLLM cannot go with, its keys without effect, and what its ``auto`` and empty values stand for."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from typing import Literal

from surogate_rl.config.devices import chosen_device, chosen_engine, chosen_recipe, vllm_missing_reason
from surogate_rl.config.errors import KeyPath, Problem
from surogate_rl.config.schema import GrpoConfig, VllmConfig
from surogate_rl.rollouts.engines.vllm.address import parse_url

PATH: KeyPath = ("rollouts", "vllm")
COLDEST, HOTTEST = 0.01, 2.0  # vLLM changes or refuses others
TOLERANCE = {"float32": 0.01, "bfloat16": 0.1}  # nats; a hundred and about three times what such a pair was measured to differ by


def vllm_problems(config: GrpoConfig, planning: bool) -> Iterator[Problem]:
    engine, vllm = chosen_engine(config), config.rollouts.vllm
    where: KeyPath = ("rollouts", "engine")
    if engine == "native":
        if chosen_device(config) == "cuda":
            message = "rollouts.engine: native samples on the cpu only; with device: cuda set it to vllm (or auto), or set device: cpu"
            yield Problem(message, where, (("device",),))
        return
    if not planning and (reason := vllm_missing_reason(vllm)):
        if vllm.python is not None:
            yield Problem(f"rollouts.vllm.python: {reason}", (*PATH, "python"))
        else:
            because = "vllm" if config.rollouts.engine == "vllm" else "device: cuda samples with vLLM"
            yield Problem(f"rollouts.engine: {because}, but {reason}", where, (("device",),))
    yield from _mode_problems(vllm, chosen_device(config))
    yield from _transfer_problems(config, planning)
    for section, sampling in (("rollouts", config.rollouts), ("eval", config.eval)):
        if sampling is not None and sampling.temperature > HOTTEST:
            message = f"{section}.temperature: vLLM samples at {HOTTEST:g} at the most; lower it, or set rollouts.engine: native"
            yield Problem(message, (section, "temperature"), (where,))
        elif sampling is not None and 0 < sampling.temperature < COLDEST:
            message = f"{section}.temperature: vLLM takes {COLDEST:g} for anything between 0 and that; raise it"
            yield Problem(message, (section, "temperature"), (where,))
    if vllm.sync in ("merged", "adapter") and not config.lora:
        yield Problem(f"rollouts.vllm.sync: {vllm.sync} needs lora: true; set sync: full, or remove the key", (*PATH, "sync"), (("lora",),))
    if vllm.sync == "full" and config.lora:
        yield Problem(
            "rollouts.vllm.sync: full sends the weights without the adapter that lora: true trains; set merged or adapter",
            (*PATH, "sync"),
            (("lora",),),
        )
    if vllm.sync == "adapter" and "lm_head" in config.lora_target_modules:
        yield Problem(
            "rollouts.vllm.sync: adapter cannot carry an adapter on lm_head, which vLLM has no place for; set sync: merged",
            (*PATH, "sync"),
            (("lora_target_modules",),),
        )


def _transfer_problems(config: GrpoConfig, planning: bool) -> Iterator[Problem]:
    vllm, device = config.rollouts.vllm, chosen_device(config)
    where: KeyPath = (*PATH, "transfer")
    if vllm.transfer != "cuda_ipc":
        return
    if device == "cpu":
        yield Problem("rollouts.vllm.transfer: cuda_ipc is for GPUs, but device is cpu; remove the key", where, (("device",),))
    elif chosen_mode(vllm) == "server":
        yield Problem(
            "rollouts.vllm.transfer: cuda_ipc reaches an engine on the learner's own GPU; with mode: server remove the key, or set host",
            where,
            ((*PATH, "mode"), (*PATH, "base_url"), (*PATH, "devices")),
        )
    elif not planning and (reason := no_cuda_ipc_reason()):
        yield Problem(f"rollouts.vllm.transfer: cuda_ipc cannot be had: {reason}; or set transfer: host", where)


def no_cuda_ipc_reason() -> str:
    """Why memory of the GPU that torch takes in this process cannot be shared, and what to do; empty if it can."""
    import torch

    if torch.version.cuda is None:
        return f"torch {torch.__version__} is built without CUDA; install one that has it beside surogate-rl"
    for name in ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"):
        if "expandable_segments:true" in os.environ.get(name, "").replace(" ", "").lower():
            return f"memory of torch's expandable segments is not shared; take expandable_segments out of {name}"
    return ""


def chosen_mode(vllm: VllmConfig) -> Literal["colocate", "server"]:
    elsewhere = vllm.base_url is not None or vllm.devices is not None or vllm.replicas > 1 or vllm.tensor_parallel_size > 1
    return vllm.mode if vllm.mode != "auto" else "server" if elsewhere else "colocate"


def _chosen_transfer(vllm: VllmConfig, device: str) -> Literal["cuda_ipc", "host"]:
    if vllm.transfer != "auto":
        return vllm.transfer
    return "cuda_ipc" if device == "cuda" and chosen_mode(vllm) == "colocate" and not no_cuda_ipc_reason() else "host"


def _mode_problems(vllm: VllmConfig, device: str) -> Iterator[Problem]:
    for number, url in enumerate(base_urls(vllm)):
        try:
            parse_url(url)
        except ValueError as error:
            place: KeyPath = (*PATH, "base_url", number) if isinstance(vllm.base_url, list) else (*PATH, "base_url")
            yield Problem(f"rollouts.vllm.base_url: {error}", place)
    if vllm.base_url == []:
        yield Problem("rollouts.vllm.base_url: an empty list names no server; name one, or remove the key", (*PATH, "base_url"))
    if vllm.mode == "colocate":
        for key, given in (("base_url", vllm.base_url), ("devices", vllm.devices), ("replicas", vllm.replicas > 1)):
            if given:
                yield Problem(f"rollouts.vllm.{key}: goes with mode: server; remove it or the mode", (*PATH, key), ((*PATH, "mode"),))
        if vllm.tensor_parallel_size > 1:
            yield Problem(
                "rollouts.vllm.tensor_parallel_size: an engine of several GPUs cannot share the learner's one; set mode: server",
                (*PATH, "tensor_parallel_size"),
                ((*PATH, "mode"),),
            )
    elif vllm.base_url is not None:
        for key, given in (("devices", vllm.devices is not None), ("replicas", vllm.replicas > 1), ("python", vllm.python is not None)):
            if given:
                yield Problem(
                    f"rollouts.vllm.{key}: is for engines that are started here, not for those of base_url; remove one of the two",
                    (*PATH, key),
                    ((*PATH, "base_url"),),
                )
    if vllm.devices is not None and device == "cpu":
        yield Problem("rollouts.vllm.devices: names GPUs, but device is cpu; remove the key", (*PATH, "devices"), (("device",),))
    elif vllm.devices is not None and len(set(vllm.devices)) != vllm.replicas * vllm.tensor_parallel_size:
        yield Problem(
            f"rollouts.vllm.devices: {len(set(vllm.devices))} GPU(s), but replicas x tensor_parallel_size is "
            f"{vllm.replicas * vllm.tensor_parallel_size}; name as many, each once",
            (*PATH, "devices"),
            ((*PATH, "replicas"), (*PATH, "tensor_parallel_size")),
        )


def idle_vllm(config: GrpoConfig, idle: Callable[..., None]) -> None:
    """Tells of keys under rollouts.vllm that do nothing."""
    vllm = config.rollouts.vllm
    if chosen_engine(config) == "native":
        idle(vllm, VllmConfig(), tuple(VllmConfig.model_fields), "the engine is native", PATH)
    elif chosen_device(config) == "cpu":
        idle(vllm, VllmConfig(), ("gpu_memory_utilization",), "the device is cpu; kv_cache_gb bounds the cache", PATH)


def resolve_vllm(config: GrpoConfig) -> VllmConfig:
    """With every ``auto`` and empty value decided, if vLLM is the engine."""
    vllm = config.rollouts.vllm
    if chosen_engine(config) == "native":
        return vllm
    device, recipe = chosen_device(config), chosen_recipe(config)
    dtype = recipe if vllm.dtype == "auto" else vllm.dtype
    mode = chosen_mode(vllm)
    devices = vllm.devices
    if device == "cuda" and mode == "server" and vllm.base_url is None and devices is None:
        devices = list(range(1, 1 + vllm.replicas * vllm.tensor_parallel_size))
    tolerance = vllm.probe_tolerance
    if tolerance is None:
        tolerance = max(TOLERANCE[dtype], TOLERANCE[recipe])
    return vllm.model_copy(
        update={
            "mode": mode,
            "devices": devices,
            "dtype": dtype,
            "sync": vllm.sync if vllm.sync != "auto" else "merged" if config.lora else "full",
            "transfer": _chosen_transfer(vllm, device),
            "enforce_eager": vllm.enforce_eager if vllm.enforce_eager is not None else device == "cpu",
            "probe_tolerance": tolerance,
        }
    )


def base_urls(vllm: VllmConfig) -> tuple[str, ...]:
    if vllm.base_url is None:
        return ()
    return (vllm.base_url,) if isinstance(vllm.base_url, str) else tuple(vllm.base_url)
