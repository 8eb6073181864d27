"""Functions written for TRL run unchanged, get what TRL gives them, and add up to what TRL makes of them."""

from __future__ import annotations

import asyncio
import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from trl import GRPOTrainer
from trl.rewards import (
    accuracy_reward,
    get_cosine_scaled_reward,
    get_repetition_penalty_reward,
    get_soft_overlong_punishment,
    think_format_reward,
)

from surogate_rl.config.schema import RewardConfig
from surogate_rl.rewards import load_rewards
from surogate_rl.rewards.call import TrainerState, batch_arguments, plan_call
from surogate_rl.rewards.length import Length
from surogate_rl.rewards.math_answer import MathAnswer
from surogate_rl.rollouts.types import Episode, Message, Segment, Task

CHAT = [
    ([{"role": "user", "content": "1/3?"}], r"<think>easy</think>It is $\boxed{\frac{1}{3}}$", [11, 12, 13, 11, 12], r"\frac{1}{3}"),
    ([{"role": "user", "content": "1/2?"}], r"It is $\boxed{\frac{2}{3}}$", [21], r"\frac{1}{2}"),
    ([{"role": "system", "content": "S"}, {"role": "user", "content": "?"}], "no idea", [31, 31, 31, 31, 31, 31], "42"),
]
PLAIN = [("1+1=", "2", [5], "2"), ("2+2=", "5", [6, 7], "4")]


def episodes(chat: bool) -> list[Episode]:
    made = []
    for index, (prompt, completion, ids, solution) in enumerate(CHAT if chat else PLAIN):
        segment = Segment([1, 2, *ids], [False, False] + [True] * len(ids), [0.0] * (2 + len(ids)), [0] * (2 + len(ids)))
        columns = {"solution": f"${solution}$", "level": index}
        task = Task(index, prompt if chat else None, None if chat else prompt, columns)  # type: ignore[arg-type]
        messages: list[Message] = [*prompt, {"role": "assistant", "content": completion}] if chat else []  # type: ignore[list-item]
        made.append(Episode(task, 0, 0, [segment], messages, completion))
    return made


def trl_rewards(functions: list[Any], of: list[Episode], chat: bool) -> torch.Tensor:
    """By TRL's own code, given the inputs in the form that its trainer has them."""
    trainer: Any = SimpleNamespace(
        accelerator=SimpleNamespace(device="cpu", num_processes=1, is_main_process=True),
        args=SimpleNamespace(report_to=[]),
        state=SimpleNamespace(global_step=0),
        environments=None,
        reward_funcs=functions,
        reward_processing_classes=[None] * len(functions),
        reward_func_names=[getattr(function, "__name__", "f") for function in functions],
        _log_completion_extra=lambda column, values: None,
        _log_metric=lambda name, value: None,
    )
    prompts = [one.task.messages if chat else one.task.prompt for one in of]
    completions = [[{"role": "assistant", "content": one.completion}] if chat else one.completion for one in of]
    ids = [one.segments[0].tokens[2:] for one in of]
    inputs = [{"prompt": prompt, **one.task.columns} for prompt, one in zip(prompts, of, strict=True)]
    return GRPOTrainer._calculate_rewards(trainer, inputs, prompts, completions, ids)


@pytest.mark.parametrize("chat", [True, False])
def test_arguments_are_those_of_trl(chat: bool) -> None:
    recorded: dict[str, Any] = {}

    def spy(**kwargs: Any) -> list[float]:
        recorded.update(kwargs)
        return [0.0] * len(kwargs["prompts"])

    given = episodes(chat)
    trl_rewards([spy], given, chat)
    ours = batch_arguments(plan_call("spy", spy), given, TrainerState())
    both = {"prompts", "completions", "completion_ids", "solution", "level"}
    assert {key: ours[key] for key in both} == {key: recorded[key] for key in both}
    assert recorded.keys() - ours.keys() == {"log_extra", "log_metric"}, "which the worker supplies"
    assert ours.keys() - recorded.keys() == set()


def test_trl_functions_give_what_they_give_there() -> None:
    functions = [
        accuracy_reward,
        think_format_reward,
        get_soft_overlong_punishment(max_completion_len=6, soft_punish_cache=4),
        get_repetition_penalty_reward(ngram_size=2),
        get_cosine_scaled_reward(max_len=10),
    ]
    given = episodes(chat=True)
    expected = trl_rewards(functions, given, chat=True)
    with load_rewards(functions) as runner:
        names = runner.names
        asyncio.run(runner.score(given))
        report = runner.report()
    assert names == [
        "accuracy_reward",
        "think_format_reward",
        "soft_overlong_punishment_reward",
        "repetition_penalty_reward",
        "cosine_scaled_reward",
    ]
    for one, row in zip(given, expected.tolist(), strict=True):
        assert [math.nan if value is None else value for value in one.rewards.values()] == pytest.approx(row, abs=1e-6, nan_ok=True)
    assert report.extras["gold_parsed"][0] == (0, 0, "[1/3, '\\\\frac{1}{3}']")
    rewards = [one.reward for one in given]
    assert rewards == pytest.approx(expected.nansum(dim=1).tolist(), abs=1e-6)


def test_weights_are_applied_as_in_trl(tmp_path: Any) -> None:
    file = tmp_path / "three.py"
    file.write_text(
        "def a(completions, **kwargs): return [1.0, None]\n"
        "def b(prompts, completions, level, **kwargs): return [float(x) - 3 for x in level]\n"
        "async def c(completions, completion_ids, **kwargs): return [len(ids) for ids in completion_ids]\n"
    )
    namespace: dict[str, Any] = {}
    exec(file.read_text(), namespace)
    given = episodes(chat=False)
    expected = trl_rewards([namespace["a"], namespace["b"]], given, chat=False)
    total = (expected * torch.tensor([0.5, 2.0])).nansum(dim=1)
    total += 0.25 * torch.tensor([1.0, 2.0])
    configs = [RewardConfig(name=f"{file}:{name}", weight=weight) for name, weight in (("a", 0.5), ("b", 2.0), ("c", 0.25))]
    with load_rewards(configs) as runner:
        asyncio.run(runner.score(given))
        metrics = runner.report().metrics()
    assert [one.reward for one in given] == pytest.approx(total.tolist())
    assert metrics["rewards/a/mean"] == pytest.approx(torch.nanmean(expected[:, 0]).item())
    assert metrics["rewards/b/std"] == pytest.approx(expected[:, 1].std().item())


@pytest.mark.parametrize(("length", "cache"), [(10, 4), (10, 0), (10, 10)])
def test_soft_overlong_punishment(length: int, cache: int) -> None:
    ours = Length(max_completion_len=length, soft_punish_cache=cache)
    theirs = get_soft_overlong_punishment(length, cache)
    for count in range(15):
        assert ours(tokens=[0] * count) == pytest.approx(theirs(completion_ids=[[0] * count])[0])


def test_math_agrees_with_accuracy_reward() -> None:
    cases = [
        (r"$\boxed{\frac{1}{3}}$", r"$\frac{1}{3}$"),
        (r"$\boxed{0.5}$", r"$\frac12$"),
        (r"so $\boxed{x^2+2x+1}$", r"$(x+1)^2$"),
        (r"$\boxed{\{1,2\}}$", r"$\{2,1\}$"),
        (r"$\boxed{7}$", r"$8$"),
        (r"$\boxed{(1,2)}$", r"$(1,2)$"),
    ]
    for completion, answer in cases:
        assert [MathAnswer()(completion, answer)] == accuracy_reward([[{"content": completion}]], [answer])
