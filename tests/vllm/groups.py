"""Processes of a group, from /proc. A process may end at any moment while it is looked at."""

from __future__ import annotations

import contextlib
import os
import time
from pathlib import Path


def members(group: int) -> dict[int, str]:
    """Living processes of a group: id and command line."""
    found = {}
    for entry in os.listdir("/proc"):
        with contextlib.suppress(OSError, IndexError, ValueError):
            fields = Path(f"/proc/{entry}/stat").read_bytes().rpartition(b")")[2].split()
            if int(fields[2]) == group and fields[0] != b"Z":
                found[int(entry)] = Path(f"/proc/{entry}/cmdline").read_bytes().replace(b"\0", b" ").decode()
    return found


def children(group: int, name: str = "") -> list[int]:
    """Members but for the leader and resource trackers; with `name`: those whose command line has it."""
    return [
        number for number, command in members(group).items() if number != group and "resource_tracker" not in command and name in command
    ]


def gone(group: int, patience: float = 60.0) -> dict[int, str]:
    """What is left of a group after at most `patience` seconds."""
    deadline = time.monotonic() + patience
    while (left := members(group)) and time.monotonic() < deadline:
        time.sleep(0.05)
    return left
