"""Combinations of keys that cannot work, keys without effect, and the values that ``auto`` and empty stand for."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TypeVar

from surogate_rl.config.budget import budget_notes, budget_problems
from surogate_rl.config.devices import chosen_device, chosen_engine, chosen_recipe, cuda_unavailable_reason, samples
from surogate_rl.config.errors import KeyPath, Problem, path_text
from surogate_rl.config.explain import nearest
from surogate_rl.config.loss import SEQUENCE_RATIO_LOSSES, is_user_objective, loss_problems
from surogate_rl.config.paths import WHERE
from surogate_rl.config.schema import (
    Command,
    DatasetConfig,
    DepthBudgetConfig,
    DpoConfig,
    DynamicSamplingConfig,
    EnvironmentConfig,
    EvalConfig,
    GrpoConfig,
    PolicyLossConfig,
    RewardConfig,
    SamplingConfig,
    SftConfig,
    TrainConfig,
)
from surogate_rl.config.vllm import idle_vllm, resolve_vllm, vllm_problems
from surogate_rl.config.yaml_source import dump
from surogate_rl.files import user_path

LORA_MODULES = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj", "lm_head")
DEFAULT_EVAL_COMPLETION = 256
MAX_SEQUENCES = {"cpu": 64, "cuda": 256}

Config = TypeVar("Config", bound=TrainConfig)


def find_problems(config: TrainConfig, command: Command, *, rewards_given: bool = False, planning: bool = False) -> list[Problem]:
    """Everything that the types alone cannot rule out. ``planning``: nothing will run, so what this machine has does not matter."""
    problems = [
        *_device_problems(config, planning),
        *_training_problems(config),
        *_lora_problems(config),
        *_loss_problems(config),
    ]
    if config.eval is not None:
        problems.extend(_eval_problems(config, config.eval))
    if command != "sft" and not config.packing:
        problems.append(Problem(f"packing: {command} always packs; remove this key", ("packing",)))
    if isinstance(config, GrpoConfig):
        problems.extend(_rollout_problems(config))
        problems.extend(_grpo_problems(config, rewards_given))
        problems.extend(vllm_problems(config, planning))
    return problems


def _device_problems(config: TrainConfig, planning: bool) -> Iterator[Problem]:
    device = chosen_device(config)
    if config.device == "cuda" and not planning and (reason := cuda_unavailable_reason()):
        yield Problem(f"device: cuda was asked for, but {reason}", ("device",))
    if device == "cuda" and config.gpus is not None and config.gpus != 1:
        what = "0 leaves no GPU to device: cuda" if config.gpus == 0 else f"{config.gpus} asked for, but several GPUs are not there yet"
        yield Problem(f"gpus: {what}; set gpus: 1 or remove the key", ("gpus",), (("device",),))
    if device == "cpu" and config.gpus:
        sampled = "the native engine samples this run's completions on the cpu"
        why = "device is cpu" if config.device == "cpu" else cuda_unavailable_reason() or sampled
        yield Problem(f"gpus: {config.gpus} asked for, but {why}; set gpus: 0 or remove the key", ("gpus",), (("device",),))
    if device == "cpu" and config.recipe == "bfloat16":
        yield Problem("recipe: bfloat16 needs a GPU, the CPU computes in float32; set recipe: float32", ("recipe",), (("device",),))
    elif chosen_recipe(config) == "float32":
        for key in ("optimizer_state_dtype", "gradient_dtype", "logits_dtype"):
            if getattr(config, key) == "bfloat16":
                yield Problem(f"{key}: bfloat16 goes with recipe: bfloat16 on a GPU only; remove this key", (key,), (("recipe",),))
    if device == "cuda" and samples(config) and not isinstance(config, GrpoConfig):
        message = "eval.rewards: completions are sampled by the native engine, on the cpu only"
        hint = "set device: cpu, or remove eval.rewards to measure the held-out loss"
        yield Problem(f"{message}; {hint}", ("eval", "rewards"), (("device",),))


def _training_problems(config: TrainConfig) -> Iterator[Problem]:
    if config.max_steps == 0 or config.max_steps < -1:
        message = f"max_steps: expected a whole number greater than 0, or -1 for num_train_epochs; got {config.max_steps}"
        yield Problem(message, ("max_steps",))
    if config.warmup_ratio > 0 and config.warmup_steps > 0:
        yield Problem("warmup_ratio and warmup_steps are both given; keep one of them", ("warmup_ratio",), (("warmup_steps",),))
    if config.max_steps > 0 and config.warmup_steps > config.max_steps:
        yield Problem(
            f"warmup_steps: {config.warmup_steps} is more than max_steps ({config.max_steps}); lower it",
            ("warmup_steps",),
            (("max_steps",),),
        )
    if config.resume not in ("auto", "never") and not os.path.isdir(config.resume):
        yield Problem(
            f"resume: no checkpoint at '{config.resume}'; write auto, never, or a folder such as {config.output_dir}/checkpoints/step-100",
            ("resume",),
        )


def _lora_problems(config: TrainConfig) -> Iterator[Problem]:
    if config.lora_dropout != 0:
        yield Problem(f"lora_dropout: {config.lora_dropout:g} is not supported; set lora_dropout: 0 or remove the key", ("lora_dropout",))
    if config.adapter is not None and not config.lora:
        yield Problem("adapter: needs lora: true; set it, or merge the adapter into the model", ("adapter",), (("lora",),))
    if config.adapter is not None and not os.path.isdir(config.adapter):
        yield Problem(f"adapter: no folder '{config.adapter}'; give the folder that holds adapter_config.json", ("adapter",))
    if isinstance(config.lora_target_modules, list):
        if not config.lora_target_modules:
            yield Problem("lora_target_modules: an empty list trains nothing; write all-linear or names", ("lora_target_modules",))
        for index, module in enumerate(config.lora_target_modules):
            if module not in LORA_MODULES:
                close = nearest(module, LORA_MODULES)
                hint = f"did you mean '{close}'?" if close else f"choose from {', '.join(LORA_MODULES)}"
                path: KeyPath = ("lora_target_modules", index)
                yield Problem(f"{path_text(path)}: unknown module '{module}'; {hint}", path)
            elif module in config.lora_target_modules[:index]:
                path = ("lora_target_modules", index)
                yield Problem(f"{path_text(path)}: '{module}' is in the list twice; remove one", path)


def _loss_problems(config: TrainConfig) -> Iterator[Problem]:
    assert isinstance(config, SftConfig | DpoConfig | GrpoConfig)
    if is_user_objective(config.loss.loss_type):
        yield from _function_problems(config.loss.loss_type, ("loss", "loss_type"))
    yield from loss_problems(config.loss)


def _function_problems(name: str, path: KeyPath) -> Iterator[Problem]:
    """``path/file.py:function``: the file must be there; what is in it is seen when it is loaded."""
    file, _, function = name.rpartition(":")
    if not file.endswith(".py") or not function:
        yield Problem(f"{path_text(path)}: expected path/file.py:function, got '{name}'", path)
    else:
        yield from _file_problems(file, path)


def _file_problems(file: str, path: KeyPath) -> Iterator[Problem]:
    if not os.path.isfile(user_path(file)):
        yield Problem(f"{path_text(path)}: no file '{file}'; {WHERE}", path)


def _reward_problems(rewards: list[RewardConfig], path: KeyPath) -> Iterator[Problem]:
    """Built-in rewards with their options, and the files of a user's own."""
    from surogate_rl.rewards.registry import BUILTINS, RewardError, build

    for index, reward in enumerate(rewards):
        name: KeyPath = (*path, index, "name")
        if reward.name.endswith(".py"):
            yield from _file_problems(reward.name, name)
        elif reward.name not in BUILTINS and (":" in reward.name or "/" in reward.name):
            yield from _function_problems(reward.name, name)
        else:
            try:
                build(reward.name, reward.args)
            except RewardError as error:
                where = name if reward.name not in BUILTINS else (*path, index, "args")
                yield Problem(f"{path_text(where)}: {error}", where, (name,))


