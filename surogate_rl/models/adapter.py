"""LoRA adapters in PEFT's form: adapter_model.safetensors and adapter_config.json."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from safetensors import SafetensorError, safe_open

from surogate_rl.files import user_path
from surogate_rl.learner import LORA_TARGETS, Learner, LoraSettings
from surogate_rl.models.errors import ModelError
from surogate_rl.models.family import Family, Shape
from surogate_rl.models.files import replaced_directory, require_space, verify_safetensors, write_safetensors, write_text
from surogate_rl.models.load import LoadedModel
from surogate_rl.models.locate import read_json
from surogate_rl.models.save import SAVED_MARKERS

logger = logging.getLogger(__name__)

F32 = NDArray[np.float32]

CONFIG_FILE, WEIGHTS_FILE = "adapter_config.json", "adapter_model.safetensors"

# Settings of a PEFT config that do not change what a loaded adapter computes, or that are read by name.
_IDENTITY = {"peft_type", "task_type", "auto_mapping", "peft_version", "base_model_name_or_path", "revision", "inference_mode"}
_READ = {"r", "lora_alpha", "target_modules", "init_lora_weights"}
_HARMLESS = {
    "lora_dropout",
    "exclude_modules",
    "layers_to_transform",
    "layers_pattern",
    "megatron_core",
    "qalora_group_size",
    "ensure_weight_tying",
}
_OFF: tuple[Any, ...] = (None, False, "none", "", 0, {}, [])
# Initialisations that change the base weights too, so that the adapter alone is not the model.
_BASE_CHANGING = ("pissa", "olora", "corda", "loftq", "lora_ga")


def file_name(core_name: str) -> str:
    """PEFT's name of an adapter matrix: ``layers.0...q_proj.lora_A`` -> ``base_model.model.model.layers.0...q_proj.lora_A.weight``."""
    return f"base_model.model.{Family.file_name(core_name)}.weight"


def save_adapter(learner: Learner, loaded: LoadedModel, directory: str | Path, base_model: str | None = None) -> None:
    """Saves the learner's adapter so that ``peft.PeftModel.from_pretrained`` loads it, with the tokenizer beside it.

    The directory appears whole or not at all, and only after it was read back and compared.

    Args:
        base_model: what ``base_model_name_or_path`` shall say; default: the path the model was loaded from.

    Raises:
        ModelError: the learner has no adapter, a value is not finite, or what was read back differs.
        OSError, FileExistsError: as ``save_model``.
    """
    if learner.lora is None:
        raise ModelError("save_adapter: this learner has no adapter (it trains all weights); use save_model")
    core_names = {file_name(info.name): info.name for info in learner.tensors() if info.is_adapter}
    shapes: dict[str, Shape] = {file_name(info.name): info.shape for info in learner.tensors() if info.is_adapter}
    if not any(learner.export(name).any() for name in core_names.values() if name.endswith(".lora_B")):
        logger.warning("save_adapter: B is zero throughout: this adapter was never trained and changes nothing")
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base_model if base_model is not None else loaded.path,
        "r": learner.lora.rank,
        "lora_alpha": learner.lora.alpha,
        "lora_dropout": 0.0,
        "target_modules": list(learner.lora.resolve(tied=learner.spec.tied)),
        "bias": "none",
        "fan_in_fan_out": False,
        "inference_mode": True,
        "init_lora_weights": True,
        "modules_to_save": None,
        "use_dora": False,
        "use_rslora": False,
    }
    directory = Path(directory)
    require_space(directory, 4 * sum(int(np.prod(shape)) for shape in shapes.values()))
    with replaced_directory(directory, SAVED_MARKERS) as aside:
        hashes = write_safetensors(aside / WEIGHTS_FILE, shapes, lambda name: learner.export(core_names[name]))
        write_text(aside / CONFIG_FILE, json.dumps(config, indent=2) + "\n")
        loaded.tokenizer.save_pretrained(aside)
        verify_safetensors(aside / WEIGHTS_FILE, shapes, hashes)
        _check_config(aside, learner)


def adapter_settings(directory: str | Path) -> LoraSettings:
    """Rank, alpha and targets of a saved adapter, to make a Learner that can load it.

    Raises:
        ModelError: it is not a PEFT LoRA adapter, or uses a variant that the core does not implement.
    """
    directory = _existing(directory)
    config = _read_config(directory)
    targets = sorted({name.rsplit(".", 3)[-3] for name in _headers(directory)})
    unknown = [name for name in targets if name not in LORA_TARGETS]
    if unknown:
        raise ModelError(
            f"{directory / WEIGHTS_FILE}: adapters on {', '.join(unknown)} are not supported; supported are {', '.join(LORA_TARGETS)}"
        )
    return LoraSettings(config["r"], float(config["lora_alpha"]), [name for name in LORA_TARGETS if name in targets])


