"""In vLLM's worker: receives weights from buckets, and proves that the model has them.

It is a backend of vLLM's own weight transfer: `start_weight_update`, `update_weights` and `finish_weight_update` drive it, and vLLM's
layer-wise reload puts the tensors where its kernels want them (on the CPU they are packed anew and the plain weight is dropped; writing
into the parameters would go unnoticed there). Importing the module registers the backend, so the worker is given an extension class from
here (and its process packs log-probabilities, `packed_logprobs`).

On a GPU the first update goes that way; once reading back has proved where every tensor lies, later ones are copied to those very places,
in a few launches. The parameters' addresses, which CUDA graphs hold, are the same either way.

Three checks, each naming the tensor: the bytes that arrived have the sender's checksum; the names and the engine's parameters are a
bijection; and after the update the live parameters are read back and compared with what was sent, bit for bit. A weight that only exists
packed is read back through its own kernel: a product with one-hot rows returns its columns exactly.
"""

from __future__ import annotations

import contextlib
import math
import mmap
import os
import zlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from vllm.distributed.weight_transfer.base import WeightTransferEngine, WeightTransferInitInfo, WeightTransferUpdateInfo
from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory

from . import packed_logprobs
from .checksums import ROW, checksums
from .layout import Layout
from .mapping import Mappings

BACKEND = "surogate"


@dataclass
class InitInfo(WeightTransferInitInfo):  # type: ignore[misc]
    pass


@dataclass
class Bucket(WeightTransferUpdateInfo):  # type: ignore[misc]
    """Where tensors lie.

    Attributes:
        size: bytes of the memory.
        path: of memory of the host that can be mapped; or
        handle: of a GPU's, for CUDA IPC, in base64.
        offset: bytes from the start of what `handle` stands for.
        entries: (name, dtype, shape, offset, bytes, checksum) of each tensor: CRC-32, or two sums of a GPU's memory (`checksums`).
    """

    size: int
    path: str = ""
    handle: str = ""
    offset: int = 0
    entries: list[list[Any]] = field(default_factory=list)


class Spot:
    """Where a tensor of a bucket goes in the engine.

    Args:
        address: of the parameter `target`.
        sent: the tensor in its bucket.
        live: the part of the parameter that it is for.
        part: of `sent`, that goes there.
    """

    def __init__(self, name: str, target: str, address: int, sent: torch.Tensor, live: torch.Tensor, part: torch.Tensor) -> None:
        self.name, self.target, self.address = name, target, address
        self.sent, self.live, self.part = sent, live, part
        # the next update's values will be in the same memory
        self.reusable = sent.is_cuda and part.untyped_storage().data_ptr() == sent.untyped_storage().data_ptr()
        self.bits = words(live, part) if self.reusable else (live, part)

    def takes(self, tensor: torch.Tensor) -> bool:
        """Whether it is the same place of a bucket."""
        sent = self.sent
        return tensor.data_ptr() == sent.data_ptr() and tensor.shape == sent.shape and tensor.dtype == sent.dtype


