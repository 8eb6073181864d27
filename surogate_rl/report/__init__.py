"""report.html: one self-contained page about a run, made from what lies in its folder."""

from __future__ import annotations

import os
from pathlib import Path

from surogate_rl.errors import InputError
from surogate_rl.report.data import read_run
from surogate_rl.report.page import render

__all__ = ["write_report"]

FILE_NAME = "report.html"


def write_report(directory: str | os.PathLike[str]) -> Path:
    """Reads metrics.jsonl, config.yaml and rollouts/*.parquet of a run's folder, writes report.html beside them and returns its path.

    Raises:
        InputError: the folder is missing or holds no metrics.
    """
    folder = Path(directory)
    if not folder.is_dir():
        raise InputError(f"{folder}: no such folder; give the output_dir of a run")
    if not (folder / "metrics.jsonl").exists():
        raise InputError(f"{folder}: holds no metrics.jsonl, so it is not the output_dir of a run")
    text = render(read_run(folder))
    target = folder / FILE_NAME
    aside = target.with_name(f".{FILE_NAME}.{os.getpid()}")
    aside.write_text(text, encoding="utf-8")
    aside.replace(target)
    return target
