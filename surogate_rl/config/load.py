"""From YAML, a dict or an object to a checked configuration, with every error of it at once."""

from __future__ import annotations

import copy
import os
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, overload

from pydantic import BaseModel, ValidationError

from surogate_rl.config import overrides as set_
from surogate_rl.config.errors import ConfigError, ConfigWarning, KeyPath, Problem, path_text
from surogate_rl.config.explain import enum_values, expects, got, nearest, node_at, takes, unknown_key
from surogate_rl.config.paths import anchor
from surogate_rl.config.resolve import find_idle_keys, find_problems, resolve
from surogate_rl.config.schema import CONFIGS, Command, DpoConfig, GrpoConfig, SftConfig, TrainConfig
from surogate_rl.config.yaml_source import Source, parse, scalar

# Sections of the design that are still to come: a better answer than "unknown key".
_NOT_YET: dict[KeyPath, str] = {
    ("distributed",): "training on several machines is not there yet; remove this section",
}
_YES = {"yes": "true", "on": "true", "y": "true", "no": "false", "off": "false", "n": "false"}


@overload
def load_config(
    path: str | os.PathLike[str],
    command: Literal["sft"],
    overrides: Sequence[str] = ...,
    *,
    rewards_given: bool = ...,
    planning: bool = ...,
) -> SftConfig: ...
@overload
def load_config(
    path: str | os.PathLike[str],
    command: Literal["dpo"],
    overrides: Sequence[str] = ...,
    *,
    rewards_given: bool = ...,
    planning: bool = ...,
) -> DpoConfig: ...
@overload
def load_config(
    path: str | os.PathLike[str],
    command: Literal["grpo"],
    overrides: Sequence[str] = ...,
    *,
    rewards_given: bool = ...,
    planning: bool = ...,
) -> GrpoConfig: ...
def load_config(
    path: str | os.PathLike[str], command: Command, overrides: Sequence[str] = (), *, rewards_given: bool = False, planning: bool = False
) -> TrainConfig:
    """Reads, checks and resolves a YAML file.

    Args:
        path: the file.
        command: sft, dpo or grpo.
        overrides: ``key=value`` texts of ``--set``, applied in order.
        rewards_given: grpo: reward functions come from Python, so that the file needs none.
        planning: nothing will be run, so ``device: cuda`` needs no GPU.

    Raises:
        ConfigError: all that is wrong, one ``file:line: message`` each.
    """
    name = os.fspath(path)
    source = parse(_read(name))
    if source.data is None and not source.problems:
        raise ConfigError([f"{name}: the file is empty; it needs at least model, output_dir and datasets"])
    if source.data is not None and not isinstance(source.data, dict):
        raise ConfigError([f"{name}: expected 'key: value' lines, got {got(source.data)}"])
    if source.data is None:
        raise ConfigError([_located(name, problem, source, []) for problem in source.problems])
    return _check(source, command, overrides, name, rewards_given, planning)


@overload
def parse_config(
    config: Mapping[str, Any] | BaseModel,
    command: Literal["sft"],
    overrides: Sequence[str] = ...,
    *,
    rewards_given: bool = ...,
    planning: bool = ...,
) -> SftConfig: ...
@overload
def parse_config(
    config: Mapping[str, Any] | BaseModel,
    command: Literal["dpo"],
    overrides: Sequence[str] = ...,
    *,
    rewards_given: bool = ...,
    planning: bool = ...,
) -> DpoConfig: ...
@overload
def parse_config(
    config: Mapping[str, Any] | BaseModel,
    command: Literal["grpo"],
    overrides: Sequence[str] = ...,
    *,
    rewards_given: bool = ...,
    planning: bool = ...,
) -> GrpoConfig: ...
def parse_config(
    config: Mapping[str, Any] | BaseModel,
    command: Command,
    overrides: Sequence[str] = (),
    *,
    rewards_given: bool = False,
    planning: bool = False,
) -> TrainConfig:
    """The same for a dict or a configuration object; errors name the key path instead of file and line.

    Raises:
        ConfigError: all that is wrong.
        TypeError: ``config`` is neither.
    """
    if isinstance(config, TrainConfig) and not isinstance(config, CONFIGS[command]):
        raise ConfigError([f"{command} takes a {CONFIGS[command].__name__} or a dict, got a {type(config).__name__}"])
    if not isinstance(config, BaseModel | Mapping):
        raise TypeError(f"the configuration must be a dict or a {CONFIGS[command].__name__}, got {type(config).__name__}")
    source = Source()
    source.data = _plain(config, (), source.problems)
    _numbers_from_yaml11(source.data, command, ())
    return _check(source, command, overrides, None, rewards_given, planning)


def _read(name: str) -> str:
    try:
        return Path(name).read_text(encoding="utf-8-sig")
    except FileNotFoundError:
        raise ConfigError([f"{name}: no such file; give the path of a YAML configuration"]) from None
    except IsADirectoryError:
        raise ConfigError([f"{name}: is a folder; give the path of a YAML configuration"]) from None
    except UnicodeDecodeError as error:
        raise ConfigError([f"{name}: not a text file in UTF-8 (byte {error.start}); save it as UTF-8"]) from None
    except OSError as error:
        raise ConfigError([f"{name}: cannot be read: {error.strerror}"]) from None


