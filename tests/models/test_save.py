"""Saving: what transformers and PEFT load gives the same log-probabilities, and nothing else is ever left behind."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import peft
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from surogate_rl.learner import LoraSettings
from surogate_rl.models import ModelError, adapter_settings, files, load_adapter, load_model, save_adapter, save_model
from surogate_rl.models import save as save_module

LORA = LoraSettings(3, 7.0, ["q_proj", "o_proj", "up_proj"])


def train(learner: Any, parity: Any, steps: int = 2) -> Any:
    """A few updates, so that what is saved is not what was loaded; returns a batch to compare on."""
    for seed in range(steps):
        batch = parity.make_sequences(seed, 50)
        learner.forward_backward(batch.pack(), batch.dlogp)
        assert learner.step(1e-2, weight_decay=0.1).applied
    return parity.make_sequences(99, 50)


def assert_same_logp(learner: Any, model: torch.nn.Module, batch: Any, parity: Any) -> None:
    """Theirs in float64, ours in float32; they must agree to rounding, while training moved them by far more."""
    truth = parity.torch_numbers(parity.in_float64(model), [batch])
    assert parity.error([learner.score(batch.pack()).logp], truth.logp) < 2e-6


# Whole models ---------------------------------------------------------------------------------------------------------------------


def test_transformers_loads_what_was_saved(model_name: str, tiny: Callable[..., Any], parity: Any, tmp_path: Path) -> None:
    made = tiny(model_name)
    # A temperature without do_sample: transformers reads such a file, of which there are many, but refuses to write it again.
    (made.directory / "generation_config.json").write_text(json.dumps({"eos_token_id": [2, 5], "temperature": 0.3}))
    learner = made.learner()
    batch = train(learner, parity)
    loaded = load_model(str(made.directory))
    save_model(learner, loaded, tmp_path / "saved")
    model, report = AutoModelForCausalLM.from_pretrained(tmp_path / "saved", output_loading_info=True, attn_implementation="sdpa")
    assert not report["missing_keys"]
    assert not report["unexpected_keys"]
    assert model.dtype == torch.float32
    assert_same_logp(learner, model, batch, parity)
    before = parity.torch_numbers(parity.in_float64(made.model), [batch])
    assert parity.error([learner.score(batch.pack()).logp], before.logp) > 1e-3
    assert AutoTokenizer.from_pretrained(tmp_path / "saved").get_vocab() == loaded.tokenizer.get_vocab()
    again = load_model(str(tmp_path / "saved"))
    assert again.generation_config is not None
    assert (again.generation_config.temperature, again.generation_config.eos_token_id) == (0.3, [2, 5])
    assert (again.stop_ids, again.valid_vocab, again.family) == (loaded.stop_ids, loaded.valid_vocab, loaded.family)
    assert sorted(p.name for p in tmp_path.iterdir() if p.name.startswith(".")) == []


def test_shards(tiny: Callable[..., Any], parity: Any, tmp_path: Path) -> None:
    made = tiny("qwen3")
    learner = made.learner()
    batch = train(learner, parity)
    save_model(learner, made.loaded, tmp_path / "saved", max_shard_bytes=20_000)
    shards = sorted((tmp_path / "saved").glob("model-*.safetensors"))
    assert len(shards) > 3
    index = json.loads((tmp_path / "saved" / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == 4 * sum(p.numel() for p in made.model.parameters())
    assert set(index["weight_map"].values()) == {path.name for path in shards}
    assert_same_logp(learner, AutoModelForCausalLM.from_pretrained(tmp_path / "saved"), batch, parity)


def test_an_untied_head_stays_untied(tiny: Callable[..., Any], parity: Any, tmp_path: Path) -> None:
    """The source's config says tied, but its head is its own: the saved config must not tie it again."""
    made = tiny("llama")
    path = made.directory / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "tie_word_embeddings": True}))
    loaded = load_model(str(made.directory))
    learner = made.learner()
    batch = train(learner, parity)
    save_model(learner, loaded, tmp_path / "saved")
    assert json.loads((tmp_path / "saved" / "config.json").read_text())["tie_word_embeddings"] is False
    assert_same_logp(learner, AutoModelForCausalLM.from_pretrained(tmp_path / "saved"), batch, parity)


