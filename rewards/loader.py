"""From what the configuration or the caller names to functions, each with its call plan and what a worker loads it from."""

from __future__ import annotations

import functools
import importlib.machinery
import inspect
import os
import pickle
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

from surogate_rl.files import user_path
from surogate_rl.rewards.call import CallPlan, plan_call
from surogate_rl.rewards.registry import BUILTINS, RewardError, build, mark_of, nearest
from surogate_rl.rewards.worker import FileSource, PickledSource, attribute, module_of_file, short_traceback

if TYPE_CHECKING:
    from surogate_rl.config.schema import RewardConfig

_LARGE = 32 * 2**20


@dataclass(frozen=True)
class RewardFunction:
    """One weighted reward.

    Attributes:
        name: unique in the run; what metrics and messages call it.
        timeout: seconds for one call.
    """

    name: str
    weight: float
    timeout: float
    plan: CallPlan
    source: FileSource | PickledSource


def load_functions(
    rewards: Sequence[RewardConfig | Callable[..., Any] | str], default_timeout: float = 30.0, *, alone: bool = True
) -> list[RewardFunction]:
    """Finds every function and reads its signature.

    Args:
        rewards: entries of the configuration, names, or Python callables. Relative paths count from the working directory.
        alone: nothing else gives rewards, so that one of them must have a weight.

    Raises:
        RewardError: what cannot be found, loaded or called, and why.
    """
    functions: list[RewardFunction] = []
    for entry in rewards:
        options: dict[str, Any]
        target: Callable[..., Any] | None
        if isinstance(entry, str):
            label, weight, timeout, options, target = entry, 1.0, default_timeout, {}, None
        elif callable(entry):
            label, weight, timeout, options, target = "", 1.0, default_timeout, {}, entry
        else:
            label, weight, timeout, options, target = entry.name, entry.weight, entry.timeout, dict(entry.args), None
        function, source, name, options = _from_callable(target) if target is not None else _from_name(label, options)
        name = _unique(name, {known.name for known in functions})
        functions.append(RewardFunction(name, weight, timeout, plan_call(name, function, options), source))
    if alone and functions and all(function.weight == 0 for function in functions):
        raise RewardError("every reward has weight 0: nothing would be learned")
    return functions


def _unique(name: str, taken: set[str]) -> str:
    number = 1
    unique = name
    while unique in taken:
        number += 1
        unique = f"{name}_{number}"
    return unique


_Found = tuple[Callable[..., Any], FileSource | PickledSource, str, dict[str, Any]]


def _from_name(name: str, options: dict[str, Any]) -> _Found:
    path, colon, attribute_name = name.rpartition(":")
    if colon and path.endswith(".py"):
        return _from_file(path, attribute_name, options)
    if name.endswith(".py"):
        return _from_file(name, "", options)
    if name not in BUILTINS and (colon or "/" in name):
        raise RewardError(f"reward {name!r}: a function in a file is named path/file.py:fn")
    function = build(name, options)
    return function, PickledSource(pickle.dumps(function)), name, {}


def _from_file(path: str, function_name: str, options: dict[str, Any]) -> _Found:
    label = f"{path}:{function_name}" if function_name else path
    file = _find(path, label)
    try:
        module = module_of_file(str(file))
    except Exception as error:
        raise RewardError(f"reward {label!r}: importing {file} failed:\n{short_traceback(error)}") from error
    own = {
        key: value
        for key, value in vars(module).items()
        if callable(value) and not key.startswith("_") and getattr(value, "__module__", module.__name__) == module.__name__
    }
    if not function_name:
        marked = [key for key, value in own.items() if mark_of(value)]
        if len(marked) != 1:
            found = f"{len(marked)} functions marked @reward" + (f" ({', '.join(marked)})" if marked else "")
            known = ", ".join(own) or "none"
            raise RewardError(f"reward {label!r}: the file has {found}; say which function by {path}:fn (its functions: {known})")
        function_name = marked[0]
    try:
        function = attribute(module, function_name)
    except AttributeError:
        known = ", ".join(own) or "none"
        raise RewardError(
            f"reward {label!r}: {file} has no function {function_name!r}{nearest(function_name, own) or '.'} Functions there: {known}"
        ) from None
    if not callable(function):
        raise RewardError(f"reward {label!r}: {function_name!r} in {file} is not callable but of type {type(function).__name__}")
    return function, FileSource(str(file), function_name), _name_of(function, function_name), options


