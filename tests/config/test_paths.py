"""Paths count from the configuration's folder, then from the folder the command starts in."""

from __future__ import annotations

from pathlib import Path

import pytest

from surogate_rl.config import GrpoConfig, load_config, write_resolved

TEXT = """
model: tiny
tokenizer: elsewhere
output_dir: out
chat_template: "{% for message in messages %}{{ message['content'] }}{% endfor %}"
datasets:
  - rows.jsonl
  - {path: org/name}
rewards:
  - mine.py:fn
  - exact_match
loss: objective.py:loss
eval: {datasets: [held.jsonl], rewards: ["mine.py:fn"]}
"""


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A project's folder with everything in it; the working directory is another one."""
    folder, start = tmp_path / "project", tmp_path / "start"
    (folder / "tiny").mkdir(parents=True)
    start.mkdir()
    for name in ("rows.jsonl", "held.jsonl", "mine.py", "objective.py"):
        (folder / name).write_text("")
    (folder / "config.yaml").write_text(TEXT)
    monkeypatch.chdir(start)
    return folder


def paths(config: GrpoConfig) -> list[str]:
    assert config.eval is not None
    sources = [*config.datasets, *config.eval.datasets]
    functions = [*config.rewards, *config.eval.rewards]
    return [config.model, *(source.path for source in sources), *(function.name for function in functions), config.loss.loss_type]


def test_what_lies_beside_the_configuration_is_found_from_anywhere(project: Path) -> None:
    config = load_config("../project/config.yaml", "grpo")
    assert paths(config) == [
        f"{project}/tiny",
        f"{project}/rows.jsonl",
        "org/name",
        f"{project}/held.jsonl",
        f"{project}/mine.py:fn",
        "exact_match",
        f"{project}/mine.py:fn",
        f"{project}/objective.py:loss",
    ]
    # what is not there stays as it is: a hub id, a folder of the working directory, a template's text, what is written
    assert (config.tokenizer, config.output_dir) == ("elsewhere", "out")
    assert config.chat_template is not None
    assert config.chat_template.startswith("{% for")


def test_the_configuration_that_a_run_leaves_means_the_same_from_anywhere(
    project: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = load_config(project / "config.yaml", "grpo")
    write_resolved(config, tmp_path / "run" / "config.yaml")
    monkeypatch.chdir("/")
    assert load_config(tmp_path / "run" / "config.yaml", "grpo") == config


def test_the_working_directory_comes_second(project: Path) -> None:
    (project / "mine.py").rename("mine.py")
    config = load_config(project / "config.yaml", "grpo")
    assert config.rewards[0].name == "mine.py:fn"


def test_in_its_own_folder_nothing_changes(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(project)
    expected = ["tiny", "rows.jsonl", "org/name", "held.jsonl", "mine.py:fn", "exact_match", "mine.py:fn", "objective.py:loss"]
    assert paths(load_config("config.yaml", "grpo")) == expected


def test_what_is_typed_counts_from_where_it_is_typed(project: Path) -> None:
    Path("rows.jsonl").write_text("")
    config = load_config(project / "config.yaml", "grpo", ["datasets.0.path=rows.jsonl", "rewards.0.weight=2"])
    assert config.datasets[0].path == "rows.jsonl"
    assert config.rewards[0].name == f"{project}/mine.py:fn"
