"""The commands: each takes a config and returns what the run left."""

from surogate_rl.trainers.commands import run_dpo, run_grpo, run_sft
from surogate_rl.trainers.loop import Interrupted, RunResult
from surogate_rl.trainers.plan import Plan, plan

__all__ = ["Interrupted", "Plan", "RunResult", "plan", "run_dpo", "run_grpo", "run_sft"]
