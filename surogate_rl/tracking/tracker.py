"""Where a run's metrics go."""

from __future__ import annotations

import importlib.util
import logging
import os
import uuid
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from pydantic import BaseModel

from surogate_rl.tracking.metrics import RESERVED, MetricsFile
from surogate_rl.tracking.remote import RemoteSink

logger = logging.getLogger(__name__)

CLOSE_SECONDS = 30.0
_RUN_ID_FILE = "wandb-run-id"


class Tracker:
    """metrics.jsonl, and wandb and TensorBoard beside it.

    Args:
        output_dir: the run's folder.
        report_to: any of ``wandb`` and ``tensorboard``.
        run_name: shown by wandb; default: the folder's name.
        config: shown by wandb.
        resume_step: the step that the run goes on after; None or 0 starts over.
        close_seconds: how long `close` waits for wandb and TensorBoard together, then they are ended.
    """

    def __init__(
        self,
        output_dir: str | os.PathLike[str],
        report_to: Sequence[str] = (),
        run_name: str | None = None,
        config: BaseModel | Mapping[str, Any] | None = None,
        *,
        resume_step: int | None = None,
        close_seconds: float = CLOSE_SECONDS,
    ) -> None:
        directory = Path(output_dir)
        self._file = MetricsFile(directory, resume_step)
        self._file_failed = False
        self._close_seconds = close_seconds
        self._sinks: list[RemoteSink] = []
        values = config.model_dump(mode="json") if isinstance(config, BaseModel) else dict(config or {})
        for name in report_to:
            if importlib.util.find_spec(name) is None:
                logger.warning("report_to: %s is not installed, the run goes on without it; pip install %s", name, name)
                continue
            options = {
                "directory": str(directory),
                "name": run_name or directory.resolve().name,
                "config": values,
                "resume_step": resume_step or 0,
                "offline": offline(),
                "run_id": _run_id(directory, bool(resume_step)) if name == "wandb" else "",
            }
            self._sinks.append(RemoteSink(name, options, log_file=directory / f"{name}.log"))

    def log(self, step: int, metrics: Mapping[str, Any]) -> None:
        """Writes one line at once; NaN and infinity become null.

        Args:
            step: optimiser steps done.
            metrics: name -> number (None: no value). ``step`` and ``time`` are the line's own.

        Raises:
            ValueError: a reserved name, or a value that is no number.
        """
        values = {name: _number(name, value) for name, value in metrics.items()}
        try:
            self._file.write(step, values)
            self._file_failed = False
        except OSError as error:
            # Metrics are worth less than the run they are about: say so once and go on.
            if not self._file_failed:
                logger.warning("%s: cannot be written: %s; the run goes on without this line", self._file.path, error.strerror or error)
            self._file_failed = True
        for sink in self._sinks:
            sink.send(step, values)

    def close(self) -> None:
        """Never raises; waits no longer than ``close_seconds``."""
        try:
            self._file.close()
        except OSError as error:
            logger.warning("%s: cannot be closed: %s", self._file.path, error.strerror or error)
        for sink in self._sinks:
            sink.finish()
        for sink in self._sinks:
            self._close_seconds -= sink.join(max(self._close_seconds, 0.0))
        self._sinks = []

    def __enter__(self) -> Tracker:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


def offline() -> bool:
    """Whether the user keeps the machine off the network: then nothing is sent, and wandb keeps its files for a later sync."""
    return any(os.environ.get(name, "").lower() in ("1", "true", "yes", "on") for name in ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE"))


def _number(name: str, value: Any) -> float | None:
    if name in RESERVED:
        raise ValueError(f"metric '{name}': the name is the line's own; choose another")
    if value is None:
        return None
    if isinstance(value, int) and not isinstance(value, bool):
        return value
    try:
        return float(value)
    except (TypeError, ValueError):
        raise ValueError(f"metric '{name}': expected a number, got {value!r}") from None


def _run_id(directory: Path, resumed: bool) -> str:
    """A resumed run goes on in the same wandb run."""
    file = directory / _RUN_ID_FILE
    if resumed and file.exists():
        return file.read_text(encoding="utf-8").strip()
    run_id = uuid.uuid4().hex[:12]
    file.write_text(run_id + "\n", encoding="utf-8")
    return run_id
