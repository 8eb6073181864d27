"""Which arguments a function gets."""

from __future__ import annotations

import functools
import types
from typing import Any

import pytest

from surogate_rl.rewards import RewardError, reward
from surogate_rl.rewards.call import TrainerState, batch_arguments, check_columns, plan_call, single_arguments
from surogate_rl.rollouts.types import Episode, Segment, Task

PROMPT = [{"role": "system", "content": "S"}, {"role": "user", "content": "U"}]


def chat(*later: str, **columns: Any) -> Episode:
    messages = [*PROMPT, *({"role": "assistant" if n % 2 == 0 else "user", "content": text} for n, text in enumerate(later))]
    return Episode(Task(3, PROMPT, None, columns), 1, 0, messages=messages, completion="".join(later[::2]))


def plain(completion: str = "C", index: int = 3, **columns: Any) -> Episode:
    segments = [Segment([1, 2, 3], [False, True, True], [0.0] * 3, [0] * 3), Segment([1, 4, 5], [False, False, True], [0.0] * 3, [0] * 3)]
    return Episode(Task(index, None, "P", types.MappingProxyType(columns)), 1, 0, segments, completion=completion)


def single(function: Any, episode: Episode, **options: Any) -> dict[str, Any]:
    return single_arguments(plan_call("f", function, options), episode, TrainerState(1, 2, 0.5))


def batch(function: Any, *episodes: Episode, **options: Any) -> dict[str, Any]:
    return batch_arguments(plan_call("f", function, options), episodes, TrainerState(1, 2, 0.5))


def test_every_name_of_a_single_call() -> None:
    def f(
        prompt: Any, completion: Any, messages: Any, tokens: Any, answer: Any, level: Any, trainer_state: Any, absent: int = 7
    ) -> None: ...

    assert single(f, plain(answer="A", level=2, unused=0)) == {
        "prompt": "P",
        "completion": "C",
        "messages": [{"role": "user", "content": "P"}, {"role": "assistant", "content": "C"}],
        "tokens": [2, 3, 5],
        "answer": "A",
        "level": 2,
        "trainer_state": TrainerState(1, 2, 0.5),
    }
    got = single(f, chat("one", "more", "two", answer="A", level=2, absent=8))
    assert got["prompt"] == PROMPT
    assert got["completion"] == "onetwo"
    assert [message["content"] for message in got["messages"]] == ["S", "U", "one", "more", "two"]
    assert got["absent"] == 8


def test_an_episode_can_be_sent() -> None:
    import pickle

    def f(episode: Episode) -> None: ...

    sent = pickle.loads(pickle.dumps(single(f, plain(answer="A"))))["episode"]
    assert (sent.completion, sent.task.index, sent.sample, sent.task.columns) == ("C", 3, 1, {"answer": "A"})


def test_kwargs_get_the_rest() -> None:
    def f(completion: str, **rest: Any) -> None: ...

    got = single(f, plain(answer="A", level=2))
    assert got.keys() == {"prompt", "completion", "messages", "tokens", "answer", "level", "trainer_state"}
    assert plan_call("f", f).loggers == ("log_metric", "log_extra")


def test_fixed_arguments_go_before_columns_and_reach_kwargs() -> None:
    def f(completion: str, level: int) -> None: ...
    def g(completion: str, **rest: Any) -> None: ...

    assert single(f, plain(level=2), level=5)["level"] == 5
    assert single(g, plain(), anything=5)["anything"] == 5


def test_batch_forms() -> None:
    def f(prompts: Any, completions: Any, completion_ids: Any, answer: Any, absent: Any = None) -> None: ...

    assert batch(f, plain(answer="A"), plain("D", answer="B")) == {
        "prompts": ["P", "P"],
        "completions": ["C", "D"],
        "completion_ids": [[2, 3, 5], [2, 3, 5]],
        "answer": ["A", "B"],
    }
    got = batch(f, chat("one", answer=1), chat("one", "more", "two", answer=2))
    assert got["prompts"] == [PROMPT, PROMPT]
    assert got["completions"] == [
        [{"role": "assistant", "content": "one"}],
        [{"role": "assistant", "content": "one"}, {"role": "user", "content": "more"}, {"role": "assistant", "content": "two"}],
    ]


def test_a_column_that_some_rows_lack_is_none_there() -> None:
    def f(completions: Any, **columns: Any) -> None: ...
    def g(completions: Any, level: Any) -> None: ...

    assert batch(f, plain(level=1), plain(other=2))["level"] == [1, None]
    assert batch(f, plain(level=1), plain(other=2))["other"] == [None, 2]
    check_columns([plan_call("g", g)], [{"level": 1}, {"other": 2}])
    with pytest.raises(KeyError, match=r"no task has a column 'level'"):
        batch(g, plain(), plain())


def test_which_kind() -> None:
    def trl(**kwargs: Any) -> None: ...
    def one(completion: Any, **kwargs: Any) -> None: ...
    def columns(answer: Any) -> None: ...
    def ids(completion_ids: Any) -> None: ...
    @reward(batch=True)
    def marked(answer: Any) -> None: ...

    kinds = {function.__name__: plan_call("f", function).batch for function in (trl, one, columns, ids, marked)}
    assert kinds == {"trl": True, "one": False, "columns": False, "ids": True, "marked": True}


def test_async_is_recognised() -> None:
    async def f(completion: Any, n: int) -> None: ...

    class Awaited:
        async def __call__(self, completion: Any) -> None: ...

    class Plain:
        def __call__(self, completion: Any) -> None: ...

    assert [plan_call("f", x).is_async for x in (f, functools.partial(f, n=1), Awaited(), Plain(), lambda completion: 0)] == [
        True,
        True,
        True,
        False,
        False,
    ]


def test_a_partial_does_not_ask_for_what_it_has() -> None:
    def f(completion: Any, level: int) -> None: ...

    plan = plan_call("f", functools.partial(f, level=3))
    assert plan.required == ()


def test_signatures_that_cannot_be_filled() -> None:
    def both(completion: Any, completions: Any) -> None: ...
    def positional(completion: Any, /) -> None: ...

    with pytest.raises(RewardError, match=r"^reward 'f': takes both 'completion' \(one completion per call\) and 'completions'"):
        plan_call("f", both)
    with pytest.raises(RewardError, match=r"^reward 'f': parameter 'completion' is positional-only; rewards are called by name$"):
        plan_call("f", positional)


def test_some_tasks_lack_a_column() -> None:
    def f(completion: Any, answer: Any, level: Any = 0) -> None: ...

    check_columns([plan_call("f", f)], [{"answer"}, {"answer", "level"}])
    check_columns([plan_call("f", f)], [])
    with pytest.raises(
        RewardError, match=r"^reward 'f': parameter 'answer' asks for a column which 1 of 2 tasks lack\. Columns: answer, level\."
    ):
        check_columns([plan_call("f", f)], [{"answer"}, {"level"}])
    with pytest.raises(RewardError, match=r"which the data set does not have\. Columns: none\."):
        check_columns([plan_call("f", f)], [{}])
    with pytest.raises(TypeError, match="the columns of each task, not a list of names"):
        check_columns([plan_call("f", f)], ["answer"])
