"""metrics.jsonl, and services that must not harm a run."""

from __future__ import annotations

import json
import logging
import os
import signal
import subprocess
import sys
import time
from datetime import datetime
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import surogate_rl
from surogate_rl.config import parse_config
from surogate_rl.tracking import Tracker, read_metrics


def rows(directory: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (directory / "metrics.jsonl").read_text().splitlines()]


def test_lines(tmp_path: Path) -> None:
    with Tracker(tmp_path / "run") as tracker:
        tracker.log(1, {"loss": 0.5, "count": 3, "nan": float("nan"), "inf": -np.inf, "none": None})
        assert len(rows(tmp_path / "run")) == 1  # before it is closed
        tracker.log(2, {"loss": np.float32(0.25), "kl": torch.tensor(0.125)})
    first, second = rows(tmp_path / "run")
    assert datetime.fromisoformat(first.pop("time")).utcoffset() is not None
    assert first == {"step": 1, "loss": 0.5, "count": 3, "nan": None, "inf": None, "none": None}
    assert (second["step"], second["loss"], second["kl"]) == (2, 0.25, 0.125)
    assert read_metrics(tmp_path / "run" / "metrics.jsonl") == rows(tmp_path / "run")


def test_what_is_no_metric(tmp_path: Path) -> None:
    with Tracker(tmp_path) as tracker:
        with pytest.raises(ValueError, match=r"^metric 'step': the name is the line's own; choose another$"):
            tracker.log(1, {"step": 1})
        with pytest.raises(ValueError, match=r"^metric 'loss': expected a number, got 'high'$"):
            tracker.log(1, {"loss": "high"})
    assert rows(tmp_path) == []


def test_a_resumed_run_loses_the_lines_after_its_step(tmp_path: Path) -> None:
    with Tracker(tmp_path) as tracker:
        for step in (1, 2, 3, 4):
            tracker.log(step, {"loss": float(step)})
        tracker.log(2, {"eval_loss": 9.0})
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 2, "loss"')  # the process was killed while it wrote
    with Tracker(tmp_path, resume_step=2) as tracker:
        tracker.log(3, {"loss": 30.0})
    assert [(row["step"], row.get("loss"), row.get("eval_loss")) for row in rows(tmp_path)] == [
        (1, 1.0, None),
        (2, 2.0, None),
        (2, None, 9.0),
        (3, 30.0, None),
    ]
    assert [path.name for path in tmp_path.iterdir()] == ["metrics.jsonl"]


@pytest.mark.parametrize("resume_step", [None, 0])
def test_a_run_that_starts_over_keeps_the_old_file(tmp_path: Path, resume_step: int | None) -> None:
    for value in (1.0, 2.0, 3.0):
        with Tracker(tmp_path, resume_step=resume_step) as tracker:
            tracker.log(1, {"loss": value})
    assert [row["loss"] for row in rows(tmp_path)] == [3.0]
    assert [read_metrics(tmp_path / f"metrics-{number}.jsonl")[0]["loss"] for number in (1, 2)] == [1.0, 2.0]


def test_a_full_disk_is_told_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "metrics.jsonl").symlink_to("/dev/full")
    tracker = Tracker(tmp_path)
    with caplog.at_level(logging.WARNING):
        tracker.log(1, {"loss": 1.0})
        tracker.log(2, {"loss": 1.0})
        tracker.close()
    messages = [record.getMessage() for record in caplog.records if "cannot be written" in record.getMessage()]
    assert messages == [f"{tmp_path / 'metrics.jsonl'}: cannot be written: No space left on device; the run goes on without this line"]


# -- services ------------------------------------------------------------------------------------------------------------------

FAKE_WANDB = """
import json, os, sys, time
def record(**entry):
    with open(os.environ["FAKE_LOG"], "a") as file:
        file.write(json.dumps(entry) + "\\n")
class Run:
    def log(self, metrics, step):
        print("noise on stdout")
        {log}
        record(step=step, metrics=metrics)
    def finish(self):
        {finish}
        record(finished=True)
def init(**options):
    {init}
    kept = {{key: options[key] for key in ("project", "name", "id", "resume", "dir")}}
    record(init=kept, seed=options["config"].get("seed"), mode=os.environ.get("WANDB_MODE"))
    return Run()
"""


