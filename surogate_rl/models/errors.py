"""The one error of this package."""

from __future__ import annotations

from surogate_rl.errors import InputError


class ModelError(InputError):
    """A model, tokenizer or adapter cannot be used as given; the message says what, where and what to do."""
