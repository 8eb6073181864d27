"""What a configuration asks of a learner."""

from __future__ import annotations

from typing import Any

from surogate_rl.config.schema import SftConfig, TrainConfig
from surogate_rl.learner import Compute, LoraSettings


def lora_settings(config: TrainConfig) -> LoraSettings | None:
    if not config.lora:
        return None
    return LoraSettings(rank=config.lora_rank, alpha=config.lora_alpha, targets=config.lora_target_modules)


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
        "compute": compute_settings(config, keep_logits=keep_logits, lend_gradients=recompute and _one_backward_per_step(config)),
    }


def learner_choices(config: TrainConfig, max_tokens: int) -> list[dict[str, Any]]:
    """Options of a learner from the fastest to the smallest: the first that fits beside the rest of the run is taken."""
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


def reference_options(config: TrainConfig, max_tokens: int) -> dict[str, Any]:
    """Of a second, forward-only learner, which holds the reference policy of full fine-tuning."""
    return {"max_tokens": max_tokens, "threads": config.threads, "trainable": False, "compute": compute_settings(config)}
