"""Progress with and without a terminal."""

from __future__ import annotations

import io
import os
import pty
import re
import subprocess
import sys
from pathlib import Path

import pytest

import surogate_rl
from surogate_rl.console import Progress, format_number, format_seconds


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0.0, "0"),
        (3.0, "3"),
        (0.51234, "0.5123"),
        (1234.5678, "1235"),
        (123456.7, "123457"),
        (1.5e-5, "1.50e-05"),
        (12345678.0, "1.23e+07"),
        (-0.25, "-0.25"),
        (float("nan"), "nan"),
        (float("-inf"), "-inf"),
    ],
)
def test_numbers(value: float, text: str) -> None:
    assert format_number(value) == text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0.4, "0:00"), (42, "0:42"), (725, "12:05"), (59.7, "1:00"), (11220, "3:07:00"), (176400, "2d 01:00:00"), (float("inf"), "-")],
)
def test_durations(seconds: float, text: str) -> None:
    assert format_seconds(seconds) == text


def test_plain_lines() -> None:
    stream = io.StringIO()
    with Progress(stream) as progress:
        progress.note("rows.jsonl: 10 rows [kept 9]")
        progress.start("grpo", 300, 0)
        progress.update(0, {"eval_reward": 0.25})
        progress.update(1, {"unshown": 5.0, "learning_rate": 1e-6, "reward": 0.5, "loss": -0.01, "tokens_per_second": 849.6})
        progress.update(300, {"loss": float("nan"), "eval_reward": 0.75})
    lines = stream.getvalue().splitlines()
    assert lines[0] == "rows.jsonl: 10 rows [kept 9]"
    assert lines[1] == "eval at step 0  reward 0.25"
    assert re.fullmatch(r"step   1/300  loss -0\.01  reward 0\.5  lr 1\.00e-06  850 tok/s  eta \d+:\d\d", lines[2])
    assert lines[3:] == ["step 300/300  loss nan", "eval at step 300  reward 0.75"]
    assert "\x1b" not in stream.getvalue()


def test_long_lines_are_not_broken() -> None:
    stream = io.StringIO()
    Progress(stream).note("x" * 500)
    assert stream.getvalue() == "x" * 500 + "\n"


def test_a_closed_stream_ends_nothing() -> None:
    stream = io.StringIO()
    progress = Progress(stream)
    progress.start("sft", 2)
    stream.close()
    progress.update(1, {"loss": 1.0})
    progress.note("x")
    progress.stop()


LIVE = """
import time
from surogate_rl.console import Progress
progress = Progress()
progress.start("sft", 4, 1)
progress.note("a note")
for step in (2, 3, 4):
    progress.update(step, {"loss": 1.0 / step, "tokens_per_second": 100.0})
progress.update(4, {"eval_loss": 0.125})
progress.stop()
progress.stop()
"""


def on_terminal(**environment: str) -> str:
    """What the script writes to a pseudo-terminal."""
    leader, follower = pty.openpty()
    env = {key: value for key, value in os.environ.items() if key not in ("CI", "NO_COLOR", "COLUMNS")}
    env |= {"PYTHONPATH": str(Path(surogate_rl.__file__).parents[1]), "TERM": "xterm", **environment}
    process = subprocess.Popen([sys.executable, "-c", LIVE], stderr=follower, stdout=follower, env=env)
    os.close(follower)
    chunks = []
    try:
        while chunk := os.read(leader, 65536):
            chunks.append(chunk)
    except OSError:  # the other side is closed
        pass
    os.close(leader)
    assert process.wait(60) == 0
    return b"".join(chunks).decode()


def test_live_on_a_terminal() -> None:
    text = on_terminal()
    assert "\x1b[" in text
    last = text[text.rindex("4/4") :]
    plain = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", text)
    assert "a note" in plain
    assert "eval at step 4  loss 0.125" in plain
    assert "100 tok/s" in last
    assert "loss 0.25" in re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", last)


@pytest.mark.parametrize("environment", [{"CI": "true"}, {"TERM": "dumb"}])
def test_plain_where_a_terminal_cannot_redraw(environment: dict[str, str]) -> None:
    text = on_terminal(**environment)
    assert "\x1b[" not in text
    assert re.search(r"step 2/4  loss 0\.5  100 tok/s  eta \d+:\d\d", text)
