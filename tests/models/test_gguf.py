"""Small GGUF files of every kind that llama.cpp writes for the supported families, made with the format's own package."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from transformers import AutoTokenizer

from surogate_rl.models import ModelError, inspect_model, load_model
from surogate_rl.models.family import Family

SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
LETTERS = [*"abcdefghijklmnopqrstuvwxyz0123456789", "Ġ", "Ċ", "ab"]
TENSORS = {
    "embed_tokens": "token_embd",
    "norm": "output_norm",
    "lm_head": "output",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


def gguf_name(name: str) -> str:
    stem, _, kind = name.removeprefix("model.").rpartition(".")
    if stem.startswith("layers."):
        _, layer, stem = stem.split(".", 2)
        return f"blk.{layer}.{TENSORS[stem]}.{kind}"
    return f"{TENSORS[stem]}.{kind}"


def interleaved(value: np.ndarray[Any, Any], heads: int) -> np.ndarray[Any, Any]:
    """llama.cpp keeps the two halves of each rotated pair side by side for the llama architecture."""
    return value.reshape(heads, 2, value.shape[0] // heads // 2, *value.shape[1:]).swapaxes(1, 2).reshape(value.shape)


def write_gguf(
    path: Path,
    model: torch.nn.Module,
    *,
    extra: Callable[[gguf.GGUFWriter], None] | None = None,
    leave_out: str = "",
    architecture: str | None = None,
) -> None:
    config = model.config
    writer = gguf.GGUFWriter(path, architecture or config.model_type)
    writer.add_name("tiny")
    writer.add_context_length(config.max_position_embeddings)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_vocab_size(config.vocab_size)
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    writer.add_rope_dimension_count(head_dim)
    writer.add_key_length(head_dim)
    writer.add_value_length(head_dim)
    tokens = SPECIAL + LETTERS
    tokens += [f"[PAD{i}]" for i in range(config.vocab_size - len(tokens))]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("qwen2")
    writer.add_token_list(tokens)
    writer.add_token_types([gguf.TokenType.CONTROL if t in SPECIAL else gguf.TokenType.NORMAL for t in tokens])
    writer.add_token_merges(["a b"])
    writer.add_bos_token_id(0)
    writer.add_eos_token_id(2)
    writer.add_pad_token_id(0)
    writer.add_add_bos_token(False)
    writer.add_chat_template("{% for m in messages %}<|im_start|>{{ m.content }}<|im_end|>{% endfor %}")
    if extra is not None:
        extra(writer)
    for name, parameter in model.named_parameters():
        value = parameter.detach().numpy()
        if config.model_type == "llama" and ("q_proj" in name or "k_proj" in name):
            value = interleaved(value, config.num_attention_heads if "q_proj" in name else config.num_key_value_heads)
        if name != leave_out:
            writer.add_tensor(gguf_name(name), np.ascontiguousarray(value))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


@pytest.fixture
def make(parity: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., tuple[Path, torch.nn.Module]]:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))

    def write(
        name: str, extra: Callable[[gguf.GGUFWriter], None] | None = None, leave_out: str = "", **changes: Any
    ) -> tuple[Path, torch.nn.Module]:
        model = parity.make_model(name, **changes)
        write_gguf(tmp_path / "tiny.gguf", model, extra=extra, leave_out=leave_out)
        return tmp_path / "tiny.gguf", model

    return write


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("llama", {}),
        ("llama-tied-linear", {"rope_parameters": {"rope_type": "default", "rope_theta": 20000.0}}),
        ("qwen2", {}),
        ("qwen3", {}),
    ],
)
def test_weights_config_and_tokenizer(name: str, changes: dict[str, Any], make: Callable[..., Any], tmp_path: Path) -> None:
    path, model = make(name, **changes)
    before, loaded = inspect_model(str(path)), load_model(str(path))
    expected = {key: value.detach().numpy() for key, value in model.named_parameters()}
    got = {Family.file_name(key): value for key, value in loaded.weights()}
    assert got.keys() == expected.keys()
    for key, value in got.items():
        np.testing.assert_array_equal(value, expected[key], err_msg=key)
    for spec in (before.spec, loaded.spec):
        assert spec.head_dim == (getattr(model.config, "head_dim", None) or model.config.hidden_size // model.config.num_attention_heads)
        np.testing.assert_allclose(np.array(spec.rope_inv_freq), model.model.rotary_emb.inv_freq.numpy(), rtol=1e-6)
        assert (spec.tied, spec.windows) == (model.config.tie_word_embeddings, [0, 0])
    assert loaded.stop_ids == (2,)
    tokenizer = loaded.tokenizer
    assert tokenizer.apply_chat_template([{"role": "user", "content": "abc"}])["input_ids"] == [1, *tokenizer("abc")["input_ids"], 2]
    assert len(list((tmp_path / "cache").rglob("config.json"))) == 1
    assert AutoTokenizer.from_pretrained(next((tmp_path / "cache").rglob("config.json")).parent).eos_token == "<|im_end|>"


def test_a_changed_file_is_converted_anew(make: Callable[..., Any]) -> None:
    for seed in (1, 2):
        path, model = make("qwen2", seed=seed)
        np.testing.assert_array_equal(dict(load_model(str(path)).weights())["norm.weight"], model.model.norm.weight.detach().numpy())


LLAMA3 = {
    "rope_type": "llama3", "rope_theta": 500000.0, "factor": 32.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}  # fmt: skip


def test_llama3_scaling_is_found_again_in_its_divisors(make: Callable[..., Any]) -> None:
    """llama.cpp keeps this scaling as a tensor of divisors, which transformers passes over."""
    divisors: list[np.ndarray[Any, Any]] = []

    def add(writer: gguf.GGUFWriter) -> None:
        writer.add_tensor("rope_freqs.weight", divisors[0])

    import math

    theta, dim = 500000.0, 64
    frequencies = [1 / theta ** (2 * i / dim) for i in range(dim // 2)]
    values = []
    for frequency in frequencies:  # as llama.cpp's converter computes them
        wavelength = 2 * math.pi / frequency
        if wavelength < 8192 / 4:
            values.append(1.0)
        elif wavelength > 8192 / 1:
            values.append(32.0)
        else:
            smooth = (8192 / wavelength - 1) / (4 - 1)
            values.append(1 / ((1 - smooth) / 32 + smooth))
    assert sum(1 < v < 32 for v in values) > 1
    divisors.append(np.array(values, np.float32))
    path, model = make("llama", extra=add, head_dim=dim, rope_parameters=LLAMA3, max_position_embeddings=131072)
    for spec in (inspect_model(str(path)).spec, load_model(str(path)).spec):
        np.testing.assert_allclose(np.array(spec.rope_inv_freq), model.model.rotary_emb.inv_freq.numpy(), rtol=1e-6)
    divisors[0] = divisors[0] * np.float32(0.9)
    path, _ = make("llama", extra=add, head_dim=dim, rope_parameters=LLAMA3, max_position_embeddings=131072)
    with pytest.raises(
        ModelError, match=r"rope_freqs.weight holds an unknown rope scaling; give the model as a Hugging Face directory or hub id"
    ):
        load_model(str(path))


def test_other_rope_scaling(make: Callable[..., Any]) -> None:
    def linear(writer: gguf.GGUFWriter) -> None:
        writer.add_rope_scaling_type(gguf.RopeScalingType.LINEAR)
        writer.add_rope_scaling_factor(2.5)

    path, model = make("llama-tied-linear", extra=linear)
    np.testing.assert_allclose(np.array(load_model(str(path)).spec.rope_inv_freq), model.model.rotary_emb.inv_freq.numpy(), rtol=1e-6)
    path, _ = make("qwen2", extra=lambda writer: writer.add_rope_scaling_type(gguf.RopeScalingType.YARN))
    with pytest.raises(
        ModelError, match="rope scaling 'yarn' is incomplete in GGUF files; give the model as a Hugging Face directory or hub id"
    ):
        load_model(str(path))


def test_tensors_that_would_be_lost_or_made_up(make: Callable[..., Any], tmp_path: Path) -> None:
    path, _ = make("llama", attention_bias=True)
    with pytest.raises(
        ModelError, match=r"the file holds 29 tensors, of which transformers takes over 21; the rest \(biases, for one\) would be lost"
    ):
        load_model(str(path))
    path, _ = make("qwen3", leave_out="model.layers.1.mlp.up_proj.weight")
    with pytest.raises(ModelError, match=r"the file lacks 1 tensor\(s\) of the model: model.layers.1.mlp.up_proj.weight"):
        load_model(str(path))
    assert not list((tmp_path / "cache").rglob("config.json"))


@pytest.mark.parametrize(
    ("architecture", "message"),
    [
        ("starcoder2", "model_type 'starcoder2' is not supported; supported are llama, mistral, qwen2, qwen3"),
        ("rwkv6", r"transformers cannot read this GGUF file \(GGUF model with architecture rwkv6 is not supported yet"),
    ],
)
def test_an_unsupported_architecture_is_refused_by_name(architecture: str, message: str, parity: Any, tmp_path: Path) -> None:
    write_gguf(tmp_path / "tiny.gguf", parity.make_model("llama"), architecture=architecture)
    for load in (inspect_model, load_model):
        with pytest.raises(ModelError, match=message):
            load(str(tmp_path / "tiny.gguf"))
