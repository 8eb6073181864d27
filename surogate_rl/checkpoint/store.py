"""A folder of checkpoints, `checkpoints/step-00000012/`, each with a manifest of sizes and hashes."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from numpy.typing import NDArray

from surogate_rl.checkpoint.arrays import ArrayFile, Saved, write_arrays
from surogate_rl.errors import RunError

MANIFEST = "manifest.json"
ARRAYS = "arrays.safetensors"
STATE = "state.json"
FORMAT = 1
_PREFIX = "step-"
_ASIDE = ".partial-"


class CheckpointError(RunError):
    """A checkpoint cannot be written or is not what its manifest says."""


@dataclass(frozen=True)
class Checkpoint:
    """Attributes:
    step: steps done when it was taken.
    arrays: weights, optimiser moments and whatever else is an array, by name; each is read when it is asked for.
    state: everything else, JSON.
    """

    step: int
    arrays: Mapping[str, NDArray[Any]]
    state: dict[str, Any]


class CheckpointStore:
    def __init__(self, directory: Path, keep: int | None) -> None:
        self.directory = directory
        self.keep = keep

    def save(self, step: int, arrays: Mapping[str, Saved], state: Mapping[str, Any]) -> Path:
        """Writes a checkpoint aside, syncs it, reads it back against its hashes, renames it, then drops the oldest beyond `keep`. At most
        one of the arrays that are lazy is in memory.

        Raises:
            CheckpointError: an array is not finite, the disk has too little room or fails, or what was written reads back differently.
                Earlier checkpoints stay as they are.
        """
        self.directory.mkdir(parents=True, exist_ok=True)
        self._require_room(step, sum(array.nbytes for array in arrays.values()))
        final = self.directory / f"{_PREFIX}{step:08d}"
        aside = self.directory / f"{_ASIDE}{final.name}"
        try:
            self._write(aside, step, arrays, state)
            if final.exists():
                shutil.rmtree(final)
            os.rename(aside, final)
            _sync(self.directory)
        except ValueError as error:
            shutil.rmtree(aside, ignore_errors=True)
            raise CheckpointError(f"checkpoint of step {step}: {error}; nothing was written") from error
        except OSError as error:
            shutil.rmtree(aside, ignore_errors=True)
            raise CheckpointError(
                f"checkpoint of step {step}: {self.directory} cannot be written to: {error}; earlier checkpoints are untouched"
            ) from error
        self._verify(final)
        self._rotate()
        return final

    @staticmethod
    def _write(aside: Path, step: int, arrays: Mapping[str, Saved], state: Mapping[str, Any]) -> None:
        shutil.rmtree(aside, ignore_errors=True)
        aside.mkdir()
        write_arrays(aside / ARRAYS, arrays)
        (aside / STATE).write_text(json.dumps(dict(state), indent=1, sort_keys=True), encoding="utf-8")
        files = {name: _describe(aside / name) for name in (ARRAYS, STATE)}
        (aside / MANIFEST).write_text(json.dumps({"format": FORMAT, "step": step, "files": files}, indent=1), encoding="utf-8")
        for path in (*aside.iterdir(), aside):
            _sync(path)

    def steps(self) -> list[int]:
        """Steps of the complete checkpoints here, ascending. What a killed run left half-written does not count."""
        if not self.directory.is_dir():
            return []
        found = []
        for path in self.directory.iterdir():
            number = path.name.removeprefix(_PREFIX)
            if path.name.startswith(_PREFIX) and number.isdigit() and (path / MANIFEST).is_file():
                found.append(int(number))
        return sorted(found)

    def newest(self) -> Path | None:
        steps = self.steps()
        return self.directory / f"{_PREFIX}{steps[-1]:08d}" if steps else None

    def load_newest(self, tell: Callable[[str], None]) -> tuple[Path, Checkpoint] | None:
        """The newest whole checkpoint; None if there is none at all. Damaged ones are passed over, and `tell` is told of each.

        Raises:
            CheckpointError: there are some, and none is whole.
        """
        steps = self.steps()
        for place, step in enumerate(reversed(steps)):
            path = self.directory / f"{_PREFIX}{step:08d}"
            try:
                return path, self.load(path)
            except CheckpointError as error:
                if place == len(steps) - 1:
                    raise
                tell(f"{error}; going back to the one before")
        return None

    @staticmethod
    def load(path: Path) -> Checkpoint:
        """Raises:
        CheckpointError: something is missing, or differs from the manifest's size or hash.
        """
        manifest = CheckpointStore._verify(path)
        return Checkpoint(manifest["step"], ArrayFile(path / ARRAYS), json.loads((path / STATE).read_text(encoding="utf-8")))

    @staticmethod
    def _verify(path: Path) -> dict[str, Any]:
        manifest_path = path / MANIFEST
        if not manifest_path.is_file():
            raise CheckpointError(f"{path}: no {MANIFEST}; this is not a complete checkpoint")
        try:
            manifest: dict[str, Any] = json.loads(manifest_path.read_text(encoding="utf-8"))
        except ValueError as error:
            raise CheckpointError(f"{path}: {MANIFEST} is damaged: {error}") from error
        if manifest.get("format") != FORMAT:
            raise CheckpointError(f"{path}: format {manifest.get('format')!r}, this version reads {FORMAT}")
        for name, expected in manifest["files"].items():
            if not (path / name).is_file():
                raise CheckpointError(f"{path}: {name} is missing")
            if _describe(path / name) != expected:
                raise CheckpointError(f"{path}: {name} differs from its manifest, it is damaged")
        return manifest

    def _require_room(self, step: int, needed: int) -> None:
        free = shutil.disk_usage(self.directory).free
        wanted = int(needed * 1.05) + (1 << 20)
        if free < wanted:
            raise CheckpointError(
                f"checkpoint of step {step}: {self.directory} has {free / 2**20:.0f} MiB free, {wanted / 2**20:.0f} MiB are needed; "
                "free some space or lower save_total_limit. Earlier checkpoints are untouched"
            )

    def _rotate(self) -> None:
        if self.keep is None:
            return
        for step in self.steps()[: -self.keep]:
            shutil.rmtree(self.directory / f"{_PREFIX}{step:08d}")


def _describe(path: Path) -> dict[str, Any]:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while chunk := file.read(1 << 22):
            digest.update(chunk)
    return {"bytes": path.stat().st_size, "sha256": digest.hexdigest()}


def _sync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
