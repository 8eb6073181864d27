"""In vLLM's worker: receives weights from buckets, and proves that the model has them.

It is a backend of vLLM's own weight transfer: `start_weight_update`, `update_weights` and `finish_weight_update` drive it, and vLLM's
layer-wise reload puts the tensors where its kernels want them (on the CPU they are packed anew and the plain weight is dropped; writing
into the parameters would go unnoticed there). Importing the module registers the backend, so the worker is given an extension class from
here.

Three checks, each naming the tensor: the bytes that arrived have the sender's checksum; the names and the engine's parameters are a
bijection; and after the update the live parameters are read back and compared with what was sent, bit for bit. A weight that only exists
packed is read back through its own kernel: a product with one-hot rows returns its columns exactly.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import zlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from vllm.distributed.weight_transfer.base import WeightTransferEngine, WeightTransferInitInfo, WeightTransferUpdateInfo
from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory

BACKEND = "surogate"
_WRAPPER = ".base_layer."
COLUMNS = 64  # of a packed weight that are read back after each update; drawn anew each time


@dataclass
class InitInfo(WeightTransferInitInfo):  # type: ignore[misc]
    pass


@dataclass
class Bucket(WeightTransferUpdateInfo):  # type: ignore[misc]
    """Where tensors lie.

    Attributes:
        path: of memory that can be mapped.
        size: its bytes.
        entries: (name, dtype, shape, offset, bytes, CRC-32) of each tensor.
    """

    path: str
    size: int
    entries: list[list[Any]] = field(default_factory=list)


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
        self._open = True
        self._received, self._problems = {}, []
        initialize_layerwise_reload(self.model)

    def update_weights(self, update_info: dict[str, Any]) -> None:
        self.receive_weights(self.parse_update_info(update_info))
        if self.device.type != "cpu":
            torch.accelerator.synchronize()

    def receive_weights(self, update_info: Bucket) -> None:
        """A tensor that is not right is left out and remembered for `verify`, which names all of them."""
        good: list[tuple[str, torch.Tensor]] = []
        for name, tensor in open_bucket(update_info):
            problem = tensor if isinstance(tensor, str) else "came twice" if name in self._received else self._layout.misfit(name, tensor)
            if problem:
                self._problems.append(f"tensor {name} {problem}")
            else:
                assert isinstance(tensor, torch.Tensor)
                self._received[name] = tensor
                good.append((self._layout.loadable(name), tensor))
        self.model.load_weights(good)

    def finish_weight_update(self) -> None:
        from vllm.model_executor.model_loader.reload import finalize_layerwise_reload

        finalize_layerwise_reload(self.model, self.model_config)
        self._layout.pack_tied()
        self._open = False

    def verify(self) -> dict[str, Any]:
        """Checks the update that just ended, and lets go of the buckets.

        Returns: how many `tensors` came, how many of them were read back `packed`, and the `problems`.
        """
        self._updates += 1
        problems = self._problems + self._layout.gaps(self._received)
        packed = 0
        for name, sent in self._received.items():
            for target in self._layout.holders(name):
                try:
                    live, expected, was_packed = self._layout.read_back(name, target, sent, self._updates)
                except ValueError as error:
                    problems.append(f"tensor {name} cannot be read back ({error})")
                    continue
                packed += was_packed
                if not torch.equal(live.cpu(), expected.cpu()):
                    problems.append(f"tensor {name} is not in the engine as it was sent" + (f" ({target})" if target != name else ""))
        report = {"tensors": len(self._received), "packed": packed, "problems": problems}
        self._received, self._problems = {}, []
        return report

    def shutdown(self) -> None:
        self._received = {}

    @staticmethod
    def trainer_send_weights(iterator: Any, trainer_args: Any) -> None:
        """Of the sender's side, which older versions of vLLM declare here; the run has a sender of its own."""
        raise RuntimeError("buckets are filled by the run, not by vLLM")


