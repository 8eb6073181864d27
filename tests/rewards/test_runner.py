"""Scoring: weighted sums, what is unscored and why, deadlines, counts."""

from __future__ import annotations

import asyncio
import math
import os
import re
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from surogate_rl.config.schema import RewardConfig
from surogate_rl.rewards import RewardError, RewardRunner, load_rewards
from surogate_rl.rollouts.types import Episode, Segment, Task


def episode(completion: str, index: int = 0, messages: list[dict[str, Any]] | None = None, **columns: Any) -> Episode:
    segment = Segment([1, 2, 3, 4], [False, False, True, True], [0.0] * 4, [-1, -1, 0, 0])
    return Episode(Task(index, messages, None if messages else "Q", columns), 0, 0, [segment], completion=completion)


@pytest.fixture
def load() -> Iterator[Callable[..., RewardRunner]]:
    runners: list[RewardRunner] = []

    def make(*rewards: Any, **options: Any) -> RewardRunner:
        runners.append(load_rewards(list(rewards), **options))
        return runners[-1]

    yield make
    for runner in runners:
        runner.close()


def entry(tmp_path: Path, body: str, name: str = "f", **config: Any) -> RewardConfig:
    file = tmp_path / f"{name}_{abs(hash(body)) % 10**8}.py"
    file.write_text(body)
    return RewardConfig(name=f"{file}:{name}", **config)


def score(runner: RewardRunner, episodes: Sequence[Episode]) -> list[float | None]:
    asyncio.run(runner.score(episodes))
    return [one.reward for one in episodes]


def test_none_does_not_apply(load: Callable[..., RewardRunner]) -> None:
    def f(completion: str) -> None:
        return None

    def g(completion: str) -> float | None:
        return 0.5 if completion else None

    runner = load(f, g)
    both, neither = episode("x"), episode("")
    assert score(runner, [both, neither]) == [0.5, None]
    assert both.rewards == {"f": None, "g": 0.5}
    assert neither.rewards == {"f": None, "g": None}
    assert neither.error is None
    report = runner.report()
    assert (report.unscored, report.nothing_applied) == (1, 1)
    assert report.functions["f"].not_applicable == 2
    assert report.functions["f"].unscored == {}


def test_weights_are_summed_without_renormalising(load: Callable[..., RewardRunner], tmp_path: Path) -> None:
    a = entry(tmp_path, "def a(completion): return 1.0\n", "a", weight=2.0)
    b = entry(tmp_path, "def b(completion): return None if completion == 'x' else -1.0\n", "b", weight=0.5)
    c = entry(tmp_path, "def c(completion): return 7\n", "c", weight=0.0)
    assert score(load(a, b, c), [episode("x"), episode("y")]) == [2.0, 1.5]


def test_a_failing_reward_of_weight_zero_spoils_nothing(load: Callable[..., RewardRunner], tmp_path: Path) -> None:
    bad = entry(tmp_path, "def bad(completion): raise KeyError('no')\n", "bad", weight=0.0)
    good = entry(tmp_path, "def good(completion): return 1\n", "good")
    one = episode("x")
    runner = load(bad, good)
    assert score(runner, [one]) == [1.0]
    assert runner.report().functions["bad"].unscored == {"exception": 1}


