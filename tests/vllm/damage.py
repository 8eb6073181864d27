"""What can go wrong with a snapshot on its way, whatever memory it is in."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from surogate_rl.rollouts.engines.vllm.weights import Snapshot

Damage = Callable[[Snapshot], None]


@contextmanager
def undamaged(bench: Any) -> Iterator[None]:
    """The snapshot is whole again behind it, and the engine takes updates (for a run, a damaged one is the end)."""
    bench.sample([[1]])
    snapshot = bench.engine._snapshot
    assert snapshot is not None
    whole = [[dataclasses.replace(entry) for entry in bucket.entries] for bucket in snapshot.buckets]
    yield
    for bucket, entries in zip(snapshot.buckets, whole, strict=True):
        bucket.entries = entries
    bench.engine._failure = None


def leave_out(name: str) -> Damage:
    def damage(snapshot: Snapshot) -> None:
        bucket, entry = snapshot.find(name)
        bucket.entries.remove(entry)

    return damage


def rename(name: str, other: str) -> Damage:
    def damage(snapshot: Snapshot) -> None:
        snapshot.find(name)[1].name = other

    return damage


def cut_rows(name: str) -> Damage:
    def damage(snapshot: Snapshot) -> None:
        bucket, entry = snapshot.find(name)
        rows, width = entry.shape
        entry.shape = (rows - 1, width)
        entry.length = (rows - 1) * width * bucket.dtype.itemsize
        bucket.seal(entry)

    return damage


def cut_bytes(name: str) -> Damage:
    def damage(snapshot: Snapshot) -> None:
        snapshot.find(name)[1].length -= 4

    return damage


def flip_a_bit(name: str) -> Damage:
    def damage(snapshot: Snapshot) -> None:
        bucket, entry = snapshot.find(name)
        bucket.memory[entry.offset + 9] ^= 1

    return damage


def swap(name: str, other: str) -> Damage:
    def damage(snapshot: Snapshot) -> None:
        first, second = snapshot.find(name)[1], snapshot.find(other)[1]
        first.name, second.name = second.name, first.name

    return damage


Q = "model.layers.0.self_attn.q_proj.weight"
UP = "model.layers.1.mlp.up_proj.weight"
DOWN = "model.layers.1.mlp.down_proj.weight"
GATE = "model.layers.1.mlp.gate_proj.weight"

# of a model whose down projections are [64, 96]
CASES = {
    "left-out": (leave_out(Q), f"tensor {Q} did not come"),
    "norm-left-out": (leave_out("model.norm.weight"), "tensor model.norm.weight did not come"),
    "renamed": (
        rename(UP, "model.layers.7.mlp.up_proj.weight"),
        "tensor model.layers.7.mlp.up_proj.weight is not in the engine's model",
    ),
    "twice": (rename(UP, GATE), f"tensor {GATE} came twice"),
    "rows-cut": (cut_rows(DOWN), f"tensor {DOWN} has shape [63, 96], the engine's model has [64, 96]"),
    "bytes-cut": (cut_bytes(DOWN), f"tensor {DOWN} is cut"),
    "bit": (flip_a_bit(Q), f"tensor {Q} did not arrive as it was sent (checksum)"),
    "swapped": (swap(GATE, UP), "has the learner's weights but not its log-probabilities: they differ by"),
}
HEAD_BIT = (flip_a_bit("lm_head.weight"), "tensor lm_head.weight did not arrive as it was sent (checksum)")
