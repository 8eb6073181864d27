"""Configuration: one strict YAML per run. Nothing here imports torch."""

from surogate_rl.config.errors import ConfigError, ConfigWarning, Problem
from surogate_rl.config.load import load_config, parse_config
from surogate_rl.config.resolve import dump_config, write_resolved
from surogate_rl.config.schema import (
    CONFIGS,
    Command,
    DatasetConfig,
    DpoConfig,
    EvalConfig,
    GrpoConfig,
    LossConfig,
    PolicyLossConfig,
    PreferenceLossConfig,
    RewardConfig,
    RolloutsConfig,
    SamplingConfig,
    SftConfig,
    SftLossConfig,
    TrainConfig,
)
from surogate_rl.errors import InputError

__all__ = [
    "CONFIGS",
    "Command",
    "ConfigError",
    "ConfigWarning",
    "DatasetConfig",
    "DpoConfig",
    "EvalConfig",
    "GrpoConfig",
    "InputError",
    "LossConfig",
    "PolicyLossConfig",
    "PreferenceLossConfig",
    "Problem",
    "RewardConfig",
    "RolloutsConfig",
    "SamplingConfig",
    "SftConfig",
    "SftLossConfig",
    "TrainConfig",
    "dump_config",
    "load_config",
    "parse_config",
    "write_resolved",
]
