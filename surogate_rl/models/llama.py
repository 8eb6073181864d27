"""Llama 1 to 3, SmolLM2 and others that call themselves ``llama``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from transformers import PretrainedConfig

from surogate_rl.models.family import Family, SpecFields, common_fields


def spec_fields(config: PretrainedConfig, raw: Mapping[str, Any]) -> SpecFields:
    bias = bool(config.attention_bias)
    return common_fields(config, raw) | {"qkv_bias": bias, "o_bias": bias, "mlp_bias": bool(config.mlp_bias)}


LLAMA = Family("llama", "LlamaForCausalLM", spec_fields)
