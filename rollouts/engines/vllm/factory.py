"""From a configuration to a vLLM engine."""

from __future__ import annotations

import json
import os
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from surogate_rl.config.schema import GrpoConfig
from surogate_rl.config.vllm import base_urls, resolve_vllm
from surogate_rl.models.gguf import plain_config
from surogate_rl.models.registry import FAMILIES
from surogate_rl.rollouts.engines.vllm.device_weights import merge_bytes
from surogate_rl.rollouts.engines.vllm.engine import VllmEngine
from surogate_rl.rollouts.engines.vllm.options import VllmOptions
from surogate_rl.rollouts.engines.vllm.process import EngineProcess

if TYPE_CHECKING:
    from surogate_rl._core import ModelSpec
    from surogate_rl.learner import Learner
    from surogate_rl.models import LoadedModel

TOKEN = "SUROGATE_VLLM_TOKEN"
LOG = "vllm.log"
RESERVE = 3 << 30  # bytes beside weights and cache: activations, CUDA graphs, and the context of a process
BLOCK = 128  # positions of the largest block that vLLM cuts its cache into; each sequence wastes part of one
LEARNERS_GPU = 0


@dataclass(frozen=True)
class EngineMemory:
    """What an engine takes, in bytes.

    Attributes:
        weights: of the model, in the engine's number format.
        cache: keys and values.
        reserve: everything else; 0 on the CPU, where it is not planned.
    """

    weights: int
    cache: int
    reserve: int

    @property
    def total(self) -> int:
        return self.weights + self.cache + self.reserve


def position_bytes(spec: ModelSpec, dtype: str) -> int:
    """Of the keys and values of one position."""
    return 2 * spec.layers * spec.kv_heads * spec.head_dim * (4 if dtype == "float32" else 2)


