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

import numpy as np
import torch
import transformers
from numpy.typing import NDArray
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PretrainedConfig

from surogate_rl.models.errors import ModelError
from surogate_rl.models.files import write_safetensors, write_text
from surogate_rl.models.registry import family_of
from surogate_rl.models.rope import make_rope

logger = logging.getLogger(__name__)

FREQUENCY_FACTORS = "rope_freqs.weight"
_FORMAT = 2  # of what lies in the cache; raise it when the conversion changes


def cache_directory() -> Path:
    """Where conversions are kept: ``$XDG_CACHE_HOME/surogate-rl``, by default ``~/.cache/surogate-rl``."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "surogate-rl"


def gguf_config(path: Path) -> PretrainedConfig:
    """The transformers config of a GGUF file, from its metadata, with what transformers leaves out (see ``_complete``) put right.

    Raises:
        ModelError: ``gguf`` is not installed; the file is damaged, of an architecture that transformers does not know, or has a setting
            that cannot be carried over.
    """
    _require("gguf", path)
    try:
        config: PretrainedConfig = AutoConfig.from_pretrained(path.parent, gguf_file=path.name, local_files_only=True)
    except Exception as error:
        raise ModelError(f"{path}: transformers cannot read this GGUF file ({_first_line(error)})") from error
    _complete(config, path)
    return config


def _complete(config: PretrainedConfig, path: Path) -> None:
    """transformers passes over a GGUF file's own head size and its rotation scaling; without them the model would be another one."""
    from gguf import GGUFReader

    reader = GGUFReader(path)

    def value_of(key: str) -> Any:
        field = reader.fields.get(f"{architecture}.{key}")
        return None if field is None else field.contents()

    architecture = reader.fields["general.architecture"].contents()
    if (head_dim := value_of("attention.key_length")) is not None:
        config.head_dim = int(head_dim)
    kind = value_of("rope.scaling.type")
    if kind == "linear":
        config.rope_parameters = {**config.rope_parameters, "rope_type": "linear", "factor": float(value_of("rope.scaling.factor"))}
    elif kind not in (None, "none"):
        raise ModelError(f"{path}: rope scaling {kind!r} is incomplete in GGUF files; give the model as a Hugging Face directory or hub id")
    factors = next((tensor.data for tensor in reader.tensors if tensor.name == FREQUENCY_FACTORS), None)
    if factors is not None:
        config.rope_parameters = _llama3_parameters(config, np.asarray(factors, np.float64).ravel(), path)


def _llama3_parameters(config: PretrainedConfig, factors: NDArray[np.float64], path: Path) -> dict[str, Any]:
    """The llama3 scaling behind a file's divisors of the frequencies.

    Only ``factor``, the largest divisor, differs between the released models; that the other settings are the usual ones is verified, since
    the divisors must come out the same."""
    parameters = {
        "rope_type": "llama3",
        "rope_theta": config.rope_parameters["rope_theta"],
        "factor": float(factors.max()),
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
    plain = {"rope_type": "default", "rope_theta": parameters["rope_theta"]}
    sizes = {"head_dim": 2 * factors.size, "max_positions": config.max_position_embeddings}
    implied = np.array(make_rope(plain, **sizes).inv_freq) / np.array(make_rope(parameters, **sizes).inv_freq)
    if not np.allclose(implied, factors, rtol=1e-4):
        raise ModelError(f"{path}: {FREQUENCY_FACTORS} holds an unknown rope scaling; give the model as a Hugging Face directory or hub id")
    return parameters


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
    config = gguf_config(path)
    family_of(plain_config(config), str(path))  # before the work, not after it
    try:
        tokenizer = AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name, local_files_only=True)
        pair: Any = AutoModelForCausalLM.from_pretrained(
            path.parent, gguf_file=path.name, config=config, dtype=torch.float32, local_files_only=True, output_loading_info=True
        )
    except Exception as error:
        raise ModelError(f"{path}: transformers cannot unpack this GGUF file ({_first_line(error)})") from error
    model, report = pair
    tensors: dict[str, torch.Tensor] = model.state_dict()
    if model.config.tie_word_embeddings:
        tensors.pop("lm_head.weight", None)
    _require_all(path, len(tensors), report)
    packed = sorted(name for name, tensor in tensors.items() if tensor.dtype != torch.float32)
    if packed:
        raise ModelError(
            f"{path}: transformers left {len(packed)} tensor(s) packed ({packed[0]}); give a GGUF file of another quantisation type"
        )
    write_safetensors(
        directory / "model.safetensors", {name: tuple(t.shape) for name, t in tensors.items()}, lambda name: tensors[name].numpy()
    )
    values = plain_config(model.config) | {"architectures": [type(model).__name__], "dtype": "float32"}
    tokenizer.save_pretrained(directory)
    if model.generation_config is not None:
        write_text(directory / "generation_config.json", model.generation_config.to_json_string())
    write_text(directory / "config.json", json.dumps(values, indent=2) + "\n")


def _require_all(path: Path, converted: int, report: dict[str, Any]) -> None:
    """transformers fills what it does not find with random numbers, and passes over tensors that the config has no place for."""
    from gguf import GGUFReader

    if missing := sorted(report["missing_keys"]):
        raise ModelError(f"{path}: the file lacks {len(missing)} tensor(s) of the model: {', '.join(missing[:3])}")
    stored = [tensor.name for tensor in GGUFReader(path).tensors if tensor.name != FREQUENCY_FACTORS]
    if len(stored) != converted:
        raise ModelError(
            f"{path}: the file holds {len(stored)} tensors, of which transformers takes over {converted}; the rest (biases, for one) would "
            "be lost, so give the model as a Hugging Face directory or hub id"
        )


def plain_config(config: PretrainedConfig) -> dict[str, Any]:
    """The config as config.json would hold it, without where it came from and the mark that the weights were quantised."""
    values: dict[str, Any] = json.loads(config.to_json_string(use_diff=False))
    for key in ("quantization_config", "_name_or_path", "_model_name_or_path"):
        values.pop(key, None)
    return values


def _require(package: str, path: Path) -> None:
    if find_spec(package) is None:
        raise ModelError(f"{path}: reading a GGUF file needs the package {package}; run: pip install gguf accelerate")


def _first_line(error: Exception) -> str:
    return str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
