"""Whole runs in environments of several turns."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import surogate_rl

from .outputs import rows_by_step, same, weights

Make = Callable[..., dict[str, Any]]
TURNS = Path(__file__).parent / "turns.py"
ROLLOUTS = {"prompts_per_step": 4, "num_generations": 4, "max_completion_length": 4, "max_sequences": 16}


def multi(base: Make, **changes: Any) -> dict[str, Any]:
    environment = {"name": f"{TURNS}:Digits"} | changes.pop("environment", {})
    config = {"environment": environment, "rollouts": ROLLOUTS, "sequence_len": 64, "max_steps": 3} | changes
    made = base("grpo", **config)
    if "rewards" not in changes:
        del made["rewards"]
    return made


def rollouts(result: Any, step: int = 1) -> list[dict[str, Any]]:
    return rows_by_step(result.output_dir)[step - 1]


def test_a_run_without_reward_functions(base: Make, tmp_path: Path) -> None:
    result = surogate_rl.grpo(multi(base))
    again = surogate_rl.grpo(multi(base, output_dir=str(tmp_path / "again")))
    assert same(weights(result.final_model), weights(again.final_model))
    for line in result.history:
        assert line["grad_norm"] > 0
        assert line["episodes/turns_mean"] == 3.0
        assert line["episodes/segments_mean"] == 1.0
        assert line["episodes/cut/turns"] == line["episodes/environment_errors"] == 0.0
        assert line["reward"] == pytest.approx(line["rewards/environment/mean"])
        # what the sampler said of tokens in later turns is what the learner says of them
        assert line["sampling/sampling_logp_difference/max"] < 1e-4
    rows = rollouts(result)
    assert len(rows) == 16
    for row in rows:
        messages = json.loads(row["messages"])
        assert [m["role"] for m in messages] == ["user", "user"] + ["assistant", "user"] * 3
        assert messages[1]["content"] == "7="
        assert (row["turns"], row["cut"], row["segments"]) == (3, None, 1)
        assert sorted(set(row["token_turns"])) == [0, 1, 2]
        assert row["prompt"].endswith("7=")
        assert row["reward"] == pytest.approx(sum(row["turn_rewards"])) == row["environment_reward"]


def test_the_environments_reward_is_weighed_beside_functions(base: Make) -> None:
    rewards = [{"name": f"{TURNS}:length_of_conversation", "weight": 0.5}]
    result = surogate_rl.grpo(multi(base, rewards=rewards, environment={"weight": 2.0, "args": {"final": True}}, max_steps=1))
    for row in rollouts(result):
        assert json.loads(row["rewards"]) == {"length_of_conversation": 8.0, "environment": row["environment_reward"]}
        assert row["environment_reward"] == pytest.approx(10.0 + sum(row["turn_rewards"]))
        assert row["reward"] == pytest.approx(0.5 * 8.0 + 2.0 * row["environment_reward"])
    unweighed = surogate_rl.grpo(
        multi(base, rewards=rewards, environment={"weight": 0.0}, max_steps=1, output_dir=f"{result.output_dir}-unweighed")
    )
    assert {row["reward"] for row in rollouts(unweighed)} == {4.0}


def test_credit_by_turns_changes_what_is_learned_and_where(base: Make, tmp_path: Path) -> None:
    loss = {"loss_type": "dr_grpo", "scale_rewards": "none"}
    whole = surogate_rl.grpo(multi(base, loss=loss, max_steps=1))
    turns = surogate_rl.grpo(
        multi(base, loss=loss, max_steps=1, environment={"turn_credit": "reward_to_go"}, output_dir=str(tmp_path / "turns"))
    )
    assert [row["tokens"] for row in rollouts(whole)] == [row["tokens"] for row in rollouts(turns)]
    assert not same(weights(whole.final_model), weights(turns.final_model))
    # with a single turn both are the same thing
    one = {"environment": {"args": {"turns": 1}}}
    a = surogate_rl.grpo(multi(base, loss=loss, **one, output_dir=str(tmp_path / "a")))
    one["environment"]["turn_credit"] = "reward_to_go"  # type: ignore[assignment]
    b = surogate_rl.grpo(multi(base, loss=loss, **one, output_dir=str(tmp_path / "b")))
    for x, y in zip(weights(a.final_model).values(), weights(b.final_model).values(), strict=True):
        np.testing.assert_allclose(x, y, atol=1e-6)


@pytest.mark.parametrize("loss_type", ["grpo", "dapo", "gspo", "rloo", "cispo"])
def test_losses_over_several_passes(base: Make, loss_type: str) -> None:
    loss = {"loss_type": loss_type, "num_iterations": 2, "num_minibatches": 2}
    result = surogate_rl.grpo(multi(base, loss=loss, max_steps=1))
    assert result.history[-1]["grad_norm"] > 0


def test_limits_are_cuts_and_evaluation_plays_in_the_same_environment(base: Make, data: Path) -> None:
    evaluation = {"datasets": [{"path": str(data / "heldout.jsonl"), "type": "prompt"}], "temperature": 1.0}
    result = surogate_rl.grpo(multi(base, environment={"max_turns": 2, "args": {"turns": 5}}, eval=evaluation))
    assert all(line["episodes/cut/turns"] == 1.0 == line["completions/clipped_ratio"] for line in result.history if "loss" in line)
    assert {(row["turns"], row["cut"]) for row in rollouts(result)} == {(2, "turns")}
    assert result.evaluation["eval_episodes/turns_mean"] == 2.0
    assert result.evaluation["eval_rewards/environment/mean"] == pytest.approx(result.evaluation["eval_reward"])


def test_an_environment_that_fails_or_hangs_loses_its_episode_and_not_the_run(base: Make) -> None:
    result = surogate_rl.grpo(multi(base, environment={"timeout": 3.0, "args": {"fail_on": 1, "hang_on": 2}}, max_steps=1))
    (line,) = [line for line in result.history if "loss" in line]
    assert line["episodes/environment_errors"] == 8.0 == line["completions/unscored"]
    rows = rollouts(result)
    assert {row["error"] for row in rows if row["sample"] == 1} == {"environment: step: ValueError: the board broke"}
    assert {row["error"] for row in rows if row["sample"] == 2} == {"environment: step: no result after 3 s"}
    assert all(row["reward"] is None and row["advantage"] == 0.0 for row in rows if row["sample"] in (1, 2))
    assert all(row["reward"] is not None for row in rows if row["sample"] in (0, 3))


def test_text_that_no_encoding_can_hold_ends_no_run_and_no_resumed_one(base: Make) -> None:
    """In observations, in what the environment raises, and in what a reward raises."""

    def broken(completion: str) -> float:
        if "1" in completion:
            raise ValueError("\ud83d")
        return float(len(completion))

    config = multi(base, environment={"args": {"odd": True, "fail_on": 1}}, max_steps=2, save_steps=1)
    config["rewards"] = []
    result = surogate_rl.grpo(config, rewards=[broken])
    assert result.steps == 2
    rows = [row for step in (1, 2) for row in rollouts(result, step)]
    assert {row["error"] for row in rows if row["sample"] == 1} == {"environment: step: ValueError: the board broke\ufffd"}
    assert any("\ufffd" in row["error"] for row in rows if row["sample"] != 1 and row["error"] is not None)
    assert all("7=\ufffd" in row["messages"] for row in rows)
    resumed = surogate_rl.grpo(config | {"max_steps": 3, "resume": "auto"}, rewards=[broken])
    assert resumed.steps == 3


def test_calls_that_hang_are_counted(base: Make) -> None:
    """Two completions of each of four groups sleep longer than they may, on threads of their own."""
    config = multi(base, environment={"name": f"{TURNS}:Sleeping", "timeout": 0.2}, max_steps=1)
    (line,) = [line for line in surogate_rl.grpo(config).history if "loss" in line]
    assert line["episodes/environment_errors"] == 8.0 == line["episodes/hung_calls"]


def test_a_resumed_run_ends_as_an_unbroken_one(base: Make, tmp_path: Path) -> None:
    import shutil

    changes = {"environment": {"turn_credit": "reward_to_go"}, "max_steps": 4}
    whole = surogate_rl.grpo(multi(base, output_dir=str(tmp_path / "whole"), **changes))
    broken = multi(base, output_dir=str(tmp_path / "broken"), save_steps=2, save_total_limit=None, **changes)
    surogate_rl.grpo(broken)
    shutil.rmtree(tmp_path / "broken" / "checkpoints" / "step-00000004")
    shutil.rmtree(tmp_path / "broken" / "final")
    resumed = surogate_rl.grpo(broken | {"resume": "auto"})
    assert all(
        np.array_equal(a, b) for a, b in zip(weights(whole.final_model).values(), weights(resumed.final_model).values(), strict=True)
    )


def test_it_learns_even_digits(base: Make) -> None:
    config = multi(base, max_steps=20, lr_scheduler_type="constant", environment={"turn_credit": "reward_to_go"})
    config["rollouts"] = ROLLOUTS | {"num_generations": 8, "max_sequences": 32}
    history = [line["reward"] for line in surogate_rl.grpo(config).history if "reward" in line]
    assert history[0] < 1.8
    assert np.mean(history[-4:]) > 2.5  # of 3