def _find(path: str, label: str) -> Path:
    file = user_path(path).resolve()
    if file.is_file():
        return file
    near = [sibling.name for sibling in file.parent.glob("*.py")] if file.parent.is_dir() else []
    raise RewardError(f"reward {label!r}: there is no file {file}{nearest(file.name, near)}")


def _name_of(function: Any, default: str) -> str:
    mark = mark_of(function)
    if mark is not None and mark.name:
        return mark.name
    while isinstance(function, functools.partial):
        function = function.func
    name = getattr(function, "__name__", None)
    if not isinstance(name, str):
        name = type(function).__name__
    return name if name != "<lambda>" else default or "lambda"


def _from_callable(function: Callable[..., Any]) -> _Found:
    name = _name_of(function, "")
    return function, PickledSource(_dump(function, name)), name, {}


def _dump(function: Callable[..., Any], name: str) -> bytes:
    """Bytes from which another process makes the function: by reference where it can import it, else with its code and globals."""
    import cloudpickle

    local = [module for module in _modules_of(function) if not _importable(module)]
    for module in local:
        cloudpickle.register_pickle_by_value(module)
    try:
        data: bytes = cloudpickle.dumps(function)
    except Exception as error:
        raise RewardError(
            f"reward {name!r} cannot be sent to a worker process: {error}. It uses an object that cannot be copied (an open file, a lock, "
            "a model, ...): make that object inside the function on its first call, or put the function in a file and name it "
            "path/file.py:fn, which each worker imports for itself"
        ) from error
    finally:
        for module in local:
            cloudpickle.unregister_pickle_by_value(module)
    if len(data) > _LARGE:
        raise RewardError(
            f"reward {name!r} carries {len(data) / 2**20:.0f} MiB of data with it, which every worker would have to copy; load the data "
            "inside a file named path/file.py:fn instead"
        )
    return data


def _modules_of(function: Any) -> Iterator[ModuleType]:
    seen: set[str] = set()
    parts = [function]
    while parts:
        part = parts.pop()
        if isinstance(part, functools.partial):
            parts.append(part.func)
            continue
        if inspect.ismethod(part):
            parts += [part.__func__, type(part.__self__)]
        elif not inspect.isfunction(part) and not inspect.isclass(part):
            parts.append(type(part))
        if hasattr(part, "__wrapped__"):
            parts.append(part.__wrapped__)
        module = sys.modules.get(getattr(part, "__module__", None) or "")
        if module is not None and module.__name__ not in seen:
            seen.add(module.__name__)
            yield module


def _importable(module: ModuleType) -> bool:
    """Whether a fresh process with this `sys.path` would import the same module by its name."""
    if module.__name__ == "__main__":
        return True  # cloudpickle sends its contents by value anyhow
    path: Sequence[str] | None = None
    spec: importlib.machinery.ModuleSpec | None = None
    name = ""
    for part in module.__name__.split("."):
        name = f"{name}.{part}" if name else part
        spec = _find_spec(name, path)
        if spec is None:
            return False
        path = list(spec.submodule_search_locations or []) or None
    file = getattr(module, "__file__", None)
    if spec is None or file is None or spec.origin is None:
        return spec is not None
    return bool(os.path.realpath(spec.origin) == os.path.realpath(file))


def _find_spec(name: str, path: Sequence[str] | None) -> importlib.machinery.ModuleSpec | None:
    for finder in sys.meta_path:
        find: Any = getattr(finder, "find_spec", None)
        spec = find(name, path) if find is not None else None
        if isinstance(spec, importlib.machinery.ModuleSpec):
            return spec
    return None
