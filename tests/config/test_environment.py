"""The section `environment`: shorthand, what cannot work, what has no effect, and where its files are looked for."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest

from surogate_rl.config import ConfigError, ConfigWarning, dump_config, load_config, parse_config

MINIMAL: dict[str, Any] = {"model": "m", "output_dir": "out", "datasets": ["rows.jsonl"], "rewards": ["exact_match"]}
GAME = "text_game:number_guess"


def errors(**keys: Any) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        parse_config({**MINIMAL, **keys}, "grpo")
    return caught.value.lines


def test_a_name_stands_for_the_section_and_the_default_is_one_turn() -> None:
    plain = parse_config(MINIMAL, "grpo").environment
    assert (plain.name, plain.max_turns, plain.turn_credit) == ("single_turn", 1, "none")
    game = parse_config({**MINIMAL, "environment": GAME}, "grpo").environment
    assert (game.name, game.max_turns, game.weight) == (GAME, 10, 1.0)
    assert parse_config({**MINIMAL, "environment": {"name": GAME, "max_turns": 3}}, "grpo").environment.max_turns == 3
    assert parse_config(MINIMAL, "grpo", ["environment.name=text_game:key_door"]).environment.name == "text_game:key_door"
    assert parse_config(MINIMAL, "grpo", ["environment=text_game:key_door"]).environment.name == "text_game:key_door"


def test_what_is_written_down_loads_again(tmp_path: Path) -> None:
    config = parse_config({**MINIMAL, "environment": {"name": GAME, "args": {"high": 9}, "turn_credit": "reward_to_go"}}, "grpo")
    (tmp_path / "config.yaml").write_text(dump_config(config))
    assert load_config(tmp_path / "config.yaml", "grpo") == config


def test_environments_that_reward_need_no_reward_function() -> None:
    without = {key: value for key, value in MINIMAL.items() if key != "rewards"}
    parse_config({**without, "environment": GAME}, "grpo")
    needed = "rewards: grpo needs at least one"
    for environment in ("single_turn", {"name": GAME, "weight": 0.0}):
        with pytest.raises(ConfigError, match=needed):
            parse_config({**without, "environment": environment}, "grpo")
    unweighed = {"rewards": [{"name": "exact_match", "weight": 0.0}]}
    parse_config({**without, **unweighed, "environment": GAME}, "grpo")
    with pytest.raises(ConfigError, match="every weight is 0"):
        parse_config({**without, **unweighed}, "grpo")


@pytest.mark.parametrize(
    ("environment", "message"),
    [
        ("gym:nowhere.py:Room", "environment.name: no file 'nowhere.py'"),
        ("nowhere.py:Room", "environment.name: no file 'nowhere.py'"),
        ({"name": "tools", "args": {"tools": ["nowhere.py:f"]}}, "environment.args.tools[0]: no file 'nowhere.py'"),
        ({"name": "tools", "args": {"tools": ["f"]}}, "environment.args.tools[0]: expected path/file.py:function, got 'f'"),
        ({"name": "tools", "args": {}}, "environment.args.tools: tools needs it"),
        ({"name": GAME, "args": {"hi": 3}}, "unexpected keyword argument 'hi'"),
        ({"name": "single_turn", "max_turns": 2}, "environment.max_turns: single_turn has one turn, 2 asked for"),
        ({"name": "single_turn", "args": {"a": 1}}, "environment.args: a: single_turn takes none; remove them"),
        ({"name": GAME, "timeout": 0}, "environment.timeout: expected a number greater than 0, got 0"),
        ({"name": GAME, "turn_credit": "gae"}, "environment.turn_credit: expected one of none, reward_to_go, got 'gae'"),
        ({"name": GAME, "max_turn": 3}, "unknown key 'environment.max_turn'; did you mean 'environment.max_turns'?"),
    ],
)
def test_refused(environment: Any, message: str) -> None:
    (line,) = errors(environment=environment)
    assert message in line


def test_credit_by_turns_goes_with_losses_of_tokens_and_without_a_budget() -> None:
    environment = {"name": GAME, "turn_credit": "reward_to_go"}
    parse_config({**MINIMAL, "environment": environment, "loss": "dapo"}, "grpo")
    for loss in ("gspo", "rloo"):
        assert "gives tokens advantages of their own, but" in errors(environment=environment, loss=loss)[0]
    budget = {"depth": {}}
    lines = errors(environment=environment, rollouts={"budget": budget})
    assert any("environment.turn_credit: reward_to_go does not go with rollouts.budget" in line for line in lines)


def test_keys_without_effect_are_told() -> None:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", ConfigWarning)
        parse_config({**MINIMAL, "environment": {"timeout": 3.0, "weight": 2.0}}, "grpo")
        parse_config({**MINIMAL, "environment": {"name": GAME, "turn_discount": 0.5}}, "grpo")
    assert [str(warning.message) for warning in caught] == [
        "environment.timeout has no effect while environment.name is single_turn",
        "environment.weight has no effect while single_turn gives no reward of its own",
        "environment.turn_discount has no effect while environment.turn_credit is none",
    ]


def test_files_count_from_the_configurations_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "project"
    folder.mkdir()
    monkeypatch.chdir(tmp_path)
    (folder / "mine.py").write_text("def f(a: int) -> int:\n    return a\n")
    for name, expected in (
        ("mine.py:Room", f"{folder}/mine.py:Room"),
        ("text_game:mine.py:Room", f"text_game:{folder}/mine.py:Room"),
        ("gym:mine.py:Room", f"gym:{folder}/mine.py:Room"),
    ):
        (folder / "grpo.yaml").write_text(f"model: m\noutput_dir: out\ndatasets: [rows.jsonl]\nenvironment: {name}\n")
        assert load_config(folder / "grpo.yaml", "grpo").environment.name == expected
    (folder / "grpo.yaml").write_text(
        "model: m\noutput_dir: out\ndatasets: [rows.jsonl]\nrewards: [exact_match]\n"
        "environment: {name: tools, args: {tools: [mine.py:f]}}\n"
    )
    assert load_config(folder / "grpo.yaml", "grpo").environment.args["tools"] == [f"{folder}/mine.py:f"]


def test_the_line_is_that_of_the_key(tmp_path: Path) -> None:
    path = tmp_path / "grpo.yaml"
    path.write_text(
        "model: m\noutput_dir: out\ndatasets: [rows.jsonl]\nrewards: [exact_match]\nenvironment:\n  name: text_game:number_guess\n"
        "  args:\n    low: 5\n    high: 4\n"
    )
    with pytest.raises(ConfigError) as caught:
        load_config(path, "grpo")
    assert caught.value.lines == [f"{path}:7: environment.args: number_guess: low is 5 and high is 4, expected low < high"]
