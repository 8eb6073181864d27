"""Finding, checking and streaming weights."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from surogate_rl.models import ModelError, inspect_model, load_model
from surogate_rl.models.family import Family
from surogate_rl.models.weights import Checkpoint, SafetensorsWeights

INDEX = "model.safetensors.index.json"


def values_of(directory: Path) -> dict[str, np.ndarray[Any, Any]]:
    return {Family.file_name(name): value for name, value in load_model(str(directory)).weights()}


def assert_equal_weights(directory: Path, expected: dict[str, torch.Tensor]) -> None:
    got = values_of(directory)
    assert got.keys() == expected.keys()
    for name, value in expected.items():
        assert got[name].dtype == np.float32
        np.testing.assert_array_equal(got[name], value.float().numpy(), err_msg=name)


def parameters(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    return {name: value.detach() for name, value in model.named_parameters()}


def shard(made: Any) -> list[Path]:
    (made.directory / "model.safetensors").unlink()
    made.model.save_pretrained(made.directory, max_shard_size="20KB")
    shards = sorted(made.directory.glob("model-*.safetensors"))
    assert len(shards) > 2
    return shards


def rewrite(directory: Path, change: Callable[[dict[str, torch.Tensor]], None]) -> None:
    tensors = load_file(directory / "model.safetensors")
    change(tensors)
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})


def set_config(directory: Path, **changes: Any) -> None:
    path = directory / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def test_single_file(model_name: str, tiny: Callable[..., Any]) -> None:
    made = tiny(model_name)
    assert_equal_weights(made.directory, parameters(made.model))


def test_shards(tiny: Callable[..., Any]) -> None:
    made = tiny("qwen3")
    shard(made)
    assert_equal_weights(made.directory, parameters(made.model))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_other_dtypes(dtype: torch.dtype, tiny: Callable[..., Any]) -> None:
    made = tiny("llama")
    made.model.to(dtype).save_pretrained(made.directory)
    assert_equal_weights(made.directory, parameters(made.model))


def test_weights_stream_anew_on_each_call(tiny: Callable[..., Any]) -> None:
    loaded = tiny("llama").loaded
    assert [name for name, _ in loaded.weights()] == [name for name, _ in loaded.weights()]


def test_a_missing_shard_fails_at_once(tiny: Callable[..., Any]) -> None:
    made = tiny("llama")
    shards = shard(made)
    shards[1].unlink()
    with pytest.raises(ModelError, match=rf"{INDEX} names 1 missing file\(s\): {shards[1].name}; complete the download"):
        load_model(str(made.directory))


def test_an_index_that_names_a_missing_tensor_fails_at_once(tiny: Callable[..., Any]) -> None:
    made = tiny("llama")
    shards = shard(made)
    index = json.loads((made.directory / INDEX).read_text())
    index["weight_map"]["model.norm.weight"] = next(s.name for s in shards if s.name != index["weight_map"]["model.norm.weight"])
    (made.directory / INDEX).write_text(json.dumps(index))
    with pytest.raises(ModelError, match=r"places tensor model.norm.weight in model-\S+.safetensors, where it is not"):
        load_model(str(made.directory))


@pytest.mark.parametrize("text", ["{", "[]", '{"weight_map": {"a": 3}}', "{}"])
def test_a_broken_index(text: str, tiny: Callable[..., Any]) -> None:
    made = tiny("llama")
    shard(made)
    (made.directory / INDEX).write_text(text)
    with pytest.raises(ModelError, match=rf"{INDEX}: .*weight_map.*download the file again"):
        load_model(str(made.directory))


def test_a_cut_file(tiny: Callable[..., Any]) -> None:
    made = tiny("llama")
    path = made.directory / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-1000])
    with pytest.raises(ModelError, match=r"model.safetensors: not a readable safetensors file"):
        load_model(str(made.directory))


def test_missing_unknown_and_misshapen_tensors(tiny: Callable[..., Any]) -> None:
    made = tiny("llama")
    rewrite(made.directory, lambda t: t.__delitem__("model.layers.1.mlp.up_proj.weight"))
    with pytest.raises(
        ModelError, match=r"tensor model.layers.1.mlp.up_proj.weight is missing; config.json and weights do not belong together"
    ):
        load_model(str(made.directory))
    made = tiny("llama")
    rewrite(made.directory, lambda t: t.update({"model.layers.0.self_attn.q_proj.bias": torch.zeros(64)}))
    with pytest.raises(ModelError, match=r"1 tensor\(s\) that a model of this config does not have: model.layers.0.self_attn.q_proj.bias"):
        load_model(str(made.directory))
    made = tiny("llama")
    set_config(made.directory, num_key_value_heads=4)
    with pytest.raises(
        ModelError, match=r"model.layers.0.self_attn.k_proj.weight: expected shape \[64, 48\] from config.json, got \[32, 48\]"
    ):
        load_model(str(made.directory))
    made = tiny("llama")
    rewrite(made.directory, lambda t: t.update({"model.norm.weight": torch.ones(48, dtype=torch.int8)}))
    with pytest.raises(ModelError, match=r"tensor model.norm.weight is stored as I8; supported are BF16, F16, F32, F64"):
        load_model(str(made.directory))


def test_an_old_rotation_buffer_is_passed_over(tiny: Callable[..., Any]) -> None:
    made = tiny("llama")
    rewrite(made.directory, lambda t: t.update({"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(8)}))
    assert_equal_weights(made.directory, parameters(made.model))


# Tied heads -----------------------------------------------------------------------------------------------------------------------


def test_a_head_unequal_to_the_embedding_is_kept_although_the_config_says_tied(
    tiny: Callable[..., Any], parity: Any, caplog: pytest.LogCaptureFixture
) -> None:
    made = tiny("llama")
    set_config(made.directory, tie_word_embeddings=True)
    loaded = load_model(str(made.directory))
    assert "the head differs from the embedding although config.json says tied; both are kept" in caplog.text
    assert not loaded.spec.tied
    assert not loaded.hf_config.tie_word_embeddings
    assert not inspect_model(str(made.directory)).spec.tied
    assert_equal_weights(made.directory, parameters(made.model))


def test_an_equal_head_is_tied(tiny: Callable[..., Any]) -> None:
    made = tiny("llama-tied-linear")
    rewrite(made.directory, lambda t: t.update({"lm_head.weight": t["model.embed_tokens.weight"].clone()}))
    assert load_model(str(made.directory)).spec.tied
    assert_equal_weights(made.directory, parameters(made.model))


def test_a_tied_matrix_may_be_stored_as_the_head(tiny: Callable[..., Any]) -> None:
    made = tiny("llama-tied-linear")
    rewrite(made.directory, lambda t: t.update({"lm_head.weight": t.pop("model.embed_tokens.weight")}))
    assert_equal_weights(made.directory, parameters(made.model))


def test_an_untied_config_without_a_head(tiny: Callable[..., Any]) -> None:
    made = tiny("llama")
    rewrite(made.directory, lambda t: t.__delitem__("lm_head.weight"))
    with pytest.raises(
        ModelError, match=r"tensor lm_head.weight is missing; config.json says tie_word_embeddings: false; set it to true if"
    ):
        load_model(str(made.directory))


# Random weights -------------------------------------------------------------------------------------------------------------------


def test_random_weights(tiny: Callable[..., Any]) -> None:
    made = tiny("qwen3-tied-bias-window", initializer_range=0.05, hidden_size=96)
    (made.directory / "model.safetensors").unlink()
    first, again, other = (dict(load_model(str(made.directory), init="random", seed=seed).weights()) for seed in (7, 7, 8))
    assert {Family.file_name(name): value.shape for name, value in first.items()} == {
        n: tuple(p.shape) for n, p in made.model.named_parameters()
    }
    for name, value in first.items():
        np.testing.assert_array_equal(value, again[name])
        if name.endswith("norm.weight"):
            assert (value == 1).all()
        elif name.endswith(".bias"):
            assert (value == 0).all()
        else:
            assert not np.array_equal(value, other[name])
            assert value.std() == pytest.approx(0.05, rel=0.1)
            assert abs(value.mean()) < 0.05 * 4 / np.sqrt(value.size)
    matrices = [value.ravel()[:500] for value in first.values() if value.ndim == 2]
    correlation = np.corrcoef(matrices) - np.eye(len(matrices))
    assert np.abs(correlation).max() < 0.25  # every matrix has a stream of its own


def test_random_weights_need_a_config_and_a_tokenizer_only(tiny: Callable[..., Any]) -> None:
    made = tiny("llama")
    (made.directory / "model.safetensors").unlink()
    with pytest.raises(ModelError, match=r"no weights; expected model.safetensors or model.safetensors.index.json; .*set init: random"):
        load_model(str(made.directory))
    assert load_model(str(made.directory / "config.json"), init="random").spec.hidden == 48
    with pytest.raises(ModelError, match="init must be 'pretrained' or 'random', got 'zeros'"):
        load_model(str(made.directory), init="zeros")  # type: ignore[arg-type]


# Paths ----------------------------------------------------------------------------------------------------------------------------


def test_paths_that_lead_nowhere(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"model '\./nowhere': there is no such directory; check the path"):
        load_model("./nowhere")
    with pytest.raises(ModelError, match=r"model '/no/such.gguf': there is no such file; check the path"):
        load_model("/no/such.gguf")
    (tmp_path / "notes.txt").write_text("x")
    with pytest.raises(ModelError, match=r"is a file; expected a Hugging Face directory, a hub id or a .gguf file"):
        load_model(str(tmp_path / "notes.txt"))


def test_a_hub_id_that_is_not_available_offline(monkeypatch: pytest.MonkeyPatch) -> None:
    import huggingface_hub.constants

    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    message = (
        "model 'nobody/no-such-model': there is no such directory here, and the Hugging Face hub could not give it; HF_HUB_OFFLINE is set "
        "and it is not in the local cache; check the spelling, the network"
    )
    with pytest.raises(ModelError, match=message):
        load_model("nobody/no-such-model")


def test_a_hub_id_from_the_local_cache(tiny: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The cache as the hub's client lays it out serves without a network."""
    import huggingface_hub.constants

    made, commit = tiny("qwen2"), "0" * 40
    repo = tmp_path / "hub" / "models--some--model"
    shutil.copytree(made.directory, repo / "snapshots" / commit)
    (repo / "refs").mkdir()
    (repo / "refs" / "main").write_text(commit)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    loaded = load_model("some/model")
    assert loaded.path == "some/model"
    for name, value in loaded.weights():
        np.testing.assert_array_equal(value, parameters(made.model)[Family.file_name(name)].numpy(), err_msg=name)


