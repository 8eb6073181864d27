"""A user's own objective: ``loss_type: path/file.py:fn``."""

from __future__ import annotations

import hashlib
import importlib.util
import inspect
import sys
from collections.abc import Callable, Mapping
from typing import Any, cast, get_args

import torch

from surogate_rl.batch import PackedBatch, Totals
from surogate_rl.errors import InputError
from surogate_rl.files import user_path
from surogate_rl.objectives.base import Loss, TokenStats, Unit
from surogate_rl.objectives.mismatch import measured


class ObjectiveError(InputError):
    """A user's own objective cannot be loaded or called, or returned what is no loss; the message names it."""


class UserObjective:
    """Calls ``fn(stats, batch, totals, **args)``, which returns a scalar tensor or a `Loss`.

    Attributes the function may carry: ``unit`` (default ``step``: it sees the whole optimiser step at once),
    ``needs_entropy`` and ``needs_reference`` (default False).
    """

    mask_truncated = False

    def __init__(self, name: str, function: Callable[..., Any], args: Mapping[str, Any] | None = None) -> None:
        """Raises:
        ObjectiveError: the function cannot be called so, or its attributes are wrong.
        """
        self.name = name
        self.args = dict(args or {})
        self._function = function
        unit = getattr(function, "unit", "step")
        if unit not in get_args(Unit):
            raise ObjectiveError(f"{name}: attribute unit is {unit!r}, expected one of {', '.join(get_args(Unit))}")
        self.unit: Unit = cast(Unit, unit)
        self.needs_entropy = _flag(name, function, "needs_entropy")
        self.needs_reference = _flag(name, function, "needs_reference")
        _check_signature(name, function, self.args)

    def __call__(self, stats: TokenStats, batch: PackedBatch, totals: Totals) -> Loss:
        """Raises:
        ObjectiveError: the function returned something else than a finite-or-not real scalar tensor that depends on the
            statistics, or a `Loss` of one. What the function itself raises passes through.
        """
        result = self._function(stats, batch, totals, **self.args)
        loss = result if isinstance(result, Loss) else Loss(self._scalar(result), {})
        total = self._scalar(loss.total)
        if batch.num_trained > 0 and not total.requires_grad:
            raise ObjectiveError(
                f"{self.name}: the returned loss does not depend on stats.logp or stats.entropy as far as autograd can see; "
                "do not detach it or convert it to a number (a loss that is truly constant: add 0 * stats.logp.sum())"
            )
        metrics = {**measured(stats, batch), **self._metrics(loss.metrics)}
        if "loss" not in metrics:
            part = {"token": (batch.num_trained, totals.tokens), "pair": (_num_pairs(batch), totals.pairs)}.get(
                self.unit, (int((batch.trained_per_sequence() > 0).sum()), totals.sequences)
            )
            metrics["loss"] = (float(total.detach()), part[0] / max(part[1], 1))
        return Loss(total, metrics)

    def _scalar(self, value: object) -> torch.Tensor:
        if not isinstance(value, torch.Tensor):
            raise ObjectiveError(f"{self.name}: returned {type(value).__name__}, expected a scalar torch.Tensor or a Loss")
        if value.numel() != 1:
            shape = tuple(value.shape)
            raise ObjectiveError(f"{self.name}: returned a tensor of shape {shape}, expected a scalar; sum it and divide by totals")
        if not value.is_floating_point():
            raise ObjectiveError(f"{self.name}: returned a tensor of {value.dtype}, expected a floating-point one")
        return value.reshape(())

    def _metrics(self, metrics: object) -> dict[str, tuple[float, float]]:
        if not isinstance(metrics, Mapping):
            raise ObjectiveError(f"{self.name}: Loss.metrics is {type(metrics).__name__}, expected a mapping of name to (sum, weight)")
        checked: dict[str, tuple[float, float]] = {}
        for key, entry in metrics.items():
            try:
                value, weight = entry
                checked[str(key)] = (float(value), float(weight))
            except (TypeError, ValueError, RuntimeError) as error:
                raise ObjectiveError(f"{self.name}: metric {key!r} is {entry!r}, expected a pair of numbers (sum, weight)") from error
        return checked


def load_user_objective(spec: str, args: Mapping[str, Any] | None = None) -> UserObjective:
    """Loads ``path/file.py:fn``; a relative path counts from the working directory.

    Raises:
        ObjectiveError: no such file or function, the file fails to import, or the function does not fit; names `spec`.
    """
    path_text, _, function_name = spec.rpartition(":")
    if not path_text.endswith(".py"):
        raise ObjectiveError(f"loss_type: expected path/file.py:fn, got '{spec}'")
    path = user_path(path_text)
    if not path.is_file():
        raise ObjectiveError(f"loss_type: {spec}: there is no file {path}")
    if not function_name.isidentifier():
        raise ObjectiveError(f"loss_type: {spec}: {function_name!r} is no function name, expected path/file.py:fn")
    # A name of its own, so that two files called loss.py do not meet; registered, because dataclasses and pickle look it up.
    module_name = f"surogate_rl_user_{path.stem}_{hashlib.sha256(str(path.resolve()).encode()).hexdigest()[:12]}"
    module_spec = importlib.util.spec_from_file_location(module_name, path)
    if module_spec is None or module_spec.loader is None:
        raise ObjectiveError(f"loss_type: {spec}: {path} cannot be loaded as a Python file")
    module = importlib.util.module_from_spec(module_spec)
    sys.modules[module_name] = module
    try:
        module_spec.loader.exec_module(module)
    except Exception as error:
        del sys.modules[module_name]
        raise ObjectiveError(f"loss_type: {spec}: importing {path} failed: {type(error).__name__}: {error}") from error
    function = getattr(module, function_name, None)
    if not callable(function):
        found = ", ".join(sorted(name for name, value in vars(module).items() if inspect.isfunction(value))) or "none"
        raise ObjectiveError(f"loss_type: {spec}: {path} has no function {function_name} (functions: {found})")
    return UserObjective(spec, function, args)


def _flag(name: str, function: Callable[..., Any], attribute: str) -> bool:
    value = getattr(function, attribute, False)
    if not isinstance(value, bool):
        raise ObjectiveError(f"{name}: attribute {attribute} is {value!r}, expected True or False")
    return value


def _check_signature(name: str, function: Callable[..., Any], args: Mapping[str, Any]) -> None:
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):
        return
    try:
        signature.bind(None, None, None, **args)
    except TypeError as error:
        given = ", ".join(args) or "none"
        called = "cannot be called as fn(stats, batch, totals, **args)"
        raise ObjectiveError(f"{name}{signature} {called} with args {given}: {error}") from error


def _num_pairs(batch: PackedBatch) -> int:
    if batch.pair is None:
        return 0
    return int((batch.trained_per_sequence()[batch.pairs()].sum(axis=1) > 0).sum())
