"""The YAML reader: scalars of YAML 1.2, places of keys, duplicates, syntax errors; and the writer."""

from __future__ import annotations

import math
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from surogate_rl.config.yaml_source import dump, parse


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("1e-5", 1e-5),
        ("5E-6", 5e-6),
        ("1e5", 1e5),
        ("-2e-3", -2e-3),
        ("1.5e-5", 1.5e-5),
        (".5", 0.5),
        ("1.", 1.0),
        ("1_000", 1000),
        ("0x1F", 31),
        ("010", 10),
        ("-7", -7),
        ("true", True),
        ("False", False),
        ("no", "no"),
        ("yes", "yes"),
        ("on", "on"),
        ("Off", "Off"),
        ("1:30", "1:30"),
        ("2020-01-01", "2020-01-01"),
        ("~", None),
        ("null", None),
        ("", None),
        ('"1e-5"', "1e-5"),
        ("'true'", "true"),
        ("'<<'", "<<"),
        ("e5", "e5"),
        ("1e", "1e"),
        ("Qwen/Qwen3-0.6B", "Qwen/Qwen3-0.6B"),
        ("!!str 5", "5"),
    ],
)
def test_scalars(text: str, value: Any) -> None:
    source = parse(f"key: {text}\n")
    assert source.problems == []
    assert source.data == {"key": value}
    assert type(source.data["key"]) is type(value)


def test_infinity_and_nan() -> None:
    data = parse("a: .inf\nb: -.inf\nc: .nan\n").data
    assert data["a"] == math.inf
    assert data["b"] == -math.inf
    assert math.isnan(data["c"])


def test_keys_are_text_whatever_they_look_like() -> None:
    assert parse("on: 1\n2: x\nnull: y\n").data == {"on": 1, "2": "x", "null": "y"}


def test_lines_of_keys_and_items() -> None:
    source = parse("a: 1\n\nb:\n  c: 2\n  d:\n    - x\n    - y: 3\n")
    assert source.lines == {("a",): 1, ("b",): 3, ("b", "c"): 4, ("b", "d"): 5, ("b", "d", 0): 6, ("b", "d", 1): 7, ("b", "d", 1, "y"): 7}


def test_duplicate_keys_at_every_depth() -> None:
    source = parse("a: 1\nb:\n  c: 2\n  c: 3\na: 4\n")
    assert [(problem.line, problem.message) for problem in source.problems] == [
        (4, "duplicate key 'b.c'; it is already on line 3, remove one of them"),
        (5, "duplicate key 'a'; it is already on line 1, remove one of them"),
    ]


def test_merge_keys() -> None:
    source = parse("base: &base {x: 1, y: 2}\nmore:\n  <<: *base\n  y: 3\n")
    assert source.problems == []
    assert source.data["more"] == {"x": 1, "y": 3}
    assert source.lines[("more", "y")] == 4
    assert source.lines[("more", "x")] == 1


def test_alias_within_itself_is_refused() -> None:
    assert [problem.message for problem in parse("a: &a [1, *a]\n").problems] == ["a[1]: an alias that holds itself"]


def test_tags_that_run_code_are_refused() -> None:
    source = parse("a: !!python/name:os.system\n")
    assert [problem.message for problem in source.problems] == ["a: the tag tag:yaml.org,2002:python/name:os.system is not allowed here"]
    assert source.data == {"a": None}


@pytest.mark.parametrize(
    ("text", "line", "column", "message"),
    [
        ("a: 1\n\tb: 2\n", 2, 1, "a tab where YAML wants spaces; indent with spaces"),
        (
            "a: b: c\n",
            1,
            5,
            "not valid YAML: mapping values are not allowed here; put a value that holds ': ' in quotes, and check the indentation",
        ),
        ("a: [1, 2\nb: 3\n", 2, 2, "not valid YAML: expected ',' or ']', but got ':'"),
        ('a: "x\n', 2, 1, "not valid YAML: found unexpected end of stream; a quote or bracket is not closed"),
        ("a: *x\n", 1, 4, "not valid YAML: found undefined alias 'x'; define it with &name first"),
        ("a: 1\n---\nb: 2\n", 2, 1, "not valid YAML: it holds more than one document; keep one, without '---' between"),
    ],
)
def test_syntax_errors_name_the_place(text: str, line: int, column: int, message: str) -> None:
    problems = parse(text).problems
    assert [(problem.line, problem.column, problem.message) for problem in problems] == [(line, column, message)]


_text = st.text(st.characters(codec="utf-8", exclude_categories=["Cs", "Cc"]), max_size=12)
_scalars = (
    st.none()
    | st.booleans()
    | st.integers(-(10**12), 10**12)
    | st.floats(allow_nan=False)
    | _text
    | st.sampled_from(["no", "1e-5", "0x1", "~", "<<"])
)
_data = st.recursive(_scalars, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(_text, inner, max_size=3), max_leaves=8)


@settings(deadline=None)
@given(st.dictionaries(_text, _data, max_size=4))
def test_what_is_written_is_read_back(data: dict[str, Any]) -> None:
    source = parse(dump(data))
    assert source.problems == []
    assert source.data == data
