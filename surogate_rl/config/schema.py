"""Every key of the YAML, its type, default and meaning. Loading and error messages are in `load.py`, combinations in `resolve.py`.

docs/config.md is generated from this file (``python -m surogate_rl.config.docs``).
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

Command = Literal["sft", "dpo", "grpo"]

Text = Annotated[str, Field(min_length=1)]
PositiveInt = Annotated[int, Field(gt=0)]
NonNegativeInt = Annotated[int, Field(ge=0)]
PositiveFloat = Annotated[float, Field(gt=0)]
NonNegativeFloat = Annotated[float, Field(ge=0)]
Fraction = Annotated[float, Field(ge=0, le=1)]
Seed = Annotated[int, Field(ge=0, le=2**63 - 1)]


class Section(BaseModel):
    """Strict: a bool is no number, text is no number, infinity is no number, and an unknown key is an error."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False)


class DatasetConfig(Section):
    """One source of rows. A plain string in the YAML stands for ``{path: string}``."""

    path: Text = Field(description="a hub id, a file (jsonl, json, parquet, csv), a directory, or `reasoning_gym/<task>`")
    type: Literal["auto", "messages", "prompt_completion", "prompt", "text", "instruction", "sharegpt", "preference"] = Field(
        default="auto", description="what a row looks like; auto: recognised from its columns"
    )
    split: Text = Field(default="train", description="split of the data set")
    name: Text | None = Field(default=None, description="configuration of a hub data set")
    size: PositiveInt | None = Field(default=None, description="rows to take (reasoning_gym: rows to generate)")
    seed: Seed | None = Field(default=None, description="reasoning_gym: seed of the generated rows; default: the run's")
    args: dict[str, Any] = Field(default_factory=dict, description="arguments of a reasoning_gym task")
    columns: dict[str, str] = Field(default_factory=dict, description="our column name -> the data set's, e.g. `{prompt: question}`")
    system_prompt: str | None = Field(default=None, description="prepended as a system message where the row has none")


class LossConfig(Section):
    """Shared by the commands; each refuses what is not its own. Names are TRL's where it has them. ``loss: dapo`` stands for
    ``{loss_type: dapo}``."""

    loss_type: str | None = Field(default=None, description="see the command's list; or path/file.py:fn, a user's own objective")


class PolicyLossConfig(LossConfig):
    loss_type: Text = Field(
        default="grpo",
        description="grpo, dapo, dr_grpo, gspo, cispo, sapo, rloo, reinforce_plus_plus, or path/file.py:fn, your own objective",
    )
    epsilon: NonNegativeFloat = Field(default=0.2, description="clip width of the ratio")
    epsilon_high: NonNegativeFloat | None = Field(
        default=None, description="upper clip width; default: epsilon (cispo: the cap of the weight, default 5)"
    )
    delta: PositiveFloat | None = Field(
        default=None, description="dual clip: upper bound of the ratio where the advantage is negative; > 1 + epsilon_high"
    )
    beta: NonNegativeFloat = Field(
        default=0.0,
        description="weight of the KL to the reference: k3 in the loss (rloo: k1 taken off the reward); 0: no reference is kept",
    )
    scale_rewards: Literal["group", "batch", "none"] | None = Field(
        default=None,
        description="what the advantages' standard deviation is taken over; default: group (rloo: none, reinforce_plus_plus: batch)",
    )
    num_iterations: PositiveInt = Field(default=1, description="passes over the rollouts of a step")
    num_minibatches: PositiveInt = Field(default=1, description="optimiser updates per pass")
    mask_truncated_completions: bool = Field(default=False, description="leave completions that hit the length limit out of the loss")
    entropy_coef: NonNegativeFloat = Field(default=0.0, description="weight of the entropy bonus")
    sapo_temperature_pos: PositiveFloat = Field(default=1.0, description="sapo: temperature of the gate where the advantage is positive")
    sapo_temperature_neg: PositiveFloat = Field(default=1.05, description="sapo: temperature of the gate where the advantage is negative")
    mismatch: Literal[
        "auto", "none", "token_truncate", "token_mask", "sequence_truncate", "sequence_mask", "geometric_truncate", "geometric_mask"
    ] = Field(
        default="auto",
        description="correction of sampler against learner; auto: none with the native engine while max_staleness is 0, else "
        "token_truncate (rloo: sequence_truncate)",
    )
    mismatch_cap: PositiveFloat = Field(default=3.0, description="upper bound of the mismatch weight")
    mismatch_floor: NonNegativeFloat = Field(default=0.0, description="lower bound of the mismatch weight")
    sync_ref_model: bool = Field(default=False, description="move the reference towards the policy every ref_model_sync_steps")
    ref_model_mixup_alpha: Fraction = Field(default=0.6, description="share of the policy in the synchronised reference")
    ref_model_sync_steps: PositiveInt = Field(default=512, description="steps between two synchronisations of the reference")
    args: dict[str, Any] = Field(default_factory=dict, description="keyword arguments of your own objective")


