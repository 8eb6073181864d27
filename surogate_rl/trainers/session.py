"""What every command sets up the same way: model, learner, tracking, checkpoints."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from surogate_rl._core import ModelSpec
from surogate_rl.checkpoint import CheckpointStore
from surogate_rl.config.resolve import write_resolved
from surogate_rl.config.schema import SftConfig, TrainConfig
from surogate_rl.console import Progress
from surogate_rl.errors import InputError
from surogate_rl.learner import Compute, Learner, LoraSettings
from surogate_rl.models import LoadedModel, load_adapter, load_model
from surogate_rl.trainers.output import CHECKPOINTS, CONFIG_FILE, check_output, claimed
from surogate_rl.trainers.update import LogpSettings, Updater

if TYPE_CHECKING:
    from surogate_rl.rollouts.engines.vllm.factory import Launched


@dataclass
class Session:
    """One run's parts. `learner` holds the initial weights when this is made; a checkpoint is loaded on top of them later. `launched`: the
    engine's processes, if it has any."""

    command: str
    config: TrainConfig
    output_dir: Path
    loaded: LoadedModel
    learner: Learner
    updater: Updater
    store: CheckpointStore
    progress: Progress
    launched: Launched | None = None


def lora_settings(config: TrainConfig) -> LoraSettings | None:
    if not config.lora:
        return None
    return LoraSettings(rank=config.lora_rank, alpha=config.lora_alpha, targets=config.lora_target_modules)


def memory_limit(config: TrainConfig) -> int:
    """Bytes; 0 leaves it to the learner, which takes what the machine has free."""
    return int(config.memory_limit_gb * 2**30) if config.memory_limit_gb else 0


def compute_settings(config: TrainConfig, *, keep_logits: bool = False, lend_gradients: bool = False) -> Compute:
    return Compute(
        device=config.device if config.device != "auto" else "cpu",
        deterministic=config.deterministic,
        recipe=config.recipe if config.recipe != "auto" else "float32",
        logits_dtype=config.logits_dtype if config.logits_dtype != "auto" else "",
        gradient_dtype=config.gradient_dtype,
        optimizer_state_dtype=config.optimizer_state_dtype,
        master_weights=config.master_weights,
        keep_logits=keep_logits,
        head_gradient_in_forward=config.device == "cuda",
        border_adapters=config.device == "cuda",
        lend_gradients=lend_gradients,
    )


def learner_options(config: TrainConfig, max_tokens: int, *, recompute: bool, keep_logits: bool = False) -> dict[str, Any]:
    return {
        "max_tokens": max_tokens,
        "threads": config.threads,
        "recompute": recompute,
        "lora": lora_settings(config),
        "seed": config.seed,
        "memory_limit": memory_limit(config),
        "compute": compute_settings(config, keep_logits=keep_logits, lend_gradients=recompute and _one_backward_per_step(config)),
    }


def learner_choices(config: TrainConfig, max_tokens: int) -> list[dict[str, Any]]:
    """Options of a learner from the fastest to the smallest: the first that fits is taken."""
    choices = [learner_options(config, max_tokens, recompute=config.recompute == "block")]
    if config.device == "cuda" and _logits_pay(config):
        choices.insert(0, learner_options(config, max_tokens, recompute=config.recompute == "block", keep_logits=True))
    if config.recompute == "auto":
        choices.append(learner_options(config, max_tokens, recompute=True))
    return choices


def _one_backward_per_step(config: TrainConfig) -> bool:
    """Whether nothing but a step's single backward writes gradients, and no other pass comes between it and the update."""
    return isinstance(config, SftConfig) and not config.lora and config.gradient_accumulation_steps == 1


def _logits_pay(config: TrainConfig) -> bool:
    """Whether a backward pass would compute logits again: not if its seeds are known beforehand, nor if the head is frozen."""
    head_trained = not config.lora or "lm_head" in config.lora_target_modules
    return head_trained and not (isinstance(config, SftConfig) and config.loss.loss_type == "nll")


def make_learner(config: TrainConfig, loaded: LoadedModel, max_tokens: int) -> Learner:
    """`recompute: auto` keeps activations where they fit and computes them again where they do not."""
    *larger, smallest = learner_choices(config, max_tokens)
    for options in larger:
        try:
            return Learner(loaded.spec, **options)
        except MemoryError:
            continue
    return Learner(loaded.spec, **smallest)


def check_context(config: TrainConfig, spec: ModelSpec) -> None:
    """Raises InputError if rows of `sequence_len` tokens would have positions that the model never learned."""
    if config.sequence_len > spec.max_positions:
        raise InputError(
            f"sequence_len: {config.sequence_len} is more than the model's context of {spec.max_positions} tokens "
            f"(max_position_embeddings of {config.model}); set sequence_len: {spec.max_positions} or less"
        )


@contextmanager
def open_session(command: str, config: TrainConfig, max_tokens: int, logp: Callable[[LoadedModel], LogpSettings]) -> Iterator[Session]:
    """Loads the model into a learner for micro-batches of `max_tokens` tokens; writes nothing before that has succeeded. The output
    folder is this session's alone until it ends."""
    check_output(config)
    loaded = load_model(config.model, tokenizer=config.tokenizer, chat_template=config.chat_template, init=config.init, seed=config.seed)
    check_context(config, loaded.spec)
    learner = make_learner(config, loaded, max_tokens)
    learner.load_weights(loaded.weights())
    if config.adapter is not None:
        load_adapter(learner, config.adapter)
    if config.lora:
        learner.snapshot_adapter()  # the reference of KL terms, whatever a checkpoint loads into the live adapter later
    output_dir = Path(config.output_dir)
    with claimed(output_dir):
        check_output(config)  # what another run may have left in the meantime
        write_resolved(config, output_dir / CONFIG_FILE)
        yield Session(
            command=command,
            config=config,
            output_dir=output_dir,
            loaded=loaded,
            learner=learner,
            updater=Updater(learner, config, logp(loaded)),
            store=CheckpointStore(output_dir / CHECKPOINTS, config.save_total_limit),
            progress=Progress(stream=sys.stderr),
        )
