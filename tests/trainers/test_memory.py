"""The memory of a run is planned as a whole: what the plan says is what the run's objects take, and what does not fit is not begun."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

import surogate_rl
from surogate_rl import _core
from surogate_rl.cli import app
from surogate_rl.config import load_config
from surogate_rl.config.schema import TrainConfig
from surogate_rl.config.yaml_source import dump
from surogate_rl.learner import Learner
from surogate_rl.rollouts.engines.native import NativeEngine
from surogate_rl.trainers import plan
from surogate_rl.trainers.memory import Demands, MemoryPlan, plan_memory

from .outputs import RUN

Base = Callable[..., dict[str, Any]]
Parts = list[tuple[str, int]]

OWN_OBJECTIVE = """
def loss(stats, batch, totals):
    return ((stats.logp - __import__("torch").from_numpy(batch.per_token["reference_logp"])) ** 2).sum() / totals.tokens
loss.needs_reference = True
"""

# 4 layers of 4 heads of 16: a position of the cache is 4 * 2 * 64 * 4 = 2048 bytes
SPEC: dict[str, Any] = {
    "layers": 4,
    "hidden": 64,
    "heads": 4,
    "kv_heads": 4,
    "head_dim": 16,
    "ffn": 128,
    "vocab": 100,
    "max_positions": 1024,
    "rope_inv_freq": [0.5**i for i in range(8)],
}
POSITION = 2048


@pytest.fixture
def made(base: Base, tmp_path: Path) -> Callable[..., TrainConfig]:
    def make(command: Any, **changes: Any) -> TrainConfig:
        file = tmp_path / "config.yaml"
        file.write_text(dump(base(command, **changes)))
        return load_config(file, command, planning=True)

    return make


@pytest.fixture
def taken(monkeypatch: pytest.MonkeyPatch) -> dict[str, Parts]:
    """What the objects of a run say that they took, by owner."""
    found: dict[str, Parts] = {}
    make_learner, make_engine = Learner.__init__, NativeEngine.__init__

    def learner(self: Learner, *args: Any, **options: Any) -> None:
        make_learner(self, *args, **options)
        owner = "learner" if self.trainable else "reference"
        assert owner not in found
        found[owner] = self.memory()

    def engine(self: NativeEngine, *args: Any, **options: Any) -> None:
        make_engine(self, *args, **options)
        assert self._generator is not None
        found["sampler"] = self._generator.memory()

    monkeypatch.setattr(Learner, "__init__", learner)
    monkeypatch.setattr(NativeEngine, "__init__", engine)
    return found


@pytest.mark.parametrize(
    ("command", "changes", "owners"),
    [
        ("grpo", {}, {"learner", "sampler"}),
        ("grpo", {"loss": {"beta": 0.1}}, {"learner", "reference", "sampler"}),
        ("grpo", {"loss": {"beta": 0.1}, "lora": True, "lora_rank": 3}, {"learner", "sampler"}),
        ("grpo", {"loss": {"loss_type": "OWN"}}, {"learner", "reference", "sampler"}),
        ("grpo", {"loss": {"loss_type": "OWN"}, "lora": True}, {"learner", "sampler"}),
        ("grpo", {"recompute": "block", "rollouts": {"kv_cache_gb": 0.001, "max_completion_length": 8}}, {"learner", "sampler"}),
        ("sft", {}, {"learner"}),
        ("sft", {"eval": "REWARDS", "lora": True}, {"learner", "sampler"}),
        ("dpo", {}, {"learner"}),
        ("dpo", {"eval": "REWARDS"}, {"learner", "sampler"}),
    ],
)
def test_a_dry_run_shows_what_the_run_takes(
    base: Base, data: Path, tmp_path: Path, taken: dict[str, Parts], command: str, changes: dict[str, Any], owners: set[str]
) -> None:
    if changes.get("loss", {}).get("loss_type") == "OWN":
        (tmp_path / "own.py").write_text(OWN_OBJECTIVE)
        changes = changes | {"loss": {"loss_type": f"{tmp_path}/own.py:loss"}}
    if changes.get("eval") == "REWARDS":
        held_out = {"path": str(data / "heldout.jsonl"), "type": "prompt"}
        changes = changes | {"eval": {"datasets": [held_out], "rewards": ["exact_match"], "max_completion_length": 4}}
    config = base(command, **({"max_steps": 1, "sequence_len": 48} | changes))
    (tmp_path / "config.yaml").write_text(dump(config))
    shown = CliRunner().invoke(app, [command, str(tmp_path / "config.yaml"), "--dry-run"])
    assert (shown.exit_code, shown.stderr) == (0, "")
    assert not (tmp_path / "run").exists()
    assert taken == {}, "a dry run takes nothing"
    RUN[command](config)
    assert taken.keys() == owners
    lines = [f"{owner}: {name}" for owner in ("learner", "reference", "sampler") for name, _ in taken.get(owner, [])]
    sizes = [size for owner in ("learner", "reference", "sampler") for _, size in taken.get(owner, [])]
    table = re.findall(r"^#   ((?:learner|reference|sampler): .*?) +([\d.]+) MiB$", shown.stdout, re.MULTILINE)
    assert [(name, size) for name, size in table] == [(name, f"{size / 2**20:.1f}") for name, size in zip(lines, sizes, strict=True)]
    assert re.findall(r"^#   total +([\d.]+) MiB$", shown.stdout, re.MULTILINE) == [f"{sum(sizes) / 2**20:.1f}"]


def planned(config: TrainConfig, **changes: Any) -> MemoryPlan:
    demands = Demands(**({"max_tokens": 64} | changes))
    return plan_memory(config, _core.ModelSpec(**SPEC), demands, parameters=0)


def size(parts: Parts, owner: str, word: str = "") -> int:
    return sum(bytes_ for name, bytes_ in parts if name.startswith(f"{owner}: {word}"))


def give(monkeypatch: pytest.MonkeyPatch, available: int) -> None:
    monkeypatch.setattr(_core, "available_memory", lambda device: available)


def test_all_parts_together_decide_about_recomputation(made: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The learner alone would keep its activations; with a reference and a sampler beside it, there is no room for them."""
    config = made("grpo", loss={"beta": 0.1})
    roomy = planned(config)
    assert not roomy.learner["recompute"]
    beside = {"reference": True, "sequences": 4}
    whole = planned(config, **beside)
    assert whole.bytes > roomy.bytes
    give(monkeypatch, whole.bytes)
    assert not planned(config, **beside).learner["recompute"]
    give(monkeypatch, whole.bytes - 1)
    tight = planned(config, **beside)
    assert tight.learner["recompute"]
    assert tight.fits
    assert not planned(config).learner["recompute"]
    assert size(tight.parts, "reference") == size(whole.parts, "reference") > 0


