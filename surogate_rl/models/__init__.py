"""Models: from a Hugging Face directory, hub id or GGUF file into the core, and back into files that transformers and PEFT load."""

from __future__ import annotations

from surogate_rl.models.adapter import adapter_settings, load_adapter, save_adapter
from surogate_rl.models.errors import ModelError
from surogate_rl.models.load import LoadedModel, ModelInfo, count_sampled_ids, inspect_model, load_model
from surogate_rl.models.registry import FAMILIES
from surogate_rl.models.save import save_model

__all__ = [
    "FAMILIES",
    "LoadedModel",
    "ModelError",
    "ModelInfo",
    "adapter_settings",
    "count_sampled_ids",
    "inspect_model",
    "load_adapter",
    "load_model",
    "save_adapter",
    "save_model",
]
