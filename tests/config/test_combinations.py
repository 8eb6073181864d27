"""Keys that do not go together, keys that are not there yet, keys without effect."""

from __future__ import annotations

import os
import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any

import pytest

import surogate_rl
from surogate_rl.config import Command, ConfigError, ConfigWarning, parse_config

MINIMAL: dict[str, Any] = {"model": "m", "output_dir": "out", "datasets": ["rows.jsonl"]}
BASES: dict[Command, dict[str, Any]] = {"sft": MINIMAL, "dpo": MINIMAL, "grpo": {**MINIMAL, "rewards": ["exact_match"]}}
EVAL = {"datasets": ["held.jsonl"]}
PATHS = "; paths count from the configuration's folder, then from the folder you start in"
BIAS = "would bias the ratio in training; it belongs under eval"


def lines_of(command: Command, keys: dict[str, Any]) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        parse_config({**BASES[command], **keys}, command)
    return caught.value.lines


@pytest.mark.parametrize(
    ("command", "keys", "message"),
    [
        ("sft", {"device": "cpu", "gpus": 2}, "gpus: 2 asked for, but device is cpu; set gpus: 0 or remove the key"),
        ("sft", {"device": "cpu", "recipe": "bfloat16"}, "recipe: bfloat16 needs a GPU, the CPU computes in float32; set recipe: float32"),
        ("sft", {"max_steps": 0}, "max_steps: expected a whole number greater than 0, or -1 for num_train_epochs; got 0"),
        ("sft", {"max_steps": -5}, "max_steps: expected a whole number greater than 0, or -1 for num_train_epochs; got -5"),
        ("sft", {"warmup_ratio": 0.1, "warmup_steps": 3}, "warmup_ratio and warmup_steps are both given; keep one of them"),
        ("sft", {"warmup_steps": 30, "max_steps": 20}, "warmup_steps: 30 is more than max_steps (20); lower it"),
        (
            "sft",
            {"resume": "nowhere/step-5"},
            "resume: no checkpoint at 'nowhere/step-5'; write auto, never, or a folder such as out/checkpoints/step-100",
        ),
        ("dpo", {"lora": True, "lora_dropout": 0.1}, "lora_dropout: 0.1 is not supported; set lora_dropout: 0 or remove the key"),
        ("dpo", {"lora": True, "adapter": "nowhere"}, "adapter: no folder 'nowhere'; give the folder that holds adapter_config.json"),
        ("dpo", {"lora": True, "lora_target_modules": []}, "lora_target_modules: an empty list trains nothing; write all-linear or names"),
        (
            "sft",
            {"eval": {**EVAL, "rewards": ["exact_match"], "samples": 4}},
            "eval.samples: 4 greedy completions are all alike; set eval.temperature above 0 or samples: 1",
        ),
        (
            "sft",
            {"sequence_len": 64, "eval": {**EVAL, "rewards": ["exact_match"], "max_completion_length": 64}},
            "eval.max_completion_length: 64 leaves no room for a prompt in sequence_len (64); lower it or raise sequence_len",
        ),
        (
            "grpo",
            {"rollouts": {"num_generations": 1}},
            "rollouts.num_generations: a group of one has no baseline, grpo learns nothing from it; set it to 2 or more, "
            "or loss: reinforce_plus_plus, whose baseline is the batch's",
        ),
        (
            "grpo",
            {"rollouts": {"num_generations": 1, "prompts_per_step": 1}, "loss": "reinforce_plus_plus"},
            "rollouts.prompts_per_step: a batch of one completion has no baseline; raise it or num_generations",
        ),
        ("grpo", {"rollouts": {"top_p": 0.9}}, f"rollouts.top_p: 0.9 {BIAS}; set it to 1 or remove the key"),
        ("grpo", {"rollouts": {"top_k": 50}}, f"rollouts.top_k: 50 {BIAS}; set it to 0 or remove the key"),
        ("grpo", {"rollouts": {"min_p": 0.05}}, f"rollouts.min_p: 0.05 {BIAS}; set it to 0 or remove the key"),
        (
            "grpo",
            {"rollouts": {"temperature": 0}},
            "rollouts.temperature: 0 (greedy) cannot be trained on, all completions are alike; set it above 0",
        ),
        (
            "grpo",
            {"rollouts": {"max_staleness": 1, "oversample": 9}},
            "rollouts.oversample: with 9 groups beyond a step's 8 the last ones would be trained later than max_staleness (1) allows; "
            "set it to prompts_per_step at the most",
        ),
        (
            "grpo",
            {"rollouts": {"oversample": 2}},
            "rollouts.oversample: 2 groups more would be sampled for nothing: max_staleness 0 lets no group be carried over to the next "
            "step, and without dynamic_sampling none is replaced; set max_staleness to 1 or more, or remove it",
        ),
        (
            "grpo",
            {"rollouts": {"oversample": 9, "dynamic_sampling": {"enabled": True, "max_rounds": 2}}},
            "rollouts.oversample: 9 spares are more than dynamic_sampling.max_rounds (2) lets a step of 8 prompts use; "
            "lower it or raise max_rounds",
        ),
        (
            "grpo",
            {"rollouts": {"dynamic_sampling": {"enabled": True}}, "loss": "reinforce_plus_plus"},
            "rollouts.dynamic_sampling: reinforce_plus_plus compares with the whole batch, so groups of equal rewards teach something too; "
            "set enabled: false or another loss",
        ),
        (
            "grpo",
            {"rollouts": {"num_generations": 1, "dynamic_sampling": {"enabled": True}}, "loss": "reinforce_plus_plus"},
            "rollouts.dynamic_sampling: the reward of a group of one never differs from the group's, so every group would be passed over; "
            "set num_generations to 2 or more, or enabled: false",
        ),
        (
            "grpo",
            {"sequence_len": 256},
            "rollouts.max_completion_length: 256 leaves no room for a prompt in sequence_len (256); lower it or raise sequence_len",
        ),
        (
            "grpo",
            {"sequence_len": 300, "rollouts": {"max_prompt_length": 100}},
            "rollouts.max_prompt_length: 100 and max_completion_length (256) do not fit in sequence_len (300); "
            "lower one or raise sequence_len",
        ),
        (
            "grpo",
            {"loss": {"num_minibatches": 3}},
            "loss.num_minibatches: 3 does not divide the 64 completions of a step (prompts_per_step 8 x num_generations 8); "
            "choose a divisor",
        ),
        (
            "grpo",
            {"loss": {"delta": 1.2}},
            "loss.delta: 1.2 must be greater than 1 + epsilon_high (1.2), or it cuts below the clip; raise it",
        ),
        (
            "grpo",
            {"loss": {"delta": 1.25, "epsilon_high": 0.28}},
            "loss.delta: 1.25 must be greater than 1 + epsilon_high (1.28), or it cuts below the clip; raise it",
        ),
        (
            "grpo",
            {"loss": {"sync_ref_model": True}},
            "loss.sync_ref_model: there is no reference while loss.beta is 0; set beta above 0 or sync_ref_model: false",
        ),
        (
            "grpo",
            {"lora": True, "loss": {"beta": 0.04, "sync_ref_model": True}},
            "loss.sync_ref_model: with lora: true the reference is the adapter that the run starts from, which stays as it is; "
            "set sync_ref_model: false, or train all weights (lora: false)",
        ),
        (
            "grpo",
            {"loss": {"beta": 0.04, "ref_model_sync_steps": 8}},
            "loss.ref_model_sync_steps: 8 has no effect with loss_type grpo: sync_ref_model is false; set it to true, or remove this",
        ),
        (
            "grpo",
            {"loss": {"sapo_temperature_pos": 2.0}},
            "loss.sapo_temperature_pos: 2.0 has no effect with loss_type grpo: only sapo has a soft gate; remove it",
        ),
        (
            "grpo",
            {"loss": {"loss_type": "rloo", "scale_rewards": "group"}},
            "loss.scale_rewards: group does not go with loss_type rloo, whose baseline is leave-one-out; "
            "use batch or none, or leave it out",
        ),
        (
            "grpo",
            {"loss": {"mismatch": "none", "mismatch_cap": 2.0}},
            "loss.mismatch_cap: 2.0 has no effect with loss_type grpo: mismatch is none; set a kind of correction, or remove it",
        ),
        (
            "dpo",
            {"loss": "robust"},
            "loss.label_smoothing: 0 makes loss_type robust the same as sigmoid; set the share of wrong labels, for example 0.1, "
            "or use sigmoid",
        ),
        (
            "dpo",
            {"loss": {"loss_type": "ipo", "label_smoothing": 0.1}},
            "loss.label_smoothing: 0.1 has no effect with loss_type ipo: only sigmoid and robust smooth labels; "
            "remove it or use one of them",
        ),
        (
            "grpo",
            {"loss": {"mismatch": "token_mask", "mismatch_floor": 3.0}},
            "loss.mismatch_floor: 3 must be less than mismatch_cap (3); lower it",
        ),
        ("grpo", {"rewards": []}, "rewards: grpo needs at least one, such as 'rewards: [exact_match]' or path/file.py:function"),
        (
            "grpo",
            {"rewards": [{"name": "exact_match", "weight": 0}]},
            "rewards: every weight is 0, there is nothing to learn from; give one a weight",
        ),
        ("grpo", {"rewards": ["mine.py:fn"]}, "rewards[0].name: no file 'mine.py'" + PATHS),
        ("grpo", {"rewards": ["mine.py"]}, "rewards[0].name: no file 'mine.py'" + PATHS),
        ("grpo", {"rewards": ["a/b:fn"]}, "rewards[0].name: expected path/file.py:function, got 'a/b:fn'"),
        (
            "grpo",
            {"gradient_accumulation_steps": 2},
            "gradient_accumulation_steps: a grpo step is rollouts.prompts_per_step x rollouts.num_generations completions, "
            "split by memory alone; raise prompts_per_step instead and remove this key",
        ),
        ("grpo", {"packing": False}, "packing: grpo always packs; remove this key"),
        ("dpo", {"packing": False}, "packing: dpo always packs; remove this key"),
        (
            "grpo",
            {"overlong": "truncate"},
            "overlong: grpo drops prompts that are too long, a cut prompt asks something else; remove this key",
        ),
    ],
)
def test_refused(command: Command, keys: dict[str, Any], message: str) -> None:
    assert lines_of(command, keys) == [message]