def _sampling_problems(sampling: SamplingConfig) -> Iterator[Problem]:
    """What bends the ratio of current to sampled probability is refused for training."""
    place = "would bias the ratio in training; it belongs under eval"
    if sampling.temperature == 0:
        message = "rollouts.temperature: 0 (greedy) cannot be trained on, all completions are alike; set it above 0"
        yield Problem(message, ("rollouts", "temperature"))
    if sampling.top_p < 1:
        yield Problem(f"rollouts.top_p: {sampling.top_p:g} {place}; set it to 1 or remove the key", ("rollouts", "top_p"))
    if sampling.top_k > 0:
        yield Problem(f"rollouts.top_k: {sampling.top_k} {place}; set it to 0 or remove the key", ("rollouts", "top_k"))
    if sampling.min_p > 0:
        yield Problem(f"rollouts.min_p: {sampling.min_p:g} {place}; set it to 0 or remove the key", ("rollouts", "min_p"))


def _rollout_problems(config: GrpoConfig) -> Iterator[Problem]:
    rollouts, loss = config.rollouts, config.loss
    yield from _sampling_problems(rollouts)
    if rollouts.num_generations == 1 and loss.loss_type != "reinforce_plus_plus":
        learner = "your own objective" if is_user_objective(loss.loss_type) else loss.loss_type
        yield Problem(
            f"rollouts.num_generations: a group of one has no baseline, {learner} learns nothing from it; "
            "set it to 2 or more, or loss: reinforce_plus_plus, whose baseline is the batch's",
            ("rollouts", "num_generations"),
            (("loss", "loss_type"),),
        )
    completions = rollouts.prompts_per_step * rollouts.num_generations
    if completions == 1 and loss.loss_type == "reinforce_plus_plus":
        yield Problem(
            "rollouts.prompts_per_step: a batch of one completion has no baseline; raise it or num_generations",
            ("rollouts", "prompts_per_step"),
            (("rollouts", "num_generations"),),
        )
    if completions % loss.num_minibatches:
        yield Problem(
            f"loss.num_minibatches: {loss.num_minibatches} does not divide the {completions} completions of a step "
            f"(prompts_per_step {rollouts.prompts_per_step} x num_generations {rollouts.num_generations}); choose a divisor",
            ("loss", "num_minibatches"),
            (("rollouts", "prompts_per_step"), ("rollouts", "num_generations")),
        )
    yield from _stream_problems(config)
    yield from budget_problems(config)
    yield from _length_problems(config)


