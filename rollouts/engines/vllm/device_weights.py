"""A snapshot of the learner's weights on its own device: copied, merged, rounded and summed up there, where an engine maps it."""

from __future__ import annotations

import base64
import contextlib
from collections.abc import Iterable, Iterator
from typing import Any

import torch

from surogate_rl.learner import Learner
from surogate_rl.rollouts.engines.vllm.errors import EngineFailed
from surogate_rl.rollouts.engines.vllm.host.surogate_vllm.checksums import ROW, checksums, rows_of
from surogate_rl.rollouts.engines.vllm.host.surogate_vllm.mapping import HANDLE_BYTES
from surogate_rl.rollouts.engines.vllm.weights import Bucket, Entry, Snapshot, described

MERGE_BYTES = 128 << 20
"""Of float32 weights that are merged with their adapters at a time; a larger weight is taken alone."""
SLICE_BYTES = 32 << 20
"""Of rows of such a weight whose sums are formed at a time."""
_SHAREABLE = ord("c")  # before a handle: how torch marks memory of cudaMalloc


class DeviceBucket:
    """Memory that torch has taken on a device. On a GPU its CUDA IPC handle is what travels.

    Raises:
        EngineFailed: the memory that torch takes cannot be shared.
    """

    def __init__(self, entries: list[Entry], dtype: torch.dtype, device: torch.device) -> None:
        self.entries = entries
        self.dtype = dtype
        self.size = max(entry.offset + rows_of(entry.length) * ROW for entry in entries)
        self.memory = torch.empty(self.size, dtype=torch.uint8, device=device)
        self._views: dict[tuple[int, int, tuple[int, ...]], torch.Tensor] = {}
        self._handle, self._offset = _share(self.memory) if device.type == "cuda" else ("", 0)

    def tensor(self, entry: Entry) -> torch.Tensor:
        key = (entry.offset, entry.length, entry.shape)
        if key not in self._views:
            self._views[key] = self.memory[entry.offset : entry.offset + entry.length].view(self.dtype).view(entry.shape)
        return self._views[key]

    def seal(self, *entries: Entry) -> None:
        sums = checksums(self.memory, [(entry.offset, entry.length) for entry in entries])
        for entry, checksum in zip(entries, sums, strict=True):
            entry.checksum = checksum

    def describe(self) -> dict[str, Any]:
        return {"handle": self._handle, "offset": self._offset, "size": self.size, "entries": described(self)}

    def close(self) -> None:
        self._views.clear()
        del self.memory


def _share(memory: torch.Tensor) -> tuple[str, int]:
    """The CUDA IPC handle of the allocation that a tensor lies in, in base64, and where in it."""
    storage: Any = memory.untyped_storage()
    device, handle, _, offset, counter, place, _, _ = storage._share_cuda_()
    # torch counts who has the memory, so as not to give it to somebody else too early. Ours is kept by its owner for as long as it is in
    # use, and an engine that was killed would never count down.
    storage._release_ipc_counter(counter, place, device=device)
    if len(handle) > HANDLE_BYTES and handle[-HANDLE_BYTES - 1] != _SHAREABLE:
        raise EngineFailed(
            "rollouts.vllm.transfer: cuda_ipc cannot share memory of torch's expandable segments; take expandable_segments out of "
            "PYTORCH_ALLOC_CONF and PYTORCH_CUDA_ALLOC_CONF, or set transfer: host"
        )
    return base64.b64encode(handle[-HANDLE_BYTES:]).decode(), int(offset)


class DeviceSnapshot(Snapshot):
    """On the learner's device: a GPU whose memory the engine maps (or the host's memory, for a learner that computes there)."""

    bucket_bytes = 1 << 30
    alignment = ROW

    def __init__(self, learner: Learner, dtype: torch.dtype, *, merge: bool) -> None:
        kind, _, index = learner.device.partition(":")
        self._device = torch.device(kind, int(index or 0)) if kind == "cuda" else torch.device(kind)
        super().__init__(learner, dtype, merge=merge)

    def _bucket(self, entries: list[Entry], dtype: torch.dtype) -> Bucket:
        return DeviceBucket(entries, dtype, self._device)

    def close(self) -> None:
        super().close()
        if self._device.type == "cuda":
            torch.cuda.empty_cache()  # the learner's core takes memory from the driver, not from torch

    def _take(self, work: list[tuple[Bucket, Entry]]) -> float:
        self._learner.export_to({entry.core_name: bucket.tensor(entry) for bucket, entry in work if not self._merges(entry)})
        norms: list[torch.Tensor] = []
        with _full_precision():
            for group in _groups((bucket, entry) for bucket, entry in work if self._merges(entry)):
                norms += self._merge_group(group)
        if not norms:
            return 0.0
        lost, changed = torch.stack(norms).double().square().sum(0).tolist()
        return (lost / changed) ** 0.5 if changed else 0.0

    def _merge_group(self, group: list[tuple[Bucket, Entry]]) -> Iterator[torch.Tensor]:
        """Merges some weights; of each slice of them, the norms of what rounding loses and of the adapter's change."""
        shapes = {info.name: info.shape for info in self._learner.tensors()}
        parts: dict[str, torch.Tensor] = {}
        for _, entry in group:
            stem = entry.core_name.removesuffix(".weight")
            for name in (entry.core_name, f"{stem}.lora_A", f"{stem}.lora_B"):
                parts[name] = torch.empty(shapes[name], dtype=torch.float32, device=self._device)
        self._learner.export_to(parts)
        for bucket, entry in group:
            stem = entry.core_name.removesuffix(".weight")
            base, a, b = (parts[name] for name in (entry.core_name, f"{stem}.lora_A", f"{stem}.lora_B"))
            place = bucket.tensor(entry)
            rows = max(1, SLICE_BYTES // (4 * base.shape[1]))
            for first in range(0, len(base), rows):
                chosen = slice(first, first + rows)
                delta = (b[chosen] @ a).mul_(self._scale)
                place[chosen] = base[chosen] + delta
                if bucket.dtype != torch.float32:
                    missing = delta - (place[chosen].float() - base[chosen].to(bucket.dtype).float())
                    yield torch.stack([missing.norm(), delta.norm()])


def _groups(work: Iterable[tuple[Bucket, Entry]]) -> Iterator[list[tuple[Bucket, Entry]]]:
    """In parts of at most MERGE_BYTES of float32."""
    group: list[tuple[Bucket, Entry]] = []
    size = 0
    for bucket, entry in work:
        taken = 4 * entry.length // bucket.dtype.itemsize
        if group and size + taken > MERGE_BYTES:
            yield group
            group, size = [], 0
        group.append((bucket, entry))
        size += taken
    if group:
        yield group


def merge_bytes(largest: int) -> int:
    """What merging takes on the device beside the buckets, at the most.

    Args:
        largest: values of the largest weight that has an adapter; 0: none has.
    """
    return max(MERGE_BYTES, 4 * largest) + 6 * SLICE_BYTES if largest else 0


@contextlib.contextmanager
def _full_precision() -> Iterator[None]:
    """Products of float32 in float32, whatever torch has been told elsewhere in this process."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)
