"""Environments of the package verifiers: the real package where it is installed, else a stand-in of the same interface."""

from __future__ import annotations

import importlib.util
import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from surogate_rl.rollouts.environments import make_environments
from surogate_rl.rollouts.environments.named import EnvironmentConfigError
from surogate_rl.rollouts.types import Episode, EpisodeLimits, Task

Family = Callable[[str], Any]
HERE = Path(__file__).parent
REAL = importlib.util.find_spec("verifiers") is not None


@pytest.fixture(autouse=True)
def package(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Path]:
    """A folder on the path for environments' modules; what tests import is forgotten again."""
    before = set(sys.modules)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.syspath_prepend(str(HERE))
    if not REAL:
        monkeypatch.syspath_prepend(str(HERE / "verifiers_stand_in"))
    yield tmp_path
    for name in set(sys.modules) - before:
        if name.startswith("vf_") or (not REAL and name.partition(".")[0] == "verifiers"):
            del sys.modules[name]


def task(answer: str) -> Task:
    return Task(3, [{"role": "user", "content": "guess"}], None, {"answer": answer})


def run(family: Family, play: Any, name: str, turns: list[str], given: Task, args: dict[str, Any] | None = None, limit: int = 9) -> Episode:
    tokenizer = family("qwen2_5")
    environments = make_environments(f"verifiers:{name}", args or {}, tokenizer)
    limits = EpisodeLimits(64, 4096, max_turns=limit)
    episode: Episode = play(tokenizer, environments.make, turns, task=environments.prepare(given), limits=limits)[0]
    return episode


def test_an_episode_that_ends_by_itself(family: Family, play: Callable[..., Any]) -> None:
    episode = run(family, play, "vf-guess", ["1", "2", "3"], task("3"))
    assert (episode.error, episode.turns, episode.cut) == (None, 3, None)
    assert [m["content"] for m in episode.messages] == ["guess", "1", "no (1)", "2", "no (2)", "3"]
    assert episode.environment_reward == pytest.approx(1.3)
    assert len(episode.segments) == 1


def test_limits_of_either_side_are_cuts_and_scored_as_far_as_they_went(family: Family, play: Callable[..., Any]) -> None:
    theirs = run(family, play, "vf-guess", ["1"], task("3"), {"max_turns": 2})
    assert (theirs.error, theirs.turns, theirs.cut) == (None, 2, "turns")
    assert theirs.environment_reward == pytest.approx(0.2)
    ours = run(family, play, "vf-guess", ["1"], task("3"), limit=3)
    assert (ours.error, ours.turns, ours.cut) == (None, 3, "turns")
    assert ours.environment_reward == pytest.approx(0.3)


def test_a_system_prompt_is_shown(family: Family, play: Callable[..., Any]) -> None:
    episode = run(family, play, "vf-guess", ["3"], task("3"), {"system_prompt": "be brief"})
    assert (episode.error, episode.messages[0]) == (None, {"role": "system", "content": "be brief"})


def test_what_it_raises_loses_the_episode(family: Family, play: Callable[..., Any]) -> None:
    episode = run(family, play, "vf-guess", ["1"], task("3"), limit=20)
    assert episode.error is not None
    assert "the board is lost" in episode.error


def test_what_cannot_be_loaded_is_named(family: Family, package: Path) -> None:
    with pytest.raises(EnvironmentConfigError, match="verifiers:vf-nowhere could not be loaded"):
        make_environments("verifiers:vf-nowhere", {}, family("qwen2_5"))
    environments = make_environments("verifiers:vf-guess", {}, family("qwen2_5"))
    with pytest.raises(EnvironmentConfigError, match="needs conversations"):
        environments.prepare(Task(0, None, "plain", {}))


def test_a_release_without_the_interface_is_refused(family: Family, package: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import types

    monkeypatch.setitem(sys.modules, "verifiers", types.ModuleType("verifiers"))
    with pytest.raises(EnvironmentConfigError, match=r"no load_environment any more; pip install 'verifiers<0\.4'"):
        make_environments("verifiers:vf-guess", {}, family("qwen2_5"))


@pytest.mark.skipif(not REAL, reason="the stand-in has no tools")
def test_tools_of_an_environment(family: Family, play: Callable[..., Any], package: Path) -> None:
    (package / "vf_adder.py").write_text(
        "import verifiers as vf\n"
        "from datasets import Dataset\n"
        "async def add(a: int, b: int) -> int:\n"
        "    '''Adds two numbers.\n\n    Args:\n        a: one\n        b: two\n    '''\n"
        "    return a + b\n"
        "def load_environment():\n"
        "    async def right(completion, answer):\n"
        "        return 1.0 if answer in (completion[-1].content or '') else 0.0\n"
        "    rows = Dataset.from_list([{'prompt': [{'role': 'user', 'content': '?'}], 'answer': '1'}])\n"
        "    return vf.ToolEnv(tools=[add], max_turns=5, dataset=rows, rubric=vf.Rubric(funcs=[right]))\n"
    )
    written = f"<tool_call>\n{json.dumps({'name': 'add', 'arguments': {'a': 1, 'b': 2}})}\n</tool_call>"
    episode = run(family, play, "vf-adder", [written, "it is 3"], task("3"))
    assert (episode.error, episode.turns, episode.cut, episode.environment_reward) == (None, 2, None, 1.0)
    assert [(m["role"], m["content"]) for m in episode.messages[2:]] == [("tool", "3"), ("assistant", "it is 3")]
    assert len(episode.segments) == 1