def _check(
    source: Source, command: Command, overrides: Sequence[str], name: str | None, rewards_given: bool, planning: bool
) -> TrainConfig:
    data: dict[str, Any] = source.data
    _expand_shorthands(data, command)
    problems: list[Problem] = list(source.problems)
    set_lines: list[str] = []
    applied: list[tuple[KeyPath, str]] = []
    for text in overrides:
        try:
            path, value = set_.split(text)
            set_.apply(data, path, value, text)
            _expand_shorthands(data, command)  # so that loss=dapo may be followed by loss.epsilon_high=0.28
            applied.append((path, text))
        except set_.OverrideError as error:
            set_lines.append(str(error))
    if name is not None:
        anchor(data, Path(name).parent, applied)

    config, type_problems = _validate(data, command)
    problems.extend(type_problems)
    if config is not None:
        bad = [problem.path for problem in type_problems]
        for problem in find_problems(config, command, rewards_given=rewards_given, planning=planning):
            if not any(_touches(path, known) for path in (problem.path, *problem.also) for known in bad):
                problems.append(problem)
    if problems or set_lines:
        keyed = sorted(problems, key=lambda problem: _line_of(problem, source, applied) or 0)
        raise ConfigError([*(_located(name, problem, source, applied) for problem in keyed), *set_lines])
    assert config is not None
    for problem in find_idle_keys(config):
        warnings.warn(_located(name, problem, source, applied), ConfigWarning, stacklevel=4)
    return resolve(config)


def _touches(path: KeyPath, other: KeyPath) -> bool:
    shorter = min(len(path), len(other))
    return path[:shorter] == other[:shorter]


def _given(path: KeyPath, data: Any) -> bool:
    for part in path:
        if not _holds(data, part):
            return False
        data = data[part]
    return True


def _holds(data: Any, part: str | int) -> bool:
    if isinstance(data, list):
        return isinstance(part, int) and part < len(data)
    return isinstance(data, dict) and part in data


def _blamed(problem: Problem, source: Source) -> KeyPath:
    """The first of the problem's keys that the user wrote; its own otherwise."""
    return next((path for path in (problem.path, *problem.also) if _given(path, source.data)), problem.path)


def _line_of(problem: Problem, source: Source, applied: Sequence[tuple[KeyPath, str]]) -> int | None:
    path = _blamed(problem, source)
    if problem.line is not None:
        return problem.line
    if set_.origin(path, applied) is not None:
        return 1 << 30
    while path:
        if path in source.lines:
            return source.lines[path]
        path = path[:-1]
    return None


def _located(name: str | None, problem: Problem, source: Source, applied: Sequence[tuple[KeyPath, str]]) -> str:
    text = set_.origin(_blamed(problem, source), applied) if problem.line is None else None
    if text is not None:
        return f"--set {text}: {problem.message}"
    if name is None:
        return problem.message
    line = _line_of(problem, source, applied)
    where = name if line is None else f"{name}:{line}"
    if problem.column is not None:
        where += f":{problem.column}"
    return f"{where}: {problem.message}"


# -- types ---------------------------------------------------------------------------------------------------------------------


def _validate(data: dict[str, Any], command: Command) -> tuple[TrainConfig | None, list[Problem]]:
    """The configuration, with placeholders for what is wrong so that combinations of the rest can still be checked."""
    problems: dict[KeyPath, Problem] = {}
    for _ in range(4):
        try:
            return CONFIGS[command].model_validate(data), list(problems.values())
        except ValidationError as error:
            if not problems:
                data = copy.deepcopy(data)
                problems = _type_problems(error, data, command)
            for item in error.errors(include_url=False):
                _repair(data, _data_path(item["loc"], item["type"], data), item["type"])
    return None, list(problems.values())


def _type_problems(error: ValidationError, data: dict[str, Any], command: Command) -> dict[KeyPath, Problem]:
    problems: dict[KeyPath, Problem] = {}
    for item in error.errors(include_url=False):
        kind = item["type"]
        path = _data_path(item["loc"], kind, data)
        if path not in problems:
            problems[path] = Problem(_sentence(kind, path, _value_at(data, path), command), path)
    # A union complains of the whole and of the part: the part says more.
    covered = {path for path in problems if any(len(deep) > len(path) and _touches(deep, path) for deep in problems)}
    return {path: problem for path, problem in problems.items() if path not in covered}


def _data_path(loc: tuple[str | int, ...], kind: str, data: Any) -> KeyPath:
    """pydantic's location without the names of union members it puts between the keys."""
    path: list[str | int] = []
    for part in loc:
        if _holds(data, part):
            path.append(part)
            data = data[part]
        elif kind == "missing":
            path.append(part)
    return tuple(path)


def _value_at(data: Any, path: KeyPath) -> Any:
    for part in path:
        if not _holds(data, part):
            return None
        data = data[part]
    return data


