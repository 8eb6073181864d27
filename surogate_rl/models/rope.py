"""Rotary position embedding: from a Hugging Face config to inverse frequencies.

Each kind is computed in float32 with the operations that transformers uses, so that the frequencies have the same bits and
log-probabilities of long sequences do not drift apart.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from surogate_rl.models.errors import ModelError


@dataclass(frozen=True)
class Rope:
    """
    Attributes:
        inv_freq: [head_dim / 2] inverse frequencies in radians per position, scaling already in them.
        attention_scale: factor of cos and sin (yarn), else 1.
    """

    inv_freq: list[float]
    attention_scale: float


def rope_parameters(config: Mapping[str, Any]) -> dict[str, Any]:
    """The rope settings of a config.json as one flat dict with ``rope_type`` and ``rope_theta``.

    Newer configs keep everything inside ``rope_parameters``, older ones have ``rope_theta`` and ``rope_scaling`` at the top level; both
    are read.

    Raises:
        ModelError: there is no ``rope_theta`` in either place, or the settings differ between layers.
    """
    inner = config.get("rope_scaling") or config.get("rope_parameters") or {}
    if not isinstance(inner, Mapping):
        raise ModelError(f"config.json: rope_parameters must be a mapping, got {inner!r}")
    nested = sorted(key for key, value in inner.items() if isinstance(value, Mapping))
    if nested:
        raise ModelError(
            f"config.json: rope_parameters per layer type ({', '.join(nested)}) are not supported; only one rotation for all layers"
        )
    parameters = dict(inner)
    parameters["rope_type"] = parameters.get("rope_type") or parameters.pop("type", None) or "default"
    theta = parameters.get("rope_theta", config.get("rope_theta"))
    if theta is None:
        raise ModelError(
            "config.json: no rope_theta, neither at the top level nor inside rope_parameters; add the value that the model was trained with"
        )
    if not isinstance(theta, int | float) or isinstance(theta, bool) or not theta > 0:
        raise ModelError(f"config.json: rope_theta must be a positive number, got {theta!r}")
    parameters["rope_theta"] = theta
    partial = parameters.get("partial_rotary_factor", config.get("partial_rotary_factor"))
    if partial is not None and partial != 1:
        raise ModelError(f"config.json: partial_rotary_factor {partial} is not supported; only a rotation of the whole head (1.0)")
    if parameters["rope_type"] in ("llama3", "yarn"):
        # A value beside the dict has precedence over one inside, and the trained context is the fallback, as in transformers.
        original = config.get("original_max_position_embeddings") or parameters.get("original_max_position_embeddings")
        parameters["original_max_position_embeddings"] = original or config.get("max_position_embeddings")
    return parameters


def make_rope(parameters: Mapping[str, Any], *, head_dim: int, max_positions: int) -> Rope:
    """Inverse frequencies for the settings that :func:`rope_parameters` returns.

    Raises:
        ModelError: the kind is unknown, or one of its settings is missing or not a number.
    """
    kind = parameters["rope_type"]
    if kind not in _KINDS:
        raise ModelError(f"config.json: rope_type {kind!r} is not supported; supported are {', '.join(_KINDS)}")
    if head_dim % 2:
        raise ModelError(f"config.json: head_dim must be even for a rotation, got {head_dim}")
    inv_freq, scale = _KINDS[kind](parameters, head_dim, max_positions)
    return Rope([float(value) for value in inv_freq], float(scale))


def _number(parameters: Mapping[str, Any], key: str) -> float:
    value = parameters.get(key)
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ModelError(f"config.json: rope_type {parameters['rope_type']!r} needs a number for {key}, got {value!r}")
    return value


def _exponents(dim: int) -> torch.Tensor:
    return torch.arange(0, dim, 2, dtype=torch.float32) / dim


def _default(parameters: Mapping[str, Any], dim: int, max_positions: int) -> tuple[torch.Tensor, float]:
    return 1.0 / (parameters["rope_theta"] ** _exponents(dim)), 1.0


def _linear(parameters: Mapping[str, Any], dim: int, max_positions: int) -> tuple[torch.Tensor, float]:
    inv_freq, scale = _default(parameters, dim, max_positions)
    return inv_freq / _number(parameters, "factor"), scale


def _llama3(parameters: Mapping[str, Any], dim: int, max_positions: int) -> tuple[torch.Tensor, float]:
    """Short wavelengths stay, long ones are stretched by ``factor``, those between are blended (Llama 3.1)."""
    inv_freq, scale = _default(parameters, dim, max_positions)
    factor = _number(parameters, "factor")
    low, high = _number(parameters, "low_freq_factor"), _number(parameters, "high_freq_factor")
    original = _number(parameters, "original_max_position_embeddings")
    wavelength = 2 * math.pi / inv_freq
    stretched = torch.where(wavelength > original / low, inv_freq / factor, inv_freq)
    smooth = (original / wavelength - low) / (high - low)
    blended = (1 - smooth) * stretched / factor + smooth * stretched
    between = ~(wavelength < original / high) & ~(wavelength > original / low)
    return torch.where(between, blended, stretched), scale


def _yarn(parameters: Mapping[str, Any], dim: int, max_positions: int) -> tuple[torch.Tensor, float]:
    """YaRN (arXiv 2309.00071): dimensions that turn often keep their frequency, slow ones are interpolated, a ramp lies between."""
    theta = parameters["rope_theta"]
    original = _number(parameters, "original_max_position_embeddings")
    factor = _number(parameters, "factor") if parameters.get("factor") is not None else max_positions / original
    beta_fast, beta_slow = parameters.get("beta_fast") or 32, parameters.get("beta_slow") or 1
    mscale, mscale_all_dim = parameters.get("mscale"), parameters.get("mscale_all_dim")

    def magnitude(weight: float) -> float:
        return 1.0 if factor <= 1 else 0.1 * weight * math.log(factor) + 1.0

    scale = parameters.get("attention_factor")
    if scale is None:
        scale = magnitude(mscale) / magnitude(mscale_all_dim) if mscale and mscale_all_dim else magnitude(1)

    def dimension_of(rotations: float) -> float:
        return (dim * math.log(original / (rotations * 2 * math.pi))) / (2 * math.log(theta))

    low, high = dimension_of(beta_fast), dimension_of(beta_slow)
    if parameters.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    if low == high:
        high += 0.001  # no division by zero
    ramp = torch.clamp((torch.arange(dim // 2, dtype=torch.float32) - low) / (high - low), 0, 1)
    period = theta ** _exponents(dim)
    keep = 1 - ramp
    return 1.0 / (factor * period) * (1 - keep) + 1.0 / period * keep, scale


_KINDS: dict[str, Callable[[Mapping[str, Any], int, int], tuple[torch.Tensor, float]]] = {
    "default": _default,
    "linear": _linear,
    "llama3": _llama3,
    "yarn": _yarn,
}
