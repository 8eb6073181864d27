"""The one error of this package."""

from __future__ import annotations


class ModelError(ValueError):
    """A model, tokenizer or adapter cannot be used as given; the message says what, where and what to do."""
