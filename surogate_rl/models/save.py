"""Saving: a directory that transformers loads, verified by reading it back."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from transformers import AutoConfig

from surogate_rl.learner import Learner
from surogate_rl.models.errors import ModelError
from surogate_rl.models.family import Family, Shape
from surogate_rl.models.files import replaced_directory, require_space, verify_safetensors, write_safetensors, write_text
from surogate_rl.models.gguf import plain_config
from surogate_rl.models.load import LoadedModel, describe
from surogate_rl.models.locate import read_json
from surogate_rl.models.weights import INDEX_FILE, SINGLE_FILE, Checkpoint, SafetensorsWeights, head_is_tied

F32 = NDArray[np.float32]

MAX_SHARD_BYTES = 5_000_000_000
SAVED_MARKERS = ("config.json", "adapter_config.json")


def save_model(
    learner: Learner, loaded: LoadedModel, directory: str | Path, *, merge_adapter: bool = False, max_shard_bytes: int = MAX_SHARD_BYTES
) -> None:
    """Saves the learner's weights in Hugging Face form: config, generation config, tokenizer and float32 safetensors.

    Weights are saved in float32, the dtype they were trained in, whatever the checkpoint had: rounding them would lose small updates.
    The directory appears whole or not at all, and only after all of it was read back and compared.

    Args:
        merge_adapter: add a LoRA adapter to the weights (in float64, rounded once). Without it a learner with an adapter is refused, since
            its training would be lost; see ``save_adapter``.
        max_shard_bytes: larger models are split into files of at most this size, with an index.

    Raises:
        ModelError: a weight is not finite, the learner is not of `loaded`, or what was read back differs.
        OSError: the disk is too small or fails.
        FileExistsError: `directory` holds something other than a saved model.
    """
    names = {info.name: info for info in learner.tensors() if not info.is_adapter}
    if learner.lora is not None and not merge_adapter:
        raise ModelError(
            "save_model: this learner trains an adapter, which the weights alone do not hold; use save_adapter, or merge_adapter=True"
        )
    shapes: dict[str, Shape] = {Family.file_name(name): info.shape for name, info in names.items()}
    core_names = {Family.file_name(name): name for name in names}

    def value_of(name: str) -> F32:
        return merged_weight(learner, core_names[name]) if merge_adapter else learner.export(core_names[name])

    directory = Path(directory)
    require_space(directory, 4 * sum(int(np.prod(shape)) for shape in shapes.values()))
    with replaced_directory(directory, SAVED_MARKERS) as aside:
        _write_shards(aside, shapes, value_of, max_shard_bytes)
        _write_config(aside, loaded, tied="lm_head.weight" not in names)
        loaded.tokenizer.save_pretrained(aside)
        _check_reloads(aside, learner)


def merged_weight(learner: Learner, name: str) -> F32:
    """One weight with the adapter beside it added: W + alpha / rank * B A."""
    weight, stem = learner.export(name), name.removesuffix(".weight")
    adapters = {info.name for info in learner.tensors() if info.is_adapter}
    if learner.lora is None or f"{stem}.lora_A" not in adapters:
        return weight
    a, b = (learner.export(f"{stem}.lora_{side}").astype(np.float64) for side in "AB")
    return np.asarray(weight + learner.lora.alpha / learner.lora.rank * (b @ a), np.float32)


def _write_shards(directory: Path, shapes: dict[str, Shape], value_of: Callable[[str], F32], max_bytes: int) -> None:
    shards: list[dict[str, Shape]] = [{}]
    filled = 0
    for name, shape in shapes.items():
        size = 4 * int(np.prod(shape))
        if shards[-1] and filled + size > max_bytes:
            shards.append({})
            filled = 0
        shards[-1][name] = shape
        filled += size
    weight_map: dict[str, str] = {}
    for number, shard in enumerate(shards, 1):
        file = SINGLE_FILE if len(shards) == 1 else f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        hashes = write_safetensors(directory / file, shard, value_of)
        verify_safetensors(directory / file, shard, hashes)
        weight_map |= dict.fromkeys(shard, file)
    if len(shards) > 1:
        total = 4 * sum(int(np.prod(shape)) for shape in shapes.values())
        write_text(directory / INDEX_FILE, json.dumps({"metadata": {"total_size": total}, "weight_map": weight_map}, indent=2) + "\n")


def _write_config(directory: Path, loaded: LoadedModel, *, tied: bool) -> None:
    config = plain_config(loaded.hf_config)
    config.pop("torch_dtype", None)
    config |= {"architectures": config.get("architectures") or [_architecture(loaded)], "dtype": "float32", "tie_word_embeddings": tied}
    write_text(directory / "config.json", json.dumps(config, indent=2) + "\n")
    if loaded.generation_config is not None:
        write_text(directory / "generation_config.json", loaded.generation_config.to_json_string())


def _architecture(loaded: LoadedModel) -> str:
    from surogate_rl.models.registry import FAMILIES

    return FAMILIES[loaded.family].architecture


def _check_reloads(directory: Path, learner: Learner) -> None:
    """The saved config must describe the model that was trained, tied head included, and the files must fit it."""
    raw = read_json(directory / "config.json")
    _, fields = describe(AutoConfig.from_pretrained(directory, local_files_only=True), raw, str(directory))
    checkpoint = Checkpoint(directory)
    fields = fields | {"tied": head_is_tied(checkpoint, fields["tied"])}
    for key, value in fields.items():
        trained = getattr(learner.spec, key)
        if (
            not np.allclose(np.asarray(trained, float), np.asarray(value, float), rtol=1e-6, atol=0)
            if key != "activation"
            else trained != value
        ):
            raise ModelError(f"save_model: {key} is {trained} in the learner but would be saved as {value}; is this learner of this model?")
    SafetensorsWeights(checkpoint, {info.name: info.shape for info in learner.tensors() if not info.is_adapter})
