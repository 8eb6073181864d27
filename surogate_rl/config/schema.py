"""Every key of the YAML, its type, default and meaning. Loading and error messages are in `load.py`."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

PositiveInt = Annotated[int, Field(gt=0)]
NonNegativeInt = Annotated[int, Field(ge=0)]
PositiveFloat = Annotated[float, Field(gt=0)]
NonNegativeFloat = Annotated[float, Field(ge=0)]
Fraction = Annotated[float, Field(ge=0, le=1)]


class Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class DatasetConfig(Section):
    """One source of rows: a hub id, a file (jsonl, json, parquet, csv), a directory, or ``reasoning_gym/<task>``."""

    path: str
    type: Literal["auto", "messages", "prompt_completion", "prompt", "text", "instruction", "sharegpt", "preference"] = "auto"
    split: str = "train"
    name: str | None = Field(None, description="configuration of a hub data set")
    size: PositiveInt | None = Field(None, description="rows to take (reasoning_gym: rows to generate)")
    seed: int | None = Field(None, description="reasoning_gym: seed of the generated rows (default: the run's)")
    args: dict[str, Any] = Field(default_factory=dict, description="arguments of a reasoning_gym task")
    columns: dict[str, str] = Field(default_factory=dict, description="our column name -> the data set's, e.g. {prompt: question}")
    system_prompt: str | None = Field(None, description="prepended as a system message where the row has none")


class LossConfig(Section):
    """Shared by the commands; each refuses what is not its own. Names are TRL's where it has them."""

    loss_type: str | None = Field(None, description="see the command's list; or path/file.py:fn, a user's own objective")


class PolicyLossConfig(LossConfig):
    loss_type: str = Field("grpo", description="grpo, dapo, dr_grpo, gspo, cispo, sapo, rloo, reinforce_plus_plus, or path/file.py:fn")
    epsilon: NonNegativeFloat = 0.2
    epsilon_high: NonNegativeFloat | None = Field(None, description="upper clip width; default: epsilon (cispo: the cap of the weight)")
    delta: PositiveFloat | None = Field(None, description="dual clip: upper bound of the ratio where the advantage is negative; > 1 + epsilon")
    beta: NonNegativeFloat = Field(0.0, description="weight of the k3 KL to the reference")
    scale_rewards: Literal["group", "batch", "none"] = "group"
    num_iterations: PositiveInt = Field(1, description="passes over the rollouts of a step")
    num_minibatches: PositiveInt = Field(1, description="optimiser updates per pass")
    mask_truncated_completions: bool = False
    entropy_coef: NonNegativeFloat = Field(0.0, description="weight of the entropy bonus")
    sapo_temperature_pos: PositiveFloat = 1.0
    sapo_temperature_neg: PositiveFloat = 1.05
    mismatch: Literal["auto", "none", "token_truncate", "token_mask", "sequence_truncate", "sequence_mask", "geometric_truncate", "geometric_mask"] = Field(
        "auto", description="correction of sampler against learner; auto: none with the native engine, else token_truncate"
    )
    mismatch_cap: PositiveFloat = Field(3.0, description="upper bound of the mismatch weight")
    mismatch_floor: NonNegativeFloat = Field(0.0, description="masked below this weight (the *_mask kinds)")
    sync_ref_model: bool = False
    ref_model_mixup_alpha: Fraction = 0.6
    ref_model_sync_steps: PositiveInt = 512
    args: dict[str, Any] = Field(default_factory=dict, description="keyword arguments of a user's own objective")


class PreferenceLossConfig(LossConfig):
    loss_type: str = Field("sigmoid", description="sigmoid, ipo, hinge, robust, sigmoid_norm, or path/file.py:fn")
    beta: PositiveFloat = 0.1
    label_smoothing: Annotated[float, Field(ge=0, lt=0.5)] = 0.0
    reference_free: bool = False
    rpo_alpha: NonNegativeFloat = Field(0.0, description="weight of the mixed-in SFT loss on the chosen answer")
    args: dict[str, Any] = Field(default_factory=dict)


class SftLossConfig(LossConfig):
    loss_type: str = Field("nll", description="nll, or path/file.py:fn")
    args: dict[str, Any] = Field(default_factory=dict)


class RewardConfig(Section):
    """One reward function. A plain string in the YAML stands for ``{name: string}``."""

    name: str = Field(description="a built-in's name or path/file.py:fn")
    weight: float = 1.0
    timeout: PositiveFloat = Field(30.0, description="seconds for one call")
    args: dict[str, Any] = Field(default_factory=dict, description="keyword arguments of the function")


class SamplingConfig(Section):
    temperature: NonNegativeFloat = 1.0
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    top_k: NonNegativeInt = 0
    min_p: Fraction = 0.0
    stop: list[str] = Field(default_factory=list)


