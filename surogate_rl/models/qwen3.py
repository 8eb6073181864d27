"""Qwen3 (dense): an RMSNorm of each head of q and k before the rotation."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from transformers import PretrainedConfig

from surogate_rl.models.family import Family, SpecFields, common_fields, windows_by_layer_type


def spec_fields(config: PretrainedConfig, raw: Mapping[str, Any]) -> SpecFields:
    bias = bool(config.attention_bias)
    return common_fields(config, raw) | {"qk_norm": True, "qkv_bias": bias, "o_bias": bias, "windows": windows_by_layer_type(config)}


QWEN3 = Family("qwen3", "Qwen3ForCausalLM", spec_fields)
