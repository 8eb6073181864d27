"""The built-in rewards, by cases worked out by hand."""

from __future__ import annotations

import asyncio
import re
import time
from typing import Any

import pytest

from surogate_rl.config.schema import RewardConfig
from surogate_rl.rewards import load_rewards
from surogate_rl.rewards.exact_match import ExactMatch
from surogate_rl.rewards.extract import find_answer, last_boxed
from surogate_rl.rewards.format_tags import FormatTags
from surogate_rl.rewards.json_schema import JsonSchema
from surogate_rl.rewards.length import Length
from surogate_rl.rewards.math_answer import MathAnswer
from surogate_rl.rewards.numeric import Numeric, last_number
from surogate_rl.rewards.reasoning_gym_task import ReasoningGymTask
from surogate_rl.rewards.regex import Regex
from surogate_rl.rollouts.types import Episode, Task


def test_where_the_answer_is() -> None:
    text = "<think>a <answer>no</answer></think> b\n<answer> x </answer> c\n\n"
    assert find_answer(text, "auto") == "x"
    assert find_answer(text, "answer_tag") == "x"
    assert find_answer(text, "last_line") == "<answer> x </answer> c"
    assert find_answer(text, "whole") == text.strip()
    assert find_answer("<think>a</think> b ", "auto") == "b"
    assert find_answer("<answer>cut off", "answer_tag") is None
    assert find_answer("<answer>cut off", "auto") == "<answer>cut off"
    assert find_answer(" \n", "last_line") is None
    assert last_boxed(r"\boxed{1} and \boxed{\frac{a}{b}} end") == r"\frac{a}{b}"
    assert last_boxed(r"\boxed{\frac{a}{b}") is None


@pytest.mark.parametrize(
    ("options", "completion", "answer", "expected"),
    [
        ({}, " Paris \n", "Paris", 1.0),
        ({}, "paris", "Paris", 0.0),
        ({}, "It is Paris", "Paris", 0.0),
        ({}, "<think>Rome?</think><answer>Paris</answer>", "Paris", 1.0),
        ({}, "cafe\u0301", "caf\u00e9", 1.0),
        ({}, "12", 12, 1.0),
        ({}, "b", ["a", "b"], 1.0),
        ({}, "x", None, None),
        ({}, "", "", 1.0),
        ({"ignore_case": True}, "STRASSE", "straße", 1.0),
        ({"ignore_punctuation": True}, "Paris!", "Paris", 1.0),
        ({"ignore_whitespace": True}, "1 2\n3", "123", 1.0),
        ({"extract": "answer_tag"}, "Paris", "Paris", 0.0),
        ({"extract": "boxed"}, r"so \boxed{Paris}", "Paris", 1.0),
        ({"extract": "last_line"}, "thinking\nParis\n", "Paris", 1.0),
    ],
)
def test_exact_match(options: dict[str, Any], completion: str, answer: Any, expected: float | None) -> None:
    assert ExactMatch(**options)(completion, answer) == expected


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("there are 1,234,567.50 in all.", "1234567.50"),
        ("5-3", "3"),
        ("x=-3", "-3"),
        ("(-3)", "-3"),
        ("from 2 to \u22127", "-7"),
        ("$ .5", ".5"),
        ("1e-3", "1e-3"),
        ("ends in 42.", "42"),
        ("1,2", "2"),
        ("none", None),
        ("", None),
    ],
)
def test_last_number(text: str, number: str | None) -> None:
    found = last_number(text)
    assert found == (None if number is None else type(found)(number))  # type: ignore[misc, arg-type]


@pytest.mark.parametrize(
    ("options", "completion", "answer", "expected"),
    [
        ({}, "The answer is 42.", "reasoning #### 42", 1.0),
        ({}, "42.0000001", 42, 1.0),
        ({}, "42.1", 42, 0.0),
        ({}, "I do not know", 42, 0.0),
        ({}, "1", "no number", None),
        ({}, "1", None, None),
        ({}, "1", True, None),
        ({"tolerance": 0.0}, "0.1", 0.1, 1.0),
        ({"tolerance": 0.0}, "100000000000000000001", "100000000000000000000", 0.0),
        ({"tolerance": 0.5}, "42.5", 42, 1.0),
        ({"relative_tolerance": 0.01}, "1010", 1000, 1.0),
        ({"relative_tolerance": 0.01}, "1011", 1000, 0.0),
        ({"pattern": r"answer: (\S+)"}, "answer: 1 answer: 2 then 3", 2, 1.0),
        ({"pattern": r"answer: (\S+)"}, "2", 2, 0.0),
        ({"extract": "answer_tag"}, "<answer>2</answer> 3", 2, 1.0),
        ({}, "1e9999 is large", "1e9999", 1.0),
    ],
)
def test_numeric(options: dict[str, Any], completion: str, answer: Any, expected: float | None) -> None:
    assert Numeric(**options)(completion, answer) == expected


