"""The learner's weights as an engine takes them: named as in a Hugging Face file, in the engine's number format, in shared memory."""

from __future__ import annotations

import contextlib
import mmap
import os
import zlib
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch
from safetensors.numpy import save

from surogate_rl.learner import Learner
from surogate_rl.models.adapter import file_name
from surogate_rl.models.family import Family

Sync = Literal["full", "merged", "adapter"]

BUCKET_BYTES = 256 << 20
_ALIGNMENT = 64


@dataclass
class Entry:
    """One tensor of a bucket. `core_name` is the learner's name for it."""

    name: str
    core_name: str
    shape: tuple[int, ...]
    offset: int
    length: int
    checksum: int = 0


class Bucket:
    """Memory that torch writes to and other processes of this machine can map: anonymous, so nothing is left behind by a killed run."""

    def __init__(self, entries: list[Entry], dtype: torch.dtype) -> None:
        self.entries = entries
        self.dtype = dtype
        self.size = max(entry.offset + entry.length for entry in entries)
        self._file = os.memfd_create("surogate-bucket")
        os.ftruncate(self._file, self.size)
        self.memory = mmap.mmap(self._file, self.size)
        self.path = f"/proc/{os.getpid()}/fd/{self._file}"

    def tensor(self, entry: Entry) -> torch.Tensor:
        """The place of a tensor, as a view."""
        count = entry.length // self.dtype.itemsize
        return torch.frombuffer(self.memory, dtype=self.dtype, count=count, offset=entry.offset).view(entry.shape)

    def seal(self, entry: Entry) -> None:
        with memoryview(self.memory) as view:
            entry.checksum = zlib.crc32(view[entry.offset : entry.offset + entry.length])

    def describe(self) -> dict[str, Any]:
        """What the engine's side needs to read it."""
        dtype = str(self.dtype).removeprefix("torch.")
        entries = [[e.name, dtype, list(e.shape), e.offset, e.length, e.checksum] for e in self.entries]
        return {"path": self.path, "size": self.size, "entries": entries}

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


class Snapshot:
    """A copy of the learner's weights, kept from one update to the next: an engine that has to be started again gets these, whatever the
    learner is doing meanwhile.

    Args:
        dtype: of the engine's weights.
        merge: add the adapter to the weights, in float32, from the frozen weights that the learner keeps. Otherwise it goes beside them.
    """

    def __init__(self, learner: Learner, dtype: torch.dtype, *, merge: bool) -> None:
        self._learner = learner
        self._merge = merge and learner.lora is not None
        infos = {info.name: info for info in learner.tensors()}
        self._adapted = {
            name.removesuffix(".lora_A") + ".weight" for name, info in infos.items() if info.is_adapter and name.endswith(".lora_A")
        }
        self._filled = False
        self.version = -1
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
            if entries and offset + length > BUCKET_BYTES:
                self.buckets.append(Bucket(entries, dtype))
                entries, offset = [], 0
            entries.append(Entry(Family.file_name(name), name, info.shape, offset, length))
            offset += -(-length // _ALIGNMENT) * _ALIGNMENT
        self.buckets.append(Bucket(entries, dtype))

    @property
    def bytes(self) -> int:
        return sum(bucket.size for bucket in self.buckets)

    def fill(self) -> float:
        """Takes the present weights. The learner must be idle.

        Returns: of a merged adapter's change of the weights, the share that rounding to the engine's number format loses
            (Euclidean norms over all adapted weights; 0 without an adapter).
        """
        lost = changed = 0.0
        for bucket in self.buckets:
            for entry in bucket.entries:
                adapted = self._merge and entry.core_name in self._adapted
                if self._filled and self._learner.lora is not None and not adapted:
                    continue  # frozen
                base = torch.from_numpy(self._learner.export(entry.core_name))
                place = bucket.tensor(entry)
                if adapted:
                    delta = self._delta(entry.core_name)
                    torch.add(base, delta, out=(merged := torch.empty_like(base)))
                    place.copy_(merged)
                    if bucket.dtype != torch.float32:
                        missing = delta - (place.float() - base.to(bucket.dtype).float())
                        lost += float(missing.norm()) ** 2
                        changed += float(delta.norm()) ** 2
                else:
                    place.copy_(base)
                bucket.seal(entry)
        self._filled = True
        if self.adapter is not None:
            self.adapter.fill()
        return (lost / changed) ** 0.5 if changed else 0.0

    def _delta(self, name: str) -> torch.Tensor:
        """alpha / rank * B A, in float32."""
        assert self._learner.lora is not None
        stem = name.removesuffix(".weight")
        a, b = (torch.from_numpy(self._learner.export(f"{stem}.lora_{side}")) for side in "AB")
        return (b @ a).mul_(self._learner.lora.alpha / self._learner.lora.rank)

    def find(self, name: str) -> tuple[Bucket, Entry]:
        return next((bucket, entry) for bucket in self.buckets for entry in bucket.entries if entry.name == name)

    def close(self) -> None:
        for bucket in self.buckets:
            bucket.close()
