"""Paths that users write."""

from __future__ import annotations

import os
from pathlib import Path


def user_path(text: str | os.PathLike[str]) -> Path:
    """With ``~`` and ``~name`` for a home directory. As in a shell, a name that nobody has stays as it is."""
    return Path(os.path.expanduser(text))