@pytest.fixture
def wandb(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """A module named wandb that writes down its calls; ``make(init=..., log=..., finish=...)`` adds statements to them."""
    folder = tmp_path / "modules"
    folder.mkdir()

    def make(**bodies: str) -> None:
        (folder / "wandb.py").write_text(FAKE_WANDB.format(**{"init": "pass", "log": "pass", "finish": "pass", **bodies}))

    monkeypatch.setenv("PYTHONPATH", str(folder))
    monkeypatch.syspath_prepend(str(folder))
    monkeypatch.setenv("FAKE_LOG", str(tmp_path / "calls.jsonl"))
    for name in ("WANDB_MODE", "HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE", "WANDB_PROJECT"):
        monkeypatch.delenv(name, raising=False)
    make()
    yield make
    sys.modules.pop("wandb", None)


def calls(tmp_path: Path) -> list[dict[str, Any]]:
    file = tmp_path / "calls.jsonl"
    return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []


def test_wandb_gets_everything(tmp_path: Path, wandb: Any, caplog: pytest.LogCaptureFixture) -> None:
    config = parse_config({"model": "m", "output_dir": "o", "datasets": ["a"], "seed": 7}, "sft")
    run = tmp_path / "my-run"
    with caplog.at_level(logging.WARNING), Tracker(run, ["wandb"], None, config) as tracker:
        tracker.log(1, {"loss": 0.5, "bad": float("nan")})
        tracker.log(2, {"loss": 0.25, "none": None})
    first, one, two, last = calls(tmp_path)
    run_id = (run / "wandb-run-id").read_text().strip()
    assert first == {
        "init": {"project": "surogate-rl", "name": "my-run", "id": run_id, "resume": "allow", "dir": str(run)},
        "seed": 7,
        "mode": None,
    }
    assert (one["step"], one["metrics"]["loss"]) == (1, 0.5)
    assert two == {"step": 2, "metrics": {"loss": 0.25}}
    assert last == {"finished": True}
    assert caplog.records == []
    assert "noise on stdout" in (run / "wandb.log").read_text()


def test_a_resumed_run_goes_on_in_the_same_wandb_run(tmp_path: Path, wandb: Any) -> None:
    ids = []
    for resume_step in (None, 5, None):
        Tracker(tmp_path / "run", ["wandb"], "name", resume_step=resume_step).close()
        ids.append((tmp_path / "run" / "wandb-run-id").read_text())
    assert ids[0] == ids[1] != ids[2]
    assert [entry["init"]["id"] + "\n" for entry in calls(tmp_path) if "init" in entry] == ids


@pytest.mark.parametrize(("name", "mode"), [("HF_HUB_OFFLINE", "offline"), ("WANDB_MODE", "1")])
def test_offline_is_respected(tmp_path: Path, wandb: Any, monkeypatch: pytest.MonkeyPatch, name: str, mode: str) -> None:
    monkeypatch.setenv(name, "1")
    Tracker(tmp_path / "run", ["wandb"]).close()
    assert calls(tmp_path)[0]["mode"] == mode


@pytest.mark.parametrize(
    ("bodies", "message"),
    [
        ({"init": "raise RuntimeError('no key\\nmore')"}, "failed: RuntimeError: no key"),
        ({"log": "raise ConnectionError('gone')"}, "failed: ConnectionError: gone"),
        ({"finish": "raise OSError('late')"}, "failed: OSError: late"),
        ({"init": "os._exit(7)"}, "ended with exit code 7"),
        ({"init": "raise SystemExit(3)"}, "ended with exit code 3"),
    ],
)
def test_a_service_that_fails_is_a_warning(
    tmp_path: Path, wandb: Any, caplog: pytest.LogCaptureFixture, bodies: dict[str, str], message: str
) -> None:
    wandb(**bodies)
    with caplog.at_level(logging.WARNING), Tracker(tmp_path / "run", ["wandb"]) as tracker:
        for step in range(50):
            tracker.log(step, {"loss": 1.0})
    assert [record.getMessage() for record in caplog.records] == [
        f"report_to: wandb {message}; the run goes on without it (see {tmp_path / 'run' / 'wandb.log'})"
    ]
    assert len(rows(tmp_path / "run")) == 50


@pytest.mark.parametrize("where", ["init", "log", "finish"])
def test_a_service_that_hangs_is_ended(tmp_path: Path, wandb: Any, caplog: pytest.LogCaptureFixture, where: str) -> None:
    wandb(**{where: "open(os.environ['FAKE_LOG'] + '.pid', 'w').write(str(os.getpid())); time.sleep(600)"})
    begin = time.monotonic()
    seconds = 6.0 if where == "finish" else 4.0
    with caplog.at_level(logging.WARNING), Tracker(tmp_path / "run", ["wandb"], close_seconds=seconds) as tracker:
        for step in range(2000):
            tracker.log(step, {"loss": 1.0, **{f"metric_{index}": 1.0 for index in range(20)}})  # more than a pipe holds
        logged = time.monotonic() - begin
        # until it hangs, or has nothing left to do but to finish
        name, sign = ("calls.jsonl", '"step": 1999') if where == "finish" else ("calls.jsonl.pid", "")
        while not (file := tmp_path / name).exists() or sign not in file.read_text():
            assert time.monotonic() - begin < 120
            time.sleep(0.05)
        closing = time.monotonic()
    assert logged < 20
    assert time.monotonic() - closing < 30
    assert [record.getMessage() for record in caplog.records] == [
        f"report_to: wandb did not finish within {seconds:g} s and was ended; the run goes on without it "
        f"(see {tmp_path / 'run' / 'wandb.log'})"
    ]
    with pytest.raises(ProcessLookupError):
        os.kill(int((tmp_path / "calls.jsonl.pid").read_text()), 0)
    assert len(rows(tmp_path / "run")) == 2000


def test_a_service_that_is_not_installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with caplog.at_level(logging.WARNING), Tracker(tmp_path, ["wandb", "tensorboard"]) as tracker:
        tracker.log(1, {"loss": 1.0})
    assert [record.getMessage() for record in caplog.records] == [
        "report_to: wandb is not installed, the run goes on without it; pip install wandb",
        "report_to: tensorboard is not installed, the run goes on without it; pip install tensorboard",
    ]
    assert len(rows(tmp_path)) == 1


def test_a_killed_run_leaves_no_service_behind(tmp_path: Path, wandb: Any) -> None:
    """Its input ends with the run, so that it sends what it has and stops."""
    script = (
        "import sys, time\nfrom surogate_rl.tracking import Tracker\n"
        "tracker = Tracker(sys.argv[1], ['wandb'])\ntracker.log(1, {'loss': 1.0})\nprint('logged', flush=True)\ntime.sleep(600)\n"
    )
    path = os.pathsep.join([os.environ["PYTHONPATH"], str(Path(surogate_rl.__file__).parents[1])])
    process = subprocess.Popen(
        [sys.executable, "-c", script, str(tmp_path / "run")], env={**os.environ, "PYTHONPATH": path}, stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "logged\n"
    deadline = time.monotonic() + 120
    while not any("step" in entry for entry in calls(tmp_path)) and time.monotonic() < deadline:
        time.sleep(0.05)
    process.send_signal(signal.SIGKILL)
    process.wait()
    while {"finished": True} not in calls(tmp_path) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert {"finished": True} in calls(tmp_path)


def test_tensorboard_reads_what_was_logged(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    with caplog.at_level(logging.WARNING):
        with Tracker(tmp_path, ["tensorboard"]) as tracker:
            for step in (1, 2, 3):
                tracker.log(step, {"loss": 1.0 / step, "nothing": None})
        time.sleep(1.1)  # TensorBoard orders its files by seconds
        with Tracker(tmp_path, ["tensorboard"], resume_step=2) as tracker:
            tracker.log(3, {"loss": 30.0})
            tracker.log(4, {"loss": 40.0})
    assert caplog.records == []
    reader = EventAccumulator(str(tmp_path / "tensorboard"))
    reader.Reload()
    assert reader.Tags()["scalars"] == ["loss"]
    assert [(event.step, event.value) for event in reader.Scalars("loss")] == [(1, 1.0), (2, 0.5), (3, 30.0), (4, 40.0)]
