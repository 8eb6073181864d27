"""What a configuration comes to: shorthands, overrides, resolved values, the file written beside a run."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from surogate_rl.config import (
    CONFIGS,
    Command,
    GrpoConfig,
    TrainConfig,
    dump_config,
    load_config,
    parse_config,
    write_resolved,
)
from surogate_rl.config.docs import render
from surogate_rl.config.resolve import resolve

ROOT = Path(__file__).parents[2]
SAMPLES: list[tuple[str, Command]] = [
    ("finetome_lora.yaml", "sft"),
    ("sft_full.yaml", "sft"),
    ("sft_lora.yaml", "sft"),
    ("dpo.yaml", "dpo"),
    ("grpo.yaml", "grpo"),
]
GRPO = "model: m\noutput_dir: out\ndatasets: [rows.jsonl]\nrewards: [exact_match]\n"


def load(tmp_path: Path, text: str, command: Command = "grpo", sets: tuple[str, ...] = ()) -> Any:
    file = tmp_path / "config.yaml"
    file.write_text(text, encoding="utf-8")
    return load_config(file, command, sets)


@pytest.mark.parametrize(("text", "value"), [("1e-5", 1e-5), ("5E-6", 5e-6), ("2.5e-4", 2.5e-4), ("1", 1.0)])
def test_learning_rates_are_numbers(tmp_path: Path, text: str, value: float) -> None:
    config = load(tmp_path, GRPO + f"learning_rate: {text}\n")
    assert config.learning_rate == value
    assert isinstance(config.learning_rate, float)


def test_strings_stand_for_sections(tmp_path: Path) -> None:
    short = load(
        tmp_path,
        "model: m\noutput_dir: out\ndatasets: rows.jsonl\nrewards: exact_match\nloss: dapo\nreport_to: tensorboard\n"
        "rollouts: {stop: '###'}\neval: {datasets: held.jsonl, rewards: [exact_match]}\n",
    )
    long = load(
        tmp_path,
        "model: m\noutput_dir: out\ndatasets: [{path: rows.jsonl}]\nrewards: [{name: exact_match}]\nloss: {loss_type: dapo}\n"
        "report_to: [tensorboard]\nrollouts: {stop: ['###']}\neval: {datasets: [{path: held.jsonl}], rewards: [{name: exact_match}]}\n",
    )
    assert short == long
    assert load(tmp_path, GRPO + "report_to: none\n").report_to == []


def test_a_key_of_a_section_that_was_set_by_its_shorthand(tmp_path: Path) -> None:
    sets = (
        "loss=dapo",
        "loss.epsilon_high=0.28",
        "environment=single_turn",
        "environment.timeout=5",
        "rewards=regex",
        "rewards.0.args.pattern=x",
    )
    config = load(tmp_path, GRPO, sets=sets)
    assert (config.loss.loss_type, config.loss.epsilon_high, config.environment.timeout) == ("dapo", 0.28, 5)
    assert (config.rewards[0].name, config.rewards[0].args) == ("regex", {"pattern": "x"})


def test_overrides_are_typed_as_the_file_is(tmp_path: Path) -> None:
    config = load(
        tmp_path,
        GRPO + "loss: dapo\n",
        sets=(
            "rollouts.num_generations=16",
            "learning_rate=1e-4",
            "datasets.0.path=other.jsonl",
            "datasets.1=more.jsonl",
            "datasets[2].path=third.jsonl",
            "loss.beta=0.1",
            "lora=true",
            "lora_target_modules=[q_proj, v_proj]",
            "run_name=no",
            "report_to=wandb",
            "rollouts.stop=['a=b', c]",
            "eval.datasets.0=held.jsonl",
            "seed=1",
            "seed=2",
        ),
    )
    assert config.rollouts.num_generations == 16
    assert config.learning_rate == 1e-4
    assert [dataset.path for dataset in config.datasets] == ["other.jsonl", "more.jsonl", "third.jsonl"]
    assert (config.loss.loss_type, config.loss.beta) == ("dapo", 0.1)
    assert config.lora_target_modules == ["q_proj", "v_proj"]
    assert config.run_name == "no"
    assert config.rollouts.stop == ["a=b", "c"]
    assert config.eval is not None
    assert config.eval.datasets[0].path == "held.jsonl"
    assert config.seed == 2
    assert load(tmp_path, GRPO + "run_name: x\n", sets=("run_name=",)).run_name is None


def test_auto_and_empty_values_are_filled_in(tmp_path: Path) -> None:
    config = load(tmp_path, GRPO + "sequence_len: 1000\nrollouts: {max_completion_length: 300}\neval: {datasets: [held.jsonl]}\n")
    assert isinstance(config, GrpoConfig)
    assert (config.device, config.recipe, config.gpus, config.rollouts.engine) == ("cpu", "float32", 0, "native")
    assert config.rollouts.max_prompt_length == 700
    assert config.eval is not None
    assert config.eval.max_completion_length == 300
    assert config.eval.rewards == []  # the training's, those from Python too
    sft = parse_config({"model": "m", "output_dir": "o", "datasets": ["a"], "eval": {"datasets": ["h"], "rewards": ["exact_match"]}}, "sft")
    assert sft.eval is not None
    assert sft.eval.max_completion_length == 256
    held_out = parse_config({"model": "m", "output_dir": "o", "datasets": ["a"], "eval": {"datasets": ["h"]}}, "dpo")
    assert held_out.eval is not None
    assert held_out.eval.max_completion_length is None


@pytest.mark.parametrize(("given_stop", "stop"), [("", ["##", "END"]), ("stop: x", ["x"]), ("stop: []", [])])
def test_evaluation_stops_where_rollouts_do_unless_it_says_otherwise(tmp_path: Path, given_stop: str, stop: list[str]) -> None:
    config = load(tmp_path, GRPO + f"rollouts: {{stop: ['##', END]}}\neval:\n  datasets: [held.jsonl]\n  {given_stop}\n")
    assert config.eval.stop == stop
    write_resolved(config, tmp_path / "written.yaml")
    assert load_config(tmp_path / "written.yaml", "grpo") == config
    sampled = {"model": "m", "output_dir": "o", "datasets": ["a"], "eval": {"datasets": ["h"], "rewards": ["exact_match"]}}
    assert parse_config(sampled, "sft").eval.stop == []  # type: ignore[union-attr]


@pytest.mark.parametrize(("name", "command"), SAMPLES)
def test_sample_files(name: str, command: Command, tmp_path: Path) -> None:
    config = load_config(ROOT / "configs" / name, command)
    assert resolve(config) == config
    write_resolved(config, tmp_path / "config.yaml")
    assert load_config(tmp_path / "config.yaml", command) == config


def test_every_sample_file_is_tested() -> None:
    assert {path.name for path in (ROOT / "configs").iterdir()} == {name for name, _ in SAMPLES}


def test_the_design_sample_says_what_it_says() -> None:
    config = load_config(ROOT / "configs" / "finetome_lora.yaml", "sft")
    given_keys = yaml.safe_load((ROOT / "configs" / "finetome_lora.yaml").read_text())
    assert set(given_keys) == {
        "model", "output_dir", "per_device_train_batch_size", "gradient_accumulation_steps", "sequence_len", "learning_rate", "lora",
        "lora_rank", "datasets",
    }  # fmt: skip
    assert (config.learning_rate, config.lora_rank, config.gradient_accumulation_steps) == (2e-4, 16, 4)
    assert (config.datasets[0].path, config.datasets[0].type) == ("mlabonne/FineTome-100k", "auto")


_names = st.text(st.characters(codec="utf-8", exclude_categories=["Cs", "Cc"]), min_size=1, max_size=10) | st.sampled_from(
    ["no", "1e-5", "~"]
)
_plain = st.none() | st.booleans() | st.integers(-1000, 1000) | st.floats(allow_nan=False, allow_infinity=False) | _names


def test_a_home_that_nobody_has_is_a_name_like_any_other(tmp_path: Path) -> None:
    config = load(tmp_path, GRPO, sets=("model=~0",))
    assert config.model == "~0"


@settings(deadline=None, max_examples=50)
@given(
    rate=st.floats(1e-12, 1e3),
    name=_names,
    args=st.dictionaries(_names, _plain | st.lists(_plain, max_size=2), max_size=3),
    stop=st.lists(_names, max_size=2),
    limit=st.none() | st.integers(1, 9),
)
def test_the_written_file_loads_to_the_same(
    tmp_path_factory: pytest.TempPathFactory, rate: float, name: str, args: dict[str, Any], stop: list[str], limit: int | None
) -> None:
    config = parse_config(
        {
            "model": name,
            "output_dir": name,
            "datasets": [{"path": name, "args": args}],
            "rewards": ["exact_match"],
            "learning_rate": rate,
            "rollouts": {"stop": stop},
            "save_total_limit": limit,
        },
        "grpo",
    )
    file = tmp_path_factory.mktemp("resolved") / "config.yaml"
    write_resolved(config, file)
    assert load_config(file, "grpo") == config
    assert list(file.parent.iterdir()) == [file]


def test_the_written_file_is_yaml_for_others_too() -> None:
    """Other readers may take 1e-05 for text, but must find every key and the same text values."""
    config = parse_config({"model": "no", "output_dir": "o", "datasets": ["a"]}, "sft")
    assert yaml.safe_load(dump_config(config))["run_name"] is None
    data = json.loads(json.dumps(config.model_dump(mode="json")))
    assert set(yaml.safe_load(dump_config(config))) == set(data)


def test_objects_are_taken_as_they_are() -> None:
    config = parse_config({"model": "m", "output_dir": "o", "datasets": ["a"], "loss": "ipo"}, "dpo")
    assert parse_config(config, "dpo") == config
    changed = config.model_copy(update={"learning_rate": -1.0})
    with pytest.raises(ValueError, match=r"^learning_rate: expected a number greater than 0, got -1.0$"):
        parse_config(changed, "dpo")
    assert parse_config(config, "dpo", ["seed=3"]).seed == 3


def test_the_dict_is_left_alone() -> None:
    given_dict = {"model": "m", "output_dir": "o", "datasets": ["a"], "loss": "ipo"}
    parse_config(given_dict, "dpo", ["datasets.0.size=3"])
    assert given_dict == {"model": "m", "output_dir": "o", "datasets": ["a"], "loss": "ipo"}


def test_every_key_has_a_meaning() -> None:
    def check(model: type[TrainConfig], path: str) -> None:
        for name, node in model.model_json_schema()["properties"].items():
            assert node.get("description"), f"{path}.{name}"
        for name, definition in model.model_json_schema().get("$defs", {}).items():
            for key, node in definition["properties"].items():
                assert node.get("description"), f"{name}.{key}"

    for command, model in CONFIGS.items():
        check(model, command)


def test_the_page_about_the_keys_is_current() -> None:
    assert (ROOT / "docs" / "config.md").read_text(encoding="utf-8") == render(), "python -m surogate_rl.config.docs docs/config.md"