def test_a_checkpoint_in_bfloat16_is_saved_in_float32(tiny: Callable[..., Any], parity: Any, tmp_path: Path) -> None:
    made = tiny("qwen2")
    made.model.to(torch.bfloat16).save_pretrained(made.directory)
    loaded = load_model(str(made.directory))
    learner = made.learner()
    learner.load_weights(loaded.weights())
    batch = train(learner, parity)
    save_model(learner, loaded, tmp_path / "saved")
    assert json.loads((tmp_path / "saved" / "config.json").read_text())["dtype"] == "float32"
    assert_same_logp(learner, AutoModelForCausalLM.from_pretrained(tmp_path / "saved"), batch, parity)


def test_the_chat_template_is_saved(tiny: Callable[..., Any], tmp_path: Path) -> None:
    made = tiny("llama")
    loaded = load_model(str(made.directory), chat_template="{% for m in messages %}{{ m.content }}!{% endfor %}")
    save_model(made.learner(), loaded, tmp_path / "saved")
    assert AutoTokenizer.from_pretrained(tmp_path / "saved").chat_template == loaded.tokenizer.chat_template


def test_weights_that_are_not_finite_are_never_saved(tiny: Callable[..., Any], tmp_path: Path) -> None:
    made = tiny("llama")
    learner = made.learner()
    save_model(learner, made.loaded, tmp_path / "saved")
    good = (tmp_path / "saved" / "model.safetensors").read_bytes()
    bad = learner.export("layers.1.mlp.down_proj.weight")
    bad[3, 4] = np.inf
    learner.load("layers.1.mlp.down_proj.weight", bad)
    with pytest.raises(ModelError, match=r"model.layers.1.mlp.down_proj.weight holds a NaN or an infinity; nothing was saved"):
        save_model(learner, made.loaded, tmp_path / "saved")
    assert (tmp_path / "saved" / "model.safetensors").read_bytes() == good
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith(".")] == []


def test_a_save_replaces_a_former_one_and_nothing_else(tiny: Callable[..., Any], tmp_path: Path) -> None:
    made = tiny("llama")
    (tmp_path / "saved").mkdir()
    save_model(made.learner(), made.loaded, tmp_path / "saved")
    (tmp_path / "saved" / "stale.txt").write_text("x")
    save_model(made.learner(), made.loaded, tmp_path / "saved")
    assert not (tmp_path / "saved" / "stale.txt").exists()
    (tmp_path / "home").mkdir()
    (tmp_path / "home" / "thesis.tex").write_text("x")
    with pytest.raises(FileExistsError, match="exists and is no saved model; give a directory that is new or empty"):
        save_model(made.learner(), made.loaded, tmp_path / "home")
    assert (tmp_path / "home" / "thesis.tex").read_text() == "x"


