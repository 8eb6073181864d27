"""Refuses options that a loss cannot honour, before anything is loaded."""

from __future__ import annotations

from typing import TYPE_CHECKING

from surogate_rl.config.loss import loss_problems

if TYPE_CHECKING:
    from surogate_rl.config.schema import LossConfig


def validate_loss(config: LossConfig) -> None:
    """Checks a ``loss`` section of any command, as loading a configuration does (see `surogate_rl.config.loss`).

    Raises:
        ValueError: names the option, the loss type and what to do.
    """
    for problem in loss_problems(config):
        raise ValueError(problem.message)