def _stream_problems(config: GrpoConfig) -> Iterator[Problem]:
    """Groups that are sampled ahead, and groups that are passed over."""
    rollouts, loss, dynamic = config.rollouts, config.loss, config.rollouts.dynamic_sampling
    key: KeyPath = ("rollouts", "oversample")
    if rollouts.stragglers == "carry_over" and (rollouts.max_staleness == 0 or rollouts.oversample == 0):
        yield Problem(
            f"rollouts.stragglers: carry_over leaves groups that are under way to the next step, whose weights are a version newer, and "
            f"needs others in their place; set max_staleness (now {rollouts.max_staleness}) and oversample (now {rollouts.oversample}) to "
            "1 or more, or stragglers: wait",
            ("rollouts", "stragglers"),
            (("rollouts", "max_staleness"), key),
        )
    elif rollouts.stragglers == "carry_over" and rollouts.max_staleness == 1 and rollouts.oversample >= rollouts.prompts_per_step:
        yield Problem(
            f"rollouts.stragglers: {rollouts.oversample} groups carried over would take all {rollouts.prompts_per_step} places of the next "
            "step, and with max_staleness 1 it would have to wait for each of them; set oversample below prompts_per_step (about as many "
            "groups of a step as are slow), or max_staleness to 2",
            ("rollouts", "stragglers"),
            (key, ("rollouts", "prompts_per_step"), ("rollouts", "max_staleness")),
        )
    if rollouts.max_staleness > 0 and rollouts.oversample > rollouts.prompts_per_step:
        yield Problem(
            f"rollouts.oversample: with {rollouts.oversample} groups beyond a step's {rollouts.prompts_per_step} the last ones would be "
            f"trained later than max_staleness ({rollouts.max_staleness}) allows; set it to prompts_per_step at the most",
            key,
            (("rollouts", "max_staleness"), ("rollouts", "prompts_per_step")),
        )
    elif rollouts.max_staleness == 0 and rollouts.oversample > 0 and not dynamic.enabled:
        yield Problem(
            f"rollouts.oversample: {rollouts.oversample} groups more would be sampled for nothing: max_staleness 0 lets no group be "
            "carried over to the next step, and without dynamic_sampling none is replaced; set max_staleness to 1 or more, or remove it",
            key,
            (("rollouts", "max_staleness"), ("rollouts", "dynamic_sampling")),
        )
    elif rollouts.max_staleness == 0 and rollouts.oversample > (dynamic.max_rounds - 1) * rollouts.prompts_per_step:
        yield Problem(
            f"rollouts.oversample: {rollouts.oversample} spares are more than dynamic_sampling.max_rounds ({dynamic.max_rounds}) lets a "
            f"step of {rollouts.prompts_per_step} prompts use; lower it or raise max_rounds",
            key,
            (("rollouts", "dynamic_sampling", "max_rounds"), ("rollouts", "prompts_per_step")),
        )
    if not dynamic.enabled:
        return
    where: KeyPath = ("rollouts", "dynamic_sampling", "enabled")
    if rollouts.num_generations == 1:
        yield Problem(
            "rollouts.dynamic_sampling: the reward of a group of one never differs from the group's, so every group would be passed over; "
            "set num_generations to 2 or more, or enabled: false",
            where,
            (("rollouts", "num_generations"),),
        )
    elif loss.loss_type == "reinforce_plus_plus":
        yield Problem(
            "rollouts.dynamic_sampling: reinforce_plus_plus compares with the whole batch, so groups of equal rewards teach something too; "
            "set enabled: false or another loss",
            where,
            (("loss", "loss_type"),),
        )


