"""The section rollouts.budget: what it takes, what it cannot go with, and what makes it approximate."""

from __future__ import annotations

import warnings
from typing import Any

import pytest

from surogate_rl.config import ConfigError, ConfigWarning, parse_config

EXACT = {"loss_type": "dr_grpo", "scale_rewards": "none"}
GAME = {"name": "text_game:number_guess"}


def config(budget: dict[str, Any], loss: dict[str, Any] | None = None, rollouts: dict[str, Any] | None = None, **keys: Any) -> Any:
    base = {"model": "m", "output_dir": "out", "datasets": ["rows.jsonl"], "rewards": ["exact_match"]}
    return parse_config({**base, "loss": loss or EXACT, "rollouts": {**(rollouts or {}), "budget": budget}, **keys}, "grpo")


def problems(*arguments: Any, **keys: Any) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        config(*arguments, **keys)
    return caught.value.lines


def test_off_unless_given() -> None:
    assert config({}).rollouts.budget.depth is None
    with_both = config({"depth": {}, "width": {}}).rollouts.budget
    assert with_both.depth.credit == "unbiased"
    assert with_both.width.min == 2


@pytest.mark.parametrize(
    ("budget", "others", "message"),
    [
        ({"depth": {"coverag": 0.8}}, {}, "unknown key 'rollouts.budget.depth.coverag'; did you mean 'rollouts.budget.depth.coverage'?"),
        ({"depth": {"explore": 0.0}}, {}, "rollouts.budget.depth.explore"),
        ({"depth": {"explore": "never"}}, {}, "rollouts.budget.depth.explore"),
        ({"depth": {"coverage": 1.0}}, {}, "rollouts.budget.depth.coverage"),
        ({"width": {"min": 1}}, {}, "rollouts.budget.width.min"),
        ({"depth": {"min": 5, "max": 3}}, {}, "rollouts.budget.depth.min: 5 is more than max (3); lower it"),
        ({"depth": {"min": 256}}, {}, "rollouts.budget.depth.min: episodes have at most 256 tokens anyway"),
        ({"depth": {"min": 10}}, {"environment": GAME}, "rollouts.budget.depth.min: episodes have at most 10 turns anyway"),
        (
            {"depth": {"min": 4}},
            {"environment": GAME | {"max_turns": 4}},
            "rollouts.budget.depth.min: episodes have at most 4 turns anyway",
        ),
        ({"depth": {}}, {"loss": {"loss_type": "gspo"}}, "rollouts.budget.depth: gspo has one advantage for a whole completion"),
        ({"depth": {}}, {"loss": {"loss_type": "rloo"}}, "rollouts.budget.depth: rloo has one advantage for a whole completion"),
        ({"depth": {}}, {"loss": EXACT | {"mask_truncated_completions": True}}, "loss.mask_truncated_completions: would leave out"),
        (
            {"depth": {}},
            {"rollouts": {"dynamic_sampling": {"enabled": True}}},
            "rollouts.budget.depth: dynamic_sampling passes over groups",
        ),
        ({"depth": {"unit": "turns"}}, {}, "rollouts.budget.depth.unit: single_turn has one turn"),
        ({"depth": {}}, {"environment": GAME | {"turn_credit": "reward_to_go"}}, "environment.turn_credit: reward_to_go does not go with"),
        ({"width": {"min": 9}}, {}, "rollouts.budget.width.min: 9 is more than num_generations (8), the mean"),
        ({"width": {"max": 4}}, {}, "rollouts.budget.width.max: 4 is less than num_generations (8), the mean"),
        ({"width": {}}, {"rollouts": {"prompts_per_step": 1}}, "rollouts.budget.width: a step of one prompt has nothing to shift"),
        ({"width": {}}, {"loss": {"loss_type": "reinforce_plus_plus"}}, "rollouts.budget.width: reinforce_plus_plus compares with"),
        ({"width": {}}, {"rollouts": {"num_generations": 1}}, "rollouts.num_generations: a group of one has no baseline"),
    ],
)
def test_what_cannot_be(budget: dict[str, Any], others: dict[str, Any], message: str) -> None:
    assert any(message in line for line in problems(budget, **others)), problems(budget, **others)


def notes(budget: dict[str, Any], loss: dict[str, Any]) -> list[str]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        config(budget, loss)
    return [str(one.message) for one in caught if issubclass(one.category, ConfigWarning)]


def test_what_is_only_approximate_is_said() -> None:
    assert notes({"depth": {}, "width": {}}, EXACT) == []
    by_default = " ".join(notes({"depth": {}}, {"loss_type": "grpo"}))
    assert "scale_rewards: none makes it exact" in by_default
    assert "grpo divides by a completion's own length" in by_default
    assert "dapo divides by the number of sampled tokens" in " ".join(notes({"depth": {}}, {"loss_type": "dapo", "scale_rewards": "none"}))
    assert notes({"width": {}}, {"loss_type": "rloo"}) == []
    assert "credit: zero bends the gradient" in " ".join(notes({"depth": {"credit": "zero"}}, EXACT))
    assert "rollouts.budget.depth.max: 256 has no effect, episodes have at most 256 tokens" in " ".join(
        notes({"depth": {"max": 256}}, EXACT)
    )
    assert notes({"depth": {"min": 255, "max": 255}}, EXACT) == []
    assert "min_explore has no effect" in " ".join(notes({"depth": {"explore": 0.3, "min_explore": 0.2}}, EXACT))
