"""Weights are written to memory that somebody else owns: the bits of `export`, or those rounded once."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from surogate_rl import _core
from surogate_rl.learner import Learner, LoraSettings

SPEC = {
    "layers": 2, "hidden": 16, "heads": 4, "kv_heads": 2, "head_dim": 4, "ffn": 24, "vocab": 32, "max_positions": 64, "qkv_bias": True,
    "rope_inv_freq": [1.0, 0.1],
}  # fmt: skip


@pytest.fixture
def learner() -> Learner:
    learner = Learner(_core.ModelSpec(**SPEC), max_tokens=8, threads=2, lora=LoraSettings(2, 4.0))
    rng = np.random.default_rng(0)
    for info in learner.tensors():
        learner.load(info.name, rng.standard_normal(info.shape).astype(np.float32))
    return learner


def test_has_the_bits_of_export(learner: Learner) -> None:
    for dtype in (torch.float32, torch.bfloat16):
        places = {info.name: torch.full(info.shape, torch.nan, dtype=dtype) for info in learner.tensors()}
        learner.export_to(places)
        for name, place in places.items():
            assert torch.equal(place, torch.from_numpy(learner.export(name)).to(dtype)), name
    mixed = {"embed_tokens.weight": torch.empty(32, 16), "norm.weight": torch.empty(16, dtype=torch.bfloat16)}
    learner.export_to(mixed)
    assert all(torch.equal(place, torch.from_numpy(learner.export(name)).to(place.dtype)) for name, place in mixed.items())
    learner.export_to({})


def test_rounds_to_nearest_even_and_keeps_what_is_not_finite(learner: Learner) -> None:
    bits = [0x3F808000, 0x3F818000, 0x3F808001, 0x3F807FFF, 0x7F7FFFFF, 0x7F800000, 0xFF800000, 0x7F800001, 0x00000001, 0x80000000]
    values = np.zeros(16, np.uint32)
    values[: len(bits)] = bits
    learner.load("norm.weight", values.view(np.float32))
    place = torch.empty(16, dtype=torch.bfloat16)
    learner.export_to({"norm.weight": place})
    found = place.view(torch.int16).numpy().view(np.uint16)[: len(bits)].tolist()
    assert found == [0x3F80, 0x3F82, 0x3F81, 0x3F80, 0x7F80, 0x7F80, 0xFF80, 0x7FC0, 0x0000, 0x8000]


@pytest.mark.parametrize(
    ("name", "place", "message"),
    [
        ("norm.weigth", torch.empty(16), "this model has no tensor 'norm.weigth'; the nearest is norm.weight"),
        ("norm.weight", torch.empty(15), r"export_to: norm.weight: expected float32 or bfloat16 \[16\] on cpu, got float32 \[15\]"),
        ("norm.weight", torch.empty(16, dtype=torch.float16), r"expected float32 or bfloat16 \[16\] on cpu, got float16 \[16\]"),
        ("embed_tokens.weight", torch.empty(16, 32).T, r"expected a tensor without gaps, got strides \[1, 32\]"),
        ("norm.weight", torch.empty(16, device="meta"), r"expected float32 or bfloat16 \[16\] on cpu, got meta"),
    ],
)
def test_refuses(learner: Learner, name: str, place: torch.Tensor, message: str) -> None:
    untouched = torch.zeros(32, 16)
    with pytest.raises(ValueError, match=message):
        learner.export_to({"embed_tokens.weight": untouched, name: place} if name != "embed_tokens.weight" else {name: place})
    assert not untouched.any()


def test_the_core_itself_refuses(learner: Learner) -> None:
    with pytest.raises(ValueError, match="export_to: there is no 'nothing'"):
        learner.native.export_to([("nothing", 64)], "float32")
    with pytest.raises(ValueError, match="dtype: expected float32 or bfloat16, got 'float16'"):
        learner.native.export_to([("norm.weight", 64)], "float16")
    with pytest.raises(ValueError, match=r"export_to: norm.weight: expected memory that is aligned to its values, got 66"):
        learner.native.export_to([("norm.weight", 66)], "float32")
    with pytest.raises(ValueError, match="expected data, got a null pointer"):
        learner.native.export_to([("norm.weight", 0)], "float32")
