"""What a family is: how its Hugging Face config becomes a ModelSpec, and how its weights are named in files."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from transformers import PretrainedConfig

from surogate_rl.models.errors import ModelError
from surogate_rl.models.rope import make_rope, rope_parameters

logger = logging.getLogger(__name__)

SpecFields = dict[str, Any]
"""Keyword arguments of ``_core.ModelSpec``."""

Shape = tuple[int, ...]

# Settings that change the function a model computes and that no supported family has: key -> values that mean "off".
_UNSUPPORTED: dict[str, tuple[Any, ...]] = {
    "pretraining_tp": (None, 0, 1),
    "attn_logit_softcapping": (None,),
    "final_logit_softcapping": (None,),
    "logit_scale": (None, 1, 1.0),
    "logits_scaling": (None, 1, 1.0),
    "embedding_multiplier": (None, 1, 1.0),
    "residual_multiplier": (None, 1, 1.0),
    "quantization_config": (None,),
}


@dataclass(frozen=True)
class Family:
    """One supported architecture.

    Attributes:
        model_type: as in config.json.
        architecture: the class name of transformers' causal language model.
        spec_fields: from the transformers config and the raw config.json to the fields of a ModelSpec.
    """

    model_type: str
    architecture: str
    spec_fields: Callable[[PretrainedConfig, Mapping[str, Any]], SpecFields]

    @staticmethod
    def file_name(core_name: str) -> str:
        """The name in a Hugging Face file of what the core calls `core_name`."""
        return core_name if core_name.startswith("lm_head.") else "model." + core_name


def common_fields(config: PretrainedConfig, raw: Mapping[str, Any]) -> SpecFields:
    """The fields that all supported families read alike; a family adds its biases, norms, windows.

    Raises:
        ModelError: an option that the core does not implement is set.
    """
    for key, off in _UNSUPPORTED.items():
        if raw.get(key) not in off:
            hint = "; give a checkpoint that is not quantised" if key == "quantization_config" else ""
            raise ModelError(f"config.json: {key} = {raw[key]!r} is not supported{hint}")
    if config.hidden_act not in ("silu", "swish"):
        raise ModelError(f"config.json: hidden_act {config.hidden_act!r} is not supported; only silu")
    architectures = raw.get("architectures") or []
    if architectures and not any(name.endswith("ForCausalLM") for name in architectures):
        raise ModelError(f"config.json: architectures {architectures} is no causal language model; expected one that ends in ForCausalLM")
    if getattr(config, "attention_dropout", 0.0):
        logger.warning("config.json: attention_dropout = %s is not applied; training runs without dropout", config.attention_dropout)
    heads = config.num_attention_heads
    kv_heads = config.num_key_value_heads
    if kv_heads < 1 or heads % kv_heads:
        raise ModelError(f"config.json: num_attention_heads {heads} is not a multiple of num_key_value_heads {kv_heads}")
    # head_dim is its own number in several families; only where neither the file nor the family has one it is hidden / heads.
    head_dim = raw.get("head_dim") or getattr(config, "head_dim", None)
    if head_dim is None:
        if config.hidden_size % heads:
            raise ModelError(
                f"config.json: no head_dim, and hidden_size {config.hidden_size} is not a multiple of num_attention_heads {heads}"
            )
        head_dim = config.hidden_size // heads
    rope = make_rope(rope_parameters(raw), head_dim=head_dim, max_positions=config.max_position_embeddings)
    return {
        "layers": config.num_hidden_layers,
        "hidden": config.hidden_size,
        "heads": heads,
        "kv_heads": kv_heads,
        "head_dim": head_dim,
        "ffn": config.intermediate_size,
        "vocab": config.vocab_size,
        "max_positions": config.max_position_embeddings,
        "norm_eps": config.rms_norm_eps,
        "activation": "silu",
        "qk_norm": False,
        "qkv_bias": False,
        "o_bias": False,
        "mlp_bias": False,
        "tied": bool(config.tie_word_embeddings),
        "rope_inv_freq": rope.inv_freq,
        "rope_attention_scale": rope.attention_scale,
        "windows": [0] * config.num_hidden_layers,
    }


def windows_by_layer_type(config: PretrainedConfig) -> list[int]:
    """Sliding windows of the Qwen families: a layer has one only where ``layer_types`` says so, and never without ``use_sliding_window``.

    Where the file has no ``layer_types`` transformers derives them from ``use_sliding_window`` and ``max_window_layers``.
    """
    windows = []
    for index, kind in enumerate(config.layer_types):
        if kind == "full_attention":
            windows.append(0)
        elif kind == "sliding_attention":
            if not config.sliding_window:
                raise ModelError(
                    f"config.json: layer_types[{index}] is sliding_attention, but there is no sliding window "
                    f"(use_sliding_window = {config.use_sliding_window}, sliding_window = {config.sliding_window}); "
                    "set both, or make the layer full_attention"
                )
            windows.append(int(config.sliding_window))
        else:
            raise ModelError(
                f"config.json: layer_types[{index}] = {kind!r} is not supported; supported are full_attention, sliding_attention"
            )
    return windows


def weight_shapes(fields: SpecFields) -> dict[str, Shape]:
    """Core name -> shape of every weight of a model, in the order of the forward pass. Matrices are [out, in]."""
    hidden, ffn = fields["hidden"], fields["ffn"]
    q, kv = fields["heads"] * fields["head_dim"], fields["kv_heads"] * fields["head_dim"]
    linears = {
        "self_attn.q_proj": (q, hidden, fields["qkv_bias"]),
        "self_attn.k_proj": (kv, hidden, fields["qkv_bias"]),
        "self_attn.v_proj": (kv, hidden, fields["qkv_bias"]),
        "self_attn.o_proj": (hidden, q, fields["o_bias"]),
        "mlp.gate_proj": (ffn, hidden, fields["mlp_bias"]),
        "mlp.up_proj": (ffn, hidden, fields["mlp_bias"]),
        "mlp.down_proj": (hidden, ffn, fields["mlp_bias"]),
    }
    shapes: dict[str, Shape] = {"embed_tokens.weight": (fields["vocab"], hidden)}
    for layer in range(fields["layers"]):
        block = f"layers.{layer}."
        shapes[block + "input_layernorm.weight"] = (hidden,)
        for name, (rows, columns, bias) in linears.items():
            if name == "mlp.gate_proj":
                shapes[block + "post_attention_layernorm.weight"] = (hidden,)
            shapes[f"{block}{name}.weight"] = (rows, columns)
            if bias:
                shapes[f"{block}{name}.bias"] = (rows,)
        if fields["qk_norm"]:
            shapes[block + "self_attn.q_norm.weight"] = (fields["head_dim"],)
            shapes[block + "self_attn.k_norm.weight"] = (fields["head_dim"],)
    shapes["norm.weight"] = (hidden,)
    if not fields["tied"]:
        shapes["lm_head.weight"] = (fields["vocab"], hidden)
    return shapes
