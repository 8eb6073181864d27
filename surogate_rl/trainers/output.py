"""The folder that a run writes to: checked before anything is loaded, and one run's alone while it lasts."""

from __future__ import annotations

import errno
import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from surogate_rl.checkpoint import CheckpointStore
from surogate_rl.config.schema import TrainConfig
from surogate_rl.errors import InputError

CONFIG_FILE = "config.yaml"
CHECKPOINTS = "checkpoints"
FINAL = "final"
ROLLOUTS = "rollouts"
_LOCK = ".lock"
_NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP)


def check_output(config: TrainConfig) -> None:
    """Finds out what a run would otherwise fail of after minutes of loading, or at its end.

    Raises:
        InputError: the folder cannot be written to, or holds an earlier run that this one would mix with or overwrite.
    """
    directory = Path(config.output_dir)
    existing = directory
    while not existing.exists() and existing != existing.parent:
        existing = existing.parent
    if not existing.is_dir():
        raise InputError(f"output_dir: {existing} is a file; choose another folder")
    if not os.access(existing, os.W_OK | os.X_OK):
        raise InputError(f"output_dir: {directory} cannot be written to (no permission for {existing}); choose another folder")
    if config.resume != "never":
        return
    newest = CheckpointStore(directory / CHECKPOINTS, None).newest()
    if newest is not None:
        raise InputError(
            f"output_dir: {directory} holds checkpoints of an earlier run (newest: {newest.name}); "
            "set resume: auto to go on from it, or choose another output_dir"
        )
    if (directory / FINAL).is_dir():
        raise InputError(
            f"output_dir: {directory} holds the final model of an earlier run, which this one would overwrite; "
            "choose another output_dir, or move that one away"
        )


@contextmanager
def claimed(directory: Path) -> Iterator[None]:
    """Makes the folder and holds it for one run: a second one would interleave its lines and delete the first one's checkpoints. The claim
    ends with the process, however it ends.

    Raises:
        InputError: another run holds it.
    """
    try:
        directory.mkdir(parents=True, exist_ok=True)
        file = (directory / _LOCK).open("a+", encoding="utf-8")
    except OSError as error:
        raise InputError(f"output_dir: {directory} cannot be written to ({error.strerror}); choose another folder") from error
    with file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno not in _NO_LOCKS:  # some network file systems have no locks; the run goes on without
                file.seek(0)
                owner = file.read().strip() or "unknown"
                raise InputError(
                    f"output_dir: another run (process {owner}) is writing to {directory}; wait until it ends, or choose another output_dir"
                ) from None
        file.truncate(0)
        file.write(f"{os.getpid()}\n")
        file.flush()
        yield


def drop_later_rollouts(directory: Path, done: int) -> None:
    """Rollouts of steps that a resumed run does again were lost with the weights, as were their lines of metrics; those of an earlier run
    that a new one starts over are kept aside, as its metrics are."""
    folder = directory / ROLLOUTS
    if not folder.is_dir():
        return
    if done == 0:
        number = 1
        while (kept := folder.with_name(f"{ROLLOUTS}-{number}")).exists():
            number += 1
        folder.rename(kept)
        return
    for path in folder.glob("step-*.parquet"):
        step = path.stem.removeprefix("step-")
        if step.isdigit() and int(step) > done:
            path.unlink()