def _length_problems(config: GrpoConfig) -> Iterator[Problem]:
    rollouts = config.rollouts
    if rollouts.max_completion_length >= config.sequence_len:
        yield Problem(
            f"rollouts.max_completion_length: {rollouts.max_completion_length} leaves no room for a prompt in sequence_len "
            f"({config.sequence_len}); lower it or raise sequence_len",
            ("rollouts", "max_completion_length"),
            (("sequence_len",),),
        )
    elif rollouts.max_prompt_length is not None and rollouts.max_prompt_length + rollouts.max_completion_length > config.sequence_len:
        yield Problem(
            f"rollouts.max_prompt_length: {rollouts.max_prompt_length} and max_completion_length ({rollouts.max_completion_length}) "
            f"do not fit in sequence_len ({config.sequence_len}); lower one or raise sequence_len",
            ("rollouts", "max_prompt_length"),
            (("rollouts", "max_completion_length"), ("sequence_len",)),
        )


def _grpo_problems(config: GrpoConfig, rewards_given: bool) -> Iterator[Problem]:
    yield from _environment_problems(config.environment)
    rewarding = _rewards_itself(config.environment)
    if not config.rewards and not rewards_given and not rewarding:
        yield Problem("rewards: grpo needs at least one, such as 'rewards: [exact_match]' or path/file.py:function", ("rewards",))
    yield from _reward_problems(config.rewards, ("rewards",))
    if config.rewards and not rewards_given and not rewarding and all(reward.weight == 0 for reward in config.rewards):
        yield Problem("rewards: every weight is 0, there is nothing to learn from; give one a weight", ("rewards",))
    if config.lora and config.loss.sync_ref_model:
        yield Problem(
            "loss.sync_ref_model: with lora: true the reference is the adapter that the run starts from, which stays as it is; "
            "set sync_ref_model: false, or train all weights (lora: false)",
            ("loss", "sync_ref_model"),
            (("lora",),),
        )
    if config.environment.turn_credit != "none" and config.loss.loss_type in SEQUENCE_RATIO_LOSSES:
        yield Problem(
            f"environment.turn_credit: {config.environment.turn_credit} gives tokens advantages of their own, but {config.loss.loss_type} "
            "has one ratio and one advantage for the whole sequence; set it to none, or use another loss such as grpo or dr_grpo",
            ("environment", "turn_credit"),
            (("loss", "loss_type"),),
        )
    if config.environment.turn_credit != "none" and (config.rollouts.budget.depth or config.rollouts.budget.width):
        yield Problem(
            f"environment.turn_credit: {config.environment.turn_credit} does not go with rollouts.budget, which gives credit its own way; "
            "set it to none, or switch the budget off",
            ("environment", "turn_credit"),
            (("rollouts", "budget"),),
        )
    if config.gradient_accumulation_steps != 1:
        yield Problem(
            "gradient_accumulation_steps: a grpo step is rollouts.prompts_per_step x rollouts.num_generations completions, "
            "split by memory alone; raise prompts_per_step instead and remove this key",
            ("gradient_accumulation_steps",),
        )
    if config.overlong == "truncate":
        yield Problem("overlong: grpo drops prompts that are too long, a cut prompt asks something else; remove this key", ("overlong",))


