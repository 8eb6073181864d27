"""The learner's weights as an engine takes them: named as in a Hugging Face file, in its number format, in memory that it can map."""

from __future__ import annotations

import contextlib
import mmap
import os
import zlib
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any, Literal, Protocol

import numpy as np
import torch
from safetensors.numpy import save

from surogate_rl.learner import Learner
from surogate_rl.models.adapter import file_name
from surogate_rl.models.family import Family

Sync = Literal["full", "merged", "adapter"]

Transfer = Literal["cuda_ipc", "host"]


@dataclass
class Entry:
    """One tensor of a bucket. `core_name` is the learner's name for it."""

    name: str
    core_name: str
    shape: tuple[int, ...]
    offset: int
    length: int
    checksum: int | tuple[int, int] = 0


class Bucket(Protocol):
    """Memory that torch writes to, and that the engine's worker can map.

    Attributes:
        size: bytes.
        memory: those, which can be indexed.
    """

    entries: list[Entry]
    dtype: torch.dtype
    size: int
    memory: Any

    def tensor(self, entry: Entry) -> torch.Tensor:
        """The place of a tensor, as a view."""

    def seal(self, *entries: Entry) -> None:
        """Takes their checksums, once their values are there."""

    def describe(self) -> dict[str, Any]:
        """What the engine's side needs to read it."""

    def close(self) -> None: ...


def described(bucket: Bucket) -> list[list[Any]]:
    """Its entries as they travel."""
    dtype = str(bucket.dtype).removeprefix("torch.")
    return [[e.name, dtype, list(e.shape), e.offset, e.length, e.checksum] for e in bucket.entries]


class HostBucket:
    """Memory of the host. It is anonymous, so nothing is left behind by a killed run."""

    def __init__(self, entries: list[Entry], dtype: torch.dtype) -> None:
        self.entries = entries
        self.dtype = dtype
        self.size = max(entry.offset + entry.length for entry in entries)
        self._file = os.memfd_create("surogate-bucket")
        os.ftruncate(self._file, self.size)
        self.memory = mmap.mmap(self._file, self.size)
        self.path = f"/proc/{os.getpid()}/fd/{self._file}"

    def tensor(self, entry: Entry) -> torch.Tensor:
        count = entry.length // self.dtype.itemsize
        return torch.frombuffer(self.memory, dtype=self.dtype, count=count, offset=entry.offset).view(entry.shape)

    def seal(self, *entries: Entry) -> None:
        with memoryview(self.memory) as view:
            for entry in entries:
                entry.checksum = zlib.crc32(view[entry.offset : entry.offset + entry.length])

    def describe(self) -> dict[str, Any]:
        return {"path": self.path, "size": self.size, "entries": described(self)}

    def close(self) -> None:
        with contextlib.suppress(BufferError):  # a view is still alive; the memory goes with it
            self.memory.close()
        os.close(self._file)


class Adapter:
    """The learner's adapter as PEFT would save it: a config, and a safetensors file in memory."""

    def __init__(self, learner: Learner) -> None:
        assert learner.lora is not None
        self._learner = learner
        self._names = {info.name: file_name(info.name) for info in learner.tensors() if info.is_adapter}
        self.config: dict[str, Any] = {
            "peft_type": "LORA",
            "task_type": "CAUSAL_LM",
            "base_model_name_or_path": None,
            "r": learner.lora.rank,
            "lora_alpha": learner.lora.alpha,
            "lora_dropout": 0.0,
            "target_modules": list(learner.lora.resolve(tied=learner.spec.tied)),
            "bias": "none",
            "fan_in_fan_out": False,
            "inference_mode": True,
            "modules_to_save": None,
            "use_dora": False,
            "use_rslora": False,
        }
        self.tensors = b""

    def fill(self) -> None:
        self.tensors = save({file: self._learner.export(name) for name, file in self._names.items()})


