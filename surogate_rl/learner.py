"""The learner as Python sees it: packed batches in, numpy arrays out, over the native core."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from difflib import get_close_matches
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
from numpy.typing import NDArray

from surogate_rl import _core
from surogate_rl.batch import PackedBatch
from surogate_rl.errors import InputError

if TYPE_CHECKING:
    import torch

F32 = NDArray[np.float32]
AdapterUse = Literal["live", "initial", "off"]
Dtype = Literal["float32", "bfloat16"]

ALL_LINEAR = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
LORA_TARGETS = (*ALL_LINEAR, "lm_head")

_WEIGHT, _OPTIMIZER, _COUNT = "weight/", "optimizer/", "update_count"


@dataclass(frozen=True)
class LoraSettings:
    """A LoRA adapter: y += alpha / rank * (x A^T) B^T beside each targeted linear (arXiv 2106.09685), without dropout.

    Attributes:
        rank: r, columns of B.
        alpha: numerator of the scale.
        targets: names of linears, or ``"all-linear"``: every one of the blocks, not the head.
    """

    rank: int
    alpha: float
    targets: Sequence[str] | str = "all-linear"

    def resolve(self, *, tied: bool) -> tuple[str, ...]:
        """The targeted linears in the core's order.

        Raises:
            InputError: rank or alpha is not positive, a name is unknown or repeated, or the head of a tied model is targeted.
        """
        if self.rank < 1:
            raise InputError(f"lora_rank must be at least 1, got {self.rank}")
        if not (np.isfinite(self.alpha) and self.alpha > 0):
            raise InputError(f"lora_alpha must be a positive number, got {self.alpha}")
        if self.targets == "all-linear":
            return ALL_LINEAR
        names = (self.targets,) if isinstance(self.targets, str) else tuple(self.targets)
        if not names:
            raise InputError(f"lora_target_modules is empty; name some of {', '.join(LORA_TARGETS)}, or use all-linear")
        for name in names:
            if name not in LORA_TARGETS:
                near = get_close_matches(name, (*LORA_TARGETS, "all-linear"), n=1, cutoff=0.3)
                hint = f" (did you mean {near[0]}?)" if near else ""
                raise InputError(f"lora_target_modules: unknown module {name!r}{hint}; known are {', '.join(LORA_TARGETS)}, or all-linear")
        if len(set(names)) != len(names):
            raise InputError(f"lora_target_modules names a module twice: {', '.join(names)}")
        if tied and "lm_head" in names:
            raise InputError(
                "lora_target_modules: lm_head cannot carry an adapter in this model, because its head is tied to the embedding "
                "(tie_word_embeddings: true); remove lm_head from lora_target_modules"
            )
        return tuple(name for name in LORA_TARGETS if name in names)


@dataclass(frozen=True)
class Compute:
    """Where a learner computes, and in which number formats.

    Attributes:
        device: ``"cpu"``, ``"cuda"`` or ``"cuda:1"``, ...
        deterministic: cuda: same inputs, same bits, for some speed.
        recipe: of weights and activations; bfloat16 on cuda only.
        logits_dtype: of the head's output; ``""``: as the recipe.
        gradient_dtype: of the weights' gradients.
        optimizer_state_dtype: of the moments.
        master_weights: with bfloat16 weights: what is trained is kept in float32 too. Without, updates are rounded stochastically.
        keep_logits: keep every row's logits between forward and backward, instead of computing them again; the same bits.
        head_gradient_in_forward: with a head that is not trained: forward goes on to its gradient, which backward only scales.
        border_adapters: keep adapters as a border of the frozen weights, so that a linear and its adapters are one product.
        lend_gradients: with recompute and all weights trained: the memory of gradients holds activations until backward writes them. A step
            is then made of one backward, and no other pass lies between the two; the same bits.
        profile: cuda: time every operation, and print a table on stderr when the learner goes.
    """

    device: str = "cpu"
    deterministic: bool = False
    recipe: Dtype = "float32"
    logits_dtype: Dtype | Literal[""] = ""
    gradient_dtype: Dtype = "float32"
    optimizer_state_dtype: Dtype = "float32"
    master_weights: bool = True
    keep_logits: bool = False
    head_gradient_in_forward: bool = False
    border_adapters: bool = False
    lend_gradients: bool = False
    profile: bool = False


@dataclass(frozen=True)
class Stats:
    """Of each position of a batch.

    Attributes:
        logp: float32 [T], natural logarithm of the target's probability at the given temperature; 0 where there is no target.
        entropy: float32 [T] in nats, or None if not asked for.
    """

    logp: F32
    entropy: F32 | None = None


@dataclass(frozen=True)
class StepStats:
    """
    Attributes:
        grad_norm: Euclidean norm of all gradients, before clipping.
        applied: false if the norm was not finite: nothing changed but the gradients, which are zero again.
        step: updates applied so far.
    """

    grad_norm: float
    applied: bool
    step: int


@dataclass(frozen=True)
class TensorInfo:
    """One weight or adapter matrix of a learner."""

    name: str
    shape: tuple[int, ...]
    trainable: bool

    @property
    def is_adapter(self) -> bool:
        return self.name.endswith((".lora_A", ".lora_B"))


def _options(
    spec: _core.ModelSpec,
    *,
    max_tokens: int,
    threads: int,
    trainable: bool,
    recompute: bool,
    lora: LoraSettings | None,
    seed: int,
    memory_limit: int,
    compute: Compute | None,
) -> dict[str, Any]:
    options: dict[str, Any] = {
        "max_tokens": max_tokens,
        "threads": threads,
        "trainable": trainable,
        "recompute": recompute,
        "seed": seed,
        "memory_limit": memory_limit,
        **asdict(compute or Compute()),
    }
    if lora is not None:
        options |= {"lora_rank": lora.rank, "lora_alpha": float(lora.alpha), "lora_targets": list(lora.resolve(tied=spec.tied))}
    return options


class Learner:
    """Scores, differentiates and updates one model. Memory is planned and taken once, here.

    Args:
        spec: of the model; its weights are zero until :meth:`load_weights`.
        max_tokens: of one micro-batch.
        threads: of the CPU; 0 is one per core.
        trainable: false: forward only (a reference model).
        recompute: keep only the input of each block and compute its activations again in backward; the same bits for less memory.
        lora: train an adapter and freeze the weights.
        seed: of the fresh adapter's A, and of stochastic rounding.
        memory_limit: bytes; 0 is what the device has free.
        compute: device and number formats; default: the CPU and float32.

    Raises:
        MemoryError: it does not fit; the message itemises what each part costs.
        ValueError: an argument is out of range.
    """

    def __init__(
        self,
        spec: _core.ModelSpec,
        *,
        max_tokens: int,
        threads: int = 0,
        trainable: bool = True,
        recompute: bool = False,
        lora: LoraSettings | None = None,
        seed: int = 0,
        memory_limit: int = 0,
        compute: Compute | None = None,
    ) -> None:
        options = _options(
            spec,
            max_tokens=max_tokens,
            threads=threads,
            trainable=trainable,
            recompute=recompute,
            lora=lora,
            seed=seed,
            memory_limit=memory_limit,
            compute=compute,
        )
        self.spec = spec
        self.max_tokens = max_tokens
        self.trainable = trainable
        self.lora = lora
        self.device = (compute or Compute()).device
        self._native: _core.Learner | None = _core.Learner(spec, **options)
        self._tensors = {name: TensorInfo(name, tuple(shape), trained) for name, shape, trained in self._native.tensors()}

    @staticmethod
    def plan(
        spec: _core.ModelSpec,
        *,
        max_tokens: int,
        threads: int = 0,
        trainable: bool = True,
        recompute: bool = False,
        lora: LoraSettings | None = None,
        seed: int = 0,
        memory_limit: int = 0,
        compute: Compute | None = None,
    ) -> list[tuple[str, int]]:
        """What a learner made with the same arguments would take, part by part in bytes, without taking it."""
        options = _options(
            spec,
            max_tokens=max_tokens,
            threads=threads,
            trainable=trainable,
            recompute=recompute,
            lora=lora,
            seed=seed,
            memory_limit=memory_limit,
            compute=compute,
        )
        return _core.Learner.plan(spec, **options)

    @property
    def native(self) -> _core.Learner:
        if self._native is None:
            raise RuntimeError("this learner is closed")
        return self._native

    def close(self) -> None:
        """Gives the memory back, unless a sampler still holds the weights. Every later call raises RuntimeError."""
        self._native = None

    # Passes -----------------------------------------------------------------------------------------------------------------------

    def score(
        self, batch: PackedBatch, *, temperature: float = 1.0, valid_vocab: int = 0, entropy: bool = False, adapter: AdapterUse = "live"
    ) -> Stats:
        """Log-probabilities without gradients. ``valid_vocab``: ids from there on count as impossible (0: none do)."""
        return Stats(
            *self.native.score(*_arrays(batch), temperature=temperature, valid_vocab=valid_vocab, entropy=entropy, adapter=adapter)
        )

    def forward(self, batch: PackedBatch, *, temperature: float = 1.0, valid_vocab: int = 0, entropy: bool = False) -> Stats:
        """As :meth:`score`, and keeps what :meth:`backward` needs. A second forward before backward raises ValueError."""
        return Stats(*self.native.forward(*_arrays(batch), temperature=temperature, valid_vocab=valid_vocab, entropy=entropy))

    def backward(self, dlogp: F32, dentropy: F32 | None = None) -> None:
        """Adds the gradient of a loss to the gradients. ``dlogp`` and ``dentropy``, float32 [T]: its derivatives with respect to what
        :meth:`forward` returned (of no effect where there is no target)."""
        self.native.backward(_seed("dlogp", dlogp), None if dentropy is None else _seed("dentropy", dentropy))

    def forward_backward(
        self, batch: PackedBatch, dlogp: F32, dentropy: F32 | None = None, *, temperature: float = 1.0, valid_vocab: int = 0
    ) -> Stats:
        """Both in one pass, when the derivatives are known beforehand."""
        seeds = (_seed("dlogp", dlogp, batch.num_tokens), None if dentropy is None else _seed("dentropy", dentropy, batch.num_tokens))
        return Stats(*self.native.forward_backward(*_arrays(batch), *seeds, temperature=temperature, valid_vocab=valid_vocab))

    def discard_pending(self) -> None:
        """Drops an open :meth:`forward` without a gradient."""
        self.native.discard_pending()

    def step(
        self,
        lr: float,
        *,
        max_grad_norm: float = 0.0,
        betas: tuple[float, float] = (0.9, 0.999),
        epsilon: float = 1e-8,
        weight_decay: float = 0.0,
    ) -> StepStats:
        """One AdamW update (decay on matrices only), after clipping to ``max_grad_norm`` (0: none); the gradients are zero afterwards.
        A gradient norm that is not finite changes nothing else and is reported as ``applied = False``."""
        stats = self.native.step(
            lr, max_grad_norm=max_grad_norm, beta1=betas[0], beta2=betas[1], epsilon=epsilon, weight_decay=weight_decay
        )
        return StepStats(float(stats.grad_norm), bool(stats.applied), int(stats.step))

    def zero_gradients(self) -> None:
        self.native.zero_gradients()

    # Tensors ----------------------------------------------------------------------------------------------------------------------

    @property
    def update_count(self) -> int:
        """Updates applied so far."""
        return self.native.update_count

    def tensors(self) -> list[TensorInfo]:
        """Every weight and adapter matrix, in the core's order."""
        return list(self._tensors.values())

    def weights(self) -> Iterator[tuple[str, F32]]:
        """Streams (name, copy) of every weight, adapters apart: what :meth:`load_weights` of another learner takes."""
        for info in self._tensors.values():
            if not info.is_adapter:
                yield info.name, self.native.export(info.name)

    def export(self, name: str) -> F32:
        """A copy of one weight or adapter matrix."""
        self._info(name)
        return self.native.export(name)

    def export_to(self, places: Mapping[str, torch.Tensor]) -> None:
        """Writes weights or adapter matrices, by name, into dense tensors of the learner's device: exactly what :meth:`export` returns, or
        that rounded once to bfloat16. Waits for what is queued on the device's current stream; when it returns, the values are there.

        Raises:
            ValueError: a name is unknown, or a tensor has another shape, another dtype than those two, gaps, or another device.
        """
        by_dtype: dict[str, list[tuple[str, int]]] = {}
        for name, place in places.items():
            dtype = _checked_place(self._info(name), place, self.device)
            by_dtype.setdefault(dtype, []).append((name, place.data_ptr()))
        for device in {place.device for place in places.values() if place.is_cuda}:
            import torch

            torch.cuda.current_stream(device).synchronize()  # the core writes on a stream of its own
        for dtype, addresses in by_dtype.items():
            self.native.export_to(addresses, dtype)

    def gradient(self, name: str) -> F32:
        """A copy of one gradient."""
        self._info(name)
        return self.native.gradient(name)

    def load(self, name: str, value: F32) -> None:
        """Sets one weight or adapter matrix; ValueError for an unknown name, another shape or a dtype that is not float32."""
        self.native.load(name, _matching(self._info(name), value))

    def _info(self, name: str) -> TensorInfo:
        info = self._tensors.get(name)
        if info is None:
            near = get_close_matches(name, self._tensors, n=1)
            hint = f"; the nearest is {near[0]}" if near else ""
            raise ValueError(f"this model has no tensor {name!r}{hint}")
        return info

    def load_weights(self, weights: Iterable[tuple[str, F32]]) -> None:
        """Loads every weight (adapters apart) from a stream of (name, float32 array).

        Raises:
            ValueError: a name is unknown, repeated or missing at the end, or a shape or dtype is wrong.
        """
        wanted = {info.name for info in self._tensors.values() if not info.is_adapter}
        seen: set[str] = set()
        for name, value in weights:
            if name not in wanted:
                raise ValueError(f"load_weights: unknown weight {name!r}")
            if name in seen:
                raise ValueError(f"load_weights: weight {name!r} came twice")
            self.load(name, value)
            seen.add(name)
        if missing := sorted(wanted - seen):
            raise ValueError(
                f"load_weights: {len(missing)} weight(s) did not come: {', '.join(missing[:5])}{' ...' if len(missing) > 5 else ''}"
            )

    def snapshot_adapter(self) -> None:
        """Takes the present adapter as the initial one, which ``score(adapter="initial")`` uses from now on."""
        self.native.snapshot_adapter()

    def digest(self) -> str:
        """SHA-256 over names, shapes and bytes of all weights and adapters: equal digests, equal models."""
        digest = hashlib.sha256()
        for info in sorted(self._tensors.values(), key=lambda info: info.name):
            digest.update(f"{info.name} {info.shape}\n".encode())
            digest.update(np.ascontiguousarray(self.native.export(info.name)).data)
        return digest.hexdigest()

    def memory(self) -> list[tuple[str, int]]:
        """What this learner took, part by part in bytes."""
        return self.native.memory()

    def workspace_bytes(self) -> int:
        """Of the device, that its back-end took for itself beside :meth:`memory`; grows with the first batches."""
        return self.native.workspace_bytes()

    # Checkpoints ------------------------------------------------------------------------------------------------------------------

    def iterate_state(self) -> Iterator[tuple[str, NDArray[Any]]]:
        """The entries of :meth:`state`, one at a time, so that a checkpoint needs no second copy of them all."""
        for name in self.state_layout():
            yield name, self.state_entry(name)

    def state_layout(self) -> dict[str, tuple[tuple[int, ...], np.dtype[Any]]]:
        """Shape and dtype of each entry of :meth:`state`."""
        shapes = {_WEIGHT + info.name: info.shape for info in self._tensors.values() if info.trainable}
        shapes |= {_OPTIMIZER + name: tuple(shape) for name, shape in self.native.optimizer_state()}
        return {name: (shape, np.dtype(np.float32)) for name, shape in shapes.items()} | {_COUNT: ((1,), np.dtype(np.int64))}

    def state_entry(self, name: str) -> NDArray[Any]:
        """A copy of one entry of :meth:`state`."""
        if name == _COUNT:
            return np.array([self.native.update_count], np.int64)
        if name.startswith(_WEIGHT):
            return self.native.export(name.removeprefix(_WEIGHT))
        return self.native.export_optimizer(name.removeprefix(_OPTIMIZER))

    def state(self) -> dict[str, NDArray[Any]]:
        """All that training changes: trainable weights or adapters, the optimiser's moments and the update count (int64 [1])."""
        return dict(self.iterate_state())

    def load_state(self, state: Mapping[str, NDArray[Any]]) -> None:
        """Takes back what :meth:`state` gave. Everything is checked before anything is changed.

        Raises:
            ValueError: names, shapes or dtypes are not those of this learner.
        """
        expected = self.state_layout()
        missing, unknown = sorted(expected.keys() - state.keys()), sorted(state.keys() - expected.keys())
        if missing or unknown:
            raise ValueError(
                f"load_state: the state belongs to another learner: {len(missing)} entries missing ({', '.join(missing[:3])}), "
                f"{len(unknown)} unknown ({', '.join(unknown[:3])}); resume with the model and LoRA settings of the checkpoint"
            )
        for name, (shape, dtype) in expected.items():
            value = state[name]
            if tuple(value.shape) != shape or value.dtype != dtype:
                raise ValueError(f"load_state: {name}: expected {dtype} {list(shape)}, got {value.dtype} {list(value.shape)}")
        for name, value in state.items():
            if name.startswith(_WEIGHT):
                self.native.load(name.removeprefix(_WEIGHT), np.ascontiguousarray(value))
            elif name.startswith(_OPTIMIZER):
                self.native.load_optimizer(name.removeprefix(_OPTIMIZER), np.ascontiguousarray(value))
        self.native.update_count = int(state[_COUNT][0])


