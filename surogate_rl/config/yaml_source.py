"""YAML with line numbers, no duplicate keys and the scalars of YAML 1.2.

YAML 1.1 reads ``1e-5`` as text, ``no`` as false, ``010`` as 8 and ``1:30`` as 90; here ``1e-5`` is a number, only ``true`` and
``false`` are booleans, and the rest is what it looks like.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Any

import yaml

from surogate_rl.config.errors import KeyPath, Problem, path_text

_RESOLVERS: list[tuple[str, re.Pattern[str], str]] = [
    ("tag:yaml.org,2002:bool", re.compile(r"^(?:true|True|TRUE|false|False|FALSE)$"), "tTfF"),
    ("tag:yaml.org,2002:int", re.compile(r"^(?:[-+]?[0-9][0-9_]*|0x[0-9a-fA-F]+|0o[0-7]+)$"), "-+0123456789"),
    (
        "tag:yaml.org,2002:float",
        re.compile(
            r"^(?:[-+]?(?:\.[0-9]+|[0-9][0-9_]*\.[0-9_]*)(?:[eE][-+]?[0-9]+)?"
            r"|[-+]?[0-9][0-9_]*[eE][-+]?[0-9]+|[-+]?\.(?:inf|Inf|INF)|\.(?:nan|NaN|NAN))$"
        ),
        "-+0123456789.",
    ),
    ("tag:yaml.org,2002:null", re.compile(r"^(?:~|null|Null|NULL|)$"), "~nN\0"),
    ("tag:yaml.org,2002:merge", re.compile(r"^(?:<<)$"), "<"),
]


class _Loader(yaml.SafeLoader):
    yaml_implicit_resolvers: dict[str, list[tuple[str, re.Pattern[str]]]] = {}  # noqa: RUF012 (declared so by the base class)


class _Dumper(yaml.SafeDumper):
    """Quotes exactly the strings that `_Loader` would read as something else."""

    yaml_implicit_resolvers: dict[str, list[tuple[str, re.Pattern[str]]]] = {}  # noqa: RUF012 (declared so by the base class)

    def increase_indent(self, flow: bool = False, indentless: bool = False) -> None:
        super().increase_indent(flow, False)

    def ignore_aliases(self, data: Any) -> bool:
        return True


for _class in (_Loader, _Dumper):
    for _tag, _pattern, _first in _RESOLVERS:
        for _char in _first:
            _class.yaml_implicit_resolvers.setdefault("" if _char == "\0" else _char, []).append((_tag, _pattern))


@dataclass
class Source:
    """Plain data with the place of every key.

    Attributes:
        data: dicts, lists and scalars; None for an empty text.
        lines: key path -> line, from 1.
        problems: duplicate keys and the like, found on the way.
    """

    data: Any = None
    lines: dict[KeyPath, int] = field(default_factory=dict)
    problems: list[Problem] = field(default_factory=list)


def parse(text: str) -> Source:
    """Reads one YAML document. Whatever is wrong is in `Source.problems`; `Source.data` is what could be read."""
    source = Source()
    try:
        node = yaml.compose(text, Loader=_Loader)
    except yaml.YAMLError as error:
        source.problems.append(_syntax_problem(error))
        return source
    if node is not None:
        source.data = _construct(node, (), source, frozenset())
    return source


def dump(data: Any) -> str:
    """YAML that `parse` reads back to equal data. Keys keep their order."""
    text: str = yaml.dump(data, Dumper=_Dumper, sort_keys=False, allow_unicode=True, default_flow_style=False, width=120)
    return text


def scalar(text: str) -> Any:
    """What a plain (unquoted) scalar means: ``1e-5`` -> 0.00001, ``no`` -> "no"."""
    for tag, pattern, _ in _RESOLVERS:
        if pattern.match(text):
            return _convert(tag, text)
    return text


def _convert(tag: str, text: str) -> Any:
    kind = tag.rpartition(":")[2]
    if kind == "bool":
        return text.lower() == "true"
    if kind == "null":
        return None
    digits = text.replace("_", "")
    if kind == "int":
        base = {"0x": 16, "0o": 8}.get(digits[:2], 10)
        return int(digits, base)
    if kind == "float":
        return float(digits.lower().replace(".inf", "inf").replace(".nan", "nan"))
    return text


def _construct(node: yaml.Node, path: KeyPath, source: Source, parents: frozenset[int]) -> Any:
    line = node.start_mark.line + 1
    if id(node) in parents:
        source.problems.append(Problem(f"{path_text(path)}: an alias that holds itself", path, line=line))
        return None
    parents = parents | {id(node)}
    if isinstance(node, yaml.MappingNode):
        return _construct_mapping(node, path, source, parents)
    if isinstance(node, yaml.SequenceNode):
        values = []
        for index, item in enumerate(node.value):
            source.lines[(*path, index)] = item.start_mark.line + 1
            values.append(_construct(item, (*path, index), source, parents))
        return values
    assert isinstance(node, yaml.ScalarNode)
    known = any(node.tag == tag for tag, _, _ in _RESOLVERS)
    if not known and node.tag != "tag:yaml.org,2002:str":
        source.problems.append(Problem(f"{path_text(path)}: the tag {node.tag} is not allowed here", path, line=line))
        return None
    if known and node.style is None and scalar(node.value) is not node.value:
        return scalar(node.value)
    return _convert_tagged(node, path, source)


def _convert_tagged(node: yaml.ScalarNode, path: KeyPath, source: Source) -> Any:
    """Quoted text, or a scalar with an explicit tag such as ``!!float 1``."""
    if node.tag == "tag:yaml.org,2002:str" or node.tag.endswith(":merge"):
        return node.value
    try:
        return _convert(node.tag, node.value)
    except ValueError:
        kind = node.tag.rpartition(":")[2]
        source.problems.append(Problem(f"{path_text(path)}: {node.value!r} is no {kind}", path, line=node.start_mark.line + 1))
        return None


def _construct_mapping(node: yaml.MappingNode, path: KeyPath, source: Source, parents: frozenset[int]) -> dict[str, Any]:
    result: dict[str, Any] = {}
    merged: dict[str, tuple[Any, dict[KeyPath, int]]] = {}
    for key_node, value_node in node.value:
        line = key_node.start_mark.line + 1
        if key_node.tag.endswith(":merge"):
            _merge(value_node, path, source, parents, merged)
            continue
        if not isinstance(key_node, yaml.ScalarNode):
            source.problems.append(Problem("a key must be a name, not a list or a section", path, line=line))
            continue
        key = str(key_node.value)
        if key in result:
            first = source.lines[(*path, key)]
            source.problems.append(
                Problem(f"duplicate key '{path_text((*path, key))}'; it is already on line {first}, remove one of them", path, line=line)
            )
            continue
        source.lines[(*path, key)] = line
        result[key] = _construct(value_node, (*path, key), source, parents)
    for key, (value, lines) in merged.items():
        if key not in result:
            result[key] = value
            source.lines.update(lines)
    return result


def _merge(
    node: yaml.Node, path: KeyPath, source: Source, parents: frozenset[int], merged: dict[str, tuple[Any, dict[KeyPath, int]]]
) -> None:
    """``<<: *base``: keys that the mapping does not give itself. The first of several bases wins."""
    bases = node.value if isinstance(node, yaml.SequenceNode) else [node]
    for base in bases:
        if not isinstance(base, yaml.MappingNode):
            source.problems.append(Problem("'<<' takes a section, such as '<<: *base'", path, line=node.start_mark.line + 1))
            continue
        inner = Source()
        for key, value in _construct_mapping(base, path, inner, parents).items():
            prefix = (*path, key)
            lines = {where: line for where, line in inner.lines.items() if where[: len(prefix)] == prefix}
            merged.setdefault(key, (value, lines))


def _syntax_problem(error: yaml.YAMLError) -> Problem:
    if not isinstance(error, yaml.MarkedYAMLError):
        return Problem(f"not valid YAML: {' '.join(str(error).split())}")
    mark = error.problem_mark or error.context_mark
    line, column = (mark.line + 1, mark.column + 1) if mark else (None, None)
    what = error.problem or "it cannot be read"
    if "'\\t'" in what:
        return Problem("a tab where YAML wants spaces; indent with spaces", line=line, column=column)
    hints = {
        "mapping values are not allowed": "put a value that holds ': ' in quotes, and check the indentation",
        "could not find expected ':'": "a key needs a colon and a space after it",
        "expected <block end>": "check the indentation of this line",
        "expected a single document": "keep one document in the file, without '---' between",
        "found undefined alias": "define it with &name first",
        "found unexpected end of stream": "a quote or bracket is not closed",
    }
    hint = next((text for start, text in hints.items() if what.startswith(start)), None)
    if error.context and "single document" in error.context:
        what, hint = "it holds more than one document", "keep one, without '---' between"
    return Problem(f"not valid YAML: {what}" + (f"; {hint}" if hint else ""), line=line, column=column)