class BucketTransferEngine(WeightTransferEngine):  # type: ignore[misc]
    init_info_cls = InitInfo
    update_info_cls = Bucket
    supports_draft_weight_update = False

    def __init__(self, config: Any, vllm_config: Any, device: torch.device, model: Any) -> None:
        super().__init__(config, vllm_config, device, model)
        self._layout = Layout(model)
        self._received: dict[str, torch.Tensor] = {}
        self._problems: list[str] = []
        self._updates = 0
        self._mappings = Mappings(device)
        self._handles: set[str] = set()  # of this update's buckets
        self._proved: set[str] = set()  # tensors, if it is known where in the engine every one lies
        self._direct = False  # this update is copied there
        self._spots: dict[str, Spot] = {}
        self._copied: list[Spot] = []  # of this update
        self._open = False
        valid = int((vllm_config.additional_config or {}).get("surogate_valid_vocab", 0))
        if valid:
            mask_logits(model, valid)

    def init_transfer_engine(self, init_info: InitInfo) -> None:
        """Buckets need no meeting beforehand."""

    def start_weight_update(self) -> None:
        from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload

        if self._open:  # an update that broke off; its layers still wait for tensors
            finalize_layerwise_reload(self.model, self.model_config)
        self._open = False
        self._received, self._problems, self._handles, self._copied = {}, [], set(), []
        self._direct = bool(self._proved)
        if not self._direct:
            self._open = True
            initialize_layerwise_reload(self.model)

    def update_weights(self, update_info: dict[str, Any]) -> None:
        self.receive_weights(self.parse_update_info(update_info))
        if self.device.type != "cpu":
            torch.accelerator.synchronize()

    def receive_weights(self, update_info: Bucket) -> None:
        """A tensor that is not right is left out and remembered for `verify`, which names all of them."""
        good: list[tuple[str, torch.Tensor]] = []
        spots: list[Spot] = []
        for name, tensor in self._tensors(update_info):
            if isinstance(tensor, str):
                problem = tensor
            elif name in self._received:
                problem = "came twice"
            elif self._direct:
                spot = self._spot(name, tensor)
                problem = spot if isinstance(spot, str) else ""
                if isinstance(spot, Spot):
                    spots.append(spot)
            else:
                problem = self._layout.misfit(name, tensor)
                if not problem:
                    good.append((self._layout.loadable(name), tensor))
            if problem:
                self._problems.append(f"tensor {name} {problem}")
            elif isinstance(tensor, torch.Tensor):
                self._received[name] = tensor
        if spots:
            torch._foreach_copy_([spot.live for spot in spots], [spot.part for spot in spots])
            self._copied += spots
        elif not self._direct:
            self.model.load_weights(good)

    def _spot(self, name: str, tensor: torch.Tensor) -> Spot | str:
        """Where a tensor goes, as long as the engine's parameter is where it was; or why it cannot be loaded."""
        spot = self._spots.get(name)
        if spot is not None and spot.takes(tensor) and self._layout.address(spot.target) == spot.address:
            return spot
        if problem := self._layout.misfit(name, tensor):
            return problem
        target, _ = self._layout.place(name)
        try:
            live, part, _ = self._layout.read_back(name, target, tensor, 0)
        except ValueError as error:
            return f"cannot be loaded ({error})"
        spot = Spot(name, target, self._layout.address(target), tensor, live, part)
        if spot.reusable:
            self._spots[name] = spot
        return spot

    def _tensors(self, bucket: Bucket) -> Iterator[tuple[str, torch.Tensor | str]]:
        if not bucket.handle:
            return open_bucket(bucket)
        self._handles.add(bucket.handle)
        return read_bucket(self._mappings.memory(bucket.handle, bucket.offset, bucket.size), bucket)

    def finish_weight_update(self) -> None:
        from vllm.model_executor.model_loader.reload import finalize_layerwise_reload

        if self._open:
            finalize_layerwise_reload(self.model, self.model_config)
            self._layout.pack_tied()
        self._open = False

    def verify(self) -> dict[str, Any]:
        """Checks the update that just ended, and lets go of the buckets (of a GPU's memory, of what this update had no part in).

        Returns: how many `tensors` came, how many of them were read back `packed`, and the `problems`.
        """
        self._updates += 1
        problems, packed = self._problems, 0
        if not self._direct or self._received.keys() != self._proved:
            problems += self._layout.gaps(self._received)
        found: list[tuple[str, torch.Tensor, torch.Tensor]] = [(self._differs(spot.name, spot.target), *spot.bits) for spot in self._copied]
        for name, sent in [] if self._direct else self._received.items():
            for target in self._layout.holders(name):
                try:
                    live, expected, was_packed = self._layout.read_back(name, target, sent, self._updates)
                except ValueError as error:
                    problems.append(f"tensor {name} cannot be read back ({error})")
                    continue
                packed += was_packed
                found.append((self._differs(name, target), live, expected))
        same = equal((live, expected) for _, live, expected in found)
        problems += [message for (message, _, _), right in zip(found, same, strict=True) if not right]
        report = {"tensors": len(self._received), "packed": packed, "problems": problems}
        places_are_known = not problems and not packed and self.device.type == "cuda" and self._layout.plain
        self._proved = set(self._received) if places_are_known else set()
        self._received, self._problems, self._copied = {}, [], []
        if not self._proved:
            self._spots = {}
        self._mappings.keep(self._handles)
        return report

    @staticmethod
    def _differs(name: str, target: str) -> str:
        return f"tensor {name} is not in the engine as it was sent" + (f" ({target})" if target != name else "")

    def shutdown(self) -> None:
        self._received, self._spots, self._copied = {}, {}, []
        self._mappings.keep(())

    @staticmethod
    def trainer_send_weights(iterator: Any, trainer_args: Any) -> None:
        """Of the sender's side, which older versions of vLLM declare here; the run has a sender of its own."""
        raise RuntimeError("buckets are filled by the run, not by vLLM")


def open_bucket(bucket: Bucket) -> Iterator[tuple[str, torch.Tensor | str]]:
    """The tensors of a bucket, as views of its memory; for one that is damaged, what is wrong with it."""
    handle = os.open(bucket.path, os.O_RDWR)
    try:
        memory = mmap.mmap(handle, bucket.size)
    finally:
        os.close(handle)
    view = memoryview(memory)
    for name, dtype, shape, offset, length, checksum in bucket.entries:
        kind = getattr(torch, dtype)
        count = math.prod(shape)
        if offset + length > bucket.size or count * kind.itemsize != length:
            yield name, f"is cut: {length} bytes at {offset} of {bucket.size} for shape {shape} ({dtype})"
        elif zlib.crc32(view[offset : offset + length]) != checksum:
            yield name, "did not arrive as it was sent (checksum)"
        else:
            yield name, torch.frombuffer(memory, dtype=kind, count=count, offset=offset).view(shape)


