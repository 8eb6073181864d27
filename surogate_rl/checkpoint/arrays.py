"""Arrays in a safetensors file, written and read one at a time: a checkpoint must not need a second copy of what it holds.

The format's own writer wants all arrays at once, and copies them once more. The format: 8 bytes of header length, a JSON header with
dtype, shape and offsets, then the arrays end to end, little-endian.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from safetensors import safe_open

_open: Any = safe_open  # its methods have no types
_NAMES = {"float32": "F32", "float64": "F64", "int32": "I32", "int64": "I64", "uint8": "U8", "bool": "BOOL"}


@dataclass(frozen=True)
class LazyArray:
    """An array that is made when it is written.

    Attributes:
        shape, dtype: of it.
        make: makes it.
    """

    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    make: Callable[[], NDArray[Any]]

    @property
    def nbytes(self) -> int:
        return int(np.prod(self.shape, dtype=np.int64)) * self.dtype.itemsize


Saved = NDArray[Any] | LazyArray


def write_arrays(path: Path, arrays: Mapping[str, Saved]) -> None:
    """Writes and syncs.

    Raises:
        ValueError: an array holds a value that is not finite (named), or is not of the shape and dtype that was said.
        OSError: the disk fails.
    """
    header: dict[str, Any] = {}
    offset = 0
    for name, array in arrays.items():
        header[name] = {
            "dtype": _NAMES[array.dtype.name],
            "shape": list(array.shape),
            "data_offsets": [offset, offset + array.nbytes],
        }
        offset += array.nbytes
    encoded = json.dumps(header).encode()
    encoded += b" " * (-len(encoded) % 8)
    with path.open("wb") as file:
        file.write(len(encoded).to_bytes(8, "little"))
        file.write(encoded)
        for name, array in arrays.items():
            value = array.make() if isinstance(array, LazyArray) else array
            if value.shape != tuple(array.shape) or value.dtype != array.dtype:
                raise ValueError(f"{name} is {value.dtype} {list(value.shape)}, {array.dtype} {list(array.shape)} was said")
            if np.issubdtype(value.dtype, np.floating) and not np.isfinite(value).all():
                raise ValueError(f"{name} holds values that are not finite")
            file.write(np.ascontiguousarray(value, dtype=value.dtype.newbyteorder("<")).data)
            del value  # before the next one is made
        file.flush()
        os.fsync(file.fileno())


class ArrayFile(Mapping[str, NDArray[Any]]):
    """Arrays of a file, each read whenever it is asked for.

    Raises:
        SafetensorError: it is no such file.
    """

    def __init__(self, path: Path) -> None:
        self._file = _open(str(path), framework="numpy")
        self._names: list[str] = list(self._file.keys())

    def __getitem__(self, name: str) -> NDArray[Any]:
        if name not in self._names:
            raise KeyError(name)
        array: NDArray[Any] = self._file.get_tensor(name)
        return array

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)


class Under(Mapping[str, NDArray[Any]]):
    """Those whose names begin with `prefix`, without it."""

    def __init__(self, arrays: Mapping[str, NDArray[Any]], prefix: str) -> None:
        self._arrays, self._prefix = arrays, prefix
        self._names = [name.removeprefix(prefix) for name in arrays if name.startswith(prefix)]

    def __getitem__(self, name: str) -> NDArray[Any]:
        return self._arrays[self._prefix + name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)
