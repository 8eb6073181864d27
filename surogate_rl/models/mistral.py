"""Mistral 7B and its kin: every layer has the sliding window, if the config has one."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from transformers import PretrainedConfig

from surogate_rl.models.family import Family, SpecFields, common_fields


def spec_fields(config: PretrainedConfig, raw: Mapping[str, Any]) -> SpecFields:
    return common_fields(config, raw) | {"windows": [int(config.sliding_window or 0)] * config.num_hidden_layers}


MISTRAL = Family("mistral", "MistralForCausalLM", spec_fields)
