"""Bad input, from the command line: the whole text that the user reads, and the exit code."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from typer.testing import CliRunner

from surogate_rl.cli import app

TINY = Path(__file__).resolve().parents[2] / "examples" / "quickstart" / "tiny"

COMMON = f"""model: {TINY}
init: random
output_dir: out
datasets: [rows.jsonl]
sequence_len: 32
max_steps: 2
save_steps: 0
threads: 1
"""
SFT = COMMON + "per_device_train_batch_size: 8\n"
GRPO = COMMON + "rewards: [REWARD]\nrollouts: {prompts_per_step: 2, num_generations: 2, max_completion_length: 4}\n"

SUMS = [("12=", "12"), ("21=", "12"), ("43=", "34"), ("34=", "34")]
PAIRS = "".join(json.dumps({"prompt": prompt, "completion": answer}) + "\n" for prompt, answer in SUMS)
TASKS = "".join(json.dumps({"prompt": prompt, "answer": answer}) + "\n" for prompt, answer in SUMS)
READ = "rows.jsonl (prompt): 4 rows, 4 kept; 12 tokens\n"

Run = Callable[..., tuple[int, str]]


@pytest.fixture
def cli(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Run:
    """(exit code, standard error) of a command in an empty folder; standard output must be empty. `files` are written beforehand."""
    monkeypatch.chdir(tmp_path)

    def run(command: str, config: str, files: dict[str, str] | None = None, *sets: str) -> tuple[int, str]:
        for name, text in {"config.yaml": config, **(files or {})}.items():
            Path(name).parent.mkdir(parents=True, exist_ok=True)
            Path(name).write_text(text, encoding="utf-8")
        result = CliRunner().invoke(app, [command, "config.yaml", *(part for text in sets for part in ("--set", text))])
        assert result.stdout == ""
        return result.exit_code, re.sub(r"  [^ ]+ tok/s(  eta [0-9:-]+)?", "", result.stderr)

    return run


def reward(body: str, parameters: str = "completion") -> dict[str, str]:
    return {"rows.jsonl": TASKS, "mine.py": f"def f({parameters}):\n    {body}\n"}


# ---- files and models ------------------------------------------------------------------------------------------------------------


def test_missing_configuration(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    result = CliRunner().invoke(app, ["sft", "nowhere.yaml"])
    assert (result.exit_code, result.stderr) == (2, "nowhere.yaml: no such file; give the path of a YAML configuration\n")


def test_missing_data_file(cli: Run, tmp_path: Path) -> None:
    assert cli("sft", SFT) == (
        2,
        f"error: datasets: no such file or directory: rows.jsonl (looked for {tmp_path}/rows.jsonl); "
        "paths count from the configuration's folder, then from the folder you start in\n",
    )


def test_missing_model(cli: Run) -> None:
    assert cli("sft", SFT.replace(str(TINY), "./nowhere"), {"rows.jsonl": PAIRS}) == (
        2,
        "error: model './nowhere': there is no such directory; check the path\n",
    )


def test_missing_weights(cli: Run) -> None:
    assert cli("sft", SFT.replace("init: random\n", ""), {"rows.jsonl": PAIRS}) == (
        2,
        f"error: {TINY}: no weights; expected model.safetensors or model.safetensors.index.json; give a complete checkpoint, "
        "or set init: random to start from the config alone\n",
    )


def test_missing_reward_file(cli: Run) -> None:
    assert cli("grpo", GRPO.replace("REWARD", "mine.py:f"), {"rows.jsonl": TASKS}) == (
        2,
        "config.yaml:9: rewards[0].name: no file 'mine.py'; "
        "paths count from the configuration's folder, then from the folder you start in\n",
    )


def test_missing_reward_function(cli: Run, tmp_path: Path) -> None:
    assert cli(
        "grpo", GRPO.replace("REWARD", "mine.py:short"), {"rows.jsonl": TASKS, "mine.py": "def shorts(completion): return 1.0\n"}
    ) == (
        2,
        f"error: reward 'mine.py:short': {tmp_path}/mine.py has no function 'short'; did you mean 'shorts'? Functions there: shorts\n",
    )


def test_unknown_model_family(cli: Run) -> None:
    files = {"rows.jsonl": PAIRS, "other/config.json": '{"model_type": "gemma3"}'}
    assert cli("sft", SFT.replace(str(TINY), "other"), files) == (
        2,
        "error: other: model_type 'gemma3' is not supported; supported are llama, mistral, qwen2, qwen3\n",
    )


# ---- keys ------------------------------------------------------------------------------------------------------------------------


def test_unknown_key(cli: Run) -> None:
    assert cli("sft", SFT + "learning_rte: 1e-5\n", {"rows.jsonl": PAIRS}) == (
        2,
        "config.yaml:10: unknown key 'learning_rte'; did you mean 'learning_rate'?\n",
    )


def test_wrong_type(cli: Run) -> None:
    assert cli("sft", SFT + "learning_rate: fast\n", {"rows.jsonl": PAIRS}, "packing=no") == (
        2,
        "config.yaml:10: learning_rate: expected a number greater than 0, got 'fast'\n"
        "--set packing=no: packing: expected true or false, got 'no'; write false\n",
    )


def test_group_of_one(cli: Run) -> None:
    assert cli("grpo", GRPO.replace("REWARD", "exact_match").replace("num_generations: 2", "num_generations: 1")) == (
        2,
        "config.yaml:10: rollouts.num_generations: a group of one has no baseline, grpo learns nothing from it; "
        "set it to 2 or more, or loss: reinforce_plus_plus, whose baseline is the batch's\n",
    )


def test_top_p_in_training(cli: Run) -> None:
    assert cli("grpo", GRPO.replace("REWARD", "exact_match"), None, "rollouts.top_p=0.9") == (
        2,
        "--set rollouts.top_p=0.9: rollouts.top_p: 0.9 would bias the ratio in training; it belongs under eval; "
        "set it to 1 or remove the key\n",
    )


@pytest.mark.parametrize("command", ["sft", "grpo"])
def test_lora_on_a_tied_head(cli: Run, command: str) -> None:
    config, rows = (SFT, PAIRS) if command == "sft" else (GRPO.replace("REWARD", "exact_match"), TASKS)
    assert cli(command, config + "lora: true\nlora_target_modules: [q_proj, lm_head]\n", {"rows.jsonl": rows}) == (
        2,
        "error: lora_target_modules: lm_head cannot carry an adapter in this model, because its head is tied to the embedding "
        "(tie_word_embeddings: true); remove lm_head from lora_target_modules\n",
    )


# ---- data ------------------------------------------------------------------------------------------------------------------------


def test_missing_column(cli: Run) -> None:
    assert cli("sft", SFT, {"rows.jsonl": '{"question": "12", "solution": "12"}\n'}) == (
        2,
        """error: rows.jsonl: cannot tell what its rows are; the columns are question (text), solution (text); sft can use
    messages: `messages` (or `conversations`): a list of {role, content}
    sharegpt: `conversations`: a list of {from, value}
    prompt_completion: `prompt` and `completion`: text or lists of messages
    instruction: `instruction` and `output`, `input` if there is one
    text: `text`
  name columns with `columns`, e.g. `columns: {prompt: question, completion: solution}`
