"""The supported families, and how a config finds its own."""

from __future__ import annotations

from collections.abc import Mapping
from difflib import get_close_matches
from typing import Any

from surogate_rl.models.errors import ModelError
from surogate_rl.models.family import Family
from surogate_rl.models.llama import LLAMA
from surogate_rl.models.mistral import MISTRAL
from surogate_rl.models.qwen2 import QWEN2
from surogate_rl.models.qwen3 import QWEN3

FAMILIES: dict[str, Family] = {family.model_type: family for family in (LLAMA, MISTRAL, QWEN2, QWEN3)}


def family_of(raw: Mapping[str, Any], where: str) -> Family:
    """The family that a config.json names in ``model_type``.

    Raises:
        ModelError: there is no ``model_type``, or it is not supported; the message lists those that are.
    """
    supported = ", ".join(FAMILIES)
    kind = raw.get("model_type")
    if not isinstance(kind, str):
        raise ModelError(f"{where}: no model_type; supported are {supported}")
    if kind not in FAMILIES:
        near = get_close_matches(kind, FAMILIES, n=1)
        hint = f" (the nearest is {near[0]})" if near else ""
        raise ModelError(f"{where}: model_type {kind!r} is not supported{hint}; supported are {supported}")
    return FAMILIES[kind]