def test_raising_is_unscored_and_says_where(load: Callable[..., RewardRunner], tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    body = "def f(completion):\n    return 1.0 if completion == 'good' else {}['absent']\n"
    config = entry(tmp_path, body)
    runner = load(config)
    good, bad = episode("good"), episode("bad", 1)
    assert score(runner, [good, bad]) == [1.0, None]
    assert good.error is None
    assert bad.error == "reward 'f': exception: KeyError: 'absent'"
    assert bad.rewards == {"f": None}
    report = runner.report().functions["f"]
    assert report.unscored == {"exception": 1}
    assert report.mean == 1.0
    (detail,) = report.errors
    file = config.name.rpartition(":")[0]
    assert re.fullmatch(
        r"Traceback \(most recent call last\):\n"
        rf'  File "{re.escape(file)}", line 2, in f\n'
        r"    return 1\.0 if completion == 'good' else {}\['absent'\]\n"
        r"(?: *[~^]+\n)?"
        r"KeyError: 'absent'",
        detail,
    )
    assert "reward 'f': no reward for a completion (exception): Traceback" in caplog.text


@pytest.mark.parametrize(
    ("expression", "reason", "detail"),
    [
        ("float('nan')", "non_finite", "returned nan"),
        ("float('-inf')", "non_finite", "returned -inf"),
        ("10 ** 400", "non_finite", "returned inf"),
        ("'1.0'", "not_a_number", "returned '1.0' (str), expected a number or None"),
        ("[1.0]", "not_a_number", "returned [1.0] (list), expected a number or None"),
        ("__import__('sys').exit(3)", "exception", "SystemExit: 3"),
    ],
)
def test_what_is_no_finite_number(load: Callable[..., RewardRunner], tmp_path: Path, expression: str, reason: str, detail: str) -> None:
    runner = load(entry(tmp_path, f"def f(completion):\n    return {expression}\n"))
    one = episode("x")
    assert score(runner, [one]) == [None]
    assert one.error == f"reward 'f': {reason}: {detail}"
    assert runner.report().functions["f"].unscored == {reason: 1}


def test_numbers_of_all_kinds(load: Callable[..., RewardRunner]) -> None:
    def f(completion: str) -> Any:
        import fractions

        import numpy

        return {
            "bool": True,
            "int": 2,
            "numpy": numpy.float32(0.5),
            "numpy bool": numpy.bool_(True),
            "0-d": numpy.array(0.25),
            "fraction": fractions.Fraction(1, 8),
        }[completion]

    kinds = ["bool", "int", "numpy", "numpy bool", "0-d", "fraction"]
    assert score(load(f), [episode(kind) for kind in kinds]) == [1.0, 2.0, 0.5, 1.0, 0.25, 0.125]


def test_scored_with_a_gap(load: Callable[..., RewardRunner]) -> None:
    def f(completions: list[str], scores: list[float | None], **columns: Any) -> list[float | None]:
        return scores

    runner = load(f)
    assert score(runner, [episode("", index, scores=value) for index, value in enumerate([1, None, 0, 1])]) == [1.0, None, 0.0, 1.0]
    report = runner.report()
    assert report.functions["f"].mean == pytest.approx(2 / 3, abs=1e-5)
    assert report.functions["f"].std == pytest.approx(np.std([1, 0, 1], ddof=1))
    assert report.metrics()["rewards/f/mean"] == pytest.approx(2 / 3)
    assert report.metrics()["rewards/unscored"] == 1


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ("return [1.0]", "reward 'f' returned 1 reward, expected 4 (exactly one for each completion)"),
        ("return [0.0] * 5", "reward 'f' returned 5 rewards, expected 4 (exactly one for each completion)"),
        ("return None", "reward 'f' returned None (NoneType), expected a list of 4 rewards"),
        ("return 1.0", "reward 'f' returned 1.0 (float), expected a list of 4 rewards"),
        ("return 'abcd'", "reward 'f' returned 'abcd' (str), expected a list of 4 rewards"),
        ("return dict(a=1, b=2, c=3, d=4)", "reward 'f' returned {'a': 1, 'b': 2, 'c': 3, 'd': 4} (dict), expected a list of 4 rewards"),
    ],
)
def test_wrong_length_stops_the_run(load: Callable[..., RewardRunner], tmp_path: Path, body: str, message: str) -> None:
    runner = load(entry(tmp_path, f"def f(completions, **kwargs):\n    {body}\n"))
    with pytest.raises(ValueError, match=re.escape(message)):
        score(runner, [episode("x", index) for index in range(4)])


def test_batch_results_of_other_sequences(load: Callable[..., RewardRunner]) -> None:
    def array(completions: list[str], **kwargs: Any) -> Any:
        import numpy

        return numpy.array([1.0, numpy.nan])

    def generator(completions: list[str], **kwargs: Any) -> Any:
        return (2 for _ in completions)

    first, second = episode("x"), episode("y", 1)
    score(load(array, generator), [first, second])
    assert first.rewards == {"array": 1.0, "generator": 2.0}
    assert (second.reward, second.error) == (None, "reward 'array': non_finite: returned nan")


