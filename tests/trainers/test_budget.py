"""Runs with a budget on the tiny model."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import surogate_rl
from surogate_rl.batch import Totals
from surogate_rl.data.packing import PackSequence, pack
from surogate_rl.errors import InputError
from surogate_rl.learner import Learner
from surogate_rl.models import load_model
from surogate_rl.objectives import PolicyGradient, group_advantages
from surogate_rl.objectives.gradient import seeds
from surogate_rl.rollouts.budget import controller, depth
from surogate_rl.rollouts.manager import Group
from surogate_rl.rollouts.types import Episode, Segment, Task
from surogate_rl.trainers import budgeting
from surogate_rl.trainers.grpo import trained_sequences

from .outputs import rows_by_step, same, weights

Make = Callable[..., dict[str, Any]]
EXACT = {"loss_type": "dr_grpo", "scale_rewards": "none"}
DEPTH = {"coverage": 0.5, "max": 4, "explore": 0.5, "min_episodes": 16, "success_threshold": 0.1}


def with_budget(config: dict[str, Any], budget: dict[str, Any] | None, **rollouts: Any) -> dict[str, Any]:
    changed = config["rollouts"] | rollouts | ({"budget": budget} if budget is not None else {})
    return config | {"rollouts": changed, "loss": EXACT}


def test_off_is_a_plain_step(base: Make, tmp_path: Path) -> None:
    """One step, made again from what was logged of it by the parts alone: advantages, loss, learner. Bit for bit the same weights, so that
    whatever a budget may have changed in the path that it shares with plain runs would show."""
    config = with_budget(base("grpo", output_dir=str(tmp_path / "run"), max_steps=1, warmup_steps=0), None)
    config["loss"] = EXACT | {"entropy_coef": 0.01}
    result = surogate_rl.grpo(config)
    rows = rows_by_step(tmp_path / "run")[0]
    rewards = [[row["reward"] for row in rows[first : first + 4]] for first in range(0, len(rows), 4)]
    assert all(len({row["prompt"] for row in rows[first : first + 4]}) == 1 for first in range(0, len(rows), 4))
    advantages = np.concatenate(group_advantages(rewards, scale_rewards="none", loss_type="dr_grpo").values)
    assert (advantages != 0).any()
    loaded = load_model(config["model"], init="random", seed=config["seed"])
    sequences = []
    for number, (row, advantage) in enumerate(zip(rows, advantages, strict=True)):
        prompt = loaded.tokenizer(row["prompt"], add_special_tokens=False)["input_ids"]
        behaviour = [0.0] * len(prompt) + row["logps"]
        mask = [False] * len(prompt) + [True] * len(row["tokens"])
        sequences.append(PackSequence([*prompt, *row["tokens"]], mask, {"behaviour_logp": behaviour}, {"advantage": advantage}, id=number))
    batches = pack([[sequence] for sequence in sequences], 8 * 32)
    learner = Learner(loaded.spec, max_tokens=8 * 32, threads=1, seed=config["seed"])
    learner.load_weights(loaded.weights())
    objective = PolicyGradient("dr_grpo", entropy_coef=0.01, max_completion_length=8)
    totals = Totals.of(batches)
    for batch in batches:
        stats = learner.forward(batch, temperature=1.0, valid_vocab=loaded.valid_vocab, entropy=True)
        found = seeds(objective, stats.logp, stats.entropy, batch, totals)
        learner.backward(found.dlogp, found.dentropy)
    taken = learner.step(result.history[0]["learning_rate"], max_grad_norm=1.0, betas=(0.9, 0.999), epsilon=1e-8, weight_decay=0.0)
    assert taken.grad_norm == result.history[0]["grad_norm"] > 0
    final = dict(load_model(str(result.final_model)).weights())
    assert same(final, dict(learner.weights()))


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
        rows = rows_by_step(tmp_path / "run")[step - 1]
        lengths = [len(row["tokens"]) for row in rows]
        longer = np.mean([length > 4 for length in lengths])
        assert 0.1 < longer < 0.9
        assert {4} <= set(lengths)


def test_what_was_decided_is_logged(base: Make, tmp_path: Path) -> None:
    """Advantages before and after the cap follow from the logged columns alone."""
    config = base("grpo", output_dir=str(tmp_path / "run"), max_steps=5)
    config["datasets"] = [config["datasets"][0] | {"size": 8}]
    surogate_rl.grpo(with_budget(config, {"depth": DEPTH, "width": {"max": 8}}))
    rows = rows_by_step(tmp_path / "run")[4]
    prompts: dict[str, list[dict[str, Any]]] = {}
    for row in rows:
        prompts.setdefault(row["prompt"], []).append(row)
    assert len(prompts) == 4
    assert any(row["advantage_after_cap"] for row in rows)
    for group in prompts.values():
        assert [row["weight"] for row in group] == pytest.approx([4 / len(group)] * len(group))
        known = [row["value"] if row["reached_cap"] and not row["went_on"] else row["reward"] for row in group]
        for place, row in enumerate(group):
            assert row["depth_cap"] <= 4
            assert row["explore"] == 0.5
            others = known[:place] + known[place + 1 :]
            worth = known[place]
            if row["reached_cap"] and row["went_on"]:
                surprise = (row["reward"] - row["value"]) / row["explore"]
                worth = row["value"] + surprise
                assert row["advantage_after_cap"] == pytest.approx(surprise * 3 / 4, abs=1e-6)
            else:
                assert row["advantage_after_cap"] is None
            assert row["advantage"] == pytest.approx((worth - sum(others) / len(others)) * 3 / 4, abs=1e-6)


def test_an_unscored_one_that_another_limit_ended_is_not_trained() -> None:
    """Below the cap, by the environment's own limit: it has left its group, as without a budget. One that the cap ended stays."""
    task = Task(0, None, "p", {})

    def ended(reached: bool) -> Episode:
        segment = Segment([1, 2], [False, True], [0.0, -1.0], [-1, 0], [-1, 0])
        return Episode(task, 0, 0, [segment], turns=1, cut="turns", depth_cap=1, went_on=False, reached_cap=reached)

    assert list(trained_sequences([Group(task, [ended(False), ended(True)])])) == [(0, 1)]


