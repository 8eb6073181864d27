"""What an engine is started with."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch

from surogate_rl.rollouts.engines.vllm.weights import Sync, Transfer

Mode = Literal["colocate", "server"]
EngineDtype = Literal["float32", "bfloat16"]


@dataclass(frozen=True)
class VllmOptions:
    """
    Attributes:
        mode: one engine beside the learner, or servers: `base_urls`, or `replicas` that are started here.
        python: interpreter that has vLLM.
        base_urls: ``tcp://host:port`` of servers that the user has started.
        environments: environment variables of each replica that is started here (its devices).
        log: file that takes what the engines print; several replicas get a number each.
        model_config: what config.json holds.
        engine_args: of vLLM, by name.
        dtype: of the engine's weights.
        valid_vocab: ids from there on are never sampled and count as impossible (0: all are valid).
        memory_bytes: of a GPU that an engine may take altogether (0: engine_args say so).
        sync: which weights travel.
        transfer: over which memory: the GPU's, mapped by the engine (an engine that is started here on the learner's GPU), or the host's.
        token: what servers of the user want to be shown.
        startup_timeout: seconds until an engine must be ready.
        timeout: seconds without a sign of life after which an engine counts as dead.
        heartbeat: seconds between two checks.
        max_restarts: of one replica in a run.
        probe_tolerance: mean absolute difference of log-probabilities, in nats, that the probe after a sync bears.
        probe_temperature: at which the probe samples: the rollouts'.
    """

    model_config: Mapping[str, Any]
    engine_args: Mapping[str, Any]
    dtype: EngineDtype
    valid_vocab: int
    log: Path
    python: str
    memory_bytes: int = 0
    mode: Mode = "colocate"
    base_urls: tuple[str, ...] = ()
    environments: tuple[Mapping[str, str], ...] = field(default_factory=lambda: ({},))
    sync: Sync = "full"
    transfer: Transfer = "host"
    token: str = ""
    startup_timeout: float = 600.0
    timeout: float = 120.0
    heartbeat: float = 10.0
    max_restarts: int = 3
    probe_tolerance: float = 0.05
    probe_temperature: float = 1.0

    @property
    def torch_dtype(self) -> torch.dtype:
        return torch.float32 if self.dtype == "float32" else torch.bfloat16

    def settings(self) -> dict[str, Any]:
        """What the engine's program is told."""
        return {
            "model_config": dict(self.model_config),
            "engine_args": {"dtype": self.dtype, **self.engine_args},
            "valid_vocab": self.valid_vocab,
            "memory_bytes": self.memory_bytes,
        }