def test_adapter_without_lora(tmp_path: Path) -> None:
    assert lines_of("sft", {"adapter": str(tmp_path)}) == ["adapter: needs lora: true; set it, or merge the adapter into the model"]


def test_built_in_rewards_and_their_options_are_checked() -> None:
    (unknown,) = lines_of("grpo", {"rewards": ["exact_matc"]})
    assert unknown.startswith("rewards[0].name: unknown reward 'exact_matc'; did you mean 'exact_match'?")
    (option,) = lines_of("sft", {"eval": {**EVAL, "rewards": [{"name": "exact_match", "args": {"bogus": 1}}]}})
    assert option.startswith("eval.rewards[0].args: reward 'exact_match': unknown option 'bogus'")


@pytest.mark.parametrize(
    ("command", "keys"),
    [
        ("grpo", {"rollouts": {"num_generations": 1}, "loss": "reinforce_plus_plus"}),
        ("grpo", {"eval": {**EVAL, "temperature": 1.0, "top_p": 0.9, "top_k": 5, "min_p": 0.1, "samples": 4}}),
        ("grpo", {"loss": {"delta": 1.21}}),
        ("grpo", {"loss": {"beta": 0.1, "sync_ref_model": True}}),
        ("grpo", {"sequence_len": 257}),
        ("grpo", {"rollouts": {"prompts_per_step": 3, "num_generations": 4}, "loss": {"num_minibatches": 6}}),
        ("sft", {"lora_dropout": 0}),
        ("sft", {"gpus": 0, "device": "cpu", "recipe": "float32"}),
        ("sft", {"gradient_accumulation_steps": 2, "packing": False, "overlong": "truncate"}),
        ("sft", {"resume": "auto"}),
        ("dpo", {"eval": EVAL}),
    ],
)
def test_allowed(command: Command, keys: dict[str, Any]) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error", ConfigWarning)
        parse_config({**BASES[command], **keys}, command)


