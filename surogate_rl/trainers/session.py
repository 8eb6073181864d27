"""What every command sets up the same way: model, learner, tracking, checkpoints."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from surogate_rl._core import ModelSpec
from surogate_rl.checkpoint import CheckpointStore
from surogate_rl.config.resolve import write_resolved
from surogate_rl.config.schema import TrainConfig
from surogate_rl.console import Progress
from surogate_rl.errors import InputError
from surogate_rl.learner import Learner
from surogate_rl.models import LoadedModel, load_adapter, load_model
from surogate_rl.trainers.memory import Demands, MemoryPlan, plan_memory
from surogate_rl.trainers.output import CHECKPOINTS, CONFIG_FILE, check_output, claimed
from surogate_rl.trainers.update import LogpSettings, Updater

if TYPE_CHECKING:
    from surogate_rl.rollouts.engines.vllm.factory import Launched


@dataclass
class Session:
    """One run's parts. `learner` holds the initial weights when this is made; a checkpoint is loaded on top of them later. `memory`: what
    all parts may take. `launched`: the engine's processes, if it has any."""

    command: str
    config: TrainConfig
    output_dir: Path
    loaded: LoadedModel
    learner: Learner
    memory: MemoryPlan
    updater: Updater
    store: CheckpointStore
    progress: Progress
    launched: Launched | None = None


def check_context(config: TrainConfig, spec: ModelSpec) -> None:
    """Raises InputError if rows of `sequence_len` tokens would have positions that the model never learned."""
    if config.sequence_len > spec.max_positions:
        raise InputError(
            f"sequence_len: {config.sequence_len} is more than the model's context of {spec.max_positions} tokens "
            f"(max_position_embeddings of {config.model}); set sequence_len: {spec.max_positions} or less"
        )


@contextmanager
def open_session(command: str, config: TrainConfig, demands: Demands, logp: Callable[[LoadedModel], LogpSettings]) -> Iterator[Session]:
    """Loads the model into a learner; writes nothing before that has succeeded. The output folder is this session's alone until it ends,
    and the learner's memory is given back then.

    Raises:
        MemoryError: the run does not fit; nothing was taken.
    """
    check_output(config)
    loaded = load_model(config.model, tokenizer=config.tokenizer, chat_template=config.chat_template, init=config.init, seed=config.seed)
    check_context(config, loaded.spec)
    memory = plan_memory(config, loaded.spec, demands, parameters=loaded.parameters, valid_vocab=loaded.valid_vocab)
    memory.require()
    with closing(Learner(loaded.spec, **memory.learner)) as learner:
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
                memory=memory,
                updater=Updater(learner, config, logp(loaded)),
                store=CheckpointStore(output_dir / CHECKPOINTS, config.save_total_limit),
                progress=Progress(stream=sys.stderr),
            )