def test_a_batch_function_that_raises_leaves_all_unscored(load: Callable[..., RewardRunner], tmp_path: Path) -> None:
    runner = load(entry(tmp_path, "def f(completions, **kwargs):\n    raise OSError('down')\n"))
    episodes = [episode("x"), episode("y", 1)]
    assert score(runner, episodes) == [None, None]
    assert [one.error for one in episodes] == ["reward 'f': exception: OSError: down"] * 2
    assert runner.report().functions["f"].unscored == {"exception": 2}


def test_catastrophic_regex(load: Callable[..., RewardRunner]) -> None:
    """Holds the interpreter in C code: only killing the process helps."""
    runner = load(RewardConfig(name="regex", args={"pattern": "(a+)+$", "match": "fullmatch"}, timeout=1.0))
    before = runner.worker_pids()
    one = episode("a" * 40 + "b")
    start = time.monotonic()
    assert score(runner, [one]) == [None]
    assert time.monotonic() - start < 30
    assert one.error == "reward 'regex': timeout: no result after 1 s; its worker was killed"
    assert runner.report().functions["regex"].unscored == {"timeout": 1}
    assert score(runner, [episode("aaa")]) == [1.0]
    replaced = set(before) - set(runner.worker_pids())
    assert len(replaced) == 1
    assert not any(alive(pid) for pid in replaced)
    left = runner.worker_pids()
    runner.close()
    assert sum(alive(pid) for pid in left) == 0


def test_only_the_hanging_and_the_deadly_are_lost(load: Callable[..., RewardRunner], tmp_path: Path) -> None:
    body = """
import ctypes, os, time
def f(completion):
    if completion == "hang":
        time.sleep(60)
    if completion == "exit":
        os._exit(0)
    if completion == "segfault":
        ctypes.string_at(0)
    return 1.0
"""
    runner = load(entry(tmp_path, body, timeout=1.0))
    score(runner, [episode("warm") for _ in range(8)])
    runner.report()
    texts = ["ok"] * 5 + ["hang"] + ["ok"] * 7 + ["exit"] + ["ok"] * 7 + ["segfault"] + ["ok"] * 5
    episodes = [episode(text, index) for index, text in enumerate(texts)]
    start = time.monotonic()
    rewards = score(runner, episodes)
    assert time.monotonic() - start < 30
    assert rewards == [1.0 if text == "ok" else None for text in texts]
    assert [one.error for one in episodes if one.error] == [
        "reward 'f': timeout: no result after 1 s; its worker was killed",
        "reward 'f': died: the worker process died (it exited with code 0)",
        "reward 'f': died: the worker process died (killed by SIGSEGV)",
    ]
    assert runner.report().functions["f"].unscored == {"timeout": 1, "died": 2}
    assert score(runner, [episode("ok")]) == [1.0]


def test_a_hanging_local_function_is_killed(load: Callable[..., RewardRunner]) -> None:
    blocked = ["hang"]
    runner = load(lambda completion: len(re.findall("(a+)+$", "a" * 40 + "b")) if completion in blocked else 1.0)
    object.__setattr__(runner._functions[0], "timeout", 1.0)
    assert score(runner, [episode("hang"), episode("x", 1)]) == [None, 1.0]


@pytest.mark.parametrize("seconds", [0.0, 0.5], ids=["at-once", "once-it-is-noticed"])
def test_an_idle_worker_that_is_killed_is_replaced(load: Callable[..., RewardRunner], seconds: float) -> None:
    runner = load("exact_match")
    assert score(runner, [episode("1", answer="1")]) == [1.0]
    for pid in runner.worker_pids():
        os.kill(pid, 9)
    time.sleep(seconds)
    assert score(runner, [episode("1", answer="1"), episode("2", answer="1")]) == [1.0, 0.0]