""",
    )


def test_missing_column_of_one_row(cli: Run) -> None:
    assert cli("sft", SFT, {"rows.jsonl": PAIRS + '{"prompt": "12=", "answer": "12"}\n'}) == (
        2,
        "error: rows.jsonl:5: no column 'completion'; the row has prompt, answer\n",
    )


def test_missing_column_of_a_reward(cli: Run) -> None:
    assert cli("grpo", GRPO.replace("REWARD", "exact_match"), {"rows.jsonl": '{"prompt": "12=", "anser": "12"}\n'}) == (
        2,
        "rows.jsonl (prompt): 1 row, 1 kept; 3 tokens\n"
        "error: reward 'exact_match': parameter 'answer' asks for a column which the data set does not have; did you mean 'anser'? "
        "Columns: anser. Besides columns it can take: prompt, completion, messages, tokens, episode, trainer_state, log_metric, log_extra. "
        "Rename a column under datasets: columns, give the value under args, or give the parameter a default.\n",
    )


def test_empty_data_set(cli: Run) -> None:
    assert cli("sft", SFT, {"rows.jsonl": "\n"}) == (2, "error: rows.jsonl: the data set is empty (0 rows); check the path and the split\n")


def test_broken_row(cli: Run) -> None:
    assert cli("sft", SFT, {"rows.jsonl": PAIRS + '{"prompt": \n'}) == (
        2,
        "error: rows.jsonl:5: not valid JSON: Expecting value at column 12; every line must be one JSON object\n",
    )


def test_rows_nested_without_end(cli: Run) -> None:
    assert cli("sft", SFT, {"rows.jsonl": PAIRS + '{"prompt": ' + 3000 * "[" + 3000 * "]" + "}\n"}) == (
        2,
        "error: rows.jsonl:5: lists or objects within each other too deeply to be read\n",
    )


def test_pairs_that_are_all_alike(cli: Run) -> None:
    assert cli("dpo", SFT, {"rows.jsonl": '{"prompt": "12=", "chosen": "12", "rejected": "12"}\n'}) == (
        2,
        "rows.jsonl (preference): 1 row, 1 kept; 1 pair with identical sides, which teach nothing; 12 tokens, 6 of them trained\n"
        "error: datasets: chosen and rejected are the same tokens in every pair, which teaches nothing; check the columns\n",
    )


def test_context_shorter_than_sequence_len(cli: Run) -> None:
    """The model's own limit; what lies beyond it was never learned."""
    message = (
        f"error: sequence_len: 65 is more than the model's context of 64 tokens (max_position_embeddings of {TINY}); "
        "set sequence_len: 64 or less\n"
    )
    for command, config, rows in (("sft", SFT, PAIRS), ("grpo", GRPO.replace("REWARD", "exact_match"), TASKS)):
        assert cli(command, config.replace("sequence_len: 32", "sequence_len: 65"), {"rows.jsonl": rows}) == (2, message)