def load_adapter(learner: Learner, directory: str | Path) -> None:
    """Loads a PEFT adapter into the learner and takes it as the initial one (the reference of a run that starts from it).

    Everything is checked before anything is changed.

    Raises:
        ModelError: it is not a PEFT LoRA adapter, uses a variant that the core does not implement, or differs from the learner's in rank,
            alpha, targets or shape; the message names the setting.
    """
    directory = _existing(directory)
    if learner.lora is None:
        raise ModelError(f"load_adapter: this learner has no adapter to load {directory} into; set lora: true")
    _check_config(directory, learner)
    headers = _headers(directory)
    expected = {file_name(info.name): info for info in learner.tensors() if info.is_adapter}
    missing, unknown = sorted(expected.keys() - headers.keys()), sorted(headers.keys() - expected.keys())
    if missing or unknown:
        raise ModelError(
            f"{directory / WEIGHTS_FILE}: {len(missing)} tensor(s) missing ({', '.join(missing[:3])}) and {len(unknown)} unknown "
            f"({', '.join(unknown[:3])}); lora_target_modules and the base model must be those the adapter was trained with"
        )
    for name, info in expected.items():
        if headers[name] != info.shape:
            raise ModelError(
                f"{directory / WEIGHTS_FILE}: {name}: expected {list(info.shape)}, got {list(headers[name])}; is it of this base model?"
            )
    values: dict[str, F32] = {}
    with safe_open(directory / WEIGHTS_FILE, framework="pt") as file:
        for name, info in expected.items():
            value = np.ascontiguousarray(file.get_tensor(name).float().numpy())
            if not np.isfinite(value).all():
                raise ModelError(f"{directory / WEIGHTS_FILE}: {name} holds a NaN or an infinity")
            values[info.name] = value
    for core_name, value in values.items():
        learner.load(core_name, value)
    learner.snapshot_adapter()


def _existing(directory: str | Path) -> Path:
    path = user_path(directory)
    if not path.is_dir():
        raise ModelError(f"adapter {str(directory)!r}: there is no such directory; give one that holds {CONFIG_FILE} and {WEIGHTS_FILE}")
    return path


def _read_config(directory: Path) -> dict[str, Any]:
    path = directory / CONFIG_FILE
    config = read_json(path)
    if config.get("peft_type") != "LORA":
        raise ModelError(f"{path}: peft_type {config.get('peft_type')!r} is not supported; only LORA")
    for key, value in config.items():
        if key not in _IDENTITY | _READ | _HARMLESS and value not in _OFF:
            raise ModelError(
                f"{path}: {key} = {value!r} is not supported; only plain LoRA (no rslora, dora, bias, modules_to_save or patterns)"
            )
    start = config.get("init_lora_weights")
    if isinstance(start, str) and start.lower().startswith(_BASE_CHANGING):
        raise ModelError(f"{path}: init_lora_weights = {start!r} changes the base weights as well; convert the adapter to plain LoRA first")
    if not isinstance(config.get("r"), int) or not isinstance(config.get("lora_alpha"), int | float):
        raise ModelError(f"{path}: r and lora_alpha must be numbers, got {config.get('r')!r} and {config.get('lora_alpha')!r}")
    return config


def _headers(directory: Path) -> dict[str, Shape]:
    path = directory / WEIGHTS_FILE
    if not path.is_file():
        raise ModelError(f"{path} is missing; an adapter must be saved as safetensors")
    try:
        with safe_open(path, framework="pt") as file:
            return {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118 (not a dict)
    except (SafetensorError, OSError) as error:
        raise ModelError(f"{path}: not a readable safetensors file ({error}); it may be cut short, get it again") from error


def _check_config(directory: Path, learner: Learner) -> None:
    assert learner.lora is not None
    path, settings = directory / CONFIG_FILE, adapter_settings(directory)
    if settings.rank != learner.lora.rank:
        raise ModelError(f"{path}: rank {settings.rank} differs from lora_rank {learner.lora.rank}; set lora_rank: {settings.rank}")
    if settings.alpha != float(learner.lora.alpha):
        raise ModelError(
            f"{path}: lora_alpha {settings.alpha:g} differs from lora_alpha {learner.lora.alpha:g}; set lora_alpha: {settings.alpha:g}"
        )
    ours = learner.lora.resolve(tied=learner.spec.tied)
    if tuple(settings.targets) != ours:
        raise ModelError(
            f"{path}: the adapter has {', '.join(settings.targets)} where lora_target_modules has {', '.join(ours)}; "
            f"set lora_target_modules: [{', '.join(settings.targets)}]"
        )