def test_a_directory_with_other_weights_only(tiny: Callable[..., Any]) -> None:
    made = tiny("llama")
    (made.directory / "model.safetensors").rename(made.directory / "pytorch_model.bin")
    with pytest.raises(ModelError, match=r"found pytorch_model.bin: save the model again with transformers' save_pretrained"):
        load_model(str(made.directory))
    (made.directory / "pytorch_model.bin").rename(made.directory / "model.Q4.gguf")
    with pytest.raises(ModelError, match=r"found model.Q4.gguf: give the path of the GGUF file itself"):
        load_model(str(made.directory))


def mapped_bytes() -> int:
    """Pages of files that are this process's at the moment."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("RssFile:"):
            return int(line.split()[1]) * 1024
    pytest.skip("the system does not say how much of the files is in memory")


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="needs Linux")
def test_streaming_keeps_one_tensor_in_memory(tmp_path: Path) -> None:
    tensors = {f"model.layers.{i}.mlp.up_proj.weight": torch.full((1024, 1024), float(i)) for i in range(24)}  # 4 MiB each
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    shapes = {f"layers.{i}.mlp.up_proj.weight": (1024, 1024) for i in range(24)}
    before, most = mapped_bytes(), 0
    for name, value in SafetensorsWeights(Checkpoint(tmp_path), shapes)():
        assert value.sum() == int(name.split(".")[1]) * 1024 * 1024  # every page is read
        most = max(most, mapped_bytes() - before)
    assert most < 5 * 4 * 2**20  # of 24 tensors
