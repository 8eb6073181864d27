"""Steps of made-up log-probabilities, as our packed batches and as TRL's trainers see them."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from surogate_rl.batch import NO_TARGET, PackedBatch
from surogate_rl.objectives.advantages import group_advantages, penalise

torch.set_num_threads(1)

EOS, PAD = 2, 0


@dataclass
class Step:
    """Completions of a step, one entry each, groups of `group` in a row. Arrays are per completion token."""

    group: int
    prompts: list[list[int]]
    completions: list[list[int]]
    behaviour: list[np.ndarray]
    proximal: list[np.ndarray]
    current: list[np.ndarray]
    reference: list[np.ndarray]
    entropy: list[np.ndarray]
    rewards: list[float | None]

    @property
    def truncated(self) -> list[bool]:
        return [ids[-1] != EOS for ids in self.completions]

    def grouped(self, values: Sequence[Any]) -> list[list[Any]]:
        return [list(values[i : i + self.group]) for i in range(0, len(values), self.group)]


def make_step(seed: int = 0, *, prompts: int = 3, group: int = 4, drift: float = 0.3, noise: float = 0.3) -> Step:
    """`drift`: current against proximal; `noise`: behaviour against proximal (standard deviations in nats)."""
    rng = np.random.default_rng(seed)
    step = Step(group, [], [], [], [], [], [], [], [])
    for prompt in range(prompts):
        prompt_ids = rng.integers(3, 50, size=int(rng.integers(1, 5))).tolist()
        for _ in range(group):
            length = int(rng.integers(1, 9))
            ids = rng.integers(3, 50, size=length)
            if rng.random() < 0.7:
                ids[-1] = EOS
            proximal = -rng.gamma(2.0, 0.7, size=length)
            step.prompts.append(prompt_ids)
            step.completions.append(ids.tolist())
            step.proximal.append(proximal.astype(np.float32))
            step.behaviour.append((proximal + noise * rng.normal(size=length)).astype(np.float32))
            step.current.append((proximal + drift * rng.normal(size=length)).astype(np.float32))
            step.reference.append((proximal + 0.5 * rng.normal(size=length)).astype(np.float32))
            step.entropy.append(rng.gamma(2.0, 1.0, size=length).astype(np.float32))
            step.rewards.append(float(rng.normal()) if prompt else float(rng.integers(0, 2)))
    return step


def pack_step(
    step: Step,
    rows: Sequence[int] | None = None,
    *,
    loss_type: str = "grpo",
    scale_rewards: str | None = None,
    beta: float = 0.0,
    proximal: bool = True,
    weights: Sequence[float] | None = None,
) -> tuple[PackedBatch, np.ndarray, np.ndarray]:
    """The batch of some completions (default: the scored ones), their current log-probabilities and entropies."""
    grouped = step.grouped(step.rewards)
    kl = [float((p.astype(np.float64) - r).sum()) for p, r in zip(step.proximal, step.reference, strict=True)]
    if loss_type == "rloo" and beta > 0:
        grouped = penalise(grouped, step.grouped(kl), beta)
    advantages = group_advantages(grouped, scale_rewards=scale_rewards, loss_type=loss_type)
    flat = np.concatenate(advantages.values)
    if rows is None:
        rows = np.flatnonzero(np.concatenate(advantages.scored)).tolist()
    parts: dict[str, list[np.ndarray]] = defaultdict(list)
    for row in rows:
        ids = np.array(step.prompts[row] + step.completions[row], np.int32)
        before, length = len(step.prompts[row]), len(step.completions[row])
        spot = slice(before - 1, before - 1 + length)
        mask = np.zeros(ids.size, bool)
        mask[spot] = True
        parts["tokens"].append(ids)
        parts["mask"].append(mask)
        parts["targets"].append(np.where(mask, np.append(ids[1:], 0), NO_TARGET).astype(np.int32))
        parts["positions"].append(np.arange(ids.size, dtype=np.int32))
        for name in ("behaviour", "proximal", "current", "reference", "entropy"):
            array = np.zeros(ids.size, np.float32)
            array[spot] = getattr(step, name)[row]
            parts[name].append(array)
    cat = {name: np.concatenate(arrays) for name, arrays in parts.items()}
    per_token = {"behaviour_logp": cat["behaviour"], "reference_logp": cat["reference"]}
    if proximal:
        per_token["proximal_logp"] = cat["proximal"]
    per_sequence = {
        "advantage": flat[list(rows)],
        "truncated": np.array(step.truncated, np.float32)[list(rows)],
        "reward_kl": np.array(kl, np.float32)[list(rows)],
    }
    if weights is not None:
        per_sequence["weight"] = np.array(weights, np.float32)[list(rows)]
    batch = PackedBatch(
        tokens=cat["tokens"],
        positions=cat["positions"],
        cu_seqlens=np.cumsum([0] + [t.size for t in parts["tokens"]]).astype(np.int32),
        targets=cat["targets"],
        mask=cat["mask"],
        per_token=per_token,
        per_sequence=per_sequence,
        ids=np.array(rows, np.int64),
    )
    batch.validate()
    return batch, cat["current"], cat["entropy"]


@dataclass
class TrlResult:
    loss: float
    dlogp: list[np.ndarray]
    dentropy: list[np.ndarray]
    metrics: dict[str, float]
    advantages: list[float]


def _padded(arrays: Sequence[np.ndarray], dtype: torch.dtype = torch.float32) -> torch.Tensor:
    out = torch.zeros(len(arrays), max(len(a) for a in arrays), dtype=dtype)
    for row, array in zip(out, arrays, strict=True):
        row[: len(array)] = torch.as_tensor(np.asarray(array))
    return out


class _Accelerator:
    device = torch.device("cpu")
    num_processes = 1
    process_index = 0
    sync_gradients = True
    is_main_process = True

    @staticmethod
    def gather(tensor: torch.Tensor) -> torch.Tensor:
        return tensor

    gather_for_metrics = gather

    @staticmethod
    def reduce(tensor: torch.Tensor, reduction: str = "sum") -> torch.Tensor:
        return tensor


def run_trl_policy(step: Step, *, rloo: bool = False, proximal: bool = True, mismatch: str | None = None, **options: Any) -> TrlResult:
    """TRL's own scoring and loss over the step as one micro-batch; only generation, model and reward calls are replaced.

    `options`: GRPOConfig's (RLOOConfig's) names. `mismatch`: a ``vllm_importance_sampling_mode``.
    """
    from trl import GRPOTrainer, RLOOTrainer

    get = {
        "loss_type": "grpo",
        "importance_sampling_level": "token",
        "epsilon": 0.2,
        "epsilon_high": None,
        "delta": None,
        "beta": 0.0,
        "scale_rewards": "group",
        "entropy_coef": 0.0,
        "mask_truncated_completions": False,
        "max_completion_length": 16,
        "sapo_temperature_pos": 1.0,
        "sapo_temperature_neg": 1.05,
        "normalize_advantages": False,
        "clip_max": 3.0,
        "clip_min": None,
    } | options
    trainer = object.__new__(RLOOTrainer if rloo else GRPOTrainer)
    model = SimpleNamespace(training=True, is_gradient_checkpointing=False)
    reference = SimpleNamespace(training=False, is_gradient_checkpointing=False)
    current = _padded(step.current).requires_grad_()
    entropy = _padded(step.entropy).requires_grad_()
    phase = {"loss": False}

    def statistics(used: object, *_args: Any, **_kwargs: Any) -> tuple[torch.Tensor, torch.Tensor | None, None]:
        if used is reference:
            return _padded(step.reference), None, None
        return (current, entropy, None) if phase["loss"] else (_padded(step.proximal), None, None)

    rewards = torch.tensor([[float("nan") if r is None else r] for r in step.rewards], dtype=torch.float32)
    generated = (step.prompts, step.completions, ["" for _ in step.completions])
    if not rloo:
        sampled = [b.tolist() for b in step.behaviour] if mismatch else None
        generated = (step.prompts, step.completions, None, generated[2], sampled, {}, None, None)
    attributes = {
        "accelerator": _Accelerator(),
        "model": model,
        "ref_model": reference,
        "args": SimpleNamespace(
            per_device_train_batch_size=len(step.prompts),
            gradient_accumulation_steps=1,
            steps_per_generation=1,
            gradient_checkpointing_kwargs=None,
            use_bias_correction_kl=False,
            **{name: get[name] for name in ("delta", "sapo_temperature_pos", "sapo_temperature_neg")},
        ),
        "_generate": lambda prompts: generated,
        "_calculate_rewards": lambda *args: rewards,
        "_get_per_token_logps_and_entropies": statistics,
        "_tokenizer": SimpleNamespace(pad_token_id=PAD),
        "eos_token_ids": [EOS],
        "pad_to_multiple_of": None,
        # More than one iteration makes TRL compute the log-probabilities from before the first update.
        "num_iterations": 2 if proximal else 1,
        "num_generations": step.group,
        "current_gradient_accumulation_steps": 1,
        "reward_weights": torch.ones(1),
        "reward_func_names": ["r"],
        "reward_funcs": [None],
        "reward_clip_range": None,
        "multi_objective_aggregation": "sum_then_normalize",
        "epsilon_low": get["epsilon"],
        "use_vllm": mismatch is not None,
        "vllm_importance_sampling_correction": mismatch is not None,
        "vllm_importance_sampling_mode": mismatch,
        "vllm_importance_sampling_clip_max": get["clip_max"],
        "vllm_importance_sampling_clip_min": get["clip_min"],
        "aux_loss_enabled": False,
        "top_entropy_quantile": 1.0,
        "off_policy_mask_threshold": None,
        "use_adaptive_entropy": False,
        "_entropy_bonus_enabled": get["entropy_coef"] != 0,
        "environment_factories": None,
        "environments": None,
        "tools": None,
        "log_multimodal": False,
        "_metrics": {"train": defaultdict(list)},
        "_logs": {name: deque() for name in ("prompt", "completion", "advantages", "images")}
        | {"rewards": defaultdict(deque), "extra": defaultdict(deque)},
        "_pending_extra_logs": {},
        "_pending_metrics": {},
    } | {name: get[name] for name in get if name != "epsilon"}
    attributes["epsilon_high"] = get["epsilon"] if get["epsilon_high"] is None else get["epsilon_high"]
    for name, value in attributes.items():
        setattr(trainer, name, value)

    inputs = trainer._generate_and_score_completions([{"prompt": str(p)} for p in step.prompts])
    phase["loss"] = True
    loss = trainer._compute_loss(model, inputs)
    loss.backward()
    lengths = [len(c) for c in step.completions]

    def gradients(leaf: torch.Tensor) -> list[np.ndarray]:
        grad = torch.zeros_like(leaf) if leaf.grad is None else leaf.grad
        return [grad[i, :n].numpy() for i, n in enumerate(lengths)]

    metrics = {name: float(np.mean(values)) for name, values in trainer._metrics["train"].items()}
    return TrlResult(float(loss.detach()), gradients(current), gradients(entropy), metrics, inputs["advantages"].tolist())


def per_completion(batch: PackedBatch, array: np.ndarray) -> dict[int, np.ndarray]:
    """A [T] array cut into the trained tokens of each completion, by id."""
    segment = batch.segment_of_token()
    assert batch.ids is not None
    return {int(batch.ids[s]): array[batch.mask & (segment == s)] for s in range(batch.num_sequences)}


@pytest.fixture(scope="session")
def tools() -> SimpleNamespace:
    return SimpleNamespace(
        Step=Step, make_step=make_step, pack_step=pack_step, run_trl_policy=run_trl_policy, per_completion=per_completion, EOS=EOS
    )