class Layout:
    """How the model's parameters hold the tensors of a checkpoint: which are fused (q, k and v in one), which share their memory."""

    def __init__(self, model: Any) -> None:
        self._model = model
        self._fused: dict[str, tuple[str, list[str]]] = {}
        for fused, parts in (getattr(model, "packed_modules_mapping", None) or {}).items():
            if len(parts) > 1:
                self._fused |= {part: (fused, list(parts)) for part in parts}
        # vLLM wraps modules that may get adapters, and its parameters are named accordingly; a checkpoint's are not
        actual = dict(model.named_parameters(remove_duplicate=False))
        self._actual = {name.replace(_WRAPPER, "."): name for name in actual}
        self._parameters = {name: id(actual[its]) for name, its in self._actual.items()}

    def place(self, name: str) -> tuple[str, list[str]]:
        """The parameter that holds the tensor `name`, and all tensors that it holds, in their order."""
        path = name.split(".")
        for i, part in enumerate(path):
            if part in self._fused:
                fused, parts = self._fused[part]
                target = ".".join([*path[:i], fused, *path[i + 1 :]])
                if target in self._parameters:
                    return target, [".".join([*path[:i], sibling, *path[i + 1 :]]) for sibling in parts]
        return name, [name]

    def _find(self, target: str) -> tuple[Any, str]:
        """The module that has a parameter, and the parameter's name there."""
        module, _, leaf = self._actual[target].rpartition(".")
        return self._model.get_submodule(module), leaf

    def loadable(self, name: str) -> str:
        """The name under which vLLM's loader takes a tensor: later versions see through the wrapper of a module that may get adapters,
        older ones want to be told of it."""
        target, _ = self.place(name)
        wrapper, wrapped, _ = self._actual[target].partition(_WRAPPER)
        if not wrapped or callable(getattr(self._model.get_submodule(wrapper), "load_weights", None)):
            return name
        stem, _, leaf = name.rpartition(".")
        return f"{stem}{_WRAPPER}{leaf}"

    def misfit(self, name: str, tensor: torch.Tensor) -> str:
        """Why a tensor cannot be loaded; empty if it can. Between start and finish, when parameters have their checkpoint's shapes."""
        target, parts = self.place(name)
        if target not in self._parameters:
            return "is not in the engine's model"
        module, leaf = self._find(target)
        if getattr(module, "tp_size", 1) > 1:
            return ""  # a rank holds a part of it; reading back compares that
        shape = list(getattr(module, leaf).shape)
        if parts != [name] and hasattr(module, "output_sizes"):
            shape[0] = module.output_sizes[parts.index(name)]
        elif hasattr(module, "org_vocab_size"):
            shape[0] = module.org_vocab_size  # rows beyond are padding of the engine's own
        return "" if list(tensor.shape) == shape else f"has shape {list(tensor.shape)}, the engine's model has {shape}"

    def gaps(self, received: Iterable[str]) -> list[str]:
        """What keeps the names that came and the engine's parameters from being a bijection."""
        names = set(received)
        found: list[str] = []
        covered: dict[int, str] = {}
        for name in received:
            target, parts = self.place(name)
            key = self._parameters[target]
            if covered.setdefault(key, target) != target:
                found.append(f"tensors {covered[key]} and {name} are one parameter of the engine (tied)")
            found += [f"tensor {part} did not come" for part in parts if part not in names]
        for name, key in self._parameters.items():
            if key not in covered:
                found.append(f"tensor {name} did not come")
        return list(dict.fromkeys(found))

    def holders(self, name: str) -> list[str]:
        """The parameters that hold the tensor `name`: one, or several names of one memory (a tied head)."""
        target, _ = self.place(name)
        key = self._parameters[target]
        return [target, *(other for other, its in self._parameters.items() if its == key and other != target and name == target)]

    def pack_tied(self) -> None:
        """vLLM's reload packs a weight anew for the module that it was loaded into. A tied head has a packing of its own on the CPU, made
        from the weight of before: it is made again."""
        seen: set[int] = set()
        for name, key in self._parameters.items():
            module, _ = self._find(name)
            if key in seen and hasattr(module, "cpu_linear"):
                module.quant_method.process_weights_after_loading(module)
            seen.add(key)

    def read_back(self, name: str, target: str, sent: torch.Tensor, seed: int) -> tuple[torch.Tensor, torch.Tensor, bool]:
        """What the parameter `target` has of a tensor, what it should be, and whether it was read through a kernel.

        Raises:
            ValueError: the live parameter cannot hold the tensor.
        """
        parts = self.place(name)[1]
        module, leaf = self._find(target)
        live = getattr(module, leaf).data
        packed = leaf == "weight" and hasattr(module, "cpu_linear") and sent.ndim == 2
        if packed:
            width = getattr(module, "input_size_per_partition", None) or module.embedding_dim
            chosen = torch.randperm(width, generator=torch.Generator().manual_seed(seed))[:COLUMNS]
            rows = torch.zeros(len(chosen), width, dtype=sent.dtype)
            rows[torch.arange(len(chosen)), chosen] = 1
            live = module.quant_method.apply(module, rows, None).T
            sent = sent[:, chosen]
        if parts != [name]:
            # fused parameters hold their parts one below the other; heights follow from the module's own bookkeeping
            sizes = [size // module.tp_size for size in module.output_sizes]
            if len(sizes) != len(parts):
                raise ValueError(f"{target} has {len(sizes)} parts, expected {len(parts)}")
            first = sum(sizes[: parts.index(name)])
            live = live[first : first + sizes[parts.index(name)]]
        elif hasattr(module, "org_vocab_size"):
            # rows beyond the vocabulary are padding of the engine's own
            first = module.tp_rank * live.shape[0]
            sent = sent[first : first + live.shape[0]]
            live = live[: len(sent)]
        return live, _shard(sent, live, module, target), packed


def _shard(sent: torch.Tensor, live: torch.Tensor, module: Any, target: str) -> torch.Tensor:
    """The part of a whole tensor that this rank holds (all of it without tensor parallelism)."""
    if sent.shape == live.shape:
        return sent.to(live.dtype)
    size, rank = getattr(module, "tp_size", 1), getattr(module, "tp_rank", 0)
    for dim in range(min(sent.ndim, live.ndim)):
        if sent.shape[:dim] + sent.shape[dim + 1 :] != live.shape[:dim] + live.shape[dim + 1 :]:
            continue
        length = live.shape[dim]
        replicas = max(1, size * length // max(1, sent.shape[dim]))  # key and value heads may be fewer than ranks
        first = rank // replicas * length
        part = sent.narrow(dim, first, max(0, min(length, sent.shape[dim] - first)))
        if part.shape == live.shape:
            return part.to(live.dtype)
    raise ValueError(f"{target} has shape {list(live.shape)}, which holds no part of {list(sent.shape)}")


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
        count = 1
        for extent in shape:
            count *= extent
        if offset + length > bucket.size or count * kind.itemsize != length:
            yield name, f"is cut: {length} bytes at {offset} of {bucket.size} for shape {shape} ({dtype})"
        elif zlib.crc32(view[offset : offset + length]) != checksum:
            yield name, "did not arrive as it was sent (checksum)"
        else:
            yield name, torch.frombuffer(memory, dtype=kind, count=count, offset=offset).view(shape)


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
