"""Runs with a budget on the tiny model."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
from safetensors.numpy import load_file

import surogate_rl
from surogate_rl.rollouts.budget import controller, depth
from surogate_rl.trainers import budgeting

Make = Callable[..., dict[str, Any]]
EXACT = {"loss_type": "dr_grpo", "scale_rewards": "none"}
DEPTH = {"coverage": 0.5, "max": 4, "explore": 0.5, "min_episodes": 16, "success_threshold": 0.1}


def weights(directory: Path) -> dict[str, np.ndarray]:
    (path,) = directory.glob("*.safetensors")
    return load_file(path)


def same(a: dict[str, np.ndarray], b: dict[str, np.ndarray]) -> bool:
    return a.keys() == b.keys() and all(np.array_equal(a[name], b[name]) for name in a)


def with_budget(config: dict[str, Any], budget: dict[str, Any] | None, **rollouts: Any) -> dict[str, Any]:
    changed = config["rollouts"] | rollouts | ({"budget": budget} if budget is not None else {})
    return config | {"rollouts": changed, "loss": EXACT}


def test_off_is_the_same_run_as_without_the_module(base: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Bit for bit, and nothing of the module is touched: all of it is replaced by what fails."""
    plain = surogate_rl.grpo(with_budget(base("grpo", output_dir=str(tmp_path / "plain")), None))

    def fails(*arguments: Any, **keywords: Any) -> None:
        raise AssertionError("the budget was used")

    for module, name in (
        (controller, "AdaptiveBudget"),
        (controller, "step_credits"),
        (depth, "DepthLaw"),
        (budgeting, "AdaptiveBudget"),
        (budgeting, "BudgetSettings"),
    ):
        monkeypatch.setattr(module, name, fails)
    off = surogate_rl.grpo(with_budget(base("grpo", output_dir=str(tmp_path / "off")), {"depth": None, "width": None}))
    assert same(weights(plain.final_model), weights(off.final_model))


def test_without_a_cut_and_with_equal_numbers_it_is_the_plain_gradient(base: Make, tmp_path: Path) -> None:
    """A depth budget that has no evidence yet: leave-one-out x (n - 1) / n is the group's mean, so the run is the same up to rounding."""
    plain = surogate_rl.grpo(with_budget(base("grpo", output_dir=str(tmp_path / "plain"), max_steps=1), None))
    budget = {"depth": {"min_episodes": 1000}}
    other = surogate_rl.grpo(with_budget(base("grpo", output_dir=str(tmp_path / "depth"), max_steps=1), budget))
    assert other.history[0]["grad_norm"] == pytest.approx(plain.history[0]["grad_norm"], rel=1e-5)
    assert other.history[0]["loss"] == pytest.approx(plain.history[0]["loss"], rel=1e-4, abs=1e-7)


@pytest.mark.parametrize("budget", [{"depth": DEPTH}, {"width": {"max": 8}}, {"depth": DEPTH, "width": {"max": 8}}])
def test_a_resumed_run_ends_as_an_unbroken_one(base: Make, tmp_path: Path, budget: dict[str, Any]) -> None:
    def make(name: str, **changes: Any) -> dict[str, Any]:
        # 8 tasks, so that they are visited again within the run
        config = base("grpo", output_dir=str(tmp_path / name), lr_scheduler_type="constant", **changes)
        config["datasets"] = [config["datasets"][0] | {"size": 8}]
        return with_budget(config, budget)

    whole = surogate_rl.grpo(make("whole", max_steps=6))
    surogate_rl.grpo(make("broken", max_steps=3, save_steps=3))
    resumed = surogate_rl.grpo(make("broken", max_steps=6, save_steps=3, resume="auto"))
    assert resumed.steps == 6
    assert same(weights(whole.final_model), weights(resumed.final_model))
    names = [name for name in whole.history[-1] if name.startswith("budget/") and not name.endswith("seconds")]
    assert names
    assert all(whole.history[-1][name] == resumed.history[-1][name] for name in names)


def test_tokens_are_capped_and_logged(base: Make, tmp_path: Path) -> None:
    """From the second step on completions have four tokens, or were drawn to go on."""
    config = with_budget(base("grpo", output_dir=str(tmp_path / "run"), max_steps=4), {"depth": DEPTH})
    result = surogate_rl.grpo(config)
    later = [line for line in result.history if line["step"] >= 3]
    assert all(line["budget/depth/cap"] <= 4 for line in later)
    assert all(line["budget/depth/censored_share"] > 0 and line["budget/depth/saved_tokens"] > 0 for line in later)
    for step in (3, 4):
        rows = pq.read_table(tmp_path / "run" / "rollouts" / f"step-{step:08d}.parquet").to_pylist()
        lengths = [len(row["tokens"]) for row in rows]
        longer = np.mean([length > 4 for length in lengths])
        assert 0.1 < longer < 0.9
        assert {4} <= set(lengths)


def test_width_keeps_the_sum(base: Make, tmp_path: Path) -> None:
    config = base("grpo", output_dir=str(tmp_path / "run"), max_steps=6)
    config["datasets"] = [config["datasets"][0] | {"size": 8}]
    result = surogate_rl.grpo(with_budget(config, {"width": {"max": 8, "floor": 0.0}}))
    for step in range(1, 7):
        rows = pq.read_table(tmp_path / "run" / "rollouts" / f"step-{step:08d}.parquet").to_pylist()
        assert len(rows) == 16
    assert [line["budget/width/seen_share"] for line in result.history] == [0, 0, 1, 1, 1, 1]


def test_a_checkpoint_of_another_budget_is_refused(base: Make, tmp_path: Path) -> None:
    surogate_rl.grpo(with_budget(base("grpo", max_steps=2, save_steps=2), {"width": {"max": 8}}))
    with pytest.raises(ValueError, match=r"rollouts\.budget"):
        surogate_rl.grpo(with_budget(base("grpo", max_steps=4, save_steps=2, resume="auto"), {"depth": DEPTH, "width": {"max": 8}}))
