"""Tools for tests."""

import os
import signal
import time


def add(a: int, b: int = 0) -> int:
    """Adds two numbers.

    Args:
        a: the first number
        b: the second number
    """
    return a + b


def greet(name: str) -> dict[str, str]:
    """Greets somebody.

    Args:
        name: whom
    """
    return {"said": f"hello {name}"}


async def later(text: str) -> str:
    """Says something, asynchronously.

    Args:
        text: what
    """
    return text.upper()


def fails(text: str) -> str:
    """Always fails.

    Args:
        text: why
    """
    raise ValueError(text)


def leaves(code: int) -> str:
    """Leaves the program.

    Args:
        code: exit code
    """
    raise SystemExit(code)


def dies(code: int) -> str:
    """Kills its process.

    Args:
        code: not used
    """
    os.kill(os.getpid(), signal.SIGKILL)
    return "never"


def hangs(seconds: float) -> str:
    """Sleeps.

    Args:
        seconds: how long
    """
    time.sleep(seconds)
    return "awake"


def long(count: int) -> str:
    """A long text.

    Args:
        count: characters
    """
    return "x" * count


def undescribed(a, b):  # type: ignore[no-untyped-def]
    return a + b
