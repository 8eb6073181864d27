"""The command line: exit codes, what stands on which stream, Ctrl-C."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from typer.testing import CliRunner, Result

import surogate_rl
from surogate_rl.cli import app
from surogate_rl.config import load_config
from surogate_rl.errors import InputError, RunError

ROOT = Path(__file__).parents[2]
SFT = "model: m\noutput_dir: out\ndatasets: [rows.jsonl]\n"


@dataclass
class FakeResult:
    output_dir: Path
    steps: int = 12
    final_model: Path = Path("out/final")
    metrics: dict[str, float] = field(default_factory=lambda: {"loss": 0.25, "unshown": 1.0})
    evaluation: dict[str, float] = field(default_factory=lambda: {"eval_loss": 0.5})


@dataclass
class FakePlan:
    lines: list[str] = field(default_factory=lambda: ["memory", "  weights 12 MiB", "steps", "  12 steps"])


Act = Callable[[Any], Any]


@pytest.fixture
def cli(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Result]:
    """Runs the command line in an empty folder with trainers that do what ``act`` says."""
    monkeypatch.chdir(tmp_path)

    def run(*args: str, act: Act = lambda config: FakeResult(Path(config.output_dir))) -> Result:
        trainers = ModuleType("surogate_rl.trainers")
        for command in ("sft", "dpo", "grpo"):
            setattr(trainers, f"run_{command}", act)
        trainers.plan = lambda config: FakePlan()  # type: ignore[attr-defined]
        monkeypatch.setitem(sys.modules, "surogate_rl.trainers", trainers)
        monkeypatch.setattr(surogate_rl, "trainers", trainers, raising=False)
        return CliRunner().invoke(app, list(args))

    return run


def test_version(cli: Callable[..., Result]) -> None:
    result = cli("--version")
    assert (result.exit_code, result.stdout) == (0, f"surogate-rl {surogate_rl.__version__}\n")
    assert f'version = "{surogate_rl.__version__}"' in (ROOT / "pyproject.toml").read_text()


def test_a_run_ends_with_a_summary(cli: Callable[..., Result]) -> None:
    Path("config.yaml").write_text(SFT)
    result = cli("sft", "config.yaml", "--set", "seed=3")
    assert result.exit_code == 0
    assert result.stdout == ""
    assert [re.split(r"\s{2,}", line.strip()) for line in result.stderr.splitlines()] == [
        ["steps", "12"],
        ["loss", "0.25"],
        ["eval_loss", "0.5"],
        ["model", "out/final"],
        ["metrics", "out/metrics.jsonl"],
    ]


def test_overrides_reach_the_trainer(cli: Callable[..., Result]) -> None:
    Path("config.yaml").write_text(SFT)
    seen: list[Any] = []

    def act(config: Any) -> FakeResult:
        seen.append(config)
        return FakeResult(Path("out"))

    assert cli("sft", "config.yaml", "--set", "seed=3", "--set", "lora=true", act=act).exit_code == 0
    assert (seen[0].seed, seen[0].lora) == (3, True)


def test_dry_run_prints_yaml_that_loads_and_the_plan(cli: Callable[..., Result]) -> None:
    Path("config.yaml").write_text(SFT)

    def act(config: Any) -> Any:
        raise AssertionError("a dry run must not run")

    result = cli("sft", "config.yaml", "--dry-run", "--set", "learning_rate=1e-4", act=act)
    assert (result.exit_code, result.stderr) == (0, "")
    assert result.stdout.splitlines()[0] == f"# surogate-rl {surogate_rl.__version__} sft, every key with its value"
    assert result.stdout.endswith("#\n# memory\n#   weights 12 MiB\n# steps\n#   12 steps\n")
    assert "learning_rate: 0.0001\n" in result.stdout
    Path("resolved.yaml").write_text(result.stdout)
    assert load_config("resolved.yaml", "sft") == load_config("config.yaml", "sft", ["learning_rate=1e-4"])
    assert not Path("out").exists()


def test_a_wrong_configuration_is_exit_code_2(cli: Callable[..., Result]) -> None:
    Path("config.yaml").write_text(SFT + "learning_rte: 1e-5\npacking: no\n")
    result = cli("sft", "config.yaml")
    assert result.exit_code == 2
    assert result.stdout == ""
    assert result.stderr == (
        "config.yaml:4: unknown key 'learning_rte'; did you mean 'learning_rate'?\n"
        "config.yaml:5: packing: expected true or false, got 'no'; write false\n"
    )
    missing = cli("dpo", "nowhere.yaml")
    assert (missing.exit_code, missing.stderr) == (2, "nowhere.yaml: no such file; give the path of a YAML configuration\n")


def test_options_that_a_loss_does_not_have_are_located(cli: Callable[..., Result]) -> None:
    Path("config.yaml").write_text(SFT + "rewards: [exact_match]\nloss:\n  loss_type: grpo\n  sapo_temperature_pos: 2.0\n")
    result = cli("grpo", "config.yaml")
    assert result.exit_code == 2
    assert result.stderr.startswith("config.yaml:7: loss.sapo_temperature_pos: 2.0 has no effect with loss_type grpo")
    overridden = cli("grpo", "config.yaml", "--set", "loss.sapo_temperature_pos=3.0")
    assert overridden.stderr.startswith("--set loss.sapo_temperature_pos=3.0: loss.sapo_temperature_pos: 3.0 has no effect")


def test_keys_without_effect_are_a_warning(cli: Callable[..., Result]) -> None:
    Path("config.yaml").write_text(SFT + "lora_rank: 4\n")
    result = cli("sft", "config.yaml", "--dry-run")
    assert (result.exit_code, result.stderr) == (0, "warning: config.yaml:4: lora_rank has no effect while lora is false\n")


@pytest.mark.parametrize(
    ("error", "code", "text"),
    [
        (InputError("rows.jsonl: no column 'prompt'"), 2, "error: rows.jsonl: no column 'prompt'\n"),
        (RunError("the disk is full"), 1, "error: the disk is full\n"),
        (MemoryError("it does not fit"), 1, "error: it does not fit\n"),
        (ExceptionGroup("two", [InputError("inner"), KeyError("x")]), 2, "error: inner\n"),
    ],
)
def test_errors_of_a_run(cli: Callable[..., Result], error: Exception, code: int, text: str) -> None:
    Path("config.yaml").write_text(SFT)

    def act(config: Any) -> Any:
        raise error

    result = cli("sft", "config.yaml", act=act)
    assert (result.exit_code, result.stderr) == (code, text)
    debug = cli("sft", "config.yaml", "--debug", act=act)
    assert debug.exit_code == code
    assert "Traceback (most recent call last)" in debug.stderr


@pytest.mark.parametrize("error", [ValueError("shapes differ"), FileNotFoundError("gone"), KeyError("advantage")])
def test_a_fault_is_not_called_bad_input(cli: Callable[..., Result], error: Exception) -> None:
    """Whatever its type: it says of which type and where, and that there is a traceback to be had."""
    Path("config.yaml").write_text(SFT)

    def act(config: Any) -> Any:
        raise error

    result = cli("sft", "config.yaml", act=act)
    assert result.exit_code == 1
    line = act.__code__.co_firstlineno + 1
    assert result.stderr == (
        f"error: {type(error).__name__}: {error} ({__file__}:{line}, in act)\nrun again with --debug for the traceback\n"
    )


def test_report_of_no_run(cli: Callable[..., Result]) -> None:
    missing = cli("report", "nowhere")
    assert (missing.exit_code, missing.stderr) == (2, "error: nowhere: no such folder; give the output_dir of a run\n")
    Path("empty").mkdir()
    empty = cli("report", "empty")
    assert (empty.exit_code, empty.stderr) == (2, "error: empty: holds no metrics.jsonl, so it is not the output_dir of a run\n")


def test_usage_errors(cli: Callable[..., Result]) -> None:
    assert cli("sft").exit_code == 2
    assert cli("train", "config.yaml").exit_code == 2


def run_process(*args: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "surogate_rl.cli", *args], cwd=cwd, env=environment(), capture_output=True, text=True, timeout=120
    )


def environment() -> dict[str, str]:
    """The child finds the package where this process found it."""
    return {**os.environ, "PYTHONPATH": str(Path(surogate_rl.__file__).parents[1])}


def test_a_real_process(tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text(SFT + "seed: 1\nseed: 2\n")
    result = run_process("grpo", "config.yaml", "--set", "rewards=[exact_match]", cwd=tmp_path)
    assert (result.returncode, result.stdout) == (2, "")
    assert result.stderr == "config.yaml:5: duplicate key 'seed'; it is already on line 4, remove one of them\n"


STOPPED = """
import sys, time, types
import surogate_rl
from surogate_rl import cli
trainers = types.ModuleType("surogate_rl.trainers")
def run(config):
    {body}
