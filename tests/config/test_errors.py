"""What the user reads when a configuration is wrong: the exact lines."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from surogate_rl.config import Command, ConfigError, GrpoConfig, SftConfig, load_config, parse_config

BASE = "model: m\noutput_dir: out\ndatasets: [rows.jsonl]\n"  # lines 1 to 3
GRPO = BASE + "rewards: [exact_match]\n"  # line 4

Lines = Callable[..., list[str]]


@pytest.fixture
def errors(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Lines:
    monkeypatch.chdir(tmp_path)

    def lines(text: str, command: Command = "sft", sets: tuple[str, ...] = ()) -> list[str]:
        Path("config.yaml").write_text(text, encoding="utf-8")
        with pytest.raises(ConfigError) as caught:
            load_config("config.yaml", command, sets)
        assert str(caught.value) == "\n".join(caught.value.lines)
        return caught.value.lines

    return lines


@pytest.mark.parametrize(
    ("command", "line", "message"),
    [
        ("sft", "learning_rte: 1e-5", "unknown key 'learning_rte'; did you mean 'learning_rate'?"),
        ("sft", "model_name_or_path: m", "unknown key 'model_name_or_path'; did you mean 'model'?"),
        ("sft", "num-train-epochs: 2", "unknown key 'num-train-epochs'; did you mean 'num_train_epochs'?"),
        ("sft", "zzz: 1", "unknown key 'zzz'; docs/config.md lists every key"),
        ("sft", "rollouts: {temperature: 1}", "'rollouts' is a key of grpo, not of sft; remove it"),
        ("sft", "rewards: [exact_match]", "'rewards' is a key of grpo, not of sft; did you mean 'eval.rewards'?"),
        ("sft", "num_generations: 4", "'num_generations' is a key of grpo ('rollouts.num_generations'), not of sft; remove it"),
        ("dpo", "assistant_only_loss: true", "'assistant_only_loss' is a key of sft, not of dpo; remove it"),
        ("dpo", "loss: {delta: 2.0}", "'loss.delta' is a key of grpo, not of dpo; remove it"),
        ("sft", "loss: {xyz: 2.0}", "unknown key 'loss.xyz'; loss takes loss_type, args"),
        ("grpo", "num_generations: 4", "unknown key 'num_generations'; did you mean 'rollouts.num_generations'?"),
        ("grpo", "rollouts: {temprature: 1.0}", "unknown key 'rollouts.temprature'; did you mean 'rollouts.temperature'?"),
        ("grpo", "distributed: {nodes: 2}", "distributed: training on several machines is not there yet; remove this section"),
        ("sft", "learning_rate: abc", "learning_rate: expected a number greater than 0, got 'abc'"),
        ("sft", 'learning_rate: "1e-5"', "learning_rate: expected a number greater than 0, got '1e-5'; remove the quotes"),
        ("sft", "learning_rate: -1", "learning_rate: expected a number greater than 0, got -1"),
        ("sft", "learning_rate: true", "learning_rate: expected a number greater than 0, got true"),
        ("sft", "learning_rate: .nan", "learning_rate: expected a number greater than 0, got nan"),
        ("sft", "learning_rate: .inf", "learning_rate: expected a number greater than 0, got inf"),
        ("sft", "learning_rate:", "learning_rate: expected a number greater than 0, got nothing; give a value or remove the key"),
        ("sft", "sequence_len: true", "sequence_len: expected a whole number greater than 0, got true"),
        ("sft", "sequence_len: 1e3", "sequence_len: expected a whole number greater than 0, got 1000.0; write 1000"),
        ("sft", "sequence_len: 12.5", "sequence_len: expected a whole number greater than 0, got 12.5"),
        ("sft", "warmup_ratio: 1.5", "warmup_ratio: expected a number from 0 to 1, got 1.5"),
        ("sft", "adam_beta1: 1", "adam_beta1: expected a number of at least 0 and less than 1, got 1"),
        ("sft", "packing: no", "packing: expected true or false, got 'no'; write false"),
        ("sft", "packing: 1", "packing: expected true or false, got 1"),
        ("sft", "run_name: 5", "run_name: expected text, got 5; put it in quotes"),
        ("sft", "run_name: ''", "run_name: the text is empty; give a value or remove the key"),
        (
            "sft",
            "lr_scheduler_type: cosin",
            "lr_scheduler_type: expected one of linear, cosine, constant, constant_with_warmup, got 'cosin'; did you mean cosine?",
        ),
        ("sft", "report_to: mlflow", "report_to[0]: expected one of wandb, tensorboard, got 'mlflow'"),
        (
            "sft",
            "lora_target_modules: q_proj",
            "lora_target_modules: expected a list of text or all-linear, got 'q_proj'; write a list: [q_proj]",
        ),
        ("sft", "lora_target_modules: [q_porj]", "lora_target_modules[0]: unknown module 'q_porj'; did you mean 'q_proj'?"),
        ("sft", "lora_target_modules: [q_proj, q_proj]", "lora_target_modules[1]: 'q_proj' is in the list twice; remove one"),
        ("sft", "eval: {datasets: []}", "eval.datasets: the list is empty; it needs at least one item"),
        ("sft", "eval: {steps: 5}", "missing key 'eval.datasets': held-out rows"),
        ("sft", "eval: rows.jsonl", "eval: expected a section, got 'rows.jsonl'"),
        ("sft", "loss: sigmoid", "loss.loss_type: 'sigmoid' is a loss of dpo, not of sft; choose from nll"),
        ("grpo", "loss: dappo", "loss.loss_type: unknown loss 'dappo'; did you mean 'dapo'?"),
        (
            "grpo",
            "loss: {args: {x: 1}}",
            "loss.args: grpo takes no arguments of its own; they are for an objective of yours (path/file.py:function)",
        ),
        (
            "grpo",
            "loss: {loss_type: sapo, epsilon: 0.1}",
            "loss.epsilon: 0.1 has no effect with loss_type sapo: its gate is soft; set sapo_temperature_pos and sapo_temperature_neg",
        ),
        (
            "dpo",
            "loss: robust",
            "loss.label_smoothing: 0 makes loss_type robust the same as sigmoid; set the share of wrong labels, for example 0.1, "
            "or use sigmoid",
        ),
        (
            "dpo",
            "loss: mine.py:fn",
            "loss.loss_type: no file 'mine.py'; paths count from the configuration's folder, then from the folder you start in",
        ),
        ("dpo", "loss: mine.py", "loss.loss_type: expected path/file.py:function, got 'mine.py'"),
        (
            "grpo",
            "environment: {type: tools}",
            "unknown key 'environment.type'; environment takes name, args, max_turns, timeout, weight, turn_credit, turn_discount",
        ),
        (
            "grpo",
            "environment: multi_turn",
            "environment: unknown environment 'multi_turn'; known: single_turn, tools, text_game:<game>, "
            "gym:path/file.py:Class, verifiers:<id>, or path/file.py:Class of your own",
        ),
    ],
)
def test_one_line(errors: Lines, command: Command, line: str, message: str) -> None:
    text = GRPO if command == "grpo" else BASE
    number = text.count("\n") + 1
    assert errors(text + line + "\n", command) == [f"config.yaml:{number}: {message}"]


def test_all_errors_of_a_file_at_once_in_its_order(errors: Lines) -> None:
    text = """model: m
