"""surogate_rl.sft, dpo and grpo from Python."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

import surogate_rl
from surogate_rl.config import ConfigError, DpoConfig, GrpoConfig, SftConfig

MINIMAL = {"model": "m", "output_dir": "out", "datasets": ["rows.jsonl"]}


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, ...]]:
    seen: list[tuple[Any, ...]] = []
    trainers = ModuleType("surogate_rl.trainers")
    trainers.run_sft = lambda config: seen.append((config,))  # type: ignore[attr-defined]
    trainers.run_dpo = lambda config: seen.append((config,))  # type: ignore[attr-defined]

    def run_grpo(config: Any, rewards: Sequence[Any]) -> None:
        seen.append((config, rewards))

    trainers.run_grpo = run_grpo  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "surogate_rl.trainers", trainers)
    return seen


def mine(completion: str) -> float:
    return float(len(completion))


def test_dicts_objects_and_files(calls: list[tuple[Any, ...]], tmp_path: Path) -> None:
    surogate_rl.sft(MINIMAL)
    surogate_rl.dpo(MINIMAL, overrides=["loss=ipo"])
    surogate_rl.sft(calls[0][0], overrides=["seed=5"])
    file = tmp_path / "config.yaml"
    file.write_text("model: m\noutput_dir: out\ndatasets: [rows.jsonl]\n")
    surogate_rl.sft(file)
    surogate_rl.grpo(str(file), mine)
    kinds = [type(call[0]) for call in calls]
    assert kinds == [SftConfig, DpoConfig, SftConfig, SftConfig, GrpoConfig]
    assert calls[1][0].loss.loss_type == "ipo"
    assert calls[2][0].seed == 5
    assert calls[3][0] == calls[0][0]


def test_rewards(calls: list[tuple[Any, ...]]) -> None:
    surogate_rl.grpo(MINIMAL, rewards=[mine])
    surogate_rl.grpo({**MINIMAL, "rewards": ["exact_match"]})
    assert calls[0][1] == [mine]
    assert calls[1][1] == []
    with pytest.raises(ConfigError, match=r"^rewards: grpo needs at least one"):
        surogate_rl.grpo(MINIMAL)
    with pytest.raises(ConfigError, match=r"^rewards: grpo needs at least one"):
        surogate_rl.grpo(MINIMAL, rewards=[])
    with pytest.raises(TypeError, match=r"^rewards takes functions, got 'exact_match'; built-in rewards are named in the configuration$"):
        surogate_rl.grpo(MINIMAL, rewards=["exact_match"])  # type: ignore[list-item]
    assert len(calls) == 2


def test_unknown_attributes() -> None:
    with pytest.raises(AttributeError, match=r"^module 'surogate_rl' has no attribute 'ppo'$"):
        _ = surogate_rl.ppo
