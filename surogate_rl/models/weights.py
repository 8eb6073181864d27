"""Where weights come from: safetensors files, or a random generator. Both stream, one tensor at a time, as float32."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors import SafetensorError, safe_open

from surogate_rl.models.errors import ModelError
from surogate_rl.models.family import Family, Shape

F32 = NDArray[np.float32]

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
_FLOATS = {"F32", "F16", "BF16", "F64"}
# Buffers that old checkpoints carry along although they follow from the config.
_IGNORED_SUFFIXES = ("rotary_emb.inv_freq", "self_attn.masked_bias")


class WeightSource(Protocol):
    """Streams (core name, float32 array) of every weight of a model once per call."""

    def __call__(self) -> Iterator[tuple[str, F32]]: ...


def _read_index(path: Path) -> dict[str, str]:
    try:
        weight_map = json.loads(path.read_text(encoding="utf-8"))["weight_map"]
    except (json.JSONDecodeError, KeyError, UnicodeDecodeError, TypeError) as error:
        raise ModelError(f"{path}: not a safetensors index (no readable weight_map: {error}); download the file again") from error
    if not isinstance(weight_map, dict) or not all(isinstance(value, str) for value in weight_map.values()):
        raise ModelError(f"{path}: weight_map must map tensor names to file names; download the file again")
    return weight_map


class Checkpoint:
    """The safetensors files of a directory, opened for their headers. Nothing of a tensor is read before :meth:`read`.

    Raises:
        ModelError: there are no weights, a file is damaged, or the index names a shard or a tensor that is not there.
    """

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.headers: dict[str, tuple[Path, str, Shape]] = {}
        single, index = directory / SINGLE_FILE, directory / INDEX_FILE
        if single.is_file():
            self._scan(single)
            return
        if not index.is_file():
            raise ModelError(self._nothing_found())
        weight_map = _read_index(index)
        files = sorted(set(weight_map.values()))
        missing = [name for name in files if not (directory / name).is_file()]
        if missing:
            raise ModelError(f"{index} names {len(missing)} missing file(s): {', '.join(missing)}; complete the download of {directory}")
        for name in files:
            self._scan(directory / name)
        for tensor, name in weight_map.items():
            where = self.headers.get(tensor)
            if where is None or where[0].name != Path(name).name:
                raise ModelError(f"{index} places tensor {tensor} in {name}, where it is not; the checkpoint is damaged, get it again")

    def _nothing_found(self) -> str:
        message = f"{self.directory}: no weights; expected {SINGLE_FILE} or {INDEX_FILE}"
        others = sorted(p.name for p in self.directory.glob("*") if p.suffix in (".bin", ".pt", ".pth", ".gguf", ".safetensors"))
        if any(name.endswith(".gguf") for name in others):
            return f"{message}; found {', '.join(others[:4])}: give the path of the GGUF file itself"
        if others:
            return f"{message}; found {', '.join(others[:4])}: save the model again with transformers' save_pretrained"
        return f"{message}; give a complete checkpoint, or set init: random to start from the config alone"

    def _scan(self, path: Path) -> None:
        try:
            with safe_open(path, framework="pt") as file:
                for name in file.keys():  # noqa: SIM118 (not a dict)
                    view = file.get_slice(name)
                    if name in self.headers:
                        raise ModelError(
                            f"{path}: tensor {name} is also in {self.headers[name][0].name}; the checkpoint is damaged, get it again"
                        )
                    self.headers[name] = (path, view.get_dtype(), tuple(view.get_shape()))
        except (SafetensorError, OSError) as error:
            raise ModelError(f"{path}: not a readable safetensors file ({error}); it may be cut short, get it again") from error

    def read(self, name: str) -> torch.Tensor:
        """One tensor in the file's dtype."""
        with safe_open(self.headers[name][0], framework="pt") as file:
            tensor: torch.Tensor = file.get_tensor(name)
            return tensor

    def same(self, first: str, second: str) -> bool:
        """Whether two tensors hold equal values."""
        if self.headers[first][2] != self.headers[second][2]:
            return False
        return torch.equal(self.read(first).float(), self.read(second).float())


