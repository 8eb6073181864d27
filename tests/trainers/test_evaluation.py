"""Evaluation by rewards: what is counted, which rewards, and how completions end."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import surogate_rl
from surogate_rl.rollouts.manager import Group
from surogate_rl.rollouts.types import Episode, Segment, Task
from surogate_rl.trainers.evaluation import summarise

from .outputs import same, weights

Make = Callable[..., dict[str, Any]]
TASK = Task(0, None, "1+1=", {})


def group(*rewards: float | None, sampled: int = 2, truncated: int = 0) -> Group:
    """`truncated`: so many completions hit the limit."""
    episodes = []
    for sample, reward in enumerate(rewards):
        segment = Segment([5, *[6] * sampled], [False, *[True] * sampled], [0.0] * (sampled + 1), [0] * (sampled + 1))
        episode = Episode(TASK, sample, 0, segments=[segment], truncated=sample < truncated, reward=reward)
        episode.rewards = {"half": None if reward is None else reward / 2, "rare": 1.0 if reward == 1.0 else None}
        episodes.append(episode)
    return Group(TASK, episodes)


def test_what_is_counted_by_hand() -> None:
    groups = [group(1.0, 0.0, 0.5, truncated=1), group(0.2, None, 0.4, sampled=5), group(None, None, None, sampled=2, truncated=2)]
    assert summarise(groups, 3, pass_threshold=0.5) == pytest.approx(
        {
            "num_prompts": 3.0,
            "completions/mean_length": (3 * 2 + 3 * 5 + 3 * 2) / 9,
            "completions/clipped_ratio": 3 / 9,
            "unscored": 4.0,
            "reward": 2.1 / 5,
            "reward_std": math.sqrt(0.568 / 4),  # 0.58^2 + 0.42^2 + 0.08^2 + 0.22^2 + 0.02^2
            "mean@3": (0.5 + 0.3) / 2,  # of the prompts that have a score
            "pass@3": 1 / 3,  # of all of them
            "rewards/half/mean": 1.05 / 5,
            "rewards/rare/mean": 1.0,
        }
    )


@pytest.mark.parametrize(("threshold", "passed"), [(0.4, 2 / 2), (0.41, 1 / 2), (1.0, 1 / 2), (1.01, 0.0)])
def test_a_prompt_passes_if_one_completion_reaches_the_threshold(threshold: float, passed: float) -> None:
    values = summarise([group(0.0, 1.0), group(0.4, 0.3)], 2, threshold)
    assert values["pass@2"] == passed
    assert values["mean@2"] == pytest.approx(0.425)


def test_nothing_scored_has_no_mean() -> None:
    values = summarise([group(None)], 1, 1.0)
    assert (values["unscored"], values["pass@1"]) == (1.0, 0.0)
    assert not {"reward", "reward_std", "mean@1", "rewards/half/mean"} & set(values)


def held_out(data: Path, **keys: Any) -> dict[str, Any]:
    return {"datasets": [{"path": str(data / "heldout.jsonl"), "type": "prompt"}], **keys}


def test_the_metrics_of_a_run_are_those_of_its_rows(base: Make, data: Path) -> None:
    def low(answer: str) -> float:
        return float(answer[0] == "0")

    result = surogate_rl.grpo(base("grpo", max_steps=1, rewards=[], eval=held_out(data, temperature=1.0, samples=3)), rewards=[low])
    answers = [json.loads(line)["answer"] for line in (data / "heldout.jsonl").read_text().splitlines()]
    share = sum(answer[0] == "0" for answer in answers) / len(answers)
    assert 0 < share < 1
    for name in ("eval_mean@3", "eval_pass@3", "eval_reward"):
        assert result.evaluation[name] == pytest.approx(share)
    assert result.evaluation["eval_num_prompts"] == len(answers) == 16
    assert result.evaluation["eval_unscored"] == 0


def test_rewards_from_python_count_beside_those_of_the_file(base: Make, data: Path) -> None:
    def ten() -> float:
        return 10.0

    result = surogate_rl.grpo(base("grpo", max_steps=1, eval=held_out(data)), rewards=[ten])
    evaluation = result.evaluation
    assert evaluation["eval_rewards/ten/mean"] == 10
    assert evaluation["eval_reward"] == pytest.approx(10 + evaluation["eval_rewards/digits_in_order/mean"])
    # its own ones, where it names some, and no others
    config = base("grpo", max_steps=1, eval=held_out(data, rewards=["exact_match"]), output_dir=str(result.output_dir) + "-own")
    named = surogate_rl.grpo(config, rewards=[ten]).evaluation
    assert {name for name in named if name.startswith("eval_rewards/")} == {"eval_rewards/exact_match/mean"}


def test_training_is_as_it_would_be_without(base: Make, data: Path) -> None:
    """Neither its weights nor what is logged of it: the same reward functions are called for both."""
    evaluated = surogate_rl.grpo(base("grpo", eval=held_out(data, steps=2, temperature=1.0, samples=3)))
    plain = surogate_rl.grpo(base("grpo", output_dir=str(evaluated.output_dir) + "-plain"))
    assert [line["step"] for line in evaluated.history if "eval_reward" in line] == [0, 2, 4]

    def logged(result: Any) -> list[dict[str, float]]:
        lines = [line for line in result.history if "grad_norm" in line]
        return [{k: v for k, v in line.items() if "time" not in k and "second" not in k} for line in lines]

    assert logged(evaluated) == logged(plain)
    assert same(weights(evaluated.final_model), weights(plain.final_model))


@pytest.mark.parametrize(("stop", "stops"), [(None, True), ([], False), (["3"], False)])
def test_completions_of_training_and_evaluation_end_at_stop(base: Make, data: Path, stop: list[str] | None, stops: bool) -> None:
    def none_goes_on(completion: str) -> float:
        return float("7" not in completion[:-1])

    def some_end(completion: str) -> float:
        return float(completion.endswith("7"))

    evaluation = held_out(data, temperature=1.0) | ({} if stop is None else {"stop": stop})
    config = base("grpo", max_steps=1, rewards=[], eval=evaluation)
    config["rollouts"]["stop"] = ["7"]
    result = surogate_rl.grpo(config, rewards=[none_goes_on, some_end])
    assert result.metrics["rewards/none_goes_on/mean"] == 1
    assert result.metrics["rewards/some_end/mean"] > 0
    assert (result.evaluation["eval_rewards/none_goes_on/mean"] == 1) == stops
    assert result.evaluation["eval_rewards/some_end/mean"] > 0
