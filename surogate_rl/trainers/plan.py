"""What a run would take and do, without loading a weight or a row."""

from __future__ import annotations

from dataclasses import dataclass

from surogate_rl import _core
from surogate_rl.config.schema import DpoConfig, GrpoConfig, SftConfig, TrainConfig
from surogate_rl.learner import Learner
from surogate_rl.models import inspect_model
from surogate_rl.trainers import dpo, grpo, sft
from surogate_rl.trainers.kv_cache import available_bytes, cache_tokens
from surogate_rl.trainers.sampling import stream_settings
from surogate_rl.trainers.session import check_context, compute_settings, learner_choices, memory_limit


@dataclass(frozen=True)
class Plan:
    """`lines` are ready to be printed; `bytes` is what all parts take together."""

    lines: list[str]
    bytes: int


def plan(config: TrainConfig) -> Plan:
    """Raises what loading the model's config raises (missing directory, unknown family...)."""
    info = inspect_model(config.model, tokenizer=config.tokenizer)
    spec, parameters = info.spec, info.parameters
    check_context(config, spec)
    tokens = micro_batch_tokens(config)
    parts = [(f"learner: {name}", size) for name, size in learner_plan(config, spec, tokens)]
    if isinstance(config, GrpoConfig):
        context = min(config.sequence_len, spec.max_positions)
        sequences = grpo.sequences_together(config)
        if config.rollouts.engine == "vllm":
            parts += vllm_parts(config, spec, sequences, context, parameters)
        else:
            tokens_cached = cache_tokens(spec, sequences, context, config.rollouts.kv_cache_gb)
            sampler = _core.Generator.plan(spec, max_sequences=sequences, cache_tokens=tokens_cached)
            parts += [(f"sampler: {name}", size) for name, size in sampler]
        if config.loss.beta > 0 and not config.lora:
            reference = Learner.plan(spec, max_tokens=tokens, trainable=False, compute=compute_settings(config))
            parts += [(f"reference: {name}", size) for name, size in reference]
    total = sum(size for _, size in parts)
    lines = [f"device {config.device}, {config.recipe}", "memory"]
    lines += [f"  {name:<44} {size / 2**20:>10.1f} MiB" for name, size in parts]
    lines.append(f"  {'total':<44} {total / 2**20:>10.1f} MiB")
    if limit := memory_limit(config):
        lines.append(f"  {'memory_limit_gb':<44} {limit / 2**20:>10.1f} MiB")
    lines += ["steps", *(f"  {line}" for line in step_lines(config, tokens))]
    return Plan(lines, total)


def vllm_parts(config: GrpoConfig, spec: _core.ModelSpec, sequences: int, context: int, parameters: int) -> list[tuple[str, int]]:
    """What an engine takes of the learner's device; nothing if it has devices of its own."""
    from surogate_rl.rollouts.engines.vllm.factory import engine_memory

    vllm, gpu = config.rollouts.vllm, config.device == "cuda"
    if vllm.base_url is not None or (gpu and vllm.mode == "server"):
        return []
    asked = config.rollouts.kv_cache_gb
    memory = engine_memory(
        spec,
        parameters,
        "float32" if vllm.dtype == "float32" else "bfloat16",
        sequences=sequences,
        context=context,
        free=None if gpu else available_bytes(),
        gpu=gpu,
        cache_bytes=int(asked * 2**30) if asked is not None else None,
    )
    parts = [("vllm: weights", memory.weights), ("vllm: KV cache, at the most", memory.cache)]
    if gpu:
        return [*parts, ("vllm: activations, CUDA graphs, context", memory.reserve)]
    return [(name, size * vllm.replicas) for name, size in parts] + [("vllm: copy of the weights for updates", memory.weights)]


def learner_plan(config: TrainConfig, spec: _core.ModelSpec, tokens: int) -> list[tuple[str, int]]:
    """What would be chosen now; where the device is not here to be asked and no limit is given, the largest choice."""
    *larger, smallest = learner_choices(config, tokens)
    room = memory_limit(config) or device_memory(config)
    for options in larger:
        parts = Learner.plan(spec, **options)
        if room is None or sum(size for _, size in parts) <= room:
            return parts
    return Learner.plan(spec, **smallest)


def device_memory(config: TrainConfig) -> int | None:
    """Bytes that the device has free; None if there is none here."""
    if config.device == "cuda" and not _core.cuda_available():
        return None
    return _core.available_memory("cuda" if config.device == "cuda" else "cpu")


def micro_batch_tokens(config: TrainConfig) -> int:
    if isinstance(config, GrpoConfig):
        return grpo.micro_batch_tokens(config)
    if isinstance(config, DpoConfig):
        return dpo.micro_batch_tokens(config)
    if isinstance(config, SftConfig):
        return sft.micro_batch_tokens(config)
    raise TypeError(f"no command trains with a {type(config).__name__}")


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
        steps = "the next step" if rollouts.max_staleness == 1 else f"the next {rollouts.max_staleness} steps"
        lines.append(
            f"while it learns, {steps} may be sampled: at most {settings.learning} groups ({settings.waiting} while it waits for its own)"
        )
        lines.append(f"no token that it trains is more than {rollouts.max_staleness} version(s) old (max_staleness)")
    elif rollouts.oversample > 0:
        lines.append(f"with {rollouts.oversample} spare group(s) beside them")
    if settings.limit is not None:
        lines.append(f"groups without signal are replaced, up to {settings.limit} groups sampled for a step (dynamic_sampling)")
    return lines
