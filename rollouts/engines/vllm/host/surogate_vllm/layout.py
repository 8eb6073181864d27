"""Where the tensors of a checkpoint lie in vLLM's model, and how they are read back from there."""

from __future__ import annotations

from collections.abc import Iterable
from functools import cached_property
from typing import Any

import torch

_WRAPPER = ".base_layer."
COLUMNS = 64  # of a packed weight that are read back after each update; drawn anew each time


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
        self._found: dict[str, tuple[Any, str]] = {}
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

    @cached_property
    def plain(self) -> bool:
        """Whether the kernels read the parameters themselves, as they are in a checkpoint, and nothing that was made from them."""
        modules = list(self._model.modules())
        methods = [type(method).__name__ for module in modules if (method := getattr(module, "quant_method", None)) is not None]
        return all(name.startswith("Unquantized") for name in methods) and not any("MLA" in type(module).__name__ for module in modules)

    def _find(self, target: str) -> tuple[Any, str]:
        """The module that has a parameter, and the parameter's name there."""
        if target not in self._found:
            module, _, leaf = self._actual[target].rpartition(".")
            self._found[target] = self._model.get_submodule(module), leaf
        return self._found[target]

    def address(self, target: str) -> int:
        """Of a parameter's memory, at present."""
        module, leaf = self._find(target)
        return int(getattr(module, leaf).data_ptr())

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
        live = getattr(module, leaf).data.as_subclass(torch.Tensor)
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
            first = module.shard_indices.org_vocab_start_index
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