def test_async_functions_run_together_with_a_deadline_each(load: Callable[..., RewardRunner], tmp_path: Path) -> None:
    body = """
import asyncio
loops = set()
async def f(completion):
    loops.add(id(asyncio.get_running_loop()))
    await asyncio.sleep(60 if completion == "hang" else 1)
    return float(len(loops))
"""
    runner = load(entry(tmp_path, body, timeout=4.0))
    episodes = [episode("hang" if index == 3 else "x", index) for index in range(20)]
    start = time.monotonic()
    rewards = score(runner, episodes)
    assert time.monotonic() - start < 12  # one after the other: more than 20 s, or 10 s in each of two workers and those of "hang"
    assert rewards == [None if index == 3 else 1.0 for index in range(20)]
    assert episodes[3].error == "reward 'f': timeout: no result after 4 s"
    assert score(runner, [episode("x")]) == [1.0]  # still the same event loop


def test_async_batch_function(load: Callable[..., RewardRunner]) -> None:
    async def f(completions: list[str], **kwargs: Any) -> list[float]:
        import asyncio

        await asyncio.sleep(0)
        return [float(len(text)) for text in completions]

    assert score(load(f), [episode("a"), episode("abc", 1)]) == [1.0, 3.0]


def test_an_async_function_that_blocks_its_loop_is_killed(load: Callable[..., RewardRunner], tmp_path: Path) -> None:
    body = "import time\nasync def f(completion):\n    time.sleep(60 if completion == 'hang' else 0)\n    return 1.0\n"
    runner = load(entry(tmp_path, body, timeout=1.0))
    assert score(runner, [episode("x"), episode("hang", 1), episode("y", 2)]) == [1.0, None, 1.0]


def test_the_event_loop_keeps_running(load: Callable[..., RewardRunner], tmp_path: Path) -> None:
    runner = load(entry(tmp_path, "import time\ndef f(completion):\n    time.sleep(2.5)\n    return 1.0\n"))

    async def main() -> float:
        gaps = []
        scoring = asyncio.ensure_future(runner.score([episode("x"), episode("y", 1)]))
        last = time.monotonic()
        while not scoring.done():
            await asyncio.sleep(0.01)
            gaps.append(time.monotonic() - last)
            last = time.monotonic()
        await scoring
        return max(gaps)

    assert asyncio.run(main()) < 2.0


def test_cancelling_kills_the_work(load: Callable[..., RewardRunner], tmp_path: Path) -> None:
    runner = load(
        entry(
            tmp_path, "import time\ndef f(completion):\n    time.sleep(1e6 if completion == 'hang' else 0)\n    return 1.0\n", timeout=1e6
        )
    )

    async def main() -> None:
        scoring = asyncio.ensure_future(runner.score([episode("hang", index) for index in range(3)]))
        await asyncio.sleep(0.5)
        scoring.cancel()
        with pytest.raises(asyncio.CancelledError):
            await scoring
        await asyncio.wait_for(runner.score([episode("x")]), 20)

    asyncio.run(main())


def test_scores_at_the_same_time_do_not_mix(load: Callable[..., RewardRunner]) -> None:
    def double(completion: str, factor: int) -> float:
        return float(int(completion) * factor)

    runner = load(double)
    groups = [[episode(str(row), row, factor=group) for row in range(10)] for group in range(10)]

    async def main() -> None:
        await asyncio.gather(*(runner.score(group) for group in groups))

    asyncio.run(main())
    assert [[one.reward for one in group] for group in groups] == [[float(row * group) for row in range(10)] for group in range(10)]


def test_failed_rollouts_are_not_shown_to_functions(load: Callable[..., RewardRunner]) -> None:
    def f(completion: str) -> float:
        return 1.0

    failed, fine = episode("x"), episode("y", 1)
    failed.error, failed.reward = "the engine went away", 3.0
    runner = load(f)
    assert score(runner, [failed, fine]) == [None, 1.0]
    assert failed.error == "the engine went away"
    assert (runner.report(reset=False).functions["f"].calls, runner.report().unscored) == (1, 1)


def test_environment_reward_is_one_more_function(load: Callable[..., RewardRunner]) -> None:
    def f(completion: str) -> float:
        return 0.5

    good, bad = episode("x"), episode("y", 1)
    good.environment_reward, bad.environment_reward = 2.0, math.nan
    assert score(load(f), [good, bad]) == [2.5, None]
    assert good.rewards == {"f": 0.5, "environment": 2.0}
    assert bad.error == "reward 'environment': non_finite: returned nan"