def test_your_own_objective_has_the_options_of_the_run_and_its_args(tmp_path: Path) -> None:
    (tmp_path / "loss.py").write_text("def fn(stats, batch, totals): ...\n")
    own = {"loss_type": f"{tmp_path}/loss.py:fn"}
    allowed = {**own, "args": {"a": 1}, "num_iterations": 2, "scale_rewards": "batch", "sync_ref_model": True, "mismatch": "none"}
    parse_config({**BASES["grpo"], "loss": allowed}, "grpo")
    assert lines_of("grpo", {"loss": {**own, "epsilon": 0.1, "mismatch_cap": 2.0}, "rollouts": {"max_staleness": 1}}) == [
        f"loss.{option} has no effect with loss_type {tmp_path}/loss.py:fn: your own objective gets its options from args; move it there"
        for option in ("epsilon: 0.1", "mismatch_cap: 2.0")
    ]


def test_a_group_of_one_has_no_baseline_for_your_own_objective_either(tmp_path: Path) -> None:
    (tmp_path / "loss.py").write_text("def fn(stats, batch, totals): ...\n")
    own = {"loss": f"{tmp_path}/loss.py:fn", "rollouts": {"num_generations": 1}}
    assert lines_of("grpo", own) == [
        "rollouts.num_generations: a group of one has no baseline, your own objective learns nothing from it; set it to 2 or more, "
        "or loss: reinforce_plus_plus, whose baseline is the batch's"
    ]