class PreferenceLossConfig(LossConfig):
    loss_type: Text = Field(
        default="sigmoid", description="sigmoid, ipo, hinge, robust, sigmoid_norm, or path/file.py:fn, your own objective"
    )
    beta: PositiveFloat = Field(default=0.1, description="inverse temperature of the implicit reward")
    label_smoothing: Annotated[float, Field(ge=0, lt=0.5)] = Field(
        default=0.0, description="assumed probability that a pair is labelled the wrong way"
    )
    reference_free: bool = Field(default=False, description="leave the reference out: it counts as uniform")
    rpo_alpha: NonNegativeFloat = Field(default=0.0, description="weight of the mixed-in SFT loss on the chosen answer")
    args: dict[str, Any] = Field(default_factory=dict, description="keyword arguments of your own objective")


class SftLossConfig(LossConfig):
    loss_type: Text = Field(default="nll", description="nll, or path/file.py:fn, your own objective")
    args: dict[str, Any] = Field(default_factory=dict, description="keyword arguments of your own objective")


class RewardConfig(Section):
    """One reward function. A plain string in the YAML stands for ``{name: string}``."""

    name: Text = Field(description="a built-in's name or path/file.py:fn")
    weight: float = Field(default=1.0, description="factor in the weighted sum")
    timeout: PositiveFloat = Field(default=30.0, description="seconds for one call")
    args: dict[str, Any] = Field(default_factory=dict, description="keyword arguments of the function")


class SamplingConfig(Section):
    temperature: NonNegativeFloat = Field(default=1.0, description="sampling temperature; 0 (greedy) is for evaluation only")
    top_p: Annotated[float, Field(gt=0, le=1)] = Field(default=1.0, description="nucleus sampling; for evaluation only")
    top_k: NonNegativeInt = Field(default=0, description="sample among the k likeliest, 0: all; for evaluation only")
    min_p: Fraction = Field(default=0.0, description="sample above this share of the likeliest's probability; for evaluation only")
    stop: list[Text] | None = Field(default=None, description="strings that end a completion")


class DynamicSamplingConfig(Section):
    """Groups whose rewards are all equal are replaced by others (DAPO)."""

    enabled: bool = Field(default=False, description="train only groups whose rewards differ, and sample others in place of the rest")
    max_rounds: PositiveInt = Field(
        default=4, description="a step samples at most so many times prompts_per_step groups, and then trains what it has"
    )


class DepthBudgetConfig(Section):
    """How far episodes go. See docs/budget.md."""

    unit: Literal["auto", "turns", "tokens"] = Field(
        default="auto", description="what depth counts: turns, or sampled tokens; auto: turns where episodes have several, else tokens"
    )
    coverage: Annotated[float, Field(gt=0, lt=1)] = Field(default=0.9, description="share of eventual success that a cap must reach")
    min: PositiveInt | None = Field(default=None, description="the least cap; default: 1")
    max: PositiveInt | None = Field(
        default=None, description="the greatest cap, once min_episodes were seen (before, nothing is capped); default: none is a choice too"
    )
    explore: Literal["auto"] | Annotated[float, Field(gt=0, le=1)] = Field(
        default="auto", description="probability of going on past the cap; auto: chosen with the cap for least variance x cost"
    )
    min_explore: Annotated[float, Field(gt=0, le=1)] = Field(default=0.1, description="explore auto: the least probability")
    credit: Literal["unbiased", "value", "mask", "zero"] = Field(
        default="unbiased", description="what an episode is worth that reaches its cap; all but unbiased bend the gradient"
    )
    memory: Annotated[float, Field(ge=1)] = Field(default=10.0, description="steps over which what was seen fades to 1/e")
    buckets: PositiveInt = Field(default=3, description="classes of difficulty with caps of their own, by the tasks' past success")
    min_episodes: PositiveInt = Field(default=64, description="effective number of episodes that a cap needs for evidence")
    success_threshold: float = Field(default=0.5, description="a reward from here on is a success")


