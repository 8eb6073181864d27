"""The two errors whose message is all that a user needs. The command line shows them without a traceback; anything else is a fault in
the program, or in a function of the user's that raised."""

from __future__ import annotations


class InputError(ValueError):
    """Something the user gave (a configuration, data, a model, a function) is not right. The message says what, where and what to do.
    Exit code 2."""


class RunError(RuntimeError):
    """A run that was right could not go on, such as for a full disk. The message says why and what is left. Exit code 1."""
