"""The tools. Signature and docstring are what the model is told of them; what they return, or raise, is what it sees next."""

from __future__ import annotations


def add(a: int, b: int) -> int:
    """Adds two numbers.

    Args:
        a: the first number
        b: the second number
    """
    return a + b


def multiply(a: int, b: int) -> int:
    """Multiplies two numbers.

    Args:
        a: the first number
        b: the second number
    """
    return a * b
