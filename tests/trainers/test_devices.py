"""What the trainers ask of the learner on a GPU. None is needed: options and plans come from the configuration and the model's alone."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from surogate_rl.config import load_config
from surogate_rl.config.schema import TrainConfig
from surogate_rl.config.yaml_source import dump
from surogate_rl.learner import Learner
from surogate_rl.models import inspect_model
from surogate_rl.trainers import plan
from surogate_rl.trainers.learner_options import learner_choices
from surogate_rl.trainers.memory import MemoryPlan

Base = Callable[..., dict[str, Any]]


@pytest.fixture
def planned(base: Base, tmp_path: Any) -> Callable[..., TrainConfig]:
    def make(command: Any, **changes: Any) -> TrainConfig:
        file = tmp_path / "config.yaml"
        config = base(command, **changes)
        if config.get("device") == "cuda":
            del config["threads"]
        file.write_text(dump(config))
        return load_config(file, command, planning=True)

    return make


def choices(config: TrainConfig) -> list[tuple[bool, bool]]:
    """(keep_logits, recompute) of each."""
    return [(options["compute"].keep_logits, options["recompute"]) for options in learner_choices(config, 64)]


@pytest.mark.parametrize(
    ("command", "changes", "expected"),
    [
        ("dpo", {}, [(True, False), (False, False), (False, True)]),
        ("dpo", {"recompute": "none"}, [(True, False), (False, False)]),
        ("dpo", {"recompute": "block"}, [(True, True), (False, True)]),
        ("dpo", {"lora": True}, [(False, False), (False, True)]),
        ("dpo", {"lora": True, "lora_target_modules": ["q_proj", "lm_head"]}, [(True, False), (False, False), (False, True)]),
        ("sft", {}, [(False, False), (False, True)]),
        ("sft", {"device": "cpu"}, [(False, False), (False, True)]),
        ("dpo", {"device": "cpu", "recompute": "block"}, [(False, True)]),
    ],
)
def test_choices(planned: Any, command: str, changes: dict[str, Any], expected: list[tuple[bool, bool]]) -> None:
    assert choices(planned(command, **({"device": "cuda"} | changes))) == expected


def test_settings(planned: Any) -> None:
    changes = {"optimizer_state_dtype": "bfloat16", "master_weights": False, "logits_dtype": "float32", "deterministic": True}
    compute = learner_choices(planned("sft", device="cuda", **changes), 64)[0]["compute"]
    assert (compute.device, compute.recipe, compute.logits_dtype, compute.deterministic) == ("cuda", "bfloat16", "float32", True)
    assert (compute.optimizer_state_dtype, compute.gradient_dtype, compute.master_weights) == ("bfloat16", "float32", False)
    assert compute.head_gradient_in_forward
    assert compute.border_adapters
    cpu = learner_choices(planned("sft", device="cpu"), 64)[0]["compute"]
    assert (cpu.device, cpu.recipe) == ("cpu", "float32")
    assert [cpu.keep_logits, cpu.head_gradient_in_forward, cpu.border_adapters] == [False] * 3


@pytest.mark.parametrize(
    ("command", "changes", "expected"),
    [
        ("sft", {}, [False, True]),
        ("sft", {"recompute": "block"}, [True]),
        ("sft", {"recompute": "none"}, [False]),
        ("sft", {"device": "cpu"}, [False, True]),
        ("sft", {"gradient_accumulation_steps": 2}, [False, False]),
        ("sft", {"lora": True}, [False, False]),
        ("dpo", {}, [False, False, False]),
    ],
)
def test_gradients_are_lent_where_a_step_is_one_backward(planned: Any, command: str, changes: dict[str, Any], expected: list[bool]) -> None:
    config = planned(command, **({"device": "cuda", "gradient_accumulation_steps": 1} | changes))
    assert [options["compute"].lend_gradients for options in learner_choices(config, 64)] == expected


def test_the_largest_choice_that_fits_is_made(planned: Any) -> None:
    """Each choice is made as soon as it fits, and none before."""
    config = planned("dpo", device="cuda", memory_limit_gb=64.0)
    spec = plan(config).memory
    sizes = [sum(size for _, size in Learner.plan(inspect_model(config.model).spec, **options)) for options in choices_of(spec)]
    assert sizes == sorted(sizes, reverse=True)
    made = [(True, False), (False, False), (False, True)]
    assert sizes[1] > sizes[2]
    for size in sizes:
        memory = plan(planned("dpo", device="cuda", memory_limit_gb=size / 2**30)).memory
        assert (memory.learner["compute"].keep_logits, memory.learner["recompute"]) == made[sizes.index(size)]
        assert memory.bytes == size
    assert not plan(planned("dpo", device="cuda", memory_limit_gb=(sizes[-1] - 1) / 2**30)).memory.fits


def choices_of(memory: MemoryPlan) -> list[dict[str, Any]]:
    return learner_choices(memory.config, memory.demands.max_tokens)


def test_plan_of_a_gpu_run(planned: Any) -> None:
    gpu, cpu = plan(planned("sft", device="cuda")), plan(planned("sft", device="cpu"))
    assert gpu.lines[0] == "device cuda, bfloat16"
    assert cpu.lines[0] == "device cpu, float32"

    def sizes(lines: list[str]) -> dict[str, float]:
        rows = [line.split("learner: ")[1].rsplit(maxsplit=2) for line in lines if "learner: " in line]
        return {name.strip(): float(size) for name, size, _ in rows}

    narrow, wide = sizes(gpu.lines), sizes(cpu.lines)
    assert narrow["weights"] == pytest.approx(wide["weights"] / 2, abs=0.1)
    assert narrow["float32 master weights"] == pytest.approx(wide["weights"], abs=0.1)
    assert narrow["optimizer state"] == pytest.approx(wide["optimizer state"], abs=0.1)


def test_a_limit_chooses_in_the_plan(planned: Any) -> None:
    roomy = plan(planned("dpo", device="cuda", memory_limit_gb=64.0))
    tight = plan(planned("dpo", device="cuda", memory_limit_gb=roomy.bytes / 2**30 - 1e-4))
    assert tight.bytes < roomy.bytes
