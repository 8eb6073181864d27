"""Files that survive a crash: written aside, fsynced, renamed; safetensors written tensor by tensor and verified."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import shutil
import uuid
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from safetensors import safe_open

from surogate_rl.models.errors import ModelError

F32 = NDArray[np.float32]
Shape = tuple[int, ...]


def write_text(path: Path, text: str) -> None:
    with path.open("w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())


def write_safetensors(path: Path, shapes: Mapping[str, Shape], value_of: Callable[[str], F32]) -> dict[str, str]:
    """Writes float32 tensors one at a time (the format's own writer wants them all at once) and returns name -> SHA-256 of the bytes.

    The format: 8 bytes of header length, a JSON header with dtype, shape and offsets, then the tensors end to end, little-endian.

    Raises:
        ModelError: a tensor holds a NaN or an infinity, or is not of its announced shape.
    """
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for name, shape in shapes.items():
        size = 4 * int(np.prod(shape, dtype=np.int64))
        header[name] = {"dtype": "F32", "shape": list(shape), "data_offsets": [offset, offset + size]}
        offset += size
    encoded = json.dumps(header).encode()
    encoded += b" " * (-len(encoded) % 8)
    hashes: dict[str, str] = {}
    with path.open("wb") as file:
        file.write(len(encoded).to_bytes(8, "little"))
        file.write(encoded)
        for name, shape in shapes.items():
            value = np.ascontiguousarray(value_of(name), dtype="<f4")
            if value.shape != shape:
                raise ModelError(f"{name}: expected shape {list(shape)}, got {list(value.shape)}")
            if not np.isfinite(value).all():
                raise ModelError(f"{name} holds a NaN or an infinity; nothing was saved, go back to the last good checkpoint")
            hashes[name] = hashlib.sha256(value.data).hexdigest()
            file.write(value.data)
        file.flush()
        os.fsync(file.fileno())
    return hashes


def verify_safetensors(path: Path, shapes: Mapping[str, Shape], hashes: Mapping[str, str]) -> None:
    """Reads a file back and compares names, shapes, dtypes and hashes.

    Raises:
        ModelError: anything differs from what was written.
    """
    with safe_open(path, framework="numpy") as file:
        names = set(file.keys())
        if names != set(shapes):
            raise ModelError(f"{path}: reads back with other tensors than were written: {', '.join(sorted(names ^ set(shapes))[:5])}")
        for name, shape in shapes.items():
            value = file.get_tensor(name)
            if value.dtype != np.float32 or value.shape != shape:
                raise ModelError(f"{path}: {name} reads back as {value.dtype} {list(value.shape)} instead of float32 {list(shape)}")
            if hashlib.sha256(np.ascontiguousarray(value).data).hexdigest() != hashes[name]:
                raise ModelError(f"{path}: {name} reads back with other values than were written; the disk may be failing")


def require_space(directory: Path, size: int) -> None:
    """Raises OSError if the disk under `directory` has less than `size` bytes free, before anything is written."""
    existing = directory
    while not existing.exists():
        existing = existing.parent
    free = shutil.disk_usage(existing).free
    if free < size:
        raise OSError(f"{directory}: saving needs {size / 1e9:.2f} GB, and {free / 1e9:.2f} GB are free; make room or save elsewhere")


@contextlib.contextmanager
def replaced_directory(directory: Path, markers: tuple[str, ...]) -> Iterator[Path]:
    """A fresh directory to write into, which takes the place of `directory` when the block ends well and vanishes when it does not.

    An existing one is replaced only if it is empty or a former save (holds one of `markers`); anything else is not ours to delete.

    Raises:
        FileExistsError: `directory` holds something else.
    """
    directory = Path(os.path.abspath(directory))
    if directory.exists() and not _replaceable(directory, markers):
        raise FileExistsError(f"{directory} exists and is no saved model; give a directory that is new or empty")
    directory.parent.mkdir(parents=True, exist_ok=True)
    tag = uuid.uuid4().hex[:8]
    aside, old = directory.with_name(f".{directory.name}.new-{tag}"), directory.with_name(f".{directory.name}.old-{tag}")
    aside.mkdir()
    try:
        yield aside
        for path in aside.rglob("*"):
            _sync(path)
        _sync(aside)
        if directory.exists():
            directory.rename(old)
            try:
                aside.rename(directory)
            except OSError:
                old.rename(directory)
                raise
        else:
            aside.rename(directory)
        _sync(directory.parent)
        shutil.rmtree(old, ignore_errors=True)
    finally:
        shutil.rmtree(aside, ignore_errors=True)


def _replaceable(directory: Path, markers: tuple[str, ...]) -> bool:
    return directory.is_dir() and (not any(directory.iterdir()) or any((directory / marker).is_file() for marker in markers))


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