learning_rte: 1e-5
seed: 1
seed: 2
output_dir: out
datasets:
  - a.jsonl
  - path: b
    typ: auto
rollouts:
  num_generations: 1
  top_p: 0.9
rewards: [exact_match]
warmup_ratio: 0.1
warmup_steps: 3
"""
    assert errors(text, "grpo", ("loss.beta=abc", "foo.bar=1")) == [
        "config.yaml:2: unknown key 'learning_rte'; did you mean 'learning_rate'?",
        "config.yaml:4: duplicate key 'seed'; it is already on line 3, remove one of them",
        "config.yaml:9: unknown key 'datasets[1].typ'; did you mean 'datasets[1].type'?",
        "config.yaml:11: rollouts.num_generations: a group of one has no baseline, grpo learns nothing from it; "
        "set it to 2 or more, or loss: reinforce_plus_plus, whose baseline is the batch's",
        "config.yaml:12: rollouts.top_p: 0.9 would bias the ratio in training; it belongs under eval; set it to 1 or remove the key",
        "config.yaml:14: warmup_ratio and warmup_steps are both given; keep one of them",
        "--set loss.beta=abc: loss.beta: expected a number of at least 0, got 'abc'",
        "--set foo.bar=1: unknown key 'foo'; docs/config.md lists every key",
    ]


def test_missing_keys_say_what_they_are(errors: Lines) -> None:
    assert errors("seed: 1\n") == [
        "config.yaml: missing key 'model': a Hugging Face directory, hub id or GGUF file",
        "config.yaml: missing key 'output_dir': the folder that everything is written to",
        "config.yaml: missing key 'datasets': what to train on",
    ]
    assert errors(BASE.replace("[rows.jsonl]", "[{type: auto}]")) == [
        "config.yaml:3: missing key 'datasets[0].path': a hub id, a file (jsonl, json, parquet, csv), a directory, "
        "or `reasoning_gym/<task>`"
    ]


def test_a_placeholder_is_never_blamed(errors: Lines) -> None:
    """sequence_len is wrong, so nothing may be said about what its default would not allow."""
    assert errors(GRPO + "sequence_len: x\nrollouts: {max_completion_length: 5000}\n", "grpo") == [
        "config.yaml:5: sequence_len: expected a whole number greater than 0, got 'x'"
    ]


def test_files_that_cannot_be_read(errors: Lines, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"^nowhere\.yaml: no such file; give the path of a YAML configuration$"):
        load_config("nowhere.yaml", "sft")
    with pytest.raises(ConfigError, match=r": is a folder; give the path of a YAML configuration$"):
        load_config(tmp_path, "sft")
    Path("latin.yaml").write_bytes(b"model: \xe9\n")
    with pytest.raises(ConfigError, match=r"^latin\.yaml: not a text file in UTF-8 \(byte 7\); save it as UTF-8$"):
        load_config("latin.yaml", "sft")
    assert errors("") == ["config.yaml: the file is empty; it needs at least model, output_dir and datasets"]
    assert errors("# nothing\n") == ["config.yaml: the file is empty; it needs at least model, output_dir and datasets"]
    assert errors("- a\n- b\n") == ["config.yaml: expected 'key: value' lines, got a list"]
    assert errors("model: m\n\tseed: 1\n") == ["config.yaml:2:1: a tab where YAML wants spaces; indent with spaces"]


@pytest.mark.parametrize(
    ("sets", "lines"),
    [
        (("seed",), ["--set seed: write --set key=value, such as --set rollouts.num_generations=16"]),
        (("=1",), ["--set =1: write --set key=value, such as --set rollouts.num_generations=16"]),
        (
            ("rollouts..n=1",),
            ["--set rollouts..n=1: 'rollouts..n' has an empty part; write keys with single dots, such as rollouts.temperature"],
        ),
        (("datasets.7=x",), ["--set datasets.7=x: datasets has 1 items, the next one would be datasets.1"]),
        (("datasets.path=x",), ["--set datasets.path=x: datasets is a list; name an item by its number, such as datasets.0.path"]),
        (("seed.x=1",), ["--set seed.x=1: seed is 7, which has no keys"]),
        (("sede=1",), ["--set sede=1: unknown key 'sede'; did you mean 'seed'?"]),
        (("learning_rate=fast",), ["--set learning_rate=fast: learning_rate: expected a number greater than 0, got 'fast'"]),
        (
            ("rollouts.stop=[a",),
            [
                "--set rollouts.stop=[a: the value is not valid YAML: expected ',' or ']', but got '<stream end>'; quote it, such as "
                "--set 'rollouts.stop=\"...\"'"
            ],
        ),
        (
            ("rollouts.max_completion_length=64", "sequence_len=64"),
            [
                "--set rollouts.max_completion_length=64: rollouts.max_completion_length: 64 leaves no room for a prompt in "
                "sequence_len (64); "
                "lower it or raise sequence_len"
            ],
        ),
    ],
)
def test_errors_of_set_name_it(errors: Lines, sets: tuple[str, ...], lines: list[str]) -> None:
    assert errors(GRPO + "seed: 7\n", "grpo", sets) == lines


def test_errors_of_a_dict_name_the_key() -> None:
    config: dict[str, Any] = {"model": "m", "output_dir": "out", "datasets": [{"path": "a", "typ": 1}], "learning_rate": "fast"}
    with pytest.raises(ConfigError) as caught:
        parse_config(config, "sft")
    assert caught.value.lines == [
        "unknown key 'datasets[0].typ'; did you mean 'datasets[0].type'?",
        "learning_rate: expected a number greater than 0, got 'fast'",
    ]


def test_functions_do_not_belong_in_the_dict() -> None:
    with pytest.raises(ConfigError) as caught:
        parse_config({"model": "m", "output_dir": "out", "datasets": ["a"], "rewards": [len]}, "grpo")
    assert caught.value.lines[0] == (
        "rewards[0]: expected text, numbers, true or false, lists or dicts, got builtin_function_or_method; "
        "pass functions as surogate_rl.grpo(config, rewards=[function])"
    )


def test_objects_of_another_command_and_other_types() -> None:
    config = SftConfig.model_validate({"model": "m", "output_dir": "out", "datasets": [{"path": "a"}]})
    with pytest.raises(ConfigError, match=r"^grpo takes a GrpoConfig or a dict, got a SftConfig$"):
        parse_config(config, "grpo")
    with pytest.raises(TypeError, match=r"^the configuration must be a dict or a SftConfig, got int$"):
        parse_config(3, "sft")  # type: ignore[call-overload]


def test_python_values_of_other_types_are_taken(tmp_path: Path) -> None:
    config = parse_config(
        {
            "model": tmp_path,
            "output_dir": "out",
            "datasets": ("a", {"path": "b"}),
            "learning_rate": np.float32(0.5),
            "max_steps": np.int64(3),
            "rewards": ["exact_match"],
        },
        "grpo",
    )
    assert isinstance(config, GrpoConfig)
    assert (config.model, config.learning_rate, config.max_steps) == (str(tmp_path), 0.5, 3)
    assert [dataset.path for dataset in config.datasets] == ["a", "b"]


def test_numbers_that_pyyaml_leaves_as_text() -> None:
    """yaml.safe_load gives '1e-5' as text; such a dict is what the user meant."""
    config = parse_config({"model": "m", "output_dir": "1e-5", "datasets": ["a"], "learning_rate": "1e-5", "adam_epsilon": "5E-6"}, "sft")
    assert (config.learning_rate, config.adam_epsilon, config.output_dir) == (1e-5, 5e-6, "1e-5")


def test_config_errors_survive_pickling() -> None:
    import pickle

    error = pickle.loads(pickle.dumps(ConfigError(["a", "b"])))
    assert error.lines == ["a", "b"]