def test_prompts_longer_than_the_context(cli: Run) -> None:
    long = json.dumps({"prompt": "1" * 40, "answer": "1"}) + "\n"
    assert cli("grpo", GRPO.replace("REWARD", "exact_match"), {"rows.jsonl": 3 * long}) == (
        2,
        "error: rows.jsonl: no prompt is left of 3 rows: 3 are longer than rollouts.max_prompt_length (28); "
        "raise rollouts.max_prompt_length, which is by default what sequence_len leaves beside max_completion_length\n",
    )
    code, text = cli("grpo", GRPO.replace("REWARD", "exact_match"), {"rows.jsonl": TASKS + long})
    assert code == 0
    assert text.startswith("rows.jsonl (prompt): 5 rows, 4 kept; 1 dropped as too long; 12 tokens\nstep 1/2  ")


def test_rows_longer_than_the_context(cli: Run) -> None:
    assert cli("sft", SFT, {"rows.jsonl": json.dumps({"prompt": "1" * 40, "completion": "1"}) + "\n"}) == (
        2,
        "error: rows.jsonl: no example is left of 1 row: 1 is longer than sequence_len (32); "
        "raise sequence_len or set overlong: truncate\n",
    )


def test_a_task_whose_package_is_not_there(cli: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in sys.modules if name.startswith("reasoning_gym")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "reasoning_gym", None)
    assert cli("sft", SFT.replace("rows.jsonl", "reasoning_gym/chain_sum")) == (
        2,
        "error: reasoning_gym/chain_sum: the package reasoning-gym is not installed "
        "(No module named 'reasoning_gym.factory'; 'reasoning_gym' is not a package); "
        "run: pip install reasoning-gym\n",
    )


