"""sft, dpo and grpo, from a config to a finished run."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, closing, nullcontext
from typing import Any

from surogate_rl.config.schema import DpoConfig, EnvironmentConfig, GrpoConfig, SftConfig
from surogate_rl.rewards import load_rewards
from surogate_rl.rollouts.engines.vllm.factory import Launched
from surogate_rl.rollouts.environments import gives_rewards
from surogate_rl.trainers import dpo, grpo, sft
from surogate_rl.trainers.loop import RunResult, train
from surogate_rl.trainers.output import check_output
from surogate_rl.trainers.session import Session, open_session
from surogate_rl.trainers.supervised import HeldOut, HeldOutLoss


def run_sft(config: SftConfig) -> RunResult:
    with (
        open_session("sft", config, sft.demands(config), lambda loaded: sft.LOGP) as session,
        open_held_out(session, lambda: sft.HeldOutExamples(session, config)) as held_out,
    ):
        return train(session, sft.Sft(session, config, held_out))


def run_dpo(config: DpoConfig) -> RunResult:
    with (
        open_session("dpo", config, dpo.demands(config), lambda loaded: sft.LOGP) as session,
        open_held_out(session, lambda: dpo.HeldOutPairs(session, config)) as held_out,
    ):
        return train(session, dpo.Dpo(session, config, held_out))


def open_held_out(session: Session, make_loss: Callable[[], HeldOutLoss]) -> AbstractContextManager[HeldOut | None]:
    """What `eval` asks of sft and dpo; None if it asks for nothing."""
    return closing(HeldOut(session, make_loss)) if session.config.eval is not None else nullcontext()


def own_weight(environment: EnvironmentConfig) -> float | None:
    """The weight of the environment's own reward; None where it gives none."""
    return environment.weight if gives_rewards(environment.name) else None


def run_grpo(config: GrpoConfig, rewards: Sequence[Callable[..., Any]] = ()) -> RunResult:
    """`rewards` are Python functions beside those that the config names."""
    check_output(config)
    objective = grpo.objective_of(config)
    weight = own_weight(config.environment)
    with (
        closing(Launched(config)) as launched,
        closing(load_rewards([*config.rewards, *rewards], workers=config.rollouts.reward_workers, environment_weight=weight)) as runner,
        open_session(
            "grpo", config, grpo.demands(config, objective), lambda loaded: grpo.logp_settings(config, loaded.valid_vocab)
        ) as session,
    ):
        session.launched = launched
        return train(session, grpo.Grpo(session, config, runner, objective))