class WidthBudgetConfig(Section):
    """How many completions each prompt gets; their sum per step stays prompts_per_step x num_generations. See docs/budget.md."""

    min: Annotated[int, Field(ge=2)] = Field(default=2, description="completions of a prompt at the least")
    max: PositiveInt | None = Field(default=None, description="completions of a prompt at the most; default: three times num_generations")
    floor: Fraction = Field(default=0.2, description="share of the completions that is spread evenly")
    discount: Fraction = Field(default=0.5, description="of what earlier visits of a task said, at each visit")


class BudgetConfig(Section):
    """Rollout work where it still teaches. A section that is given, even an empty one (``depth: {}``), is on."""

    depth: DepthBudgetConfig | None = Field(default=None, description="a cap on turns or tokens, see below; default: off")
    width: WidthBudgetConfig | None = Field(default=None, description="completions by prompt, see below; default: off")


class VllmConfig(Section):
    """How vLLM generates: in processes of its own, which end with the run."""

    mode: Literal["auto", "colocate", "server"] = Field(
        default="auto",
        description="colocate: one engine on the learner's device; server: engines on other devices, or elsewhere (base_url); auto: server "
        "if base_url, devices or replicas say so",
    )
    python: Text | None = Field(
        default=None, description="interpreter that has vLLM, so that it can live in an environment of its own; default: the run's"
    )
    base_url: Text | list[Text] | None = Field(
        default=None, description="tcp://host:port of servers that `surogate-rl vllm-server` runs; several share the requests"
    )
    replicas: PositiveInt = Field(default=1, description="server: engines that are started here and share the requests")
    devices: list[NonNegativeInt] | None = Field(
        default=None, description="server: the GPUs, tensor_parallel_size for each replica; default: those after the learner's"
    )
    tensor_parallel_size: PositiveInt = Field(default=1, description="GPUs of one engine")
    dtype: Literal["auto", "float32", "bfloat16"] = Field(default="auto", description="of the engine's weights; auto: the recipe's")
    sync: Literal["auto", "full", "merged", "adapter"] = Field(
        default="auto",
        description="what an update sends; full: all weights; merged: with the adapter added in float32; adapter: the adapter alone, into "
        "vLLM's own LoRA; auto: merged with lora, else full",
    )
    transfer: Literal["auto", "cuda_ipc", "host"] = Field(
        default="auto",
        description="through which memory an update goes; cuda_ipc: the GPU's, which an engine on the learner's own GPU maps; host: shared "
        "memory of the host, or the connection; auto: cuda_ipc where it can be",
    )
    gpu_memory_utilization: Annotated[float, Field(gt=0, le=1)] | None = Field(
        default=None, description="share of the GPU that the engine takes; default: weights, the KV cache of its sequences, and 3 GiB"
    )
    enforce_eager: bool | None = Field(
        default=None, description="do without compiled kernels and CUDA graphs, to start sooner; default: true on the cpu, else false"
    )
    startup_timeout: PositiveFloat = Field(default=600.0, description="seconds until an engine must be ready")
    heartbeat: PositiveFloat = Field(default=10.0, description="seconds between two checks that an engine is alive")
    timeout: PositiveFloat = Field(
        default=120.0,
        description="an engine that leaves a check unanswered for so many seconds counts as dead (one that ends is noticed at once)",
    )
    max_restarts: NonNegativeInt = Field(default=3, description="times that one engine is started again before the run stops")
    probe_tolerance: PositiveFloat | None = Field(
        default=None,
        description="mean difference of log-probabilities, in nats, between engine and learner that is borne after an update; "
        "default: 0.01, with bfloat16 on either side 0.1",
    )


