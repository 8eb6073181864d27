"""Memory of a GPU that another process has taken, mapped by its CUDA IPC handle.

A handle is the driver's own 64 bytes, not torch's wrapping of them, which differs from version to version; and it is not counted on either
side, so that an engine that is killed leaves nothing behind in the run's process.
"""

from __future__ import annotations

import base64
import ctypes
from collections.abc import Iterable
from typing import Any

import torch

HANDLE_BYTES = 64
_LAZY_PEER_ACCESS = 1


class _Handle(ctypes.Structure):
    """Passed by value."""

    _fields_ = [("bytes", ctypes.c_ubyte * HANDLE_BYTES)]


class _Place:
    """What torch needs to take memory for a tensor."""

    def __init__(self, address: int, size: int) -> None:
        self.__cuda_array_interface__ = {"shape": (size,), "typestr": "|u1", "data": (address, False), "strides": None, "version": 3}


class Mappings:
    """Keeps what it has mapped: opening a handle takes milliseconds, and one process may open it only once.

    Args:
        device: a GPU; the memory must be its own, or a peer's.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._runtime: ctypes.CDLL | None = None
        self._open: dict[str, int] = {}

    def memory(self, handle: str, offset: int, size: int) -> torch.Tensor:
        """uint8 [size] that begins `offset` bytes after the start of what `handle` (base64) stands for.

        Raises:
            RuntimeError: CUDA does not map it.
        """
        start = self._open.get(handle)
        if start is None:
            start = self._open[handle] = self._map(base64.b64decode(handle))
        return torch.as_tensor(_Place(start + offset, size), device=self._device)

    def keep(self, handles: Iterable[str]) -> None:
        """Unmaps all others. No tensor of theirs may be in use."""
        gone = self._open.keys() - set(handles)
        if not gone:
            return
        torch.cuda.synchronize(self._device)
        for handle in gone:
            self._check("cudaIpcCloseMemHandle", self._library().cudaIpcCloseMemHandle(ctypes.c_void_p(self._open.pop(handle))))

    def _map(self, handle: bytes) -> int:
        if len(handle) != HANDLE_BYTES:
            raise RuntimeError(f"a CUDA IPC handle has {HANDLE_BYTES} bytes, not {len(handle)}")
        address = ctypes.c_void_p()
        with torch.cuda.device(self._device):
            torch.cuda.synchronize()  # there is a context
            function: Any = self._library().cudaIpcOpenMemHandle
            function.argtypes = [ctypes.POINTER(ctypes.c_void_p), _Handle, ctypes.c_uint]
            self._check("cudaIpcOpenMemHandle", function(ctypes.byref(address), _Handle.from_buffer_copy(handle), _LAZY_PEER_ACCESS))
        assert address.value is not None
        return address.value

    def _library(self) -> ctypes.CDLL:
        """The CUDA runtime that torch has loaded, as an object of our own: argument types are set on it."""
        if self._runtime is None:
            with open("/proc/self/maps", encoding="utf-8") as maps:
                paths = [line.split()[-1] for line in maps if "libcudart" in line]
            if not paths:
                raise RuntimeError("torch has not loaded libcudart; set rollouts.vllm.transfer: host")
            self._runtime = ctypes.CDLL(paths[0])
            self._runtime.cudaGetErrorString.restype = ctypes.c_char_p
        return self._runtime

    def _check(self, what: str, code: int) -> None:
        if code:
            self._library().cudaGetLastError()  # or the next launch would report it
            why = self._library().cudaGetErrorString(code).decode()
            raise RuntimeError(f"{what}: {why}; the run's GPU memory cannot be mapped here: set rollouts.vllm.transfer: host")
