"""Qwen2 and Qwen2.5: biases on q, k and v alone."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from transformers import PretrainedConfig

from surogate_rl.models.family import Family, SpecFields, common_fields, windows_by_layer_type


def spec_fields(config: PretrainedConfig, raw: Mapping[str, Any]) -> SpecFields:
    return common_fields(config, raw) | {"qkv_bias": True, "windows": windows_by_layer_type(config)}


QWEN2 = Family("qwen2", "Qwen2ForCausalLM", spec_fields)