class RolloutsConfig(SamplingConfig):
    engine: Literal["auto", "native", "vllm"] = Field(
        default="auto", description="what generates; native: in process, with the learner's weights, on the cpu; auto: vllm on a GPU"
    )
    vllm: VllmConfig = Field(default_factory=VllmConfig, description="engine: vllm")
    stop: list[Text] = Field(default_factory=list, description="strings that end a completion")
    prompts_per_step: PositiveInt = Field(default=8, description="prompts in one step")
    num_generations: PositiveInt = Field(default=8, description="completions of each prompt: the group")
    max_prompt_length: PositiveInt | None = Field(
        default=None, description="longer prompts are filtered out before step 0; default: what sequence_len leaves"
    )
    max_completion_length: PositiveInt = Field(default=256, description="new tokens of a completion at the most")
    max_sequences: PositiveInt | None = Field(
        default=None, description="sequences decoded together by an engine; default: 64, on a GPU 256; never more than may be under way"
    )
    kv_cache_gb: PositiveFloat | None = Field(
        default=None,
        description="an engine's KV cache, in GiB; default: what its sequences need, at most a quarter of the memory (on a GPU: what the "
        "learner leaves), and less if the run would not fit otherwise",
    )
    max_staleness: NonNegativeInt = Field(
        default=0,
        description="versions by which rollouts may lag the learner; above 0 it learns while the next steps' are sampled; 0: on-policy",
    )
    oversample: NonNegativeInt = Field(
        default=0,
        description="groups that are sampled beyond the step's while it waits for its last ones: carried over with max_staleness, "
        "else spares of dynamic_sampling",
    )
    stragglers: Literal["wait", "carry_over"] = Field(
        default="wait",
        description="carry_over: a step closes once enough groups have ended and leaves up to oversample that are under way to the next; "
        "needs max_staleness, one version of which is kept back for it",
    )
    dynamic_sampling: DynamicSamplingConfig = Field(
        default_factory=DynamicSamplingConfig, description="passing over groups that teach nothing"
    )
    budget: BudgetConfig = Field(default_factory=BudgetConfig, description="how deep episodes go and how many a prompt gets")
    reward_workers: PositiveInt = Field(default=2, description="processes that run the rewards")


DEFAULT_MAX_TURNS = 10


class EnvironmentConfig(Section):
    """How an episode unfolds. ``environment: tools`` stands for ``{name: tools}``."""

    name: Text = Field(
        default="single_turn",
        description="single_turn, tools, text_game:<game>, gym:path/file.py:Class, verifiers:<id>, or path/file.py:Class, your own; "
        "see docs/environments.md",
    )
    args: dict[str, Any] = Field(default_factory=dict, description="its options; of your own class: keyword arguments")
    max_turns: PositiveInt | None = Field(default=None, description="turns of the policy at the most; default: 10 (single_turn: 1)")
    timeout: PositiveFloat = Field(
        default=60.0, description="seconds for one call of reset, step or close; an environment that takes longer loses its episode"
    )
    weight: float = Field(default=1.0, description="factor of the environment's own reward in the weighted sum")
    turn_credit: Literal["none", "reward_to_go"] = Field(
        default="none", description="reward_to_go: each turn is credited with what came after it, compared with the group's same turn"
    )
    turn_discount: Fraction = Field(default=1.0, description="reward_to_go: factor by which a reward counts less one turn earlier")

    @property
    def turns(self) -> int:
        """`max_turns`, its default included."""
        return self.max_turns or (1 if self.name == "single_turn" else DEFAULT_MAX_TURNS)