def test_a_value_that_reads_back_otherwise_fails_the_save(
    tiny: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = tiny("llama")
    write = files.write_safetensors

    def damaging(path: Path, *args: Any) -> dict[str, str]:
        hashes = write(path, *args)
        content = bytearray(path.read_bytes())
        content[-5] ^= 1
        path.write_bytes(content)
        return hashes

    monkeypatch.setattr(save_module, "write_safetensors", damaging)
    with pytest.raises(ModelError, match=r"lm_head.weight reads back with other values than were written"):
        save_model(made.learner(), made.loaded, tmp_path / "saved")
    assert not (tmp_path / "saved").exists()


def test_a_full_disk_is_seen_beforehand(tiny: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = tiny("llama")
    monkeypatch.setattr(files.shutil, "disk_usage", lambda path: type("Usage", (), {"free": 1000})())
    with pytest.raises(OSError, match=r"saving needs 0.00 GB, and 0.00 GB are free; make room or save elsewhere"):
        save_model(made.learner(), made.loaded, tmp_path / "saved")
    assert not (tmp_path / "saved").exists()


def test_a_learner_of_another_model_is_refused(tiny: Callable[..., Any], tmp_path: Path) -> None:
    one, other = tiny("llama"), tiny("llama", rms_norm_eps=1e-3)
    with pytest.raises(
        ModelError, match=r"save_model: norm_eps is .* in the learner but would be saved as 0.001; is this learner of this model"
    ):
        save_model(one.learner(), other.loaded, tmp_path / "saved")


# Adapters -------------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["llama-biases-llama3", "qwen2", "qwen3-tied-bias-window"])
def test_peft_loads_an_adapter(name: str, tiny: Callable[..., Any], parity: Any, tmp_path: Path) -> None:
    made = tiny(name)
    learner = made.learner(LORA)
    batch = train(learner, parity)
    save_adapter(learner, made.loaded, tmp_path / "adapter", str(made.directory))
    theirs = peft.PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(made.directory), tmp_path / "adapter", is_trainable=True)
    assert_same_logp(learner, theirs, batch, parity)
    assert parity.error([learner.score(batch.pack(), adapter="off").logp], [learner.score(batch.pack()).logp]) > 1e-3
    config = peft.PeftConfig.from_pretrained(tmp_path / "adapter")
    assert (config.base_model_name_or_path, config.r, config.lora_alpha) == (str(made.directory), 3, 7.0)
    assert set(config.target_modules) == set(LORA.targets)
    assert adapter_settings(tmp_path / "adapter") == LoraSettings(3, 7.0, ["q_proj", "o_proj", "up_proj"])


def test_an_adapter_of_peft_is_loaded_and_becomes_the_initial_one(tiny: Callable[..., Any], parity: Any, tmp_path: Path) -> None:
    made = tiny("mistral")
    theirs = peft.get_peft_model(
        made.model, peft.LoraConfig(r=4, lora_alpha=6, target_modules=["k_proj", "gate_proj"], task_type="CAUSAL_LM")
    )
    with torch.no_grad():
        for parameter in theirs.parameters():
            if parameter.requires_grad:
                parameter.normal_(std=0.2)
    theirs.save_pretrained(tmp_path / "adapter")
    learner = made.learner(adapter_settings(tmp_path / "adapter"))
    load_adapter(learner, tmp_path / "adapter")
    batch = parity.make_sequences(99, 50)
    assert_same_logp(learner, theirs, batch, parity)
    initial = learner.score(batch.pack()).logp
    train(learner, parity)
    np.testing.assert_array_equal(learner.score(batch.pack(), adapter="initial").logp, initial)
    assert not np.array_equal(learner.score(batch.pack()).logp, initial)


def test_an_adapter_on_the_head(tiny: Callable[..., Any], parity: Any, tmp_path: Path) -> None:
    made = tiny("llama")
    lora = LoraSettings(2, 4.0, ["v_proj", "lm_head"])
    learner = made.learner(lora)
    batch = train(learner, parity)
    save_adapter(learner, made.loaded, tmp_path / "adapter", str(made.directory))
    theirs = peft.PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(made.directory), tmp_path / "adapter", is_trainable=True)
    assert_same_logp(learner, theirs, batch, parity)


def test_our_own_round_trip_has_the_same_bits(tiny: Callable[..., Any], parity: Any, tmp_path: Path) -> None:
    made = tiny("qwen3")
    learner, fresh = made.learner(LORA), made.learner(LORA, seed=5)
    train(learner, parity)
    save_adapter(learner, made.loaded, tmp_path / "adapter")
    assert json.loads((tmp_path / "adapter" / "adapter_config.json").read_text())["base_model_name_or_path"] == made.loaded.path
    load_adapter(fresh, tmp_path / "adapter")
    assert fresh.digest() == learner.digest()


def test_merged(tiny: Callable[..., Any], parity: Any, tmp_path: Path) -> None:
    made = tiny("qwen3-tied-bias-window")
    learner = made.learner(LORA)
    batch = train(learner, parity)
    with pytest.raises(
        ModelError, match="this learner trains an adapter, which the weights alone do not hold; use save_adapter, or merge_adapter=True"
    ):
        save_model(learner, made.loaded, tmp_path / "saved")
    save_model(learner, made.loaded, tmp_path / "saved", merge_adapter=True)
    assert_same_logp(learner, AutoModelForCausalLM.from_pretrained(tmp_path / "saved"), batch, parity)