class Snapshot(ABC):
    """A copy of the learner's weights, kept from one update to the next: an engine that has to be started again gets these, whatever the
    learner is doing meanwhile.

    Args:
        dtype: of the engine's weights.
        merge: add the adapter to the weights, in float32, from the frozen weights that the learner keeps. Otherwise it goes beside them.
    """

    bucket_bytes: int  # of a bucket, unless a single tensor takes more
    alignment: int  # of a tensor in it

    def __init__(self, learner: Learner, dtype: torch.dtype, *, merge: bool) -> None:
        self._learner = learner
        self._merge = merge and learner.lora is not None
        infos = {info.name: info for info in learner.tensors()}
        self._adapted = {
            name.removesuffix(".lora_A") + ".weight" for name, info in infos.items() if info.is_adapter and name.endswith(".lora_A")
        }
        self._filled = False
        self.adapter: Adapter | None = None
        if learner.lora is not None and not merge:
            self.adapter = Adapter(learner)
        self.buckets: list[Bucket] = []
        entries: list[Entry] = []
        offset = 0
        for name, info in infos.items():
            if info.is_adapter:
                continue
            length = int(np.prod(info.shape)) * dtype.itemsize
            if entries and offset + length > self.bucket_bytes:
                self.buckets.append(self._bucket(entries, dtype))
                entries, offset = [], 0
            entries.append(Entry(Family.file_name(name), name, info.shape, offset, length))
            offset += -(-length // self.alignment) * self.alignment
        self.buckets.append(self._bucket(entries, dtype))

    @abstractmethod
    def _bucket(self, entries: list[Entry], dtype: torch.dtype) -> Bucket: ...

    @property
    def bytes(self) -> int:
        return sum(bucket.size for bucket in self.buckets)

    def fill(self) -> float:
        """Takes the present weights. The learner must be idle.

        Returns: of a merged adapter's change of the weights, the share that rounding to the engine's number format loses
            (Euclidean norms over all adapted weights; 0 without an adapter).
        """
        work = [(bucket, entry) for bucket in self.buckets for entry in bucket.entries if self._changes(entry)]
        lost = self._take(work)
        for bucket in self.buckets:
            bucket.seal(*(entry for its, entry in work if its is bucket))
        self._filled = True
        if self.adapter is not None:
            self.adapter.fill()
        return lost

    @abstractmethod
    def _take(self, work: list[tuple[Bucket, Entry]]) -> float:
        """Writes the learner's weights into these places; the share that is lost, as `fill` returns it."""

    def _changes(self, entry: Entry) -> bool:
        """Whether it differs from what the bucket has: weights that are frozen never do again."""
        return not self._filled or self._learner.lora is None or self._merges(entry)

    def _merges(self, entry: Entry) -> bool:
        return self._merge and entry.core_name in self._adapted

    @property
    def _scale(self) -> float:
        """alpha / rank: a merged weight is W + that * B A."""
        assert self._learner.lora is not None
        return self._learner.lora.alpha / self._learner.lora.rank

    def find(self, name: str) -> tuple[Bucket, Entry]:
        return next((bucket, entry) for bucket in self.buckets for entry in bucket.entries if entry.name == name)

    def close(self) -> None:
        for bucket in self.buckets:
            bucket.close()


class HostSnapshot(Snapshot):
    """In memory of the host, over which any learner and any engine of this machine meet."""

    bucket_bytes = 256 << 20
    alignment = 64

    def _bucket(self, entries: list[Entry], dtype: torch.dtype) -> Bucket:
        return HostBucket(entries, dtype)

    def _take(self, work: list[tuple[Bucket, Entry]]) -> float:
        lost = changed = 0.0
        for bucket, entry in work:
            base = torch.from_numpy(self._learner.export(entry.core_name))
            place = bucket.tensor(entry)
            if not self._merges(entry):
                place.copy_(base)
                continue
            delta = self._delta(entry.core_name)
            torch.add(base, delta, out=(merged := torch.empty_like(base)))
            place.copy_(merged)
            if bucket.dtype != torch.float32:
                missing = delta - (place.float() - base.to(bucket.dtype).float())
                lost += float(missing.norm()) ** 2
                changed += float(delta.norm()) ** 2
        return (lost / changed) ** 0.5 if changed else 0.0

    def _delta(self, name: str) -> torch.Tensor:
        """alpha / rank * B A, in float32."""
        stem = name.removesuffix(".weight")
        a, b = (torch.from_numpy(self._learner.export(f"{stem}.lora_{side}")) for side in "AB")
        return (b @ a).mul_(self._scale)