def test_regex() -> None:
    assert Regex("b")("abc") == 1.0
    assert Regex("b", match="match")("abc") == 0.0
    assert Regex("a.c", match="fullmatch")("a\nc") == 1.0
    assert Regex("a.c", match="fullmatch", dotall=False)("a\nc") == 0.0
    assert Regex("a", match="fullmatch")("ab") == 0.0
    assert Regex("^B$", ignore_case=True, multiline=True)("a\nb") == 1.0


@pytest.mark.parametrize(
    ("options", "completion", "expected"),
    [
        ({}, "<think>a</think>\n<answer>b</answer>\n", 1.0),
        ({}, "<think>a</think> so <answer>b</answer>", 0.0),
        ({}, "<answer>b</answer><think>a</think>", 0.0),
        ({}, "<think>a</think><answer>b", 0.0),
        ({}, "<think></think><answer>b</answer>", 0.0),
        ({}, "<think>a<think>b</think><answer>c</answer>", 0.0),
        ({}, "<think>a</think><answer>b</answer> tail", 0.0),
        ({}, "<think>a</think><answer>b</answer><answer>c</answer>", 0.0),
        ({}, "", 0.0),
        ({"prefill": "<think>"}, "a</think><answer>b</answer>", 1.0),
        ({"allow_empty": True}, "<think></think><answer></answer>", 1.0),
        ({"tags": ["think"], "allow_text_after": True}, "<think>a</think> the answer", 1.0),
        ({"tags": ["think"], "allow_text_after": True}, "<think>a</think> b <think>c</think>", 0.0),
    ],
)
def test_format(options: dict[str, Any], completion: str, expected: float) -> None:
    assert FormatTags(**options)(completion) == expected


def test_length_to_a_target() -> None:
    reward = Length(target=10)
    assert [reward([0] * count) for count in (0, 5, 10, 15, 20, 99)] == [-1.0, -0.5, 0.0, -0.5, -1.0, -1.0]


@pytest.mark.parametrize(
    ("completion", "answer", "expected"),
    [
        (r"so it is $\boxed{\frac{1}{2}}$", "1/2", 1.0),
        (r"so it is $\boxed{0.5}$", r"\frac{1}{2}", 1.0),
        ("<think>it may be 3</think> The answer is 4.", 4, 1.0),
        ("<answer>\\frac{3}{4}</answer>", "0.75", 1.0),
        ("<answer>2x + x</answer>", "$3x$", 1.0),
        (r"$\boxed{5}$", "4", 0.0),
        ("I do not know", "4", 0.0),
        ("", "4", 0.0),
        ("4", "", None),
        ("4", "no mathematics here", None),
        ("4", None, None),
        ("$1000$", "1 000", 1.0),
        (r"$\pi$", "pi", 1.0),
        ("$3$", "3x", 0.0),
        (r"$x^2+1$", "x^2+1", 1.0),
        (r"$(1,2)$", "(1, 2)", 1.0),
        ("<answer>sqrt(2)</answer>", r"\sqrt{2}", 1.0),
        ("72 apples", "3 + 4 is less\n#### 72", 1.0),
    ],
)
def test_math(completion: str, answer: Any, expected: float | None) -> None:
    assert MathAnswer()(completion, answer) == expected


def test_math_in_a_worker_and_out_of_time() -> None:
    """math-verify's alarm works there (main thread), and time-outs are unscored, never 0."""
    right, wrong, slow = (Episode(Task(0, None, "", {"answer": "8"}), 0, 0, completion=text) for text in ("8", "9", "slow"))
    factorial = r"\boxed{" + "+".join(f"\\sin({n}!)^{{{n}}}" for n in range(1000, 1400)) + "}"
    slow.completion = f"${factorial}$"
    for seconds, episodes in ((10, [right, wrong]), (1, [slow])):
        with load_rewards([RewardConfig(name="math", args={"seconds": seconds}, timeout=60.0)], workers=1) as runner:
            start = time.monotonic()
            asyncio.run(runner.score(episodes))
            assert time.monotonic() - start < 60
    assert (right.reward, wrong.reward) == (1.0, 0.0)
    assert slow.reward is None
    assert slow.error is not None
    assert re.match("reward 'math': timeout: ", slow.error)