def test_report_is_reset(load: Callable[..., RewardRunner]) -> None:
    def f(completion: str) -> float:
        return float(completion)

    runner = load(f)
    score(runner, [episode("1"), episode("3", 1)])
    first = runner.report()
    assert (first.functions["f"].calls, first.functions["f"].mean, first.functions["f"].std) == (2, 2.0, pytest.approx(math.sqrt(2)))
    assert {"rewards/f/mean", "rewards/f/std", "rewards/unscored"} <= first.metrics().keys()
    assert runner.report().metrics() == {}
    score(runner, [episode("5")])
    assert runner.report().functions["f"].mean == 5.0


def test_what_is_not_to_be_counted_is_scored_all_the_same(load: Callable[..., RewardRunner]) -> None:
    """An evaluation calls the training's functions while completions of the training may be scored."""

    def f(completion: str, log_metric: Any) -> float:
        log_metric("seen", float(completion))
        return float(completion)

    def g(completions: list[str], log_extra: Any, **kwargs: Any) -> list[float]:
        log_extra("text", completions)
        return [0.0] * len(completions)

    runner = load(f, g)
    training, held_out, failing = [episode("1"), episode("3", 1)], [episode("5", 2)], [episode("no number", 3)]

    async def both() -> None:
        await asyncio.gather(*(runner.score(some, counted=some is training) for some in (held_out, training, failing)))

    asyncio.run(both())
    assert [one.reward for one in [*training, *held_out, *failing]] == [1.0, 3.0, 5.0, None]
    report = runner.report()
    assert (report.functions["f"].calls, report.functions["f"].mean, report.episodes, report.unscored) == (2, 2.0, 2, 0)
    assert report.metrics()["seen"] == 2.0
    assert sorted(report.extras["text"]) == [(0, 0, "1"), (1, 0, "3")]


def test_logging_of_functions_reaches_the_report(load: Callable[..., RewardRunner]) -> None:
    def f(completions: list[str], log_metric: Any, log_extra: Any, trainer_state: Any, **kwargs: Any) -> list[float]:
        log_metric("length", sum(map(len, completions)))
        log_extra("text", [text.upper() for text in completions])
        return [trainer_state.global_step + trainer_state.max_steps / 100] * len(completions)

    def g(completion: str, log_metric: Any) -> None:
        log_metric("g", len(completion))

    runner = load(f, g)
    runner.set_state(global_step=3, max_steps=50)
    assert score(runner, [episode("a", 7), episode("bcd", 8)]) == [3.5, 3.5]
    report = runner.report()
    assert report.metrics()["length"] == 4.0
    assert report.metrics()["g"] == 2.0
    assert report.extras == {"text": [(7, 0, "A"), (8, 0, "BCD")]}


def test_columns_that_are_missing_are_found_before_the_run(load: Callable[..., RewardRunner]) -> None:
    def f(completion: str, anwser: str) -> float:
        return 1.0

    runner = load(f)
    with pytest.raises(RewardError) as error:
        runner.check_columns([{"answer": "1", "level": 2}, {"answer": "2"}])
    assert str(error.value) == (
        "reward 'f': parameter 'anwser' asks for a column which the data set does not have; did you mean 'answer'? "
        "Columns: answer, level. Besides columns it can take: prompt, completion, messages, tokens, episode, trainer_state, log_metric, "
        "log_extra. Rename a column under datasets: columns, give the value under args, or give the parameter a default."
    )
    unchecked = episode("x", 5, answer="1")
    assert score(runner, [unchecked]) == [None]
    assert unchecked.error == "reward 'f': exception: task 5 has no column 'anwser'"


def test_arguments_that_cannot_be_sent(load: Callable[..., RewardRunner]) -> None:
    def f(completion: str, thing: Any) -> float:
        return 1.0

    one = episode("x", thing=lambda: None)
    assert score(load(f), [one, episode("y", 1, thing=None)]) == [None, 1.0]
    assert one.error is not None
    assert one.error.startswith("reward 'f': exception: its arguments cannot be sent to a worker process: ")


def alive(pid: int) -> bool:
    try:
        return "Z" not in Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