def _environment_problems(environment: EnvironmentConfig) -> Iterator[Problem]:
    """The name, the options of a built-in one, and the files of a user's own."""
    from surogate_rl.rollouts.environments import EnvironmentConfigError, check_environment, parse_name

    name: KeyPath = ("environment", "name")
    try:
        kind, target = parse_name(environment.name)
    except EnvironmentConfigError as error:
        yield Problem(f"environment: {error}", name, (("environment",),))
        return
    try:
        check_environment(environment.name, environment.args)
    except EnvironmentConfigError as error:
        key = str(error).partition(":")[0].removeprefix("args.")
        where: KeyPath = ("environment", "args", key) if key in environment.args else ("environment", "args")
        yield Problem(f"environment.{error}", where, (("environment", "args"), name, ("environment",)))
    if kind != "verifiers" and target.rpartition(":")[0].endswith(".py"):
        yield from _file_problems(target.rpartition(":")[0], name)
    if kind == "tools":
        tools = environment.args.get("tools", [])
        for index, tool in enumerate([tools] if isinstance(tools, str) else tools if isinstance(tools, list) else []):
            if isinstance(tool, str):
                yield from _function_problems(tool, ("environment", "args", "tools", index))
    if kind == "single_turn" and environment.max_turns not in (None, 1):
        yield Problem(
            f"environment.max_turns: single_turn has one turn, {environment.max_turns} asked for; remove it, or name another environment",
            ("environment", "max_turns"),
        )


def _rewards_itself(environment: EnvironmentConfig) -> bool:
    """Whether the environment's own reward is worth something."""
    from surogate_rl.rollouts.environments import EnvironmentConfigError, gives_rewards

    try:
        return environment.weight != 0 and gives_rewards(environment.name)
    except EnvironmentConfigError:
        return True  # what is wrong with it is said elsewhere


def _eval_problems(config: TrainConfig, evaluation: EvalConfig) -> Iterator[Problem]:
    if evaluation.samples > 1 and evaluation.temperature == 0:
        yield Problem(
            f"eval.samples: {evaluation.samples} greedy completions are all alike; set eval.temperature above 0 or samples: 1",
            ("eval", "samples"),
            (("eval", "temperature"),),
        )
    if evaluation.max_completion_length is not None and evaluation.max_completion_length >= config.sequence_len:
        yield Problem(
            f"eval.max_completion_length: {evaluation.max_completion_length} leaves no room for a prompt in sequence_len "
            f"({config.sequence_len}); lower it or raise sequence_len",
            ("eval", "max_completion_length"),
            (("sequence_len",),),
        )
    yield from _reward_problems(evaluation.rewards, ("eval", "rewards"))


def find_idle_keys(config: TrainConfig) -> list[Problem]:
    """Keys that do nothing as the others stand. They are only told: switching ``lora`` off for a run should not need six edits."""
    default = type(config).model_construct()
    found: list[Problem] = []

    def idle(section: object, base: object, keys: tuple[str, ...], because: str, prefix: KeyPath = ()) -> None:
        for key in keys:
            if getattr(section, key) != getattr(base, key):
                path = (*prefix, key)
                found.append(Problem(f"{path_text(path)} has no effect while {because}", path))

    if not config.lora:
        idle(config, default, ("lora_rank", "lora_alpha", "lora_target_modules"), "lora is false")
    if config.max_steps > 0:
        idle(config, default, ("num_train_epochs",), "max_steps is given")
    if chosen_recipe(config) == "float32":
        idle(config, default, ("master_weights",), "the recipe is float32")
    if chosen_device(config) == "cpu":
        idle(config, default, ("deterministic",), "the device is cpu, which always gives the same bits")
    else:
        idle(config, default, ("threads",), "the device is cuda")
    on_cpu = config.device == "auto" and config.gpus != 0 and chosen_device(config) == "cpu"
    if on_cpu and samples(config) and not cuda_unavailable_reason():
        message = "device: auto takes the cpu, although there is a GPU: the native engine samples on the cpu only"
        found.append(Problem(message + ("; vLLM would on the GPU" if isinstance(config, GrpoConfig) else ""), ("device",)))
    if config.save_steps == 0:
        idle(config, default, ("save_total_limit",), "save_steps is 0")
    if config.lr_scheduler_type == "constant":
        idle(config, default, ("warmup_ratio", "warmup_steps"), "lr_scheduler_type is constant; constant_with_warmup uses it")
    if "wandb" not in config.report_to:
        idle(config, default, ("run_name",), "report_to has no wandb")
    if config.eval is not None:
        _idle_eval(config, config.eval, idle)
    if isinstance(config, GrpoConfig):
        _idle_grpo(config, idle)
        if config.rollouts.max_staleness > 0 and config.loss.mismatch == "none":
            message = "loss.mismatch: none trains what older weights sampled as if the present ones had; auto weighs it"
            found.append(Problem(message, ("loss", "mismatch"), (("rollouts", "max_staleness"),)))
        found.extend(budget_notes(config))
    return found


