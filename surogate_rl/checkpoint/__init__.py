"""Checkpoints: written aside, verified, renamed; a resumed run ends with the same weights as an unbroken one."""

from surogate_rl.checkpoint.arrays import LazyArray, Saved, Under
from surogate_rl.checkpoint.store import Checkpoint, CheckpointError, CheckpointStore

__all__ = ["Checkpoint", "CheckpointError", "CheckpointStore", "LazyArray", "Saved", "Under"]