def test_the_cache_is_a_quarter_at_the_most_and_then_what_is_left(made: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    config = made("sft", sequence_len=64)
    needs = 50 * 64 * POSITION
    give(monkeypatch, 1 << 40)
    roomy = planned(config, sequences=50)
    assert size(roomy.parts, "sampler", "KV cache") == roomy.engine.cache_bytes == needs
    assert roomy.engine.cache_tokens == 50 * 64

    give(monkeypatch, 4 * 3 * 2**20)  # a quarter of it: 3 MiB, 1536 positions
    quarter = planned(config, sequences=50)
    assert quarter.engine.cache_tokens == 1536
    assert quarter.fits

    others = planned(made("sft", sequence_len=64, recompute="block"), sequences=50)
    fixed = others.bytes - others.engine.cache_bytes
    # nothing is left but what 100 positions need; a cache is made of blocks of 16
    give(monkeypatch, fixed + 100 * POSITION)
    rest = planned(config, sequences=50)
    assert rest.learner["recompute"]
    assert rest.engine.cache_tokens == 96
    assert rest.fits

    # one sequence, and the position that is sampled behind it, is the least
    give(monkeypatch, fixed)
    short = planned(config, sequences=50)
    assert short.engine.cache_tokens == 80
    assert not short.fits


def test_a_size_that_is_asked_for_is_not_cut(made: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    rollouts = {"kv_cache_gb": 3 / 1024, "max_completion_length": 8}
    config = made("grpo", sequence_len=64, rollouts=rollouts)
    give(monkeypatch, 1 << 40)
    assert planned(config, sequences=50).engine.cache_tokens == 1536
    give(monkeypatch, 3 << 20)
    short = planned(config, sequences=50)
    assert short.engine.cache_tokens == 1536
    assert not short.fits
    assert "lower rollouts.kv_cache_gb" in short.advice


def test_the_limit_and_the_machine_both_count(made: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    give(monkeypatch, 5 << 20)
    assert planned(made("sft", memory_limit_gb=1)).room == 5 << 20
    assert planned(made("sft", memory_limit_gb=2**-10)).room == 1 << 20
    assert planned(made("sft")).room == 5 << 20


def test_a_refusal_names_every_part_and_keys_that_there_are(made: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    give(monkeypatch, 2 << 20)
    config = made("grpo", loss={"beta": 0.1})
    short = planned(config, sequences=4, reference=True)
    with pytest.raises(MemoryError) as caught:
        short.require()
    first, *items, advice = str(caught.value).splitlines()
    assert first == f"not enough memory: {short.bytes / 2**20:.2f} MiB needed, 2.00 MiB available. Needed for:"
    assert items == [f"  {name}: {size / 2**20:.2f} MiB" for name, size in short.parts]
    assert {item.split(":")[0].strip() for item in items} == {"learner", "reference", "sampler"}
    assert advice == (
        "To need less: lower per_device_train_batch_size or sequence_len (together they set the 64 tokens of a micro-batch that are "
        "planned for), lower rollouts.max_sequences or train an adapter (lora: true), whose reference needs no second model."
    )
    rollouts = {"kv_cache_gb": 0.1, "max_completion_length": 8}
    limited = planned(made("grpo", memory_limit_gb=2**-10, lora=True, recompute="none", rollouts=rollouts), sequences=4)
    with pytest.raises(MemoryError, match=r"MiB needed, 1\.00 MiB allowed by memory_limit_gb\."):
        limited.require()
    assert limited.advice == (
        "To need less: lower per_device_train_batch_size or sequence_len (together they set the 64 tokens of a micro-batch that are "
        "planned for), set recompute: block (a layer's activations are then computed twice and not kept), lower rollouts.kv_cache_gb, "
        "lower rollouts.max_sequences or raise memory_limit_gb."
    )


def test_memory_limit_gb_bounds_a_run(base: Base, tmp_path: Path, made: Any, taken: dict[str, Parts]) -> None:
    """Each part by itself is far below the limit. Nothing is taken and nothing is written."""
    config = base("grpo", loss={"beta": 0.1}, recompute="none", max_steps=1)
    whole = plan(made("grpo", loss={"beta": 0.1}, recompute="none")).bytes
    least = whole - plan(made("grpo", loss={"beta": 0.1}, recompute="none")).memory.engine.cache_bytes
    with pytest.raises(MemoryError, match="allowed by memory_limit_gb"):
        surogate_rl.grpo(config | {"memory_limit_gb": least / 2**30})
    assert taken == {}
    assert not (tmp_path / "run").exists()
    # with less than it should have, the cache is smaller; what is learned is the same
    small = surogate_rl.grpo(config | {"memory_limit_gb": (least + 3 * 2**20 // 8) / 2**30})
    cached = size([(f"sampler: {name}", bytes_) for name, bytes_ in taken["sampler"]], "sampler", "KV cache")
    assert cached < whole - least
    assert sum(bytes_ for parts in taken.values() for _, bytes_ in parts) <= least + 3 * 2**20 // 8
    taken.clear()
    large = surogate_rl.grpo(config | {"memory_limit_gb": whole / 2**30, "output_dir": str(tmp_path / "large")})
    assert sum(bytes_ for parts in taken.values() for _, bytes_ in parts) == whole
    assert [line["grad_norm"] for line in small.history] == [line["grad_norm"] for line in large.history]


def test_a_plan_that_does_not_fit_is_shown_and_says_so(made: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    give(monkeypatch, 1 << 20)
    lines = plan(made("sft")).lines
    assert "  " + f"{'available here':<44} {1.0:>10.1f} MiB" in lines
    (said,) = [line for line in lines if "does not fit" in line]
    assert said.startswith("  this does not fit, such a run is refused. To need less: lower per_device_train_batch_size")


def test_vllm_beside_the_learner_counts(made: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Weights in bfloat16 and the cache of each engine, and one copy of the weights for updates."""
    give(monkeypatch, 1 << 40)
    rollouts = {
        "engine": "vllm",
        "max_completion_length": 8,
        "max_sequences": 4,
        "vllm": {"mode": "server", "replicas": 2, "dtype": "bfloat16"},
    }
    config = made("grpo", sequence_len=64, rollouts=rollouts)
    parts = plan_memory(config, _core.ModelSpec(**SPEC), Demands(64, sequences=4), parameters=1000).parts
    assert size(parts, "vllm", "weights") == 2 * 1000 * 2
    # blocks of 128 positions: one for the context, and one of which a sequence wastes a part
    assert size(parts, "vllm", "KV cache") == 2 * 4 * 256 * POSITION // 2
    assert size(parts, "vllm", "copy") == 1000 * 2