def _idle_grpo(config: GrpoConfig, idle: Callable[..., None]) -> None:
    rollouts, environment = config.rollouts, config.environment
    if environment.name == "single_turn":
        keys = ("timeout", "turn_credit", "turn_discount")
        idle(environment, EnvironmentConfig(), keys, "environment.name is single_turn", ("environment",))
    elif environment.turn_credit == "none":
        idle(environment, EnvironmentConfig(), ("turn_discount",), "environment.turn_credit is none", ("environment",))
    if environment.name in ("single_turn", "tools"):
        idle(environment, EnvironmentConfig(), ("weight",), f"{environment.name} gives no reward of its own", ("environment",))
    idle_vllm(config, idle)
    if config.loss.mismatch == "auto" and chosen_engine(config) == "native" and rollouts.max_staleness == 0:
        because = "loss.mismatch is auto: the native engine needs none while max_staleness is 0"
        idle(config.loss, PolicyLossConfig(), ("mismatch_cap", "mismatch_floor"), because, ("loss",))
    budget = rollouts.budget
    if budget.depth is not None and budget.depth.explore != "auto":
        idle(budget.depth, DepthBudgetConfig(), ("min_explore",), "explore is given", ("rollouts", "budget", "depth"))
    if not rollouts.dynamic_sampling.enabled:
        because = "rollouts.dynamic_sampling.enabled is false"
        idle(rollouts.dynamic_sampling, DynamicSamplingConfig(), ("max_rounds",), because, ("rollouts", "dynamic_sampling"))


def _idle_eval(config: TrainConfig, evaluation: EvalConfig, idle: Callable[..., None]) -> None:
    base = EvalConfig(datasets=[DatasetConfig(path="-")])
    generates = isinstance(config, GrpoConfig) or bool(evaluation.rewards)
    if not generates:
        keys = ("temperature", "top_p", "top_k", "min_p", "stop", "samples", "pass_threshold", "max_completion_length")
        idle(evaluation, base, keys, "eval has no rewards: the loss on its rows is measured", ("eval",))
    elif evaluation.temperature == 0:
        idle(evaluation, base, ("top_p", "top_k", "min_p"), "eval.temperature is 0", ("eval",))


def resolve(config: Config) -> Config:
    """Fills in what ``auto`` and the empty value stand for, so that what is written down says what ran. Resolving twice changes nothing."""
    device, recipe = chosen_device(config), chosen_recipe(config)
    update: dict[str, object] = {
        "device": device,
        "recipe": recipe,
        "logits_dtype": recipe if config.logits_dtype == "auto" else config.logits_dtype,
        "gpus": 1 if device == "cuda" else 0,
    }
    evaluation = config.eval
    if isinstance(config, GrpoConfig):
        rollouts = config.rollouts
        room = config.sequence_len - rollouts.max_completion_length
        turns = config.environment.turns
        update["environment"] = config.environment.model_copy(update={"max_turns": turns})
        update["rollouts"] = rollouts.model_copy(
            update={
                "engine": chosen_engine(config),
                "vllm": resolve_vllm(config),
                "max_prompt_length": rollouts.max_prompt_length or room,
                "max_sequences": rollouts.max_sequences or MAX_SEQUENCES[device],
            }
        )
        if evaluation is not None:
            # `eval.rewards` stays empty where none are named: then the training's own are used, those given from Python among them
            update["eval"] = evaluation.model_copy(
                update={
                    "stop": rollouts.stop if evaluation.stop is None else evaluation.stop,
                    "max_completion_length": evaluation.max_completion_length or rollouts.max_completion_length,
                }
            )
    elif evaluation is not None and evaluation.rewards:
        length = min(DEFAULT_EVAL_COMPLETION, max(1, config.sequence_len // 2))
        update["eval"] = evaluation.model_copy(
            update={"stop": evaluation.stop or [], "max_completion_length": evaluation.max_completion_length or length}
        )
    return config.model_copy(update=update)


def dump_config(config: TrainConfig) -> str:
    """YAML with every key, defaults included."""
    return dump(config.model_dump(mode="python"))


def write_resolved(config: TrainConfig, path: str | os.PathLike[str]) -> None:
    """Writes `dump_config` to a file that `load_config` reads back to the same configuration; never leaves half a file."""
    target = Path(path)
    target.parent.mkdir(parents=True, exist_ok=True)
    aside = target.with_name(f".{target.name}.{os.getpid()}")
    aside.write_text(dump_config(config), encoding="utf-8")
    aside.replace(target)