def head_is_tied(checkpoint: Checkpoint, tied: bool) -> bool:
    """Whether the head is the embedding by what the files hold: a head that differs from the embedding is kept, whatever
    the config says."""
    embedding, head = Family.file_name("embed_tokens.weight"), "lm_head.weight"
    if not tied or head not in checkpoint.headers or embedding not in checkpoint.headers:
        return tied
    return checkpoint.same(embedding, head)


class SafetensorsWeights:
    """Weights of a checkpoint, checked against the model's shapes before the first byte is read.

    Raises:
        ModelError: a tensor is missing, unknown, of another shape or of a dtype that is not a float of 16, 32 or 64 bits.
    """

    def __init__(self, checkpoint: Checkpoint, shapes: dict[str, Shape]) -> None:
        self._checkpoint = checkpoint
        self._names: dict[str, str] = {}
        tied = "lm_head.weight" not in shapes
        for core_name, shape in shapes.items():
            name = Family.file_name(core_name)
            if tied and core_name == "embed_tokens.weight" and name not in checkpoint.headers:
                name = "lm_head.weight"  # a tied checkpoint may store the one matrix under either name
            self._names[core_name] = name
            self._check(core_name, name, shape)
        known = set(self._names.values()) | ({"lm_head.weight"} if tied else set())
        unknown = sorted(name for name in checkpoint.headers if name not in known and not name.endswith(_IGNORED_SUFFIXES))
        if unknown:
            raise ModelError(
                f"{checkpoint.directory}: {len(unknown)} tensor(s) that a model of this config does not have: {_few(unknown)}; "
                "config.json and weights do not belong together"
            )

    def _check(self, core_name: str, name: str, shape: Shape) -> None:
        directory, header = self._checkpoint.directory, self._checkpoint.headers.get(name)
        if header is None:
            if core_name == "lm_head.weight":
                hint = "config.json says tie_word_embeddings: false; set it to true if the head is the embedding"
            else:
                hint = "config.json and weights do not belong together, or the download is incomplete"
            raise ModelError(f"{directory}: tensor {name} is missing; {hint}")
        path, dtype, got = header
        if got != shape:
            raise ModelError(f"{path}: tensor {name}: expected shape {list(shape)} from config.json, got {list(got)}")
        if dtype not in _FLOATS:
            raise ModelError(
                f"{path}: tensor {name} is stored as {dtype}; supported are {', '.join(sorted(_FLOATS))}; "
                "give a checkpoint that is not quantised"
            )

    def __call__(self) -> Iterator[tuple[str, F32]]:
        # The file is mapped anew for each tensor: pages once read stay with the process until it is unmapped, a second copy in the end.
        for core_name, name in self._names.items():
            yield core_name, self._checkpoint.read(name).to(torch.float32).contiguous().numpy()


class RandomWeights:
    """Fresh weights as transformers initialises them: normal with ``initializer_range`` for matrices, ones for norms, zeros for biases.

    Each tensor has its own stream, made from the seed and its name, so that one tensor does not depend on the others.
    """

    def __init__(self, shapes: dict[str, Shape], *, initializer_range: float, seed: int) -> None:
        self._shapes = shapes
        self._std = initializer_range
        self._seed = seed

    def __call__(self) -> Iterator[tuple[str, F32]]:
        for name, shape in self._shapes.items():
            if name.endswith(".bias"):
                yield name, np.zeros(shape, np.float32)
            elif name.endswith("norm.weight"):
                yield name, np.ones(shape, np.float32)
            else:
                key = int.from_bytes(hashlib.sha256(f"{self._seed}:{name}".encode()).digest()[:16], "little")
                generator = np.random.Generator(np.random.Philox(key=key))
                yield name, generator.standard_normal(shape, np.float32) * np.float32(self._std)


def _few(names: list[str], limit: int = 5) -> str:
    return ", ".join(names[:limit]) + (f" and {len(names) - limit} more" if len(names) > limit else "")
