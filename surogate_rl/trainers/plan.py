"""What a run would take and do, without loading a weight or a row."""

from __future__ import annotations

from dataclasses import dataclass

from surogate_rl.config.schema import DpoConfig, GrpoConfig, SftConfig, TrainConfig
from surogate_rl.models import count_sampled_ids, inspect_model
from surogate_rl.trainers import dpo, grpo, sft
from surogate_rl.trainers.memory import Demands, MemoryPlan, plan_memory
from surogate_rl.trainers.sampling import stream_settings
from surogate_rl.trainers.session import check_context


@dataclass(frozen=True)
class Plan:
    """`lines` are ready to be printed; `memory` is what a run made of the same configuration would take."""

    lines: list[str]
    memory: MemoryPlan

    @property
    def bytes(self) -> int:
        """What all parts take together."""
        return self.memory.bytes


def plan(config: TrainConfig) -> Plan:
    """Does not refuse what does not fit here, since it may be planned for another machine, but says so.

    Raises what loading the model's config, its tokenizer and the objective raises (missing directory, unknown family...).
    """
    info = inspect_model(config.model, tokenizer=config.tokenizer)
    check_context(config, info.spec)
    asked = demands(config)
    sampled = count_sampled_ids(config.model, info.spec.vocab, tokenizer=config.tokenizer) if asked.sequences else 0
    memory = plan_memory(config, info.spec, asked, parameters=info.parameters, valid_vocab=sampled)
    lines = [f"device {config.device}, {config.recipe}", "memory"]
    lines += [f"  {line}" for line in memory_lines(memory)]
    lines += ["steps", *(f"  {line}" for line in step_lines(config, asked.max_tokens))]
    return Plan(lines, memory)


def demands(config: TrainConfig) -> Demands:
    if isinstance(config, GrpoConfig):
        return grpo.demands(config, grpo.objective_of(config))
    if isinstance(config, DpoConfig):
        return dpo.demands(config)
    if isinstance(config, SftConfig):
        return sft.demands(config)
    raise TypeError(f"no command trains with a {type(config).__name__}")


def memory_lines(memory: MemoryPlan) -> list[str]:
    sizes = [*memory.parts, ("total", memory.bytes)]
    if memory.available is not None:
        sizes.append(("available here", memory.available))
    if memory.limit:
        sizes.append(("memory_limit_gb", memory.limit))
    lines = [f"{name:<44} {size / 2**20:>10.1f} MiB" for name, size in sizes]
    return lines if memory.fits else [*lines, f"this does not fit, such a run is refused. {memory.advice}"]


def step_lines(config: TrainConfig, tokens: int) -> list[str]:
    lines = [f"micro-batches of at most {tokens} tokens"]
    if isinstance(config, GrpoConfig):
        rollouts, loss = config.rollouts, config.loss
        completions = f"{rollouts.prompts_per_step} prompts x {rollouts.num_generations} completions"
        updates = loss.num_iterations * loss.num_minibatches
        turns = f" in each of at most {config.environment.max_turns} turns" if (config.environment.max_turns or 1) > 1 else ""
        lines.append(f"a step samples {completions} of at most {rollouts.max_completion_length} tokens{turns}")
        lines += stream_lines(config)
        lines.append(f"and makes {updates} update(s): {loss.num_iterations} pass(es) of {loss.num_minibatches} minibatch(es)")
    else:
        rows = config.per_device_train_batch_size * config.gradient_accumulation_steps
        unit = "pairs" if isinstance(config, DpoConfig) else f"packs of {config.sequence_len} tokens" if config.packing else "examples"
        lines.append(f"a step takes {rows} {unit}")
    if config.max_steps > 0:
        lines.append(f"{config.max_steps} steps (max_steps)")
    else:
        lines.append(
            f"{config.num_train_epochs:g} epoch(s) of the data (num_train_epochs); their number of steps is known once the data is read"
        )
    return lines


def stream_lines(config: GrpoConfig) -> list[str]:
    """What is sampled ahead, carried over or passed over."""
    rollouts, settings = config.rollouts, stream_settings(config.rollouts, 1)
    lines = []
    if rollouts.max_staleness > 0:
        ahead = settings.learning // settings.groups
        steps = "the next step" if ahead == 1 else f"the next {ahead} steps"
        if ahead:
            begun = f"{steps} may be sampled: at most {settings.learning} groups ({settings.waiting} while it waits for its own)"
        else:
            begun = f"no group is begun; at most {settings.waiting} groups are under way while it waits for its own"
        lines.append(f"while it learns, {begun}")
        if settings.carry_over:
            lines.append("groups under way when enough others have ended are left to the next step (stragglers)")
        lines.append(f"no token that it trains is more than {rollouts.max_staleness} version(s) old (max_staleness)")
    elif rollouts.oversample > 0:
        lines.append(f"with {rollouts.oversample} spare group(s) beside them")
    if settings.limit is not None:
        lines.append(f"groups without signal are replaced, up to {settings.limit} groups sampled for a step (dynamic_sampling)")
    return lines
