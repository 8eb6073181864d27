"""Metrics of a run: metrics.jsonl always, wandb and TensorBoard if asked for, neither of which can stop or hang a run."""

from surogate_rl.tracking.metrics import read_metrics
from surogate_rl.tracking.tracker import Tracker

__all__ = ["Tracker", "read_metrics"]