trainers.run_sft = run
sys.modules["surogate_rl.trainers"] = surogate_rl.trainers = trainers
cli.main()
"""


@pytest.mark.parametrize(
    ("body", "checkpoints", "text"),
    [
        ("print('running', flush=True); time.sleep(60)", (), "stopped; no checkpoint was saved yet\n"),
        (
            "print('running', flush=True); time.sleep(60)",
            ("step-00000020", "step-00000100"),
            "stopped at once; the newest checkpoint is out/checkpoints/step-00000100; go on with --set resume=auto\n",
        ),
        (
            "try:\n        print('running', flush=True)\n        time.sleep(60)\n"
            "    except KeyboardInterrupt:\n        raise KeyboardInterrupt('saved at step 7')",
            (),
            "saved at step 7\n",
        ),
    ],
)
def test_ctrl_c_says_what_was_saved(tmp_path: Path, body: str, checkpoints: tuple[str, ...], text: str) -> None:
    (tmp_path / "config.yaml").write_text(SFT)
    for name in checkpoints:
        (tmp_path / "out" / "checkpoints" / name).mkdir(parents=True)
    (tmp_path / "driver.py").write_text(STOPPED.format(body=body))
    process = subprocess.Popen(
        [sys.executable, "driver.py", "sft", "config.yaml"],
        cwd=tmp_path, env=environment(), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    assert process.stdout is not None
    assert process.stdout.readline() == "running\n"
    process.send_signal(signal.SIGINT)
    _, stderr = process.communicate(timeout=60)
    assert (process.returncode, stderr) == (130, text)


def test_a_reader_that_leaves_is_no_traceback(tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text(SFT)
    script = STOPPED.format(body="pass").replace(
        "trainers.run_sft = run", "trainers.plan = lambda config: types.SimpleNamespace(lines=['x'] * 99999)"
    )
    (tmp_path / "driver.py").write_text(script)
    process = subprocess.Popen(
        [sys.executable, "driver.py", "sft", "config.yaml", "--dry-run"],
        cwd=tmp_path, env=environment(), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    assert process.stdout is not None
    assert process.stdout.readline().startswith("# surogate-rl")
    process.stdout.close()
    assert process.stderr is not None
    assert process.stderr.read() == ""
    assert process.wait(60) == 1


def test_importing_the_package_is_light() -> None:
    code = (
        "import sys, surogate_rl, surogate_rl.cli, surogate_rl.config, surogate_rl.tracking, surogate_rl.report\n"
        "heavy = {'torch', 'transformers', 'datasets', 'pyarrow', 'numpy', 'surogate_rl._core'} & set(sys.modules)\n"
        "assert not heavy, heavy\n"
        "assert surogate_rl.reward.__module__.startswith('surogate_rl.rewards')\n"
    )
    result = subprocess.run([sys.executable, "-c", code], env=environment(), capture_output=True, text=True, timeout=120)
    assert result.stderr == ""
    assert result.returncode == 0
