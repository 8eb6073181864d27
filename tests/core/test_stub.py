"""The stub says what the extension has: the same classes, members, parameter names, kinds and defaults."""

from __future__ import annotations

import ast
from pathlib import Path
from typing import Any

import pytest

from surogate_rl import _core

STUB = ast.parse((Path(__file__).parents[2] / "surogate_rl" / "_core.pyi").read_text())
CLASSES = {node.name: node for node in STUB.body if isinstance(node, ast.ClassDef)}
FUNCTIONS = {node.name: node for node in STUB.body if isinstance(node, ast.FunctionDef)}


def parameters(function: ast.FunctionDef) -> list[tuple[str, str, Any]]:
    """(name, kind, default) of each, without self."""
    arguments = function.args
    plain = [a.arg for a in arguments.args]
    defaults = [None] * (len(plain) - len(arguments.defaults)) + [ast.unparse(d) for d in arguments.defaults]
    found = [(name, "plain", default) for name, default in zip(plain, defaults, strict=True) if name != "self"]
    for argument, default in zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True):
        found.append((argument.arg, "keyword", None if default is None else ast.unparse(default)))
    return found


def same_default(one: str | None, other: str | None) -> bool:
    if one is None or other is None:
        return one is other
    first, second = ast.literal_eval(one), ast.literal_eval(other)
    return bool(first == second or (isinstance(first, list | tuple) and list(first) == list(second)))


def native_parameters(member: Any) -> list[tuple[str, str, Any]]:
    signature = member.__doc__.splitlines()[0]
    (function,) = ast.parse(f"def {signature}: ...").body
    assert isinstance(function, ast.FunctionDef)
    return parameters(function)


def members(node: ast.ClassDef) -> dict[str, ast.FunctionDef | None]:
    found: dict[str, ast.FunctionDef | None] = {}
    for item in node.body:
        if isinstance(item, ast.FunctionDef):
            if any(isinstance(d, ast.Name) and d.id == "property" for d in item.decorator_list):
                found[item.name] = None
                continue
            found[item.name] = item
        elif isinstance(item, ast.AnnAssign) and isinstance(item.target, ast.Name):
            found[item.target.id] = None
    return found


def test_names() -> None:
    assert {name for name in vars(_core) if not name.startswith("_")} == {*CLASSES, *FUNCTIONS}
    for name, node in CLASSES.items():
        public = {member for member in vars(getattr(_core, name)) if not member.startswith("_")}
        assert public == {member for member in members(node) if not member.startswith("_")}, name


@pytest.mark.parametrize("name", sorted(CLASSES))
def test_parameters(name: str) -> None:
    for method, stub in members(CLASSES[name]).items():
        native = getattr(getattr(_core, name), method)
        if stub is None or stub.args.kwarg is not None:  # a field, or keywords that are checked one by one
            continue
        expected, got = parameters(stub), native_parameters(native)
        assert [p[:2] for p in got] == [p[:2] for p in expected], method
        for (parameter, _, one), (_, _, other) in zip(expected, got, strict=True):
            assert same_default(one, other), f"{method}: {parameter}: stub {one}, extension {other}"