def read_bucket(memory: torch.Tensor, bucket: Bucket) -> Iterator[tuple[str, torch.Tensor | str]]:
    """The tensors of a bucket whose `memory` (uint8 [size]) is on a device, likewise. Its checksums are formed all at once."""
    flaws: dict[int, str] = {}
    for number, (_, dtype, shape, offset, length, _) in enumerate(bucket.entries):
        count = math.prod(shape)
        if offset % ROW or offset + length > bucket.size or count * getattr(torch, dtype).itemsize != length:
            flaws[number] = f"is cut: {length} bytes at {offset} of {bucket.size} for shape {shape} ({dtype})"
    whole = [number for number in range(len(bucket.entries)) if number not in flaws]
    sums = checksums(memory, [(bucket.entries[number][3], bucket.entries[number][4]) for number in whole])
    for number, found in zip(whole, sums, strict=True):
        if tuple(bucket.entries[number][5]) != found:
            flaws[number] = "did not arrive as it was sent (checksum)"
    for number, (name, dtype, shape, offset, length, _) in enumerate(bucket.entries):
        yield name, flaws.get(number) or memory[offset : offset + length].view(getattr(torch, dtype)).view(shape)


def equal(pairs: Iterable[tuple[torch.Tensor, torch.Tensor]]) -> list[bool]:
    """Of each pair, whether both have the same values: of a GPU's, the same bits, and the host waits once for all of them."""
    flags: list[torch.Tensor] = []
    for live, expected in pairs:
        if live.device.type == "cpu":
            flags.append(torch.tensor(torch.equal(live, expected)))
        else:
            one, other = words(live, expected.to(live.device, non_blocking=True))
            flags.append((one == other).all())
    return torch.stack(flags).tolist() if flags else []


def words(one: torch.Tensor, other: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Their bits, as integers that are as wide as both of them allow."""
    if not one.is_floating_point():
        return one, other
    if all(each.is_contiguous() and each.nbytes % 8 == 0 and each.data_ptr() % 8 == 0 for each in (one, other)):
        return one.flatten().view(torch.int64), other.flatten().view(torch.int64)
    narrow = {2: torch.int16, 4: torch.int32}[one.itemsize]
    return one.view(narrow), other.view(narrow)


def mask_logits(model: Any, valid: int) -> None:
    """Ids from `valid` on, which a padded vocabulary has beyond the tokenizer's, get no probability in this model, whoever samples."""
    compute = model.compute_logits

    def masked(*args: Any, **kwargs: Any) -> Any:
        logits = compute(*args, **kwargs)
        if logits is not None and logits.shape[-1] > valid:
            logits[..., valid:] = float("-inf")
        return logits

    model.compute_logits = masked


class Extension:
    """Methods that vLLM's worker gains."""

    weight_transfer_engine: BucketTransferEngine
    model_runner: Any
    finish_weight_update: Any
    _weight_update_active: bool

    def surogate_abandon(self) -> None:
        """Ends an update that failed in another worker, or between two calls; vLLM's own worker refuses a new one before that."""
        with contextlib.suppress(Exception):
            self.finish_weight_update()  # refuses where none is active any more
        self._weight_update_active = False

    def surogate_verify(self) -> dict[str, Any]:
        return self.weight_transfer_engine.verify()

    def surogate_verify_adapter(self, folder: str, number: int, scale: float) -> list[str]:
        """What the loaded adapter lacks of the one in `folder`, or has beyond it; empty if they are the same."""
        from safetensors.torch import load_file

        adapter = self.model_runner.lora_manager._adapter_manager.get_adapter(number)
        if adapter is None:
            return ["the adapter is not loaded"]
        live: dict[str, torch.Tensor] = {}
        for module, weights in adapter.loras.items():
            fused = weights.lora_a if isinstance(weights.lora_a, list) else None
            for side in "ab":
                matrices = getattr(weights, f"lora_{side}")
                for index, matrix in enumerate(matrices if fused is not None else [matrices]):
                    if matrix is not None:
                        live[f"{module}.{index if fused is not None else 0}.{side}"] = matrix
        problems: list[str] = []
        for name, sent in load_file(os.path.join(folder, "adapter_model.safetensors")).items():
            stem, side = name.removeprefix("base_model.model.").removesuffix(".weight").rsplit(".lora_", 1)
            target, parts = self.weight_transfer_engine._layout.place(f"{stem}.weight")
            found = live.pop(f"{target.removesuffix('.weight')}.{parts.index(f'{stem}.weight')}.{side.lower()}", None)
            if found is None:
                problems.append(f"tensor {name} is not in the engine's adapter")
                continue
            expected = sent.to(found.dtype)
            if side == "B" and scale != 1:
                expected *= scale  # vLLM keeps B scaled
            if not torch.equal(found.cpu(), expected):
                problems.append(f"tensor {name} is not in the engine as it was sent")
        return problems + [f"the engine's adapter has {name}, which did not come" for name in live]

    def surogate_layout(self) -> list[str]:
        """Names of the model's parameters."""
        return list(self.weight_transfer_engine._layout._parameters)


WeightTransferEngineFactory.register_engine(BACKEND, BucketTransferEngine)
packed_logprobs.install()
