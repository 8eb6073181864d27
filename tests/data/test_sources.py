"""Where rows come from: every format, and what is said of every kind of mistake."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import datasets as hf
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from surogate_rl.config.schema import DatasetConfig
from surogate_rl.data.report import DataError
from surogate_rl.data.sources import open_source

ROWS = [{"prompt": f"p{i}", "answer": str(i)} for i in range(10)]


def rows_of(path: Path | str, **options: Any) -> list[dict[str, Any]]:
    return list(open_source(DatasetConfig(path=str(path), **options), seed=0))


def write(path: Path, rows: list[dict[str, Any]]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.suffix == ".jsonl":
        path.write_text("\n".join(map(json.dumps, rows)) + "\n\n")
    elif path.suffix == ".json":
        path.write_text(json.dumps(rows, indent=1))
    elif path.suffix == ".parquet":
        pq.write_table(pa.Table.from_pylist(rows), path)
    else:
        path.write_text("prompt,answer\n" + "".join(f"{row['prompt']},{row['answer']}\n" for row in rows))
    return path


@pytest.mark.parametrize("suffix", [".jsonl", ".json", ".parquet", ".csv"])
def test_every_format_gives_the_same_rows(tmp_path: Path, suffix: str) -> None:
    path = write(tmp_path / f"rows{suffix}", ROWS)
    assert rows_of(path) == ROWS
    assert rows_of(path, size=3) == ROWS[:3]
    assert rows_of(path, size=99) == ROWS
    assert rows_of(path, split="train[80%:]") == ROWS[8:]
    assert rows_of(path, split="train[2:]", size=2) == ROWS[2:4]


def test_json_with_one_object_per_line_and_wrapped_lists(tmp_path: Path) -> None:
    lines = tmp_path / "lines.json"
    lines.write_text("\n".join(map(json.dumps, ROWS)))
    assert rows_of(lines) == ROWS
    wrapped = tmp_path / "wrapped.json"
    wrapped.write_text(json.dumps({"data": ROWS}))
    assert rows_of(wrapped) == ROWS


def test_line_separators_within_strings_do_not_break_lines(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text(json.dumps({"text": "a\u2028b\x85c"}, ensure_ascii=False) + "\n", encoding="utf-8")
    assert rows_of(path) == [{"text": "a\u2028b\x85c"}]


def test_csv_keeps_line_breaks_and_long_fields(tmp_path: Path) -> None:
    path = tmp_path / "rows.csv"
    path.write_text(f'text\n"one\ntwo"\n{"x" * 200_000}\n')
    assert [len(row["text"]) for row in rows_of(path)] == [7, 200_000]


def test_directories(tmp_path: Path) -> None:
    for number, part in enumerate((ROWS[:4], ROWS[4:])):
        write(tmp_path / "plain" / f"part{number}.jsonl", part)
    assert rows_of(tmp_path / "plain") == ROWS
    write(tmp_path / "splits" / "data" / "train-00000-of-00002.parquet", ROWS[:4])
    write(tmp_path / "splits" / "data" / "train-00001-of-00002.parquet", ROWS[4:6])
    write(tmp_path / "splits" / "data" / "test-00000-of-00001.parquet", ROWS[6:])
    assert rows_of(tmp_path / "splits") == ROWS[:6]
    assert rows_of(tmp_path / "splits", split="test") == ROWS[6:]
    assert rows_of(tmp_path / "splits", split="test[:1]") == ROWS[6:7]
    with pytest.raises(DataError, match=r"no files of split 'validation'; there are test-00000-of-00001\.parquet"):
        rows_of(tmp_path / "splits", split="validation")
    (tmp_path / "none").mkdir()
    with pytest.raises(DataError, match="no data files in this directory"):
        rows_of(tmp_path / "none")


def test_directories_written_by_datasets(tmp_path: Path) -> None:
    hf.Dataset.from_list(ROWS).save_to_disk(tmp_path / "one")
    assert rows_of(tmp_path / "one") == ROWS
    assert rows_of(tmp_path / "one", split="train[:2]") == ROWS[:2]
    hf.DatasetDict({"train": hf.Dataset.from_list(ROWS), "test": hf.Dataset.from_list(ROWS[:2])}).save_to_disk(tmp_path / "two")
    assert rows_of(tmp_path / "two", split="test") == ROWS[:2]
    with pytest.raises(DataError, match="split 'dev' does not exist; there are train, test"):
        rows_of(tmp_path / "two", split="dev")


def test_hub_data_come_through_load_dataset(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []

    def load_dataset(path: str, name: str | None, *, split: str) -> hf.Dataset:
        asked.append((path, name, split))
        return hf.Dataset.from_list(ROWS)

    monkeypatch.setattr(hf, "load_dataset", load_dataset)
    assert rows_of("org/name", name="main", split="test", size=2, columns={"question": "prompt"}) == [
        {"answer": "0", "question": "p0"},
        {"answer": "1", "question": "p1"},
    ]
    assert asked == [("org/name", "main", "test")]


def test_hub_out_of_reach_says_what_was_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(
        DataError, match=r"datasets: cannot load 'no-such/thing' \(split 'train'\) from the Hugging Face hub: .*no local path either"
    ):
        rows_of("no-such/thing")


@pytest.mark.parametrize("name", ["missing.jsonl", "./missing", "sub/missing.parquet", "/nowhere/at/all"])
def test_missing_file_is_named(name: str) -> None:
    with pytest.raises(FileNotFoundError, match=f"no such file or directory: {name}"):
        rows_of(name)


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("a.jsonl", '{"x": 1}\n\n{"x": \n', r"a\.jsonl:3: not valid JSON: .* every line must be one JSON object"),
        ("a.jsonl", '{"x": 1}\n[1]\n', r"a\.jsonl:2: a row must be a JSON object, this line holds a list"),
        ("a.json", '[{"x": 1},\n {"x" 2}]', r"a\.json:2: not valid JSON"),
        ("a.json", '[{"x": 1}, "b"]', r"a\.json row 1 .* this one is a string"),
        ("a.json", "3", r"a\.json: must hold a list of JSON objects, holds a number"),
        ("a.csv", "x,y\n1,2\n3\n", r"a\.csv:3: the header has 2 columns"),
        ("a.parquet", "no parquet", r"a\.parquet: cannot be read as Parquet"),
        ("a.txt", "hello", r"cannot read files of type '\.txt'; known types: \.jsonl"),
    ],
)
def test_broken_files_name_the_place(tmp_path: Path, name: str, text: str, message: str) -> None:
    (tmp_path / name).write_text(text)
    with pytest.raises(DataError, match=message):
        rows_of(tmp_path / name)


def test_not_utf8_is_said(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_bytes(b'{"x": "\xff"}\n')
    with pytest.raises(DataError, match=r"a\.jsonl: not UTF-8 text \(byte 7\)"):
        rows_of(tmp_path / "a.jsonl")


def test_unknown_split_of_a_file(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", ROWS)
    with pytest.raises(DataError, match="split 'test' does not exist"):
        rows_of(path, split="test")


def test_places_of_rows(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"x": 1}\n\n{"x": 2}\n')
    write(tmp_path / "b.parquet", ROWS)
    source = open_source(DatasetConfig(path=str(tmp_path), split="train[1:]", columns={"y": "x"}), seed=0)
    assert source.where(0) == f"{tmp_path}/a.jsonl:3"
    assert source.where(1) == f"{tmp_path}/b.parquet row 0 (counted from 0)"
    assert source.rows[0] == {"y": 2}


def test_renaming(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", [{"question": "q", "prompt": "old", "id": 1}])
    assert rows_of(path, columns={"prompt": "question"}) == [{"id": 1, "prompt": "q"}]
    assert rows_of(path, columns={"prompt": "question", "question": "prompt"}) == [{"id": 1, "prompt": "q", "question": "old"}]
    with pytest.raises(
        DataError,
        match=r"a\.jsonl: there is no column 'questoin' \(from `columns: \{prompt: questoin\}`\); the columns are question, prompt, id",
    ):
        rows_of(path, columns={"prompt": "questoin"})


def test_args_are_for_reasoning_gym(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", ROWS)
    with pytest.raises(DataError, match="`args` are the arguments of a reasoning_gym task"):
        rows_of(path, args={"min_terms": 2})


# ---- reasoning_gym --------------------------------------------------------------------------------------------------------------------


def test_gym_rows_are_the_library_own() -> None:
    import reasoning_gym

    made = rows_of("reasoning_gym/chain_sum", size=5, seed=3, args={"min_terms": 2, "max_terms": 3})
    for row, entry in zip(made, reasoning_gym.create_dataset("chain_sum", size=5, seed=3, min_terms=2, max_terms=3), strict=True):
        assert row["entry"] == entry
        assert (row["question"], row["answer"], row["metadata"]) == (entry["question"], entry["answer"], entry["metadata"])
        assert row["reasoning_gym"] == {"task": "chain_sum", "args": {"min_terms": 2, "max_terms": 3}}
    assert rows_of("reasoning_gym/chain_sum", size=2) != rows_of("reasoning_gym/chain_sum", size=2, seed=1)


def test_gym_composite_takes_plain_parts() -> None:
    parts = [{"name": "chain_sum", "weight": 1.0}, {"name": "spell_backward", "config": {"max_word_len": 4}}]
    made = rows_of("reasoning_gym/composite", size=20, args={"datasets": parts})
    assert {row["metadata"]["source_dataset"] for row in made} == {"chain_sum", "spell_backward"}


@pytest.mark.parametrize(
    ("path", "options", "message"),
    [
        ("reasoning_gym/chain_sun", {}, "has no task 'chain_sun'; did you mean chain_sum"),
        ("reasoning_gym/chain_sum", {"args": {"terms": 3}}, "unknown argument 'terms'; the task takes min_terms, max_terms"),
        ("reasoning_gym/chain_sum", {"args": {"min_terms": 5, "max_terms": 2}}, "the task refuses its arguments"),
        ("reasoning_gym/chain_sum", {"args": {"size": 5}}, "`size` belongs beside `args`"),
        ("reasoning_gym/chain_sum", {"split": "test"}, "use another `seed`"),
    ],
)
def test_gym_mistakes(path: str, options: dict[str, Any], message: str) -> None:
    with pytest.raises(DataError, match=message):
        rows_of(path, **options)