class EvalConfig(SamplingConfig):
    """Evaluation before, during and after training: by rewards, or (sft and dpo without rewards) the loss on held-out rows."""

    datasets: list[DatasetConfig] = Field(min_length=1, description="held-out rows")
    rewards: list[RewardConfig] = Field(default_factory=list, description="default: the training rewards; sft and dpo: the held-out loss")
    steps: NonNegativeInt = Field(default=0, description="every so many steps; 0: only before and after")
    at_start: bool = Field(default=True, description="evaluate before the first step too")
    temperature: NonNegativeFloat = Field(default=0.0, description="0: greedy")
    stop: list[Text] | None = Field(default=None, description="strings that end a completion; default: the rollouts'; sft and dpo: none")
    samples: PositiveInt = Field(default=1, description="completions per prompt: mean@k and pass@k; more than 1 needs temperature > 0")
    pass_threshold: float = Field(default=1.0, description="a reward from here on counts as passed")
    max_completion_length: PositiveInt | None = Field(
        default=None, description="default: the rollouts'; sft and dpo: 256, or half of sequence_len"
    )


class TrainConfig(Section):
    """Keys that all commands share."""

    model: Text = Field(description="a Hugging Face directory, hub id or GGUF file")
    output_dir: Text = Field(description="the folder that everything is written to")
    datasets: list[DatasetConfig] = Field(min_length=1, description="what to train on")
    tokenizer: Text | None = Field(default=None, description="directory or hub id; default: the model's")
    chat_template: Text | None = Field(default=None, description="Jinja text or a file; default: the tokenizer's")
    init: Literal["pretrained", "random"] = Field(default="pretrained", description="random: fresh weights from the model's config")
    device: Literal["auto", "cpu", "cuda"] = Field(
        default="auto", description="where to compute; auto: cuda where there is a GPU, but cpu where completions are sampled"
    )
    recipe: Literal["auto", "float32", "bfloat16"] = Field(
        default="auto", description="number format of weights and activations; auto: bfloat16 on cuda; the cpu's is float32"
    )
    master_weights: bool = Field(
        default=True, description="bfloat16: keep what is trained in float32 too; false: round updates stochastically, for less memory"
    )
    optimizer_state_dtype: Literal["float32", "bfloat16"] = Field(
        default="float32", description="number format of the optimiser's moments; bfloat16 ones are rounded stochastically"
    )
    gradient_dtype: Literal["float32", "bfloat16"] = Field(
        default="float32", description="number format in which gradients of weights are added up"
    )
    logits_dtype: Literal["auto", "float32", "bfloat16"] = Field(
        default="auto", description="number format of the head's output, before the softmax in float32; auto: the recipe's"
    )
    deterministic: bool = Field(
        default=False, description="cuda: same inputs, same bits, for some speed; the cpu always gives the same bits"
    )
    gpus: NonNegativeInt | None = Field(default=None, description="GPUs to use; default: 1 on cuda")
    threads: NonNegativeInt = Field(default=0, description="CPU threads; 0: one per core")
    sequence_len: PositiveInt = Field(default=2048, description="longest sequence in tokens, prompt and completion together")
    per_device_train_batch_size: PositiveInt = Field(
        default=2, description="sequences of sequence_len tokens in one micro-batch; with packing, tokens count"
    )
    gradient_accumulation_steps: PositiveInt = Field(default=1, description="micro-batches per optimiser step (sft, dpo)")
    packing: bool = Field(
        default=True, description="sft: lay several short rows end to end (they never see each other); dpo and grpo always do"
    )
    overlong: Literal["filter", "truncate"] = Field(default="filter", description="what to do with rows longer than sequence_len")
    learning_rate: PositiveFloat = Field(default=2e-5, description="peak learning rate")
    lr_scheduler_type: Literal["linear", "cosine", "constant", "constant_with_warmup"] = Field(
        default="linear", description="the learning rate's course after the warm-up"
    )
    warmup_ratio: Fraction = Field(default=0.0, description="share of the steps in which the learning rate rises")
    warmup_steps: NonNegativeInt = Field(default=0, description="steps in which the learning rate rises")
    weight_decay: NonNegativeFloat = Field(default=0.0, description="decoupled weight decay (AdamW)")
    adam_beta1: Annotated[float, Field(ge=0, lt=1)] = Field(default=0.9, description="decay of the first moment")
    adam_beta2: Annotated[float, Field(ge=0, lt=1)] = Field(default=0.999, description="decay of the second moment")
    adam_epsilon: PositiveFloat = Field(default=1e-8, description="added to the root of the second moment")
    max_grad_norm: NonNegativeFloat = Field(default=1.0, description="gradients are clipped to this norm; 0: no clipping")
    max_steps: int = Field(default=-1, description="optimiser steps; -1: as num_train_epochs says")
    num_train_epochs: PositiveFloat = Field(default=1.0, description="passes over the data, unless max_steps is given")
    lora: bool = Field(default=False, description="train low-rank adapters instead of all weights")
    lora_rank: PositiveInt = Field(default=16, description="rank of the adapters")
    lora_alpha: PositiveFloat = Field(default=32.0, description="the adapters' scale is lora_alpha / lora_rank")
    lora_dropout: float = Field(default=0.0, description="0 only: a dropped-out policy would not be the one that samples")
    lora_target_modules: list[Text] | Literal["all-linear"] = Field(
        default="all-linear",
        description="linears that get an adapter: q_proj, k_proj, v_proj, o_proj, gate_proj, up_proj, down_proj, lm_head",
    )
    adapter: Text | None = Field(default=None, description="directory of a PEFT adapter to start from")
    optimizer: Literal["adamw"] = Field(default="adamw", description="the optimiser")
    recompute: Literal["auto", "none", "block"] = Field(
        default="auto", description="block: save memory by computing activations twice; auto: if it must"
    )
    memory_limit_gb: PositiveFloat | None = Field(
        default=None,
        description="memory, in GiB, within which the whole run (learner, reference, engine) is planned, or refused; default: what the "
        "machine, the container or the GPU has free",
    )
    max_skipped_steps: PositiveInt = Field(
        default=5, description="stop after so many steps in a row that are not finite, or (grpo) in which no completion could be scored"
    )
    seed: Seed = Field(default=42, description="of data order, sampling and fresh weights")
    logging_steps: PositiveInt = Field(default=1, description="steps between two lines of metrics")
    save_steps: NonNegativeInt = Field(default=500, description="steps between two checkpoints; 0: only the final model")
    save_total_limit: PositiveInt | None = Field(default=2, description="checkpoints to keep; null: all")
    resume: Text = Field(default="never", description="never; auto: from the newest checkpoint of output_dir; or a checkpoint's path")
    report_to: list[Literal["wandb", "tensorboard"]] = Field(
        default_factory=list, description="besides metrics.jsonl, which is always written"
    )
    run_name: Text | None = Field(default=None, description="name shown by wandb; default: output_dir's")
    eval: EvalConfig | None = Field(default=None, description="evaluation before, during and after training")