class RolloutsConfig(SamplingConfig):
    engine: Literal["auto", "native", "vllm"] = "auto"
    prompts_per_step: PositiveInt = 8
    num_generations: PositiveInt = 8
    max_prompt_length: PositiveInt | None = Field(None, description="longer prompts are filtered out before step 0; default: what sequence_len leaves")
    max_completion_length: PositiveInt = 256
    max_sequences: PositiveInt = Field(64, description="sequences decoded together by the native engine")
    max_staleness: NonNegativeInt = 0
    reward_workers: PositiveInt = 2


class EvalConfig(SamplingConfig):
    """Evaluation before, during and after training."""

    datasets: list[DatasetConfig]
    rewards: list[RewardConfig] = Field(default_factory=list, description="default: the training rewards")
    steps: NonNegativeInt = Field(0, description="every so many steps; 0: only before and after")
    at_start: bool = True
    temperature: NonNegativeFloat = 0.0
    samples: PositiveInt = Field(1, description="completions per prompt: mean@k and pass@k; more than 1 needs temperature > 0")
    pass_threshold: float = Field(1.0, description="a reward from here on counts as passed")
    max_completion_length: PositiveInt | None = None


class TrainConfig(Section):
    """Keys that all commands share."""

    model: str = Field(description="a Hugging Face directory, hub id or GGUF file")
    output_dir: str
    datasets: list[DatasetConfig]
    tokenizer: str | None = Field(None, description="default: the model's")
    chat_template: str | None = Field(None, description="Jinja text or a file; default: the tokenizer's")
    init: Literal["pretrained", "random"] = Field("pretrained", description="random: fresh weights from the model's config")
    device: Literal["auto", "cpu", "cuda"] = "auto"
    recipe: Literal["auto", "float32", "bfloat16"] = "auto"
    gpus: NonNegativeInt | None = None
    threads: NonNegativeInt = Field(0, description="CPU threads; 0: one per core")
    sequence_len: PositiveInt = 2048
    per_device_train_batch_size: PositiveInt = Field(2, description="sequences of sequence_len tokens in one micro-batch; with packing, tokens count")
    gradient_accumulation_steps: PositiveInt = 1
    packing: bool = True
    overlong: Literal["filter", "truncate"] = Field("filter", description="what to do with rows longer than sequence_len")
    learning_rate: PositiveFloat = 2e-5
    lr_scheduler_type: Literal["linear", "cosine", "constant", "constant_with_warmup"] = "linear"
    warmup_ratio: Fraction = 0.0
    warmup_steps: NonNegativeInt = 0
    weight_decay: NonNegativeFloat = 0.0
    adam_beta1: Annotated[float, Field(ge=0, lt=1)] = 0.9
    adam_beta2: Annotated[float, Field(ge=0, lt=1)] = 0.999
    adam_epsilon: PositiveFloat = 1e-8
    max_grad_norm: NonNegativeFloat = 1.0
    max_steps: int = Field(-1, description="-1: as num_train_epochs says")
    num_train_epochs: PositiveFloat = 1.0
    lora: bool = False
    lora_rank: PositiveInt = 16
    lora_alpha: PositiveFloat = 32
    lora_dropout: float = 0.0
    lora_target_modules: list[str] | Literal["all-linear"] = "all-linear"
    adapter: str | None = Field(None, description="directory of a PEFT adapter to start from")
    optimizer: Literal["adamw"] = "adamw"
    recompute: Literal["auto", "none", "block"] = "auto"
    memory_limit_gb: PositiveFloat | None = None
    max_skipped_steps: PositiveInt = Field(5, description="stop after so many non-finite steps in a row")
    seed: int = 42
    logging_steps: PositiveInt = 1
    save_steps: NonNegativeInt = Field(500, description="0: only the final model")
    save_total_limit: PositiveInt | None = 2
    resume: Literal["auto", "never"] | str = Field("never", description="auto: from the newest checkpoint of output_dir; or a checkpoint's path")
    report_to: list[Literal["wandb", "tensorboard"]] = Field(default_factory=list)
    run_name: str | None = None
    eval: EvalConfig | None = None


class SftConfig(TrainConfig):
    assistant_only_loss: bool = Field(True, description="chat rows: train the assistant's turns only")
    completion_only_loss: bool = Field(True, description="prompt/completion rows: train the completion only")
    loss: SftLossConfig = Field(default_factory=SftLossConfig)


class DpoConfig(TrainConfig):
    loss: PreferenceLossConfig = Field(default_factory=PreferenceLossConfig)


class GrpoConfig(TrainConfig):
    learning_rate: PositiveFloat = 1e-6
    rollouts: RolloutsConfig = Field(default_factory=RolloutsConfig)
    environment: str = Field("single_turn", description="how an episode unfolds")
    rewards: list[RewardConfig] = Field(default_factory=list)
    loss: PolicyLossConfig = Field(default_factory=PolicyLossConfig)
