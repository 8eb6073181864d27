"""GGUF files: unpacked once by transformers, kept as a Hugging Face directory in the user's cache."""

from __future__ import annotations

import hashlib
import json
import logging
import os
import tempfile
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PretrainedConfig

from surogate_rl.models.errors import ModelError
from surogate_rl.models.files import write_safetensors, write_text

logger = logging.getLogger(__name__)

_FORMAT = 1  # of what lies in the cache; raise it when the conversion changes


def cache_directory() -> Path:
    """Where conversions are kept: ``$XDG_CACHE_HOME/surogate-rl``, by default ``~/.cache/surogate-rl``."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "surogate-rl"


def gguf_config(path: Path) -> PretrainedConfig:
    """The transformers config of a GGUF file, from its metadata alone.

    Raises:
        ModelError: ``gguf`` is not installed, or the file is damaged or of an architecture that transformers does not know.
    """
    _require("gguf", path)
    try:
        config: PretrainedConfig = AutoConfig.from_pretrained(path.parent, gguf_file=path.name, local_files_only=True)
    except Exception as error:
        raise ModelError(f"{path}: transformers cannot read this GGUF file ({_first_line(error)})") from error
    return config


def _target(path: Path) -> Path:
    """Where the conversion of a file lies, or will lie."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(1 << 22):
            digest.update(block)
    return cache_directory() / "gguf" / f"{digest.hexdigest()[:32]}-{_FORMAT}-{transformers.__version__}"


def earlier_conversion(path: Path) -> Path | None:
    """The directory of a conversion made before, if there is one."""
    target = _target(path)
    return target if (target / "config.json").is_file() else None


def converted_gguf(path: Path) -> Path:
    """The directory that holds `path`'s model in float32, made on the first call.

    The key is the content's hash, so that a changed file is converted anew.

    Raises:
        ModelError: ``gguf`` or ``accelerate`` is not installed, or transformers cannot unpack the file.
    """
    target = _target(path)
    if (target / "config.json").is_file():
        return target
    _require("gguf", path)
    _require("accelerate", path)
    logger.info("unpacking %s to %s (once)", path, target)
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=target.parent, prefix=".unpacking-") as scratch:
        aside = Path(scratch) / "model"
        aside.mkdir()
        _convert(path, aside)
        try:
            aside.rename(target)
        except OSError:  # another process was faster; its result is the same
            if not (target / "config.json").is_file():
                raise
    return target


def _convert(path: Path, directory: Path) -> None:
    try:
        tokenizer = AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name, local_files_only=True)
        model = AutoModelForCausalLM.from_pretrained(path.parent, gguf_file=path.name, dtype=torch.float32, local_files_only=True)
    except Exception as error:
        raise ModelError(f"{path}: transformers cannot unpack this GGUF file ({_first_line(error)})") from error
    tensors = {
        name: tensor for name, tensor in model.state_dict().items() if not (name == "lm_head.weight" and model.config.tie_word_embeddings)
    }
    packed = sorted(name for name, tensor in tensors.items() if tensor.dtype != torch.float32)
    if packed:
        raise ModelError(
            f"{path}: transformers left {len(packed)} tensor(s) packed ({packed[0]}); give a GGUF file of another quantisation type"
        )
    write_safetensors(
        directory / "model.safetensors", {name: tuple(t.shape) for name, t in tensors.items()}, lambda name: tensors[name].numpy()
    )
    config = plain_config(model.config) | {"architectures": [type(model).__name__], "dtype": "float32"}
    tokenizer.save_pretrained(directory)
    if model.generation_config is not None:
        write_text(directory / "generation_config.json", model.generation_config.to_json_string())
    write_text(directory / "config.json", json.dumps(config, indent=2) + "\n")


def plain_config(config: PretrainedConfig) -> dict[str, Any]:
    """The config as config.json would hold it, without the mark that the weights were quantised."""
    values: dict[str, Any] = json.loads(config.to_json_string(use_diff=False))
    values.pop("quantization_config", None)
    return values


def _require(package: str, path: Path) -> None:
    if find_spec(package) is None:
        raise ModelError(f"{path}: reading a GGUF file needs the package {package}; run: pip install gguf accelerate")


def _first_line(error: Exception) -> str:
    return str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
