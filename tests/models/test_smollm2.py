"""Real weights: SmolLM2-135M-Instruct out of its GGUF file."""

from __future__ import annotations

import argparse
import textwrap
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from surogate_rl.batch import NO_TARGET, PackedBatch
from surogate_rl.learner import Learner
from surogate_rl.models import ModelError, inspect_model, load_model
from surogate_rl.models.gguf import converted_gguf

torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def _cache(smollm2_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(smollm2_dir.parents[2]))


def test_a_gguf_file_is_loaded_by_path(smollm2_gguf: Path, smollm2_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    info = inspect_model(str(smollm2_gguf))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))  # no conversion there: from the file's own metadata
    unconverted = inspect_model(str(smollm2_gguf))
    for field in (
        "layers",
        "hidden",
        "heads",
        "kv_heads",
        "head_dim",
        "ffn",
        "vocab",
        "norm_eps",
        "tied",
        "rope_inv_freq",
        "windows",
        "max_positions",
    ):
        assert getattr(info.spec, field) == getattr(unconverted.spec, field), field
    assert not list(tmp_path.rglob("*"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(smollm2_dir.parents[2]))
    assert (info.family, info.spec.layers, info.spec.hidden, info.spec.heads, info.spec.kv_heads, info.spec.tied) == (
        "llama",
        30,
        576,
        9,
        3,
        True,
    )
    assert info.parameters == 134_515_008
    loaded = load_model(str(smollm2_gguf))
    assert (loaded.valid_vocab, loaded.stop_ids) == (49152, (2,))
    assert loaded.tokenizer.eos_token == "<|im_end|>"
    text = "Hello  world, 12345 + 67 = ?\n\tdéjà vu<|im_end|>"
    assert loaded.tokenizer.decode(loaded.tokenizer(text)["input_ids"]) == text
    chat = loaded.tokenizer.apply_chat_template([{"role": "user", "content": "hi"}], tokenize=False, add_generation_prompt=True)
    assert chat.endswith("<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n")
    assert not hasattr(loaded.hf_config, "quantization_config")


def test_unpacked_values_are_those_of_the_format(smollm2_gguf: Path) -> None:
    """Against the gguf package's own unpacking, for tensors that the conversion does not permute."""
    packed = {tensor.name: tensor for tensor in gguf.GGUFReader(smollm2_gguf).tensors}
    wanted = {
        "embed_tokens.weight": "token_embd.weight",
        "layers.7.mlp.down_proj.weight": "blk.7.ffn_down.weight",
        "norm.weight": "output_norm.weight",
    }
    for name, value in load_model(str(smollm2_gguf)).weights():
        if name in wanted:
            tensor = packed[wanted.pop(name)]
            expected = gguf.quants.dequantize(tensor.data, tensor.tensor_type).reshape(value.shape)
            np.testing.assert_allclose(value, expected, rtol=1e-6, atol=1e-8)
    assert not wanted


def test_a_damaged_gguf_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    (tmp_path / "broken.gguf").write_bytes(b"GGUF nonsense")
    with pytest.raises(ModelError, match=r"broken.gguf: transformers cannot (read|unpack) this GGUF file"):
        load_model(str(tmp_path / "broken.gguf"))
    with pytest.raises(ModelError, match=r"broken.gguf: transformers cannot read this GGUF file"):
        inspect_model(str(tmp_path / "broken.gguf"))
    assert not list((tmp_path / "cache").rglob("config.json"))
    monkeypatch.setattr("surogate_rl.models.gguf.find_spec", lambda name: None)
    with pytest.raises(ModelError, match=r"reading a GGUF file needs the package gguf; run: pip install gguf accelerate"):
        converted_gguf(tmp_path / "broken.gguf")


def test_log_probabilities_of_a_thousand_tokens_of_text(smollm2_dir: Path) -> None:
    loaded = load_model(str(smollm2_dir))
    text = (argparse.__doc__ or "") + (textwrap.__doc__ or "") + Path(argparse.__file__).read_text(encoding="utf-8")
    tokens = np.array(loaded.tokenizer(text)["input_ids"][:1001], np.int32)
    assert len(tokens) == 1001
    model = AutoModelForCausalLM.from_pretrained(smollm2_dir, dtype=torch.float32, attn_implementation="sdpa").eval()
    with torch.no_grad():
        logits = model(torch.from_numpy(tokens).long()[None]).logits[0, :-1]
        expected = torch.log_softmax(logits, -1).gather(1, torch.from_numpy(tokens[1:]).long()[:, None])[:, 0].numpy()
    del model, logits
    learner = Learner(loaded.spec, max_tokens=1001, trainable=False)
    learner.load_weights(loaded.weights())
    targets = np.append(tokens[1:], NO_TARGET).astype(np.int32)
    batch = PackedBatch(tokens, np.arange(1001, dtype=np.int32), np.array([0, 1001], np.int32), targets, targets != NO_TARGET)
    got = learner.score(batch).logp[:-1]
    assert -4 < expected.mean() < -1  # it is a language model that reads text, not noise
    assert np.abs(got - expected).mean() < 1e-4
    assert np.abs(got - expected).max() < 1e-2
