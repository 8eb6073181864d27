"""Snapshots on the learner's device, as far as they can be seen without a GPU: there the same code runs on memory of the host."""

from __future__ import annotations

import base64
import contextlib
import sys
from types import ModuleType, SimpleNamespace
from typing import Any, ClassVar

import numpy as np
import pytest
import torch

from surogate_rl.learner import LoraSettings
from surogate_rl.rollouts.engines.vllm.device_weights import DeviceBucket, DeviceSnapshot, merge_bytes
from surogate_rl.rollouts.engines.vllm.errors import EngineFailed
from surogate_rl.rollouts.engines.vllm.host.surogate_vllm import mapping
from surogate_rl.rollouts.engines.vllm.host.surogate_vllm.checksums import ROW, checksums
from surogate_rl.rollouts.engines.vllm.weights import Entry, HostSnapshot

from .conftest import LLAMA, QWEN2, make_learner, randomise
from .damage import DOWN, GATE, HEAD_BIT, UP, Q, cut_bytes, cut_rows, flip_a_bit, swap
from .modules import stand_in

ADAPTER = LoraSettings(rank=3, alpha=9.0)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("lora", [None, ADAPTER], ids=["full", "merged"])
def test_has_the_bits_of_the_hosts_snapshot(dtype: torch.dtype, lora: LoraSettings | None) -> None:
    learner = make_learner(QWEN2, scale=0.1, lora=lora)
    host, device = HostSnapshot(learner, dtype, merge=True), DeviceSnapshot(learner, dtype, merge=True)
    for seed in (1, 2):
        randomise(learner, seed, 0.2, adapter=lora is not None)
        assert device.fill() == pytest.approx(host.fill(), rel=1e-6)
        pairs = [
            (one.tensor(a), other.tensor(b))
            for one, other in zip(host.buckets, device.buckets, strict=True)
            for a, b in zip(one.entries, other.entries, strict=True)
        ]
        assert all(torch.equal(a, b) for a, b in pairs)
    host.close()
    device.close()


def test_what_is_frozen_is_taken_once(monkeypatch: pytest.MonkeyPatch) -> None:
    learner = make_learner(LLAMA, scale=0.1, lora=LoraSettings(rank=3, alpha=9.0, targets=("q_proj",)))
    snapshot = DeviceSnapshot(learner, torch.bfloat16, merge=True)
    snapshot.fill()
    taken: list[str] = []
    export = type(learner).export_to
    monkeypatch.setattr(type(learner), "export_to", lambda self, places: (taken.extend(places), export(self, places))[1])
    snapshot.fill()
    stems = [f"layers.{layer}.self_attn.q_proj" for layer in (0, 1)]
    assert taken == [f"{stem}.{part}" for stem in stems for part in ("weight", "lora_A", "lora_B")]


def test_large_weights_are_merged_in_slices(monkeypatch: pytest.MonkeyPatch) -> None:
    from surogate_rl.rollouts.engines.vllm import device_weights

    learner = make_learner(QWEN2, scale=0.1, lora=ADAPTER)
    whole, sliced = DeviceSnapshot(learner, torch.bfloat16, merge=True), DeviceSnapshot(learner, torch.bfloat16, merge=True)
    lost = whole.fill()
    monkeypatch.setattr(device_weights, "MERGE_BYTES", 1)
    monkeypatch.setattr(device_weights, "SLICE_BYTES", 7 * 4 * 128)
    assert sliced.fill() == pytest.approx(lost, rel=1e-5)
    for one, other in zip(whole.buckets, sliced.buckets, strict=True):
        for entry in one.entries:
            a, b = one.tensor(entry).float(), other.tensor(entry).float()
            assert torch.allclose(a, b, rtol=2**-7, atol=0), entry.name  # a product of fewer rows may round the other way
    assert merge_bytes(0) == 0
    assert merge_bytes(1 << 30) > 4 << 30