@pytest.mark.parametrize("beta", [0.0, 0.1])
def test_kl_past_the_cap_reaches_the_objective(base: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, beta: float) -> None:
    """Every trained token past the cap stands for 1/e = 2 of its kind, all others for themselves."""
    seen: list[tuple[int, float]] = []

    def of(batches: Any, *, mask_truncated: bool = False) -> Totals:
        totals = plain(batches, mask_truncated=mask_truncated)
        seen.append((totals.tokens, totals.importance))
        return totals

    plain = Totals.of
    monkeypatch.setattr(Totals, "of", staticmethod(of))
    config = with_budget(base("grpo", output_dir=str(tmp_path / "run"), max_steps=3), {"depth": DEPTH})
    surogate_rl.grpo(config | {"loss": EXACT | {"beta": beta}})
    rows = rows_by_step(tmp_path / "run")[2]
    lengths = [len(row["tokens"]) for row in rows]
    late = sum(max(length - row["depth_cap"], 0) for length, row in zip(lengths, rows, strict=True))
    assert late > 0
    assert seen[-1] == (sum(lengths), sum(lengths) + late)


def test_width_keeps_the_sum(base: Make, tmp_path: Path) -> None:
    config = base("grpo", output_dir=str(tmp_path / "run"), max_steps=6)
    config["datasets"] = [config["datasets"][0] | {"size": 8}]
    result = surogate_rl.grpo(with_budget(config, {"width": {"max": 8, "floor": 0.0}}))
    for step in range(1, 7):
        rows = rows_by_step(tmp_path / "run")[step - 1]
        assert len(rows) == 16
    assert [line["budget/width/seen_share"] for line in result.history] == [0, 0, 1, 1, 1, 1]


def test_a_checkpoint_of_another_horizon_is_refused(base: Make, tmp_path: Path) -> None:
    config = base("grpo", max_steps=2, save_steps=2)
    surogate_rl.grpo(with_budget(config, {"depth": DEPTH}))
    with pytest.raises(InputError, match="counts depth up to 8 tokens, this run up to 16 tokens"):
        surogate_rl.grpo(with_budget(config | {"max_steps": 4, "resume": "auto"}, {"depth": DEPTH}, max_completion_length=16))


WIDTH = {"max": 8}


@pytest.mark.parametrize(
    ("before", "after", "message"),
    [
        (None, {"depth": DEPTH}, "a run without rollouts.budget, this run is one with it; remove it, or start anew"),
        (None, {"width": WIDTH}, "a run without rollouts.budget, this run is one with it; remove it"),
        ({"depth": DEPTH}, None, "a run with rollouts.budget, this run is one without it; configure it as it was, or start anew"),
        ({"width": WIDTH}, None, "a run with rollouts.budget, this run is one without it; configure it as it was"),
        ({"width": WIDTH}, {"depth": DEPTH, "width": WIDTH}, "a run without rollouts.budget.depth, this run is one with it; remove it"),
        ({"depth": DEPTH, "width": WIDTH}, {"width": WIDTH}, "a run with rollouts.budget.depth, this run is one without it; configure"),
        ({"depth": DEPTH}, {"depth": DEPTH, "width": WIDTH}, "a run without rollouts.budget.width, this run is one with it; remove it"),
        ({"depth": DEPTH, "width": WIDTH}, {"depth": DEPTH}, "a run with rollouts.budget.width, this run is one without it; configure"),
    ],
)
@pytest.mark.parametrize("staleness", [0, 1])
def test_a_checkpoint_of_another_budget_is_refused(
    base: Make, before: dict[str, Any] | None, after: dict[str, Any] | None, message: str, staleness: int
) -> None:
    """What is under way was planned by the budget, and its state is what it has seen from the start."""
    surogate_rl.grpo(with_budget(base("grpo", max_steps=1, save_steps=1), before, max_staleness=staleness))
    with pytest.raises(InputError) as refused:
        surogate_rl.grpo(with_budget(base("grpo", max_steps=2, save_steps=1, resume="auto"), after, max_staleness=staleness))
    assert message in str(refused.value)