def _arrays(batch: PackedBatch) -> tuple[NDArray[np.int32], NDArray[np.int32], NDArray[np.int32], NDArray[np.int32]]:
    """The batch as the core takes it. What is wrong is refused, never converted: a silent cast would hide the caller's mistake."""
    count = batch.num_tokens
    for name, shape in (("tokens", (count,)), ("positions", (count,)), ("targets", (count,)), ("cu_seqlens", batch.cu_seqlens.shape[:1])):
        value: NDArray[np.int32] = getattr(batch, name)
        if value.dtype != np.int32 or value.shape != shape:
            raise ValueError(f"batch.{name}: expected int32 {list(shape)}, got {value.dtype} {list(value.shape)}")
    tokens, positions, cu_seqlens, targets = (
        np.ascontiguousarray(value) for value in (batch.tokens, batch.positions, batch.cu_seqlens, batch.targets)
    )
    return tokens, positions, cu_seqlens, targets


def _seed(name: str, value: F32, size: int | None = None) -> F32:
    if not isinstance(value, np.ndarray) or value.dtype != np.float32 or value.ndim != 1 or (size is not None and value.shape[0] != size):
        got = f"{value.dtype} {list(value.shape)}" if isinstance(value, np.ndarray) else type(value).__name__
        raise ValueError(f"{name}: expected a float32 array [{size if size is not None else 'T'}], got {got}")
    return np.ascontiguousarray(value)


