"""Text that no encoding can hold."""

from __future__ import annotations

import json
from typing import Any

import pytest

from surogate_rl.plain import DEEPEST, TooDeep, plain, plain_text


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", ""),
        ("plain, é, 漢, 😀", "plain, é, 漢, 😀"),
        ("\ud83d", "\ufffd"),
        ("a\ud83db", "a\ufffdb"),
        ("\ude00\ud83d", "\ufffd\ufffd"),  # the wrong way round
        ("\ud83d\ude00", "😀"),  # the two halves, put together by hand
        ("\ud83d\ud83d\ude00漢", "\ufffd😀漢"),
        ("name-\udcff.txt", "name-\ufffd.txt"),  # how Python reads a file name that is no UTF-8
        ("\x00\ufeff\ud800", "\x00\ufeff\ufffd"),
    ],
)
def test_lone_surrogates_are_replaced_and_nothing_else(text: str, expected: str) -> None:
    assert plain_text(text) == expected
    assert plain_text(text).encode().decode() == expected


def test_values_keep_their_shape() -> None:
    value: Any = {"a\ud83d": ["\ud83d", 1, None, 0.5, True, {"b": "c"}], 3: ("x", "\ud83d"), "o": (thing := object())}
    assert plain(value) == {"a\ufffd": ["\ufffd", 1, None, 0.5, True, {"b": "c"}], 3: ["x", "\ufffd"], "o": thing}
    assert value["a\ud83d"][0] == "\ud83d"  # a copy


def test_what_is_nested_beyond_reason_is_refused() -> None:
    def nested(levels: int) -> Any:
        return json.loads("[" * levels + "]" * levels)

    assert plain(nested(DEEPEST)) == nested(DEEPEST)
    with pytest.raises(TooDeep, match="more than 64 levels"):
        plain(nested(DEEPEST + 1))
    loop: list[Any] = []
    loop.append(loop)
    with pytest.raises(TooDeep):
        plain(loop)
