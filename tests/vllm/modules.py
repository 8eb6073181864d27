"""Stand-ins for modules of vLLM, where it is not installed."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from types import ModuleType
from typing import Any

import pytest


def stand_in(monkeypatch: pytest.MonkeyPatch, members: Mapping[str, Mapping[str, Any]]) -> None:
    """Makes modules importable, with the packages above them.

    Args:
        members: what each has, by its name.
    """
    packages = {name.rsplit(".", level)[0] for name in members for level in range(1, name.count(".") + 1)}
    for name in packages | members.keys():
        module = ModuleType(name)
        module.__dict__.update({"__path__": []} if name in packages else {}, **members.get(name, {}))
        monkeypatch.setitem(sys.modules, name, module)