def test_all_options_that_a_loss_does_not_have_are_told() -> None:
    assert [line.partition(" ")[0] for line in lines_of("grpo", {"loss": {"loss_type": "cispo", "epsilon": 0.1, "delta": 3.0}})] == [
        "loss.epsilon:",
        "loss.delta:",
    ]
    # of an unknown loss nothing more can be said
    (line,) = lines_of("grpo", {"loss": {"loss_type": "gropo", "delta": 0.5, "args": {"a": 1}}})
    assert line == "loss.loss_type: unknown loss 'gropo'; did you mean 'grpo'?"


def test_losses_are_checked_without_torch() -> None:
    code = (
        "import sys\nfrom surogate_rl.config import parse_config\n"
        "parse_config({'model': 'm', 'output_dir': 'o', 'datasets': ['d'], 'loss': 'hinge', 'device': 'cpu'}, 'dpo')\n"
        "assert 'torch' not in sys.modules\n"
    )
    environment = {**os.environ, "PYTHONPATH": str(Path(surogate_rl.__file__).parents[1])}
    result = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=120)
    assert (result.returncode, result.stderr) == (0, "")


def test_rewards_from_python_stand_for_the_key() -> None:
    config = parse_config(MINIMAL, "grpo", rewards_given=True)
    assert config.rewards == []
    parse_config({**MINIMAL, "rewards": [{"name": "exact_match", "weight": 0}]}, "grpo", rewards_given=True)


@pytest.mark.parametrize(
    ("command", "keys", "messages"),
    [
        (
            "sft",
            {"lora_rank": 8, "lora_alpha": 16},
            ["lora_rank has no effect while lora is false", "lora_alpha has no effect while lora is false"],
        ),
        ("sft", {"max_steps": 5, "num_train_epochs": 2}, ["num_train_epochs has no effect while max_steps is given"]),
        ("sft", {"save_steps": 0, "save_total_limit": 9}, ["save_total_limit has no effect while save_steps is 0"]),
        (
            "sft",
            {"lr_scheduler_type": "constant", "warmup_steps": 5},
            ["warmup_steps has no effect while lr_scheduler_type is constant; constant_with_warmup uses it"],
        ),
        (
            "sft",
            {"eval": {**EVAL, "max_completion_length": 5}},
            ["eval.max_completion_length has no effect while eval has no rewards: the loss on its rows is measured"],
        ),
        ("sft", {"run_name": "x"}, ["run_name has no effect while report_to has no wandb"]),
        ("grpo", {"eval": {**EVAL, "top_k": 5}}, ["eval.top_k has no effect while eval.temperature is 0"]),
        (
            "grpo",
            {"loss": {"mismatch_cap": 2.0}},
            ["loss.mismatch_cap has no effect while loss.mismatch is auto: the native engine needs none while max_staleness is 0"],
        ),
        ("grpo", {"loss": {"mismatch_cap": 2.0}, "rollouts": {"max_staleness": 1}}, []),
        (
            "grpo",
            {"loss": {"mismatch": "none"}, "rollouts": {"max_staleness": 1}},
            ["loss.mismatch: none trains what older weights sampled as if the present ones had; auto weighs it"],
        ),
        (
            "grpo",
            {"rollouts": {"dynamic_sampling": {"max_rounds": 2}}},
            ["rollouts.dynamic_sampling.max_rounds has no effect while rollouts.dynamic_sampling.enabled is false"],
        ),
    ],
)
def test_keys_without_effect_are_told(command: Command, keys: dict[str, Any], messages: list[str]) -> None:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", ConfigWarning)
        parse_config({**BASES[command], **keys}, command)
    assert [str(warning.message) for warning in caught if warning.category is ConfigWarning] == messages


@pytest.mark.parametrize("key", ["adapter", "resume"])
def test_a_text_too_long_for_a_path_is_no_path(key: str) -> None:
    (line,) = lines_of("sft", {key: "x" * 5000, "lora": True})
    assert line.startswith(f"{key}: no ")
