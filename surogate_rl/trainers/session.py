"""What every command sets up the same way: model, learner, tracking, checkpoints."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from surogate_rl.checkpoint import CheckpointStore
from surogate_rl.config.resolve import write_resolved
from surogate_rl.config.schema import TrainConfig
from surogate_rl.console import Progress
from surogate_rl.learner import Learner, LoraSettings
from surogate_rl.models import LoadedModel, load_adapter, load_model
from surogate_rl.trainers.update import LogpSettings, Updater

CONFIG_FILE = "config.yaml"
CHECKPOINTS = "checkpoints"
FINAL = "final"


@dataclass
class Session:
    """One run's parts. `learner` holds the initial weights when this is made; a checkpoint is loaded on top of them later."""

    command: str
    config: TrainConfig
    output_dir: Path
    loaded: LoadedModel
    learner: Learner
    updater: Updater
    store: CheckpointStore
    progress: Progress


def lora_settings(config: TrainConfig) -> LoraSettings | None:
    if not config.lora:
        return None
    return LoraSettings(rank=config.lora_rank, alpha=config.lora_alpha, targets=config.lora_target_modules)


def memory_limit(config: TrainConfig) -> int:
    """Bytes; 0 leaves it to the learner, which takes what the machine has free."""
    return int(config.memory_limit_gb * 2**30) if config.memory_limit_gb else 0


def learner_options(config: TrainConfig, max_tokens: int, recompute: bool) -> dict[str, Any]:
    return {
        "max_tokens": max_tokens,
        "threads": config.threads,
        "recompute": recompute,
        "lora": lora_settings(config),
        "seed": config.seed,
        "memory_limit": memory_limit(config),
    }


def make_learner(config: TrainConfig, loaded: LoadedModel, max_tokens: int) -> Learner:
    """`recompute: auto` keeps activations where they fit and computes them again where they do not."""
    if config.recompute != "auto":
        return Learner(loaded.spec, **learner_options(config, max_tokens, config.recompute == "block"))
    try:
        return Learner(loaded.spec, **learner_options(config, max_tokens, False))
    except MemoryError:
        return Learner(loaded.spec, **learner_options(config, max_tokens, True))


def open_session(command: str, config: TrainConfig, max_tokens: int, logp: Callable[[LoadedModel], LogpSettings]) -> Session:
    """Loads the model into a learner for micro-batches of `max_tokens` tokens; writes nothing before that has succeeded."""
    loaded = load_model(config.model, tokenizer=config.tokenizer, chat_template=config.chat_template, init=config.init, seed=config.seed)
    learner = make_learner(config, loaded, max_tokens)
    learner.load_weights(loaded.weights())
    if config.adapter is not None:
        load_adapter(learner, config.adapter)
    if config.lora:
        learner.snapshot_adapter()  # the reference of KL terms, whatever a checkpoint loads into the live adapter later
    output_dir = Path(config.output_dir)
    output_dir.mkdir(parents=True, exist_ok=True)
    write_resolved(config, output_dir / CONFIG_FILE)
    return Session(
        command=command,
        config=config,
        output_dir=output_dir,
        loaded=loaded,
        learner=learner,
        updater=Updater(learner, config, logp(loaded)),
        store=CheckpointStore(output_dir / CHECKPOINTS, config.save_total_limit),
        progress=Progress(stream=sys.stderr),
    )