def engine_memory(
    spec: ModelSpec, parameters: int, dtype: str, *, sequences: int, context: int, free: int | None, gpu: bool, cache_bytes: int | None
) -> EngineMemory:
    """The memory plan of one engine. A cache that is smaller than its sequences need costs time, not correctness: requests wait, or are
    computed again.

    Args:
        parameters: weights of the model.
        sequences: at a time.
        context: tokens of the longest.
        free: bytes that there are for it; None: unknown.
        cache_bytes: asked for; None: what the sequences need, as far as it fits (on the CPU: into a quarter of what is free).

    Raises:
        MemoryError: not even one sequence fits; the message itemises.
    """
    weights = parameters * (4 if dtype == "float32" else 2)
    position, blocks = position_bytes(spec, dtype), -(-context // BLOCK) + 1
    least, wanted = blocks * BLOCK * position, sequences * blocks * BLOCK * position
    reserve = RESERVE if gpu else 0
    room = wanted if free is None else free - weights - reserve if gpu else free // 4
    cache = cache_bytes if cache_bytes is not None else min(wanted, max(room, least))
    if gpu and free is not None and weights + reserve + max(cache, least) > free:
        parts = {"weights": weights, "KV cache of one sequence": least, "activations, CUDA graphs, context": reserve}
        if cache_bytes is not None:
            parts["KV cache of one sequence"] = cache
        lines = "\n".join(f"  {name:<44} {size / 2**20:>10.1f} MiB" for name, size in parts.items())
        raise MemoryError(
            f"the vLLM engine does not fit beside the learner, which leaves {free / 2**20:.1f} MiB:\n{lines}\n"
            "lower sequence_len or per_device_train_batch_size, train with lora: true, or put the engine on another GPU "
            "(rollouts.vllm.devices)"
        )
    return EngineMemory(weights, max(cache, least), reserve)


def transfer_memory(config: GrpoConfig, spec: ModelSpec, parameters: int) -> int:
    """Bytes of the learner's device that updates take with `transfer: cuda_ipc`: the weights on their way, and what merging needs."""
    vllm = resolve_vllm(config)
    weights = parameters * (4 if vllm.dtype == "float32" else 2) * 257 // 256  # each weight starts on a page of its own
    if vllm.sync != "merged":
        return weights
    widest = max(spec.ffn, (spec.heads + 2 * spec.kv_heads) * spec.head_dim)
    return weights + merge_bytes(spec.hidden * (spec.vocab if "lm_head" in config.lora_target_modules else widest))


class Launched:
    """Processes of engines that were started ahead of everything else, because importing vLLM takes long. `close` ends them, whoever has
    taken them.

    Raises:
        EngineFailed: an interpreter cannot be started.
    """

    def __init__(self, config: GrpoConfig) -> None:
        self._processes: list[EngineProcess] = []
        vllm = resolve_vllm(config)
        if config.rollouts.engine != "vllm" or vllm.base_url is not None:
            return
        try:
            for environment in environments(config):
                python = vllm.python or sys.executable
                self._processes.append(EngineProcess(python, server=vllm.mode == "server", environment=environment))
        except BaseException:
            self.close()
            raise

    @property
    def processes(self) -> list[EngineProcess]:
        return list(self._processes)

    def close(self) -> None:
        for process in self._processes:
            process.kill()


def make_vllm_engine(
    config: GrpoConfig,
    loaded: LoadedModel,
    learner: Learner,
    launched: Launched,
    *,
    sequences: int,
    free: int | None,
    cache_bytes: int = 0,
    output_dir: Path,
) -> VllmEngine:
    """The engine that `config` asks for; `begin` lets it get ready in the background.

    Args:
        launched: its processes.
        sequences: that are under way together, at the most.
        free: bytes that the engine's device has for it; None: unknown, or not the engine's business (other devices). Servers of the user's
            are asked for the same engine whatever is free here.
        cache_bytes: of keys and values, as the run's memory was planned; 0: as `engine_memory` chooses.

    Raises:
        MemoryError, EngineFailed: it does not fit or cannot be started.
    """
    return VllmEngine(
        learner,
        vllm_options(config, loaded, learner, sequences=sequences, free=free, cache_bytes=cache_bytes, output_dir=output_dir),
        tokenizer=loaded.tokenizer,
        processes=launched.processes,
    )


def vllm_options(
    config: GrpoConfig, loaded: LoadedModel, learner: Learner, *, sequences: int, free: int | None, cache_bytes: int = 0, output_dir: Path
) -> VllmOptions:
    vllm, rollouts = resolve_vllm(config), config.rollouts
    assert vllm.dtype != "auto"
    assert vllm.sync != "auto"
    assert vllm.mode != "auto"
    assert vllm.transfer != "auto"
    assert vllm.probe_tolerance is not None
    spec = loaded.spec
    context = min(config.sequence_len, spec.max_positions)
    gpu = config.device == "cuda"
    tensors = learner.tensors()
    if not cache_bytes and rollouts.kv_cache_gb is not None:
        cache_bytes = int(rollouts.kv_cache_gb * 2**30)
    parameters = sum(torch.Size(info.shape).numel() for info in tensors if not info.is_adapter)
    if free is not None and vllm.transfer == "cuda_ipc":
        free -= transfer_memory(config, spec, parameters)
    memory = engine_memory(
        spec,
        parameters,
        vllm.dtype,
        sequences=sequences,
        context=context,
        free=free if vllm.base_url is None and (vllm.mode == "colocate" or not gpu) else None,
        gpu=gpu,
        cache_bytes=cache_bytes or None,
    )
    arguments: dict[str, Any] = {
        "max_model_len": context,
        "max_num_seqs": sequences,
        "tensor_parallel_size": vllm.tensor_parallel_size,
        "enforce_eager": bool(vllm.enforce_eager),
        "seed": 0,  # each completion has its own; a server keeps its engine for a run with another one
    }
    memory_bytes = 0
    if vllm.gpu_memory_utilization is not None and gpu:
        arguments["gpu_memory_utilization"] = vllm.gpu_memory_utilization
    elif gpu and vllm.mode == "server" and rollouts.kv_cache_gb is None:
        pass  # a GPU of its own: vLLM's default share
    else:
        arguments["kv_cache_memory_bytes"] = memory.cache
        memory_bytes = memory.total
    if vllm.sync == "adapter":
        arguments |= {"enable_lora": True, "max_lora_rank": lora_rank(config.lora_rank), "max_loras": 1}
    return VllmOptions(
        model_config=model_config(loaded, tied=not any(info.name == "lm_head.weight" for info in tensors)),
        engine_args=arguments,
        dtype=vllm.dtype,
        valid_vocab=loaded.valid_vocab if loaded.valid_vocab < spec.vocab else 0,
        memory_bytes=memory_bytes,
        log=output_dir / LOG,
        python=vllm.python or sys.executable,
        mode=vllm.mode,
        base_urls=base_urls(vllm),
        environments=tuple(environments(config)),
        sync=vllm.sync,
        transfer=vllm.transfer,
        token=os.environ.get(TOKEN, ""),
        startup_timeout=vllm.startup_timeout,
        timeout=vllm.timeout,
        heartbeat=vllm.heartbeat,
        max_restarts=vllm.max_restarts,
        probe_tolerance=vllm.probe_tolerance,
        probe_temperature=rollouts.temperature,
    )


def model_config(loaded: LoadedModel, *, tied: bool) -> dict[str, Any]:
    """What config.json says of the learner's model. Ids that end a completion are the run's business, not the engine's."""
    config = plain_config(loaded.hf_config)
    for key in ("torch_dtype", "dtype", "transformers_version"):
        config.pop(key, None)
    config |= {"architectures": [FAMILIES[loaded.family].architecture], "tie_word_embeddings": tied}
    result: dict[str, Any] = json.loads(json.dumps(config))
    return result


def environments(config: GrpoConfig) -> list[dict[str, str]]:
    """Of each engine that is started here: which devices it sees."""
    vllm = resolve_vllm(config)
    if config.device == "cpu":
        return [cpu_environment(eager=bool(vllm.enforce_eager)) for _ in range(vllm.replicas)]
    visible = [entry for entry in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if entry]
    per = vllm.tensor_parallel_size
    chosen = vllm.devices if vllm.mode == "server" and vllm.devices is not None else [LEARNERS_GPU]
    names = [visible[device] if device < len(visible) else str(device) for device in chosen]
    return [{"CUDA_VISIBLE_DEVICES": ",".join(names[first : first + per])} for first in range(0, len(names), per)]


def cpu_environment(*, eager: bool) -> dict[str, str]:
    """Threads that wait for work must not burn the cores that the learner computes on. Without compilation, none of vLLM's small functions
    is compiled either, which would hold up the first request for seconds and need a C++ compiler."""
    return {"OMP_WAIT_POLICY": "PASSIVE"} | ({"TORCHDYNAMO_DISABLE": "1"} if eager else {})


def lora_rank(rank: int) -> int:
    """The smallest rank that vLLM has kernels for and that holds `rank`.

    Raises:
        ValueError: there is none.
    """
    for supported in (8, 16, 32, 64, 128, 256, 320, 512):
        if rank <= supported:
            return supported
    raise ValueError(f"lora_rank: vLLM's own LoRA goes up to rank 512, not {rank}; set rollouts.vllm.sync: merged")
