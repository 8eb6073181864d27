"""Finding reward functions, and messages where there is none."""

from __future__ import annotations

import asyncio
import functools
import re
import sys
import threading
from pathlib import Path
from typing import Any

import pytest

from surogate_rl.config.schema import RewardConfig
from surogate_rl.rewards import BUILTINS, RewardError, load_rewards, reward
from surogate_rl.rewards.loader import load_functions
from surogate_rl.rollouts.types import Episode, Task

FILE = """
from surogate_rl.rewards import reward
from beside import bonus
def correct(completion, answer): return float(completion == answer) + bonus
@reward(name="shown")
def marked(completion): return 1.0
class Scale:
    @staticmethod
    def up(completion): return 2.0
constant = 3
_private = len
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "rewards.py").write_text(FILE)
    (tmp_path / "mine" / "beside.py").write_text("bonus = 0.25\n")
    return tmp_path


def names(*rewards: Any) -> list[str]:
    return [function.name for function in load_functions(rewards)]


def message(*rewards: Any) -> str:
    with pytest.raises(RewardError) as error:
        load_functions(rewards)
    return str(error.value)


def test_files_count_from_the_working_directory(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder / "mine")
    assert names("rewards.py:correct") == ["correct"]
    assert names(f"{folder}/mine/rewards.py:Scale.up") == ["up"]


def test_a_file_runs_in_workers_with_its_neighbours(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder)
    with load_rewards(["mine/rewards.py:correct", "mine/rewards.py"]) as runner:
        one = Episode(Task(0, None, "", {"answer": "7"}), 0, 0, completion="7")
        asyncio.run(runner.score([one]))
    assert one.rewards == {"correct": 1.25, "shown": 1.0}


def test_names_are_unique() -> None:
    options = {"pattern": "x"}
    regex = RewardConfig(name="regex", args=options)
    assert names(regex, regex, "exact_match", regex) == ["regex", "regex_2", "exact_match", "regex_3"]


def test_names_of_python_callables() -> None:
    def base(completion: str, scale: float) -> float:
        return scale

    class Named:
        __name__ = "from_trl"

        def __call__(self, completions: list[str], **kwargs: Any) -> list[float]:
            return [0.0] * len(completions)

    @reward(name="renamed")
    def decorated(completion: str) -> float:
        return 0.0

    assert names(functools.partial(base, scale=2.0), Named(), decorated, lambda completion: 1) == ["base", "from_trl", "renamed", "lambda"]


def test_missing_file(folder: Path) -> None:
    text = message(f"{folder}/mine/reward.py:correct")
    assert text == f"reward '{folder}/mine/reward.py:correct': there is no file {folder}/mine/reward.py; did you mean 'rewards.py'?"


def test_missing_function(folder: Path) -> None:
    file = folder / "mine" / "rewards.py"
    assert message(f"{file}:corect") == (
        f"reward '{file}:corect': {file} has no function 'corect'; did you mean 'correct'? Functions there: correct, marked, Scale"
    )
    assert message(f"{file}:nothing_like_it") == (
        f"reward '{file}:nothing_like_it': {file} has no function 'nothing_like_it'. Functions there: correct, marked, Scale"
    )


def test_not_callable(folder: Path) -> None:
    file = folder / "mine" / "rewards.py"
    assert message(f"{file}:constant") == f"reward '{file}:constant': 'constant' in {file} is not callable but of type int"


def test_no_function_named(tmp_path: Path) -> None:
    file = tmp_path / "two.py"
    file.write_text("def a(completion): return 0\ndef b(completion): return 0\n")
    assert (
        message(str(file))
        == f"reward '{file}': the file has 0 functions marked @reward; say which function by {file}:fn (its functions: a, b)"
    )


def test_a_file_that_fails_to_import(tmp_path: Path) -> None:
    file = tmp_path / "broken.py"
    file.write_text("import os\n\nimport no_such_module\n")
    text = message(f"{file}:f")
    assert text.startswith(f"reward '{file}:f': importing {file} failed:\nTraceback (most recent call last):\n")
    assert f'File "{file}", line 3' in text
    assert text.endswith("ModuleNotFoundError: No module named 'no_such_module'")


def test_unknown_builtin() -> None:
    known = ", ".join(sorted(BUILTINS))
    assert message("exact_mach") == (
        f"unknown reward 'exact_mach'; did you mean 'exact_match'? Built-in rewards: {known}. "
        "A function of your own is named path/file.py:fn."
    )
    assert message("zzz") == f"unknown reward 'zzz'. Built-in rewards: {known}. A function of your own is named path/file.py:fn."
    assert message("pkg.module:fn") == "reward 'pkg.module:fn': a function in a file is named path/file.py:fn"


def test_options_of_builtins() -> None:
    def of(name: str, **args: Any) -> str:
        return message(RewardConfig(name=name, args=args))

    assert of("numeric", tolerence=1.0) == (
        "reward 'numeric': unknown option 'tolerence'; did you mean 'tolerance'? (options: extract, pattern, tolerance, relative_tolerance)"
    )
    assert of("numeric", tolerance="big") == "reward 'numeric': option 'tolerance' is 'big': Input should be a valid number"
    assert of("numeric", tolerance=-1) == "reward 'numeric': tolerances must not be negative: tolerance -1, relative_tolerance 0.0"
    assert of("regex") == "reward 'regex': option 'pattern' is required; give it under args"
    assert of("regex", pattern="(") == (
        "reward 'regex': pattern '(' is no regular expression: missing ), unterminated subpattern at position 0"
    )
    assert of("exact_match", extract="tag").startswith("reward 'exact_match': option 'extract' is 'tag': Input should be 'auto', 'whole'")
    assert of("length", target=5, max_completion_len=6) == (
        "reward 'length': give either max_completion_len (with soft_punish_cache) or target, in tokens"
    )
    assert of("json_schema", schema={"type": "objekt"}).startswith("reward 'json_schema': schema is no valid JSON schema: 'objekt' is not")


def test_arguments_of_ones_own_functions(tmp_path: Path) -> None:
    file = tmp_path / "own.py"
    file.write_text("def f(completion, scale=1.0): return scale\n")
    assert message(RewardConfig(name=f"{file}:f", args={"skale": 2})) == (
        "reward 'f': unknown argument 'skale'; did you mean 'scale'? (its parameters: completion, scale)"
    )
    assert message(RewardConfig(name=f"{file}:f", args={"completion": "x"})) == (
        "reward 'f': argument 'completion' is filled from the rollout and cannot be set under args"
    )
    with load_rewards([RewardConfig(name=f"{file}:f", args={"scale": 2.5})]) as runner:
        # What the configuration says goes before a column of the same name.
        one = Episode(Task(0, None, "", {"scale": 9.0}), 0, 0)
        asyncio.run(runner.score([one]))
    assert one.reward == 2.5


def test_weights_of_nothing() -> None:
    assert message(RewardConfig(name="exact_match", weight=0.0)) == "every reward has weight 0: nothing would be learned"


def test_what_cannot_be_copied_to_a_worker() -> None:
    lock = threading.Lock()

    def f(completion: str) -> float:
        with lock:
            return 1.0

    assert re.match(r"reward 'f' cannot be sent to a worker process: cannot pickle '_thread.lock' object.* path/file.py:fn", message(f))


def test_what_is_too_large_to_copy() -> None:
    data = bytes(40 * 2**20)

    def f(completion: str) -> float:
        return float(len(data))

    assert message(f).startswith("reward 'f' carries 40 MiB of data with it, which every worker would have to copy; load the data inside")


def test_functions_of_a_module_that_workers_cannot_import(tmp_path: Path) -> None:
    """As in test modules, notebooks' helpers and the like: sent with their code."""
    import types

    module = types.ModuleType("only_here")
    exec("import math\nfactor = 3.0\ndef f(completion): return factor * g() * math.floor(1.5)\ndef g(): return 2.0\n", module.__dict__)
    sys.modules["only_here"] = module
    try:
        with load_rewards([module.f]) as runner:
            one = Episode(Task(0, None, "", {}), 0, 0)
            asyncio.run(runner.score([one]))
    finally:
        del sys.modules["only_here"]
    assert one.reward == 6.0


def test_bare_import_is_refused() -> None:
    import subprocess

    root = Path(__file__).parents[2]
    for name in ("rewards", "rewards.registry"):
        result = subprocess.run(
            [sys.executable, "-c", f"import sys; sys.path.insert(0, '.'); import {name}"], cwd=root, capture_output=True, text=True
        )
        assert result.returncode == 1
        assert result.stderr.strip().splitlines()[-1] == (
            "ImportError: this package is imported as surogate_rl.rewards, not as rewards: write 'import surogate_rl.rewards'"
        )