SCHEMA = {"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"], "additionalProperties": False}


@pytest.mark.parametrize(
    ("completion", "expected"),
    [
        ('{"n": 1}', 1.0),
        ('Here:\n```json\n{"n": 1}\n```\nDone.', 1.0),
        ('<answer>{"n": 1}</answer>', 1.0),
        ('{"n": "1"}', 0.25),
        ('{"n": 1, "m": 2}', 0.25),
        ('{"n": 1', 0.0),
        ('{"n": 1, "n": 2}', 0.0),
        ("NaN", 0.0),
        ("[" * 100000, 0.0),
        ("", 0.0),
    ],
)
def test_json_schema(completion: str, expected: float) -> None:
    assert JsonSchema(SCHEMA, invalid=0.25)(completion) == expected


def test_json_schema_fetches_nothing() -> None:
    with pytest.raises(Exception, match="Unresolvable"):
        JsonSchema({"$ref": "http://127.0.0.1:9/schema.json"})("{}")


def gym(task: str, **args: Any) -> tuple[Any, dict[str, Any]]:
    from reasoning_gym.factory import create_dataset

    dataset = create_dataset(task, size=3, seed=5, **args)
    return dataset, {"reasoning_gym": {"task": task, "args": args}, "entry": dataset[0]}


def test_reasoning_gym_gives_the_tasks_own_score() -> None:
    score = ReasoningGymTask()
    dataset, columns = gym("chain_sum", min_terms=2, max_terms=2)
    answer = columns["entry"]["answer"]
    for text in (answer, f"<think>{answer}0</think><answer>{answer}</answer>", f"it is {answer}", "wrong", ""):
        extracted = find_answer(text, "auto")
        assert score(text, **columns) == dataset.score_answer(extracted, columns["entry"])
    assert score(f"it is {answer}", **columns) < 1.0
    assert ReasoningGymTask(exact=True)(f"it is {answer}", **columns) == 0.0
    assert ReasoningGymTask(extract="last_line")(f"thinking\n{answer}", **columns) == 1.0


def test_reasoning_gym_uses_the_tasks_arguments() -> None:
    """puzzle24 judges by the bounds in its configuration."""
    dataset, columns = gym("puzzle24", min_value=1, max_value=10)
    assert max(columns["entry"]["metadata"]["numbers"]) > 5
    answer = columns["entry"]["answer"]
    assert ReasoningGymTask()(answer, **columns) == dataset.score_answer(answer, columns["entry"]) == 1.0
    without = {**columns, "reasoning_gym": {"task": "puzzle24", "args": {"max_value": 5}}}
    assert ReasoningGymTask()(answer, **without) < 1.0


@pytest.mark.parametrize("task", ["n_queens", "binary_matrix", "spiral_matrix", "string_insertion", "countdown", "simple_integration"])
def test_reasoning_gym_never_runs_an_answer(task: str, tmp_path: Any) -> None:
    score = ReasoningGymTask()
    score.load()
    dataset, columns = gym(task)
    target = tmp_path / "ran"
    code = f"open({str(target)!r}, 'w').close() or 1"
    for attack in (code, f"[__import__('os').system('touch {target}')]", "exec(" + "+".join(f"chr({ord(c)})" for c in code) + ")"):
        assert score(attack, **columns) < 1.0
    assert not target.exists()
    answer = columns["entry"]["answer"]
    assert score(answer, **columns) == dataset.score_answer(answer, columns["entry"]) == 1.0


def test_reasoning_gym_in_a_worker() -> None:
    _, columns = gym("chain_sum")
    episode = Episode(Task(0, None, "", columns), 0, 0, completion=f"<answer>{columns['entry']['answer']}</answer>")
    with load_rewards(["reasoning_gym"]) as runner:
        runner.check_columns([columns])
        asyncio.run(runner.score([episode]))
    assert (episode.reward, episode.error) == (1.0, None)
