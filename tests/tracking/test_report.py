"""report.html: complete, self-contained, and nothing in it that a model wrote is markup."""

from __future__ import annotations

import json
import math
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from surogate_rl.config import InputError
from surogate_rl.report import write_report
from surogate_rl.report.charts import bounds, is_noisy, line_chart, reduce, running_mean, tick_label, ticks
from surogate_rl.report.page import shade
from surogate_rl.tracking import Tracker

VOID = {"meta", "br", "hr", "img", "input", "link", "circle", "line", "polyline", "polygon"}


class Page(HTMLParser):
    """Checks that tags are balanced and gathers what the tests ask for."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.text = ""
        self.seen: list[tuple[str, dict[str, str | None]]] = []
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.seen.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.seen.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.open and self.open[-1] not in ("style", "script"):
            self.text += data

    def tags(self, tag: str, name: str | None = None) -> list[dict[str, str | None]]:
        return [attrs for kind, attrs in self.seen if kind == tag and (name is None or name in (attrs.get("class") or "").split())]


def row(step: int, **changes: Any) -> dict[str, Any]:
    return {
        "step": step, "task": 0, "sample": 0, "prompt": "What is 1 + 1?", "completion": "It is 2", "tokens": [5, 6, 7],
        "token_texts": ["It", " is", " 2"], "logps": [-0.01, -1.0, -6.0], "reward": 1.0,
        "rewards": json.dumps({"exact": 1.0, "format": None}),
        "advantage": 0.5, "finish_reason": "stop", "error": None, **changes,
    }  # fmt: skip


def write_rollouts(directory: Path, step: int, rows: list[dict[str, Any]]) -> None:
    (directory / "rollouts").mkdir(parents=True, exist_ok=True)
    pq.write_table(pa.Table.from_pylist(rows), directory / "rollouts" / f"step-{step:08d}.parquet")


def write_metrics(directory: Path, steps: int = 3) -> None:
    with Tracker(directory) as tracker:
        for step in range(1, steps + 1):
            tracker.log(step, {"loss": 1.0 / step, "reward": None if step == 2 else step / 10})
        tracker.log(steps, {"eval_reward": 0.75})


def test_metrics_alone(tmp_path: Path) -> None:
    write_metrics(tmp_path)
    path = write_report(tmp_path)
    assert path == tmp_path / "report.html"
    page = Page(path.read_text(encoding="utf-8"))
    assert all(attrs["data-points"] for attrs in page.tags("svg"))
    labels = [attrs["aria-label"] for attrs in page.tags("svg")]
    assert labels == [
        "eval_reward over steps 3 to 3, last 0.75",
        "loss over steps 1 to 3, last 0.3333",
        "reward over steps 1 to 3, last 0.3",
    ]
    assert "Rollouts" not in page.text
    assert [file.name for file in sorted(tmp_path.iterdir())] == ["metrics.jsonl", "report.html"]


def test_it_loads_nothing_from_anywhere(tmp_path: Path) -> None:
    write_metrics(tmp_path)
    write_rollouts(tmp_path, 1, [row(1)])
    text = write_report(tmp_path).read_text(encoding="utf-8")
    page = Page(text)
    assert not any(name in attrs for _, attrs in page.seen for name in ("src", "href"))
    assert "url(" not in text
    assert "@import" not in text
    assert set(re.findall(r"https?://[^'\" ]+", text)) == {"http://www.w3.org/2000/svg"}  # a name, not an address
    assert "prefers-color-scheme: dark" in text


def test_rollouts_with_their_tokens(tmp_path: Path) -> None:
    write_metrics(tmp_path)
    write_rollouts(tmp_path, 2, [row(2), row(2, sample=1, reward=None, advantage=0.0, error="TimeoutError: 30 s", rewards="{}")])
    page = Page(write_report(tmp_path).read_text(encoding="utf-8"))
    tokens = [attrs for attrs in page.tags("span") if attrs.get("title")]
    assert [attrs["title"] for attrs in tokens[:3]] == [
        "id 5, p 0.99, logp -0.010",
        "id 6, p 0.368, logp -1.000",
        "id 7, p 0.00248, logp -6.000",
    ]
    assert [attrs.get("class") for attrs in tokens[:3]] == [None, "t2", "t5"]
    assert len(page.tags("div", "rollout")) == 2
    assert len(page.tags("div", "prompt")) == 1  # the group's prompt once
    for part in ("Step 2: 2 completions, mean reward of these 1", "exact 1", "format none", "advantage 0.5", "error TimeoutError: 30 s"):
        assert part in page.text
    assert "reward unscored" in page.text


def test_turns_with_what_the_environment_said_to_them(tmp_path: Path) -> None:
    write_metrics(tmp_path)
    messages = [
        {"role": "user", "content": "What is 1 + 1?"},
        {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "add", "arguments": {"a": 1, "b": 1}}}]},
        {"role": "tool", "name": "add", "content": "<b>2</b>"},
        {"role": "assistant", "content": "is 2"},
    ]
    several = row(1, turns=2, token_turns=[0, 1, 1], messages=json.dumps(messages), cut="turns")
    write_rollouts(tmp_path, 1, [several, row(1, turns=2, token_turns=[0, 1, 1], messages="{broken", cut=None)])
    page = Page(write_report(tmp_path).read_text(encoding="utf-8"))
    assert len(page.tags("div", "answer")) == 1
    assert "turns 2" in page.text
    assert "cut by turns" in page.text
    # call, result and answer, in this order; what cannot be read is shown as before
    assert re.search(r"It\s*add <b>2</b>\s*is 2", page.text)
    assert page.text.count("It is 2") == 1


def test_what_a_model_wrote_is_not_markup(tmp_path: Path) -> None:
    evil = "</script><script>alert(1)</script><b>&amp;\"'"
    with Tracker(tmp_path) as tracker:
        tracker.log(1, {"loss": 1.0, f"rewards/{evil}": 1.0})
    (tmp_path / "config.yaml").write_text(f"model: {evil}\n")
    changes = {"prompt": evil, "completion": evil, "token_texts": [evil, "\n", ""], "error": evil, "finish_reason": evil}
    write_rollouts(tmp_path, 1, [row(1, **changes, rewards=json.dumps({evil: 1.0, "b": 2.0}))])
    page = Page(write_report(tmp_path).read_text(encoding="utf-8"))
    assert len(page.tags("script")) == 1
    assert page.text.count("<script>alert(1)</script>") == 7  # metric, config, prompt, token, error, finish reason, reward's name
    assert "↵" in page.text
    assert "∅" in page.text


def test_long_runs_are_thinned_and_say_so(tmp_path: Path) -> None:
    write_metrics(tmp_path)
    for step in range(1, 31):
        write_rollouts(tmp_path, step, [row(step, sample=sample) for sample in range(12)])
    page = Page(write_report(tmp_path).read_text(encoding="utf-8"))
    summaries = re.findall(r"Step (\d+): 8 of 12 completions", page.text)
    assert len(summaries) == 8
    assert (summaries[0], summaries[-1]) == ("1", "30")
    assert "8 of 30 steps" in page.text
    assert [attrs for attrs in page.tags("details", "step") if "open" in attrs] == [page.tags("details", "step")[-1]]


@pytest.mark.parametrize("rewards", ['{"a": 1.0, "b": 0.5}', {"a": 1.0, "b": 0.5}, [("a", 1.0), ("b", 0.5)]])
def test_rewards_as_json_struct_or_map(tmp_path: Path, rewards: Any) -> None:
    write_metrics(tmp_path)
    table = pa.Table.from_pylist([{key: value for key, value in row(1).items() if key != "rewards"}])
    kind = pa.map_(pa.string(), pa.float64()) if isinstance(rewards, list) else None
    table = table.append_column("rewards", pa.array([rewards], type=kind))
    (tmp_path / "rollouts").mkdir()
    pq.write_table(table, tmp_path / "rollouts" / "step-00000001.parquet")
    page = Page(write_report(tmp_path).read_text(encoding="utf-8"))
    assert "a 1b 0.5" in page.text


def test_files_that_cannot_be_read_are_named(tmp_path: Path) -> None:
    write_metrics(tmp_path)
    (tmp_path / "rollouts").mkdir()
    (tmp_path / "rollouts" / "step-00000001.parquet").write_bytes(b"half a file")
    pq.write_table(pa.table({"step": [2]}), tmp_path / "rollouts" / "step-00000002.parquet")
    page = Page(write_report(tmp_path).read_text(encoding="utf-8"))
    assert "step-00000001.parquet: cannot be read" in page.text
    assert "step-00000002.parquet: lacks the columns completion, logps, token_texts, tokens" in page.text


def test_no_run(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"holds no metrics.jsonl, so it is not the output_dir of a run$"):
        write_report(tmp_path)
    with pytest.raises(InputError, match=r"no such folder; give the output_dir of a run$"):
        write_report(tmp_path / "nowhere")
    (tmp_path / "metrics.jsonl").touch()
    assert "No metrics were logged." in Page(write_report(tmp_path).read_text(encoding="utf-8")).text


@pytest.mark.parametrize(
    ("low", "high", "expected"),
    [
        (0.0, 1.0, [0.0, 0.5, 1.0]),
        (-0.02, 0.023, [-0.02, 0.0, 0.02]),
        (0.0, 400.0, [0.0, 100.0, 200.0, 300.0, 400.0]),
        (3.0, 3.0, [3.0]),
        (1e-7, 1e-6, [5e-7, 1e-6]),
    ],
)
def test_ticks_are_round(low: float, high: float, expected: list[float]) -> None:
    assert ticks(low, high) == pytest.approx(expected)


@pytest.mark.parametrize(
    ("value", "text"), [(0.0, "0"), (0.25, "0.25"), (5e-7, "5e-07"), (9000.0, "9000"), (20000.0, "20k"), (1.5e6, "1.5M"), (-3e9, "-3B")]
)
def test_tick_labels(value: float, text: str) -> None:
    assert tick_label(value) == text


def test_reduced_curves_keep_mean_and_extremes() -> None:
    points = [(step, float(step % 10)) for step in range(1, 1001)]
    means, band = reduce(points, 100)
    assert means == [(step + 6, 4.5) for step in range(0, 1000, 10)]
    assert {(low, high) for _, low, high in band} == {(0.0, 9.0)}
    assert reduce(points[:50], 100) == (points[:50], [])
    assert reduce([(1, None)] * 10, 5) == ([(1, None)] * 5, [])


def test_running_mean_leaves_gaps_out() -> None:
    assert running_mean([(1, 1.0), (2, None), (3, 5.0), (4, 3.0)], 2) == [(1, 1.0), (2, 3.0), (3, 4.0), (4, 4.0)]


def test_only_noisy_curves_get_a_mean() -> None:
    smooth = [(step, math.exp(-step / 100)) for step in range(400)]
    noisy = [(step, float(step % 2)) for step in range(400)]
    assert not is_noisy(smooth)
    assert is_noisy(noisy)
    assert 'class="line raw"' not in line_chart("x", smooth)
    assert line_chart("x", noisy).count("<polyline") == 2


def test_constant_and_missing_values() -> None:
    assert bounds([2.0, 2.0]) == (1.8, 2.2)
    assert bounds([0.0]) == (-1.0, 1.0)
    assert "no finite value" in line_chart("x", [(1, None)])
    assert line_chart("x", [(1, 1.0), (2, None), (3, 2.0), (4, 3.0)]).count("<polyline") == 1  # the gap is not bridged


@pytest.mark.parametrize(("probability", "level"), [(1.0, 0), (0.91, 0), (0.89, 1), (0.5, 2), (0.2, 3), (0.05, 4), (0.001, 5)])
def test_shades(probability: float, level: int) -> None:
    assert shade(math.log(probability)) == level
    assert shade(float("-inf")) == 5
    assert shade(float("nan")) == 5