def test_a_dead_adapter_is_said(tiny: Callable[..., Any], tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    made = tiny("llama")
    save_adapter(made.learner(LORA), made.loaded, tmp_path / "adapter")
    assert "B is zero throughout: this adapter was never trained and changes nothing" in caplog.text
    with pytest.raises(ModelError, match=r"save_adapter: this learner has no adapter \(it trains all weights\); use save_model"):
        save_adapter(made.learner(), made.loaded, tmp_path / "other")


@pytest.fixture
def saved_adapter(tiny: Callable[..., Any], parity: Any, tmp_path: Path) -> tuple[Any, Path]:
    made = tiny("llama")
    learner = made.learner(LORA)
    train(learner, parity)
    save_adapter(learner, made.loaded, tmp_path / "adapter")
    return made, tmp_path / "adapter"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"r": 4}, r"rank 4 differs from lora_rank 3; set lora_rank: 4"),
        ({"lora_alpha": 8}, r"lora_alpha 8 differs from lora_alpha 7; set lora_alpha: 8"),
        ({"use_rslora": True}, r"use_rslora = True is not supported; only plain LoRA"),
        ({"use_dora": True}, r"use_dora = True is not supported; only plain LoRA"),
        ({"bias": "all"}, r"bias = 'all' is not supported"),
        ({"modules_to_save": ["lm_head"]}, r"modules_to_save = \['lm_head'\] is not supported"),
        ({"rank_pattern": {"q_proj": 8}}, r"rank_pattern = {'q_proj': 8} is not supported"),
        ({"lora_bias": True}, r"lora_bias = True is not supported"),
        ({"init_lora_weights": "pissa_niter_4"}, r"init_lora_weights = 'pissa_niter_4' changes the base weights as well"),
        ({"peft_type": "IA3"}, r"peft_type 'IA3' is not supported; only LORA"),
        ({"r": "three"}, r"r and lora_alpha must be numbers, got 'three' and 7.0"),
    ],
)
def test_adapters_that_are_refused(changes: dict[str, Any], message: str, saved_adapter: tuple[Any, Path]) -> None:
    made, directory = saved_adapter
    path = directory / "adapter_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))
    with pytest.raises(ModelError, match=message):
        load_adapter(made.learner(LORA), directory)


def test_adapters_that_do_not_fit(saved_adapter: tuple[Any, Path], tiny: Callable[..., Any]) -> None:
    made, directory = saved_adapter
    with pytest.raises(
        ModelError, match=r"the adapter has q_proj, o_proj, up_proj where lora_target_modules has q_proj; set lora_target_modules: \[q_"
    ):
        load_adapter(made.learner(LoraSettings(3, 7.0, ["q_proj"])), directory)
    with pytest.raises(ModelError, match=r"this learner has no adapter to load .* into; set lora: true"):
        load_adapter(made.learner(), directory)
    with pytest.raises(ModelError, match=r"q_proj.lora_A.weight: expected \[3, 36\], got \[3, 48\]; is it of this base model"):
        load_adapter(tiny("mistral-window").learner(LORA), directory)
    learner = made.learner(LORA)
    before = learner.digest()
    tensors = load_file(directory / "adapter_model.safetensors")
    gone = tensors.pop("base_model.model.model.layers.1.self_attn.q_proj.lora_B.weight")
    tensors["base_model.model.model.layers.7.self_attn.q_proj.lora_B.weight"] = gone
    save_file(tensors, directory / "adapter_model.safetensors")
    with pytest.raises(ModelError, match=r"1 tensor\(s\) missing \(.*layers.1.self_attn.q_proj.lora_B.weight\) and 1 unknown \(.*layers.7"):
        load_adapter(learner, directory)
    tensors["base_model.model.model.layers.1.self_attn.q_proj.lora_B.weight"] = torch.full_like(gone, float("nan"))
    del tensors["base_model.model.model.layers.7.self_attn.q_proj.lora_B.weight"]
    save_file(tensors, directory / "adapter_model.safetensors")
    with pytest.raises(ModelError, match=r"layers.1.self_attn.q_proj.lora_B.weight holds a NaN or an infinity"):
        load_adapter(learner, directory)
    assert learner.digest() == before
    (directory / "adapter_model.safetensors").unlink()
    with pytest.raises(ModelError, match=r"adapter_model.safetensors is missing; an adapter must be saved as safetensors"):
        load_adapter(learner, directory)
    with pytest.raises(
        ModelError, match=r"there is no such directory; give one that holds adapter_config.json and adapter_model.safetensors"
    ):
        load_adapter(learner, directory / "nowhere")