def _sentence(kind: str, path: KeyPath, value: Any, command: Command) -> str:
    where = path_text(path)
    if kind == "missing":
        meaning = (node_at(command, path) or {}).get("description", "")
        return f"missing key '{where}'" + (f": {meaning}" if meaning else "")
    if kind == "extra_forbidden":
        return f"{where}: {_NOT_YET[path]}" if path in _NOT_YET else unknown_key(command, path)
    if kind == "too_short" and value == []:
        return f"{where}: the list is empty; it needs at least one item"
    if kind == "string_too_short":
        return f"{where}: the text is empty; give a value or remove the key"
    text = f"{where}: expected {expects(command, path)}, got {got(value)}"
    return text + _hint(path, value, command)


def _hint(path: KeyPath, value: Any, command: Command) -> str:
    """What to do about it, if the value shows what was meant."""
    number = takes(command, path, "number") or takes(command, path, "integer")
    if isinstance(value, str):
        if takes(command, path, "boolean"):
            meant = _YES.get(value.lower(), value.lower())
            return f"; write {meant}" if meant in ("true", "false") else ""
        if number and isinstance(scalar(value), int | float) and not isinstance(scalar(value), bool):
            return "; remove the quotes"
        close = nearest(value, enum_values(command, path))
        if close is not None:
            return f"; did you mean {close}?"
    if isinstance(value, float) and takes(command, path, "integer") and value.is_integer():
        return f"; write {int(value)}"
    if takes(command, path, "string") and isinstance(value, bool | int | float):
        return "; put it in quotes"
    if value is None:
        return "; give a value or remove the key"
    if takes(command, path, "array") and isinstance(value, str):
        return f"; write a list: [{value}]"
    if takes(command, path, "array") and isinstance(value, dict) and path[-1] in ("datasets", "rewards"):
        return "; begin each item with '- '"
    return ""


def _repair(data: Any, path: KeyPath, kind: str) -> None:
    """Takes the wrong value away; a placeholder where one is required."""
    if not path:
        return
    parent = _value_at(data, path[:-1])
    key = path[-1]
    if kind == "missing" and isinstance(parent, dict):
        parent[str(key)] = [{"path": "-"}] if key == "datasets" else "-"
    elif isinstance(parent, dict):
        parent.pop(str(key), None)
    elif isinstance(parent, list):
        # An item that is no item: the whole list goes, since its numbers would shift.
        _repair(data, path[:-1], kind)


# -- shorthands and plain data -------------------------------------------------------------------------------------------------


def _expand_shorthands(data: dict[str, Any], command: Command) -> None:
    """A plain string for a section or for a list of one, in place: the schema says where which is meant."""
    if command == "grpo" and isinstance(data.get("environment"), str):
        data["environment"] = {"name": data["environment"]}
    if isinstance(data.get("loss"), str):
        data["loss"] = {"loss_type": data["loss"]}
    if isinstance(data.get("report_to"), str):
        data["report_to"] = [] if data["report_to"] == "none" else [data["report_to"]]
    _expand_items(data, "datasets", "path")
    if command == "grpo":
        _expand_items(data, "rewards", "name")
    evaluation = data.get("eval")
    if isinstance(evaluation, dict):
        _expand_items(evaluation, "datasets", "path")
        _expand_items(evaluation, "rewards", "name")
    for section in (evaluation, data.get("rollouts")):
        if isinstance(section, dict) and isinstance(section.get("stop"), str):
            section["stop"] = [section["stop"]]


def _expand_items(section: dict[str, Any], key: str, field: str) -> None:
    items = section.get(key)
    if isinstance(items, str):
        items = [items]
    if isinstance(items, list):
        section[key] = [{field: item} if isinstance(item, str) else item for item in items]


def _plain(value: Any, path: KeyPath, problems: list[Problem]) -> Any:
    """Copies nested mappings, sequences, models, paths and subclasses of the plain types to the plain types."""
    if isinstance(value, BaseModel):
        value = {name: getattr(value, name) for name in type(value).model_fields}
    if isinstance(value, Mapping):
        return {str(key): _plain(item, (*path, str(key)), problems) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item, (*path, index), problems) for index, item in enumerate(value)]
    if value is None or isinstance(value, bool):
        return value
    for kind in (int, float, str):
        if isinstance(value, kind):
            return kind(value)
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    if getattr(value, "ndim", None) == 0 and hasattr(value, "item"):  # a numpy or torch scalar
        return _plain(value.item(), path, problems)
    hint = "; pass functions as surogate_rl.grpo(config, rewards=[function])" if callable(value) else ""
    message = f"{path_text(path)}: expected text, numbers, true or false, lists or dicts, got {type(value).__name__}{hint}"
    problems.append(Problem(message, path))
    return None


def _numbers_from_yaml11(value: Any, command: Command, path: KeyPath) -> None:
    """Dicts that other YAML readers made hold '1e-5' as text; where a number is wanted it is one."""
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, item in list(items):
        here = (*path, key)
        if isinstance(item, str) and "e" in item.lower():
            number = scalar(item)
            if isinstance(number, float) and takes(command, here, "number") and not takes(command, here, "string"):
                value[key] = number
        else:
            _numbers_from_yaml11(item, command, here)