def _matching(info: TensorInfo, value: F32) -> F32:
    if not isinstance(value, np.ndarray) or value.dtype != np.float32 or tuple(value.shape) != info.shape:
        got = f"{value.dtype} {list(value.shape)}" if isinstance(value, np.ndarray) else type(value).__name__
        raise ValueError(f"{info.name}: expected float32 {list(info.shape)}, got {got}")
    return np.ascontiguousarray(value)


def _checked_place(info: TensorInfo, place: torch.Tensor, device: str) -> str:
    """The dtype's name of a tensor that `info` may be written to."""
    kind, _, index = device.partition(":")
    wanted = f"float32 or bfloat16 {list(info.shape)} on {device}"
    dtype = str(place.dtype).removeprefix("torch.")
    if dtype not in ("float32", "bfloat16") or tuple(place.shape) != info.shape:
        raise ValueError(f"export_to: {info.name}: expected {wanted}, got {dtype} {list(place.shape)}")
    if not place.is_contiguous():
        raise ValueError(f"export_to: {info.name}: expected a tensor without gaps, got strides {list(place.stride())}")
    if place.device.type != kind or (kind == "cuda" and place.device.index != int(index or 0)):
        raise ValueError(f"export_to: {info.name}: expected {wanted}, got {place.device}")
    return dtype