def by_hand(data: bytes, first_row: int) -> tuple[int, int]:
    """The checksum as it is defined, in Python's integers."""
    words = np.frombuffer(data, np.uint64).astype(object).reshape(-1, ROW // 8)
    factors = [(0x9E3779B97F4A7C15 * (place + 1)) % 2**64 | 1 for place in range(ROW // 8)]
    plain = sum(words.flatten()) % 2**64
    weighted = sum((2 * (first_row + k) + 1) * sum(f * w for f, w in zip(factors, row, strict=True)) for k, row in enumerate(words)) % 2**64
    return tuple(value - 2**64 if value >= 2**63 else value for value in (plain, weighted))  # type: ignore[return-value]


def test_checksums_are_what_they_say(monkeypatch: pytest.MonkeyPatch) -> None:
    from surogate_rl.rollouts.engines.vllm.host.surogate_vllm import checksums as module

    memory = torch.from_numpy(np.random.default_rng(0).integers(0, 256, 7 * ROW, dtype=np.uint8))
    places = [(0, 3 * ROW), (3 * ROW, 5), (4 * ROW, 2 * ROW + 1)]
    data = memory.numpy().tobytes()
    expected = [by_hand(data[: 3 * ROW], 0), by_hand(data[3 * ROW : 4 * ROW], 3), by_hand(data[4 * ROW :], 4)]
    assert checksums(memory, places) == expected
    monkeypatch.setattr(module, "_PIECE", 2)
    assert checksums(memory, places) == expected
    assert checksums(memory, []) == []


@pytest.mark.parametrize("change", ["a bit", "words of a row", "rows"])
def test_checksums_see(change: str) -> None:
    memory = torch.from_numpy(np.random.default_rng(0).integers(0, 256, 4 * ROW, dtype=np.uint8))
    before = checksums(memory, [(0, 4 * ROW)])
    words = memory.view(torch.int64)
    if change == "a bit":
        memory[4 * ROW - 1] ^= 128
    elif change == "words of a row":
        words[[3, 400]] = words[[400, 3]]
    else:
        rows = words.view(4, -1)
        rows[[0, 3]] = rows[[3, 0]]
    after = checksums(memory, [(0, 4 * ROW)])
    assert after != before
    if change != "a bit":
        assert after[0][0] == before[0][0], "the plain sum alone would not"


@pytest.fixture
def receiver(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The module of vLLM's worker, with stand-ins for what it takes from vLLM."""
    base = "vllm.distributed.weight_transfer"
    parts: dict[str, dict[str, Any]] = {
        f"{base}.base": {
            name: type(name, (), {}) for name in ("WeightTransferEngine", "WeightTransferInitInfo", "WeightTransferUpdateInfo")
        },
        f"{base}.factory": {"WeightTransferEngineFactory": SimpleNamespace(register_engine=lambda *_: None)},
    }
    stand_in(monkeypatch, parts)
    host = "surogate_rl.rollouts.engines.vllm.host.surogate_vllm"
    packed = ModuleType(f"{host}.packed_logprobs")
    packed.__dict__["install"] = lambda: True
    monkeypatch.setitem(sys.modules, packed.__name__, packed)
    monkeypatch.setattr(sys.modules[host], "packed_logprobs", packed, raising=False)
    monkeypatch.delitem(sys.modules, f"{host}.receiver", raising=False)
    __import__(f"{host}.receiver")
    yield sys.modules[f"{host}.receiver"]
    sys.modules.pop(f"{host}.receiver", None)


def read(receiver: Any, snapshot: DeviceSnapshot) -> dict[str, Any]:
    """What arrives: tensors, and for those that are not right why."""
    found: dict[str, Any] = {}
    for bucket in snapshot.buckets:
        found |= receiver.read_bucket(bucket.memory, receiver.Bucket(**bucket.describe()))
    return found


def test_a_bucket_is_read_as_it_was_filled(receiver: Any) -> None:
    learner = make_learner(LLAMA, scale=0.1)
    snapshot = DeviceSnapshot(learner, torch.bfloat16, merge=False)
    snapshot.fill()
    found = read(receiver, snapshot)
    assert len(found) == len(learner.tensors())
    for bucket in snapshot.buckets:
        for entry in bucket.entries:
            expected = torch.from_numpy(learner.export(entry.core_name)).bfloat16()
            assert torch.equal(found[entry.name], expected)


@pytest.mark.parametrize(
    ("damage", "name", "message"),
    [
        (flip_a_bit(Q), Q, "did not arrive as it was sent (checksum)"),
        (HEAD_BIT[0], "lm_head.weight", "did not arrive as it was sent (checksum)"),
        (cut_bytes(DOWN), DOWN, "is cut: "),
    ],
)
def test_a_bucket_that_was_damaged_on_the_way(receiver: Any, damage: Any, name: str, message: str) -> None:
    snapshot = DeviceSnapshot(make_learner(LLAMA, scale=0.1), torch.bfloat16, merge=False)
    snapshot.fill()
    damage(snapshot)
    wrong = {its: flaw for its, flaw in read(receiver, snapshot).items() if isinstance(flaw, str)}
    assert list(wrong) == [name]
    assert wrong[name].startswith(message)


def test_what_other_checks_are_for_passes_this_one(receiver: Any) -> None:
    snapshot = DeviceSnapshot(make_learner(LLAMA, scale=0.1), torch.bfloat16, merge=False)
    snapshot.fill()
    for damage in (cut_rows(DOWN), swap(GATE, UP)):
        damage(snapshot)
        assert not [flaw for flaw in read(receiver, snapshot).values() if isinstance(flaw, str)]


def test_equal_is_bit_for_bit(receiver: Any) -> None:
    one = torch.tensor([[1.0, 2.0], [3.0, 4.0]])
    assert receiver.equal([(one, one.clone()), (one, one + 1), (one[:, 0], one[:, 0].clone())]) == [True, False, True]
    for dtype in (torch.float32, torch.bfloat16):
        bits = receiver.words(torch.zeros(8, dtype=dtype), torch.zeros(8, dtype=dtype).neg())
        assert bits[0].dtype == torch.int64
        assert not torch.equal(*bits), "0 and -0 are equal values of other bits"
        odd = receiver.words(torch.zeros(9, dtype=dtype)[1:], torch.zeros(8, dtype=dtype))
        assert odd[0].itemsize == dtype.itemsize


class Linear(torch.nn.Module):
    """A linear of vLLM's, as far as it matters where its tensors lie."""

    tp_size, tp_rank = 1, 0

    def __init__(self, *heights: int, width: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.output_sizes = list(heights)
        self.weight = torch.nn.Parameter(torch.zeros(sum(heights), width, dtype=dtype), requires_grad=False)
        self.quant_method = type("UnquantizedLinearMethod", (), {})()


class Model(torch.nn.Module):
    packed_modules_mapping: ClassVar = {"qkv_proj": ["q_proj", "k_proj", "v_proj"]}

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.qkv_proj = Linear(8, 4, 4, width=6, dtype=dtype)
        self.o_proj = Linear(6, width=8, dtype=dtype)
        del self.o_proj.output_sizes
        self.norm = torch.nn.Module()
        self.norm.weight = torch.nn.Parameter(torch.zeros(6, dtype=dtype))


class Sent:
    """An update that a worker gets."""

    def __init__(self, receiver: Any, dtype: torch.dtype) -> None:
        shapes = {"q_proj": (8, 6), "k_proj": (4, 6), "v_proj": (4, 6), "o_proj": (6, 8), "norm": (6,)}
        self.entries = [
            Entry(f"{name}.weight", "", shape, number * ROW, int(np.prod(shape)) * dtype.itemsize)
            for number, (name, shape) in enumerate(shapes.items())
        ]
        self.bucket = DeviceBucket(self.entries, dtype, torch.device("cpu"))
        self._receiver = receiver

    def fill(self) -> None:
        for entry in self.entries:
            self.bucket.tensor(entry).copy_(torch.randn(entry.shape))
        self.bucket.seal(*self.entries)

    def to(self, engine: Any) -> dict[str, Any]:
        engine.start_weight_update()
        engine._tensors = lambda bucket: self._receiver.read_bucket(self.bucket.memory, bucket)
        engine.receive_weights(self._receiver.Bucket(**self.bucket.describe()))
        engine.finish_weight_update()
        report: dict[str, Any] = engine.verify()
        return report


@pytest.fixture(params=[torch.bfloat16, torch.float32], ids=["bfloat16", "float32"])
def worker(request: Any, receiver: Any, monkeypatch: pytest.MonkeyPatch) -> tuple[Any, Sent]:
    """A worker that knows where its tensors lie, as on a GPU after the first update, and what it is sent."""
    reload = ModuleType("vllm.model_executor.model_loader.reload")
    reload.__dict__.update(finalize_layerwise_reload=None, initialize_layerwise_reload=None)  # not to be called
    for name in ("vllm.model_executor", "vllm.model_executor.model_loader"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    monkeypatch.setitem(sys.modules, reload.__name__, reload)
    monkeypatch.setattr(receiver.WeightTransferEngine, "__init__", lambda self, config, vllm_config, device, model: None)
    model = Model(request.param)
    engine = receiver.BucketTransferEngine(None, SimpleNamespace(additional_config=None), torch.device("cpu"), model)
    engine.model, engine.device = model, torch.device("cuda")
    sent = Sent(receiver, request.param)
    engine._proved = {entry.name for entry in sent.entries}
    return engine, sent


def test_later_updates_are_copied_in_place(worker: tuple[Any, Sent]) -> None:
    engine, sent = worker
    addresses = [parameter.data_ptr() for parameter in engine.model.parameters()]
    for _ in range(3):
        sent.fill()
        assert sent.to(engine) == {"tensors": 5, "packed": 0, "problems": []}
        parts = [sent.bucket.tensor(entry) for entry in sent.entries]
        assert torch.equal(engine.model.qkv_proj.weight, torch.cat(parts[:3]))
        assert torch.equal(engine.model.o_proj.weight, parts[3])
        assert torch.equal(engine.model.norm.weight, parts[4])
        assert [parameter.data_ptr() for parameter in engine.model.parameters()] == addresses


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        (lambda sent: sent.entries.pop(1), "tensor k_proj.weight did not come"),
        (lambda sent: setattr(sent.entries[1], "name", "x_proj.weight"), "tensor x_proj.weight is not in the engine's model"),
        (lambda sent: setattr(sent.entries[1], "name", "v_proj.weight"), "tensor v_proj.weight came twice"),
        (lambda sent: setattr(sent.entries[3], "shape", (8, 6)), "tensor o_proj.weight has shape [8, 6], the engine's model has [6, 8]"),
        (lambda sent: sent.bucket.memory.__setitem__(3 * ROW, 1 + sent.bucket.memory[3 * ROW]), "tensor o_proj.weight did not arrive"),
    ],
)
def test_in_place_too_what_is_wrong_is_named(worker: tuple[Any, Sent], change: Any, problem: str) -> None:
    engine, sent = worker
    sent.fill()
    change(sent)
    problems = sent.to(engine)["problems"]
    assert any(each.startswith(problem) for each in problems)
    assert not engine._proved, "the next update goes through vLLM's loader"


def test_in_place_too_it_is_read_back(worker: tuple[Any, Sent], monkeypatch: pytest.MonkeyPatch) -> None:
    engine, sent = worker
    sent.fill()
    monkeypatch.setattr(torch, "_foreach_copy_", lambda places, values: None)
    problems = sent.to(engine)["problems"]
    assert problems == [
        *(f"tensor {part}.weight is not in the engine as it was sent (qkv_proj.weight)" for part in ("q_proj", "k_proj", "v_proj")),
        "tensor o_proj.weight is not in the engine as it was sent",
        "tensor norm.weight is not in the engine as it was sent",
    ]


def test_a_handle_is_opened_once_and_closed_when_it_is_done_with(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[Any] = []

    class Runtime:
        """CUDA's functions, as far as they are called here."""

        class cudaIpcOpenMemHandle:
            def __new__(cls, address: Any, handle: Any, flags: int) -> Any:
                calls.append(("open", bytes(handle), flags))
                address._obj.value = 0x1000 * len(calls)
                return 0 if bytes(handle) != bytes(64) else 1

        cudaIpcCloseMemHandle = staticmethod(lambda address: calls.append(("close", address.value)) or 0)
        cudaGetLastError = staticmethod(lambda: 0)
        cudaGetErrorString = staticmethod(lambda code: b"invalid argument")

    monkeypatch.setattr(torch.cuda, "device", lambda device: contextlib.nullcontext())
    monkeypatch.setattr(torch.cuda, "synchronize", lambda *_: None)
    mappings = mapping.Mappings(torch.device("cpu"))
    monkeypatch.setattr(mappings, "_library", lambda: Runtime)
    places: list[Any] = []
    monkeypatch.setattr(torch, "as_tensor", lambda place, device: places.append(place.__cuda_array_interface__))
    with_zeros = bytes([7, 0, 0, *range(61)])
    one, other = (base64.b64encode(handle).decode() for handle in (with_zeros, b"x" * 64))
    mappings.memory(one, 512, 100)
    mappings.memory(one, 0, 50)
    mappings.memory(other, 0, 50)
    assert calls == [("open", with_zeros, 1), ("open", b"x" * 64, 1)]
    assert [place["data"] for place in places] == [(0x1000 + 512, False), (0x1000, False), (0x2000, False)]
    assert [place["shape"] for place in places] == [(100,), (50,), (50,)]
    calls.clear()
    mappings.keep([other])
    mappings.keep([other])
    assert calls == [("close", 0x1000)]
    with pytest.raises(RuntimeError, match="cudaIpcOpenMemHandle: invalid argument; the run's GPU memory cannot be mapped here: set"):
        mappings.memory(base64.b64encode(bytes(64)).decode(), 0, 50)
    with pytest.raises(RuntimeError, match="a CUDA IPC handle has 64 bytes, not 66"):
        mappings.memory(base64.b64encode(bytes(66)).decode(), 0, 50)


@pytest.mark.parametrize("version", [b"", b"\x02c", b"\x03c"], ids=["old", "2", "3"])
def test_what_travels_is_the_drivers_handle(monkeypatch: pytest.MonkeyPatch, version: bytes) -> None:
    from surogate_rl.rollouts.engines.vllm import device_weights

    released: list[Any] = []
    handle = bytes(range(64))

    class Storage:
        def _share_cuda_(self) -> tuple[Any, ...]:
            return 0, version + handle, 8192, 512, b"counter", 3, b"event", True

        def _release_ipc_counter(self, *arguments: Any, device: int) -> None:
            released.append((*arguments, device))

    memory: Any = SimpleNamespace(untyped_storage=Storage)
    assert device_weights._share(memory) == (base64.b64encode(handle).decode(), 512)
    assert released == [(b"counter", 3, 0)]
    if version:
        version = version[:1] + b"e"
        with pytest.raises(EngineFailed, match="cannot share memory of torch's expandable segments"):
            device_weights._share(memory)