# ---- rewards ---------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("body", "reason", "detail"),
    [
        ("raise KeyError('x')", "exception", "KeyError: 'x'"),
        ("raise SystemExit(3)", "exception", "SystemExit: 3"),
        ("return float('nan')", "non_finite", "returned nan"),
        ("return 'good'", "not_a_number", "returned 'good' (str), expected a number or None"),
        ("import os; os._exit(3)", "died", "the worker process died (exit code 3)"),
        ("while True: pass", "timeout", "no result after 1 s; its worker was killed"),
    ],
)
def test_a_reward_that_fails_is_told_and_ends_the_run(cli: Run, tmp_path: Path, body: str, reason: str, detail: str) -> None:
    timeout = 1 if reason == "timeout" else 30
    config = GRPO.replace("REWARD", f"{{name: 'mine.py:f', timeout: {timeout}}}") + "max_skipped_steps: 2\n"
    frame = f'Traceback (most recent call last):\n  File "{tmp_path}/mine.py", line 2, in f\n    {body}\n' if reason == "exception" else ""
    told = f"warning: reward 'f': no reward for a completion ({reason}): {frame}{detail}\n"
    cause = f"reward 'f': {reason}: {detail}"
    assert cli("grpo", config, reward(body)) == (
        1,
        READ
        + told
        + f"step 1: no completion could be scored, nothing was learned: {cause}\n"
        + "step 1/2  length 3.75  clipped 0.75  unscored 4  grad_norm 0  lr 1.00e-06\n"
        + told
        + f"error: no completion could be scored in 2 steps in a row, so nothing is learned: {cause} "
        + "(max_skipped_steps is the number of such steps that a run bears)\n",
    )


def test_a_reward_that_never_applies(cli: Run) -> None:
    config = GRPO.replace("REWARD", "mine.py:f") + "max_skipped_steps: 1\n"
    assert cli("grpo", config, reward("return None")) == (
        1,
        READ
        + "error: no completion could be scored in 1 step in a row, so nothing is learned: every reward returned None (does not apply) "
        "(max_skipped_steps is the number of such steps that a run bears)\n",
    )


@pytest.mark.parametrize(
    ("body", "problem"),
    [
        ("return [1.0]", "returned 1 reward, expected 2 (exactly one for each completion)"),
        ("return 1.0", "returned 1.0 (float), expected a list of 2 rewards"),
    ],
)
def test_a_reward_of_the_wrong_length(cli: Run, body: str, problem: str) -> None:
    config = GRPO.replace("REWARD", "mine.py:f")
    assert cli("grpo", config, reward(body, "completions, **columns")) == (2, READ + f"error: reward 'f' {problem}\n")


def test_a_reward_file_that_is_no_python(cli: Run, tmp_path: Path) -> None:
    assert cli("grpo", GRPO.replace("REWARD", "mine.py:f"), {"rows.jsonl": TASKS, "mine.py": "def f(completion) return 1.0\n"}) == (
        2,
        f"error: reward 'mine.py:f': importing {tmp_path}/mine.py failed:\n"
        f'File "{tmp_path}/mine.py", line 1\n'
        "    def f(completion) return 1.0\n"
        "                      ^^^^^^\n"
        "SyntaxError: expected ':'\n",
    )


# ---- objectives ------------------------------------------------------------------------------------------------------------------


def test_an_objective_that_raises(cli: Run, tmp_path: Path) -> None:
    files = {"rows.jsonl": PAIRS, "own.py": "def loss(stats, batch, totals):\n    return batch.per_token['advantage']\n"}
    assert cli("sft", SFT + "loss: own.py:loss\n", files) == (
        1,
        "rows.jsonl (prompt_completion): 4 rows, 4 kept; 24 tokens, 12 of them trained\n"
        f"error: KeyError: 'advantage' ({tmp_path}/own.py:2, in loss)\n"
        "run again with --debug for the traceback\n",
    )


def test_an_objective_that_returns_no_loss(cli: Run) -> None:
    files = {"rows.jsonl": PAIRS, "own.py": "def loss(stats, batch, totals):\n    return 1.0\n"}
    assert cli("sft", SFT + "loss: own.py:loss\n", files) == (
        2,
        "rows.jsonl (prompt_completion): 4 rows, 4 kept; 24 tokens, 12 of them trained\n"
        "error: own.py:loss: returned float, expected a scalar torch.Tensor or a Loss\n",
    )