class SftConfig(TrainConfig):
    assistant_only_loss: bool = Field(default=True, description="chat rows: train the assistant's turns only")
    completion_only_loss: bool = Field(default=True, description="prompt/completion rows: train the completion only")
    loss: SftLossConfig = Field(default_factory=SftLossConfig, description="the objective")


class DpoConfig(TrainConfig):
    loss: PreferenceLossConfig = Field(default_factory=PreferenceLossConfig, description="the objective")


class GrpoConfig(TrainConfig):
    learning_rate: PositiveFloat = Field(default=1e-6, description="peak learning rate")
    rollouts: RolloutsConfig = Field(default_factory=RolloutsConfig, description="how completions are sampled")
    environment: EnvironmentConfig = Field(default_factory=EnvironmentConfig, description="how an episode unfolds")
    rewards: list[RewardConfig] = Field(default_factory=list, description="what a completion is worth: a weighted sum of functions")
    loss: PolicyLossConfig = Field(default_factory=PolicyLossConfig, description="the objective")


CONFIGS: dict[Command, type[TrainConfig]] = {"sft": SftConfig, "dpo": DpoConfig, "grpo": GrpoConfig}
"""The class of each command."""

SHORTHANDS: dict[type[Section], str] = {DatasetConfig: "path", RewardConfig: "name"}
"""What a plain string in a list of these sections stands for."""
