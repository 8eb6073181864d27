"""The memory of a whole run, planned before any of it is taken: learner, reference and engine together, within what there is.

Memory that was taken but not touched yet still counts as free with the operating system, so parts that are checked one by one, each against
what is free at that moment, can all pass and not fit together.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from surogate_rl import _core
from surogate_rl._core import ModelSpec
from surogate_rl.config.schema import GrpoConfig, TrainConfig
from surogate_rl.config.vllm import resolve_vllm
from surogate_rl.learner import Learner
from surogate_rl.trainers.learner_options import learner_choices, reference_options

SHARE_OF_CACHE = 0.25
"""Of all memory, at the most, for a KV cache whose size nobody set, as long as the rest of the run has a choice."""
ON_ITS_WAY = "vllm: weights on their way to the engine"
BLOCK = 16  # positions of a block of the native sampler's cache

Parts = list[tuple[str, int]]


@dataclass(frozen=True)
class Demands:
    """What a command makes beside a learner.

    Attributes:
        max_tokens: of one micro-batch.
        sequences: sampled together; 0: nothing is sampled.
        reference: whether the objective compares with a reference policy while it trains.
    """

    max_tokens: int
    sequences: int = 0
    reference: bool = False


@dataclass(frozen=True)
class EnginePlan:
    """What samples completions.

    Attributes:
        cache_tokens: positions of the native sampler's KV cache; 0: another engine samples, or none.
        cache_bytes: of the KV cache, of each engine where there are several; 0: there is none on the learner's device.
        parts: everything it takes of the learner's memory, in bytes.
    """

    cache_tokens: int = 0
    cache_bytes: int = 0
    parts: Parts = field(default_factory=list)


@dataclass(frozen=True)
class MemoryPlan:
    """What a run will take.

    Attributes:
        config, demands: whose plan this is.
        learner: options of the learner.
        reference: options of a second learner for the reference policy; None: there is none.
        engine: what samples.
        parts: all of it, part by part in bytes.
        available: bytes that the learner's device has free; None: it is not here to be asked.
        limit: bytes that the configuration allows; 0: it sets no limit.
    """

    config: TrainConfig
    demands: Demands
    learner: dict[str, Any]
    reference: dict[str, Any] | None
    engine: EnginePlan
    parts: Parts
    available: int | None
    limit: int

    @property
    def bytes(self) -> int:
        return total(self.parts)

    @property
    def room(self) -> int | None:
        """Bytes that there are for all parts; None: unknown."""
        return smaller(self.available, self.limit or None)

    @property
    def engine_room(self) -> int | None:
        """Bytes that the learners leave; None: unknown."""
        return None if self.room is None else self.room - (self.bytes - total(self.engine.parts))

    @property
    def fits(self) -> bool:
        return self.room is None or self.bytes <= self.room

    def require(self) -> None:
        """
        Raises:
            MemoryError: it does not fit; the message itemises what each part costs, and says what to change.
        """
        if self.fits:
            return
        assert self.room is not None
        source = "allowed by memory_limit_gb" if self.limit and self.room == self.limit else "available"
        items = "".join(f"\n  {name}: {human(size)}" for name, size in self.parts)
        raise MemoryError(f"not enough memory: {human(self.bytes)} needed, {human(self.room)} {source}. Needed for:{items}\n{self.advice}")

    @property
    def advice(self) -> str:
        config = self.config
        ways = [
            "lower per_device_train_batch_size or sequence_len (together they set the "
            f"{self.demands.max_tokens} tokens of a micro-batch that are planned for)"
        ]
        if not self.learner["recompute"]:
            ways.append("set recompute: block (a layer's activations are then computed twice and not kept)")
        if isinstance(config, GrpoConfig):
            if config.rollouts.kv_cache_gb is not None:
                ways.append("lower rollouts.kv_cache_gb")
            if self.engine.parts:
                ways.append("lower rollouts.max_sequences")
            if any(name == ON_ITS_WAY for name, _ in self.engine.parts):
                ways.append("set rollouts.vllm.transfer: host (updates then take seconds)")
        elif self.engine.parts:
            ways.append("evaluate by the loss (no eval.rewards)")
        if not config.lora:
            ways.append("train an adapter (lora: true)" + (", whose reference needs no second model" if self.reference else ""))
        if self.limit and self.room == self.limit:
            ways.append("raise memory_limit_gb")
        return f"To need less: {', '.join(ways[:-1])}{' or ' if len(ways) > 1 else ''}{ways[-1]}."


def plan_memory(config: TrainConfig, spec: ModelSpec, demands: Demands, *, parameters: int, valid_vocab: int = 0) -> MemoryPlan:
    """The fastest learner with which everything fits; if nothing fits, the smallest one. The cache of an engine then takes what the others
    leave, but never less than its longest sequence needs.

    Args:
        parameters: weights of the model, a tied head counted once.
        valid_vocab: leading ids that are sampled; 0: all.
    """
    available, limit = device_memory(config), memory_limit(config)
    room = smaller(available, limit or None)
    reference = reference_options(config, demands.max_tokens) if demands.reference and not config.lora else None
    beside = named("reference", Learner.plan(spec, **reference)) if reference is not None else []
    engines = _Engines(config, spec, demands.sequences, parameters, valid_vocab, room)
    engine = engines.plan()
    for options in learner_choices(config, demands.max_tokens):
        learners = named("learner", Learner.plan(spec, **options)) + beside
        if room is None or total(learners) + total(engine.parts) <= room:
            break
    if room is not None:
        engine = engines.within(room - total(learners))
    return MemoryPlan(config, demands, options, reference, engine, learners + engine.parts, available, limit)


@dataclass(frozen=True)
class _Engines:
    """Sizes of what samples.

    Attributes:
        sequences: sampled together.
        room: bytes that there are for the whole run; None: unknown.
    """

    config: TrainConfig
    spec: ModelSpec
    sequences: int
    parameters: int
    valid_vocab: int
    room: int | None

    def plan(self) -> EnginePlan:
        """With as large a cache as it should have."""
        share = None if self.room is None else int(SHARE_OF_CACHE * self.room) // self._copies
        return self._make(share)

    def within(self, rest: int) -> EnginePlan:
        """With a cache that keeps the whole within `rest` bytes, if nobody has set its size and it can be as small as that. On a GPU the
        cache gets all of it that it can use, since nothing else will."""
        planned = self.plan()
        if not planned.parts or self._asked is not None or (total(planned.parts) <= rest and self.config.device != "cuda"):
            return planned
        smallest = self._make(0)
        spare = max(0, rest - total(smallest.parts)) // self._copies
        return self._make(smallest.cache_bytes + spare)

    @property
    def _asked(self) -> int | None:
        """Bytes of a cache, where the configuration sets them."""
        asked = self.config.rollouts.kv_cache_gb if isinstance(self.config, GrpoConfig) else None
        return None if asked is None else int(asked * 2**30)

    @property
    def _context(self) -> int:
        return min(self.config.sequence_len, self.spec.max_positions)

    @property
    def _copies(self) -> int:
        """Engines that are started on the learner's device."""
        if not isinstance(self.config, GrpoConfig) or self.config.rollouts.engine != "vllm" or self.config.device == "cuda":
            return 1
        return resolve_vllm(self.config).replicas

    def _make(self, most: int | None) -> EnginePlan:
        """With a cache of what the sequences need, but of at most `most` bytes (None: no bound), and of at least the longest sequence."""
        if self.sequences == 0:
            return EnginePlan()
        if isinstance(self.config, GrpoConfig) and self.config.rollouts.engine == "vllm":
            return self._vllm(self.config, most)
        return self._native(most)

    def _native(self, most: int | None) -> EnginePlan:
        position = 2 * 4 * self.spec.layers * self.spec.kv_heads * self.spec.head_dim  # a key and a value, float32
        least = (self._context // BLOCK + 1) * BLOCK
        bound = self._asked if self._asked is not None else most
        wanted = self.sequences * self._context
        tokens = max(least, wanted if bound is None else min(wanted, bound // position // BLOCK * BLOCK))
        rank = self.config.lora_rank if self.config.lora else 0
        parts = _core.Generator.plan(
            self.spec, max_sequences=self.sequences, cache_tokens=tokens, valid_vocab=self.valid_vocab, lora_rank=rank
        )
        return EnginePlan(cache_tokens=tokens, cache_bytes=tokens * position, parts=named("sampler", parts))

    def _vllm(self, config: GrpoConfig, most: int | None) -> EnginePlan:
        """Of an engine that takes nothing of the learner's device there are no parts."""
        from surogate_rl.rollouts.engines.vllm.factory import engine_memory, transfer_memory

        vllm, gpu = resolve_vllm(config), config.device == "cuda"
        if vllm.base_url is not None or (gpu and vllm.mode == "server"):
            return EnginePlan()

        def memory(cache_bytes: int | None) -> Any:
            return engine_memory(
                self.spec,
                self.parameters,
                vllm.dtype,
                sequences=self.sequences,
                context=self._context,
                free=None,
                gpu=gpu,
                cache_bytes=cache_bytes,
            )

        bound = self._asked
        if bound is None and most is not None:
            bound = min(most, memory(None).cache)
        taken = memory(bound)
        parts = [("vllm: weights", taken.weights), ("vllm: KV cache", taken.cache)]
        if gpu:
            parts.append(("vllm: activations, CUDA graphs, context", taken.reserve))
            if vllm.transfer == "cuda_ipc":
                parts.append((ON_ITS_WAY, transfer_memory(config, self.spec, self.parameters)))
        else:
            parts = [(name, size * self._copies) for name, size in parts]
            parts.append(("vllm: copy of the weights for updates", taken.weights))
        return EnginePlan(cache_bytes=taken.cache, parts=parts)


def memory_limit(config: TrainConfig) -> int:
    """Bytes; 0: no limit but the device's."""
    return int(config.memory_limit_gb * 2**30) if config.memory_limit_gb else 0


def device_memory(config: TrainConfig) -> int | None:
    """Bytes that the learner's device has free; None if there is none here."""
    if config.device == "cuda" and not _core.cuda_available():
        return None
    return _core.available_memory("cuda" if config.device == "cuda" else "cpu")


def smaller(one: int | None, other: int | None) -> int | None:
    """Of those that are known."""
    return min((value for value in (one, other) if value is not None), default=None)


def total(parts: Parts) -> int:
    return sum(size for _, size in parts)


def named(owner: str, parts: Parts) -> Parts:
    return [(f"{owner}: {name}", size) for name, size in parts]


def human(size: int) -> str:
    mebibytes = size / 2**20
    return f"{mebibytes / 1024:.2f} GiB" if mebibytes >= 1024 else f"{mebibytes:.2f} MiB"
