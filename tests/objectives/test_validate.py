"""Options that a loss cannot honour are refused, in words that say what to do."""

from __future__ import annotations

from typing import Any

import pytest

from surogate_rl.config.schema import LossConfig, PolicyLossConfig, PreferenceLossConfig, SftLossConfig
from surogate_rl.objectives import POLICY_LOSSES, PREFERENCE_LOSSES, make_objective, resolve_mismatch, validate_loss

OWN = "my/loss.py:fn"

POLICY: list[tuple[dict[str, Any], str]] = [
    ({"loss_type": "gropo"}, "loss_type: unknown loss 'gropo'; did you mean 'grpo'\\?"),
    ({"loss_type": "ipo"}, "loss_type: 'ipo' is a loss of dpo, not of grpo; choose from grpo, "),
    ({"loss_type": "cispo", "delta": 3.0}, "delta: 3.0 has no effect with loss_type cispo: it has no dual clip"),
    ({"loss_type": "sapo", "delta": 3.0}, "delta: 3.0 has no effect with loss_type sapo"),
    ({"loss_type": "rloo", "delta": 3.0}, "delta: 3.0 has no effect with loss_type rloo"),
    ({"loss_type": "cispo", "epsilon": 0.1}, "epsilon: 0.1 has no effect with loss_type cispo: .* set epsilon_high"),
    ({"loss_type": "cispo", "epsilon_high": 0.0}, "epsilon_high: 0 with loss_type cispo"),
    ({"loss_type": "sapo", "epsilon": 0.1}, "epsilon: 0.1 has no effect with loss_type sapo: its gate is soft"),
    ({"loss_type": "sapo", "epsilon_high": 0.1}, "epsilon_high: 0.1 has no effect with loss_type sapo"),
    ({"loss_type": "grpo", "sapo_temperature_pos": 2.0}, "sapo_temperature_pos: 2.0 has no effect with loss_type grpo: only sapo"),
    ({"loss_type": "grpo", "delta": 1.2}, "delta: 1.2 must be greater than 1 \\+ epsilon_high \\(1.2\\)"),
    ({"loss_type": "grpo", "delta": 1.25, "epsilon_high": 0.28}, "delta: 1.25 must be greater than 1 \\+ epsilon_high \\(1.28\\)"),
    ({"loss_type": "rloo", "scale_rewards": "group"}, "scale_rewards: group does not go with loss_type rloo"),
    ({"loss_type": "reinforce_plus_plus", "scale_rewards": "group"}, "scale_rewards: group does not go with loss_type reinforce_plus_plus"),
    ({"loss_type": "rloo", "mismatch": "token_mask"}, "mismatch: token_mask does not go with loss_type rloo"),
    ({"mismatch": "none", "mismatch_cap": 2.0}, "mismatch_cap: 2.0 has no effect with loss_type grpo: mismatch is none"),
    ({"mismatch": "token_mask", "mismatch_floor": 3.0}, "mismatch_floor: 3 must be less than mismatch_cap \\(3\\)"),
    ({"args": {"a": 1}}, "args: grpo takes no arguments of its own; they are for an objective of yours"),
    ({"sync_ref_model": True}, "sync_ref_model: there is no reference while loss.beta is 0"),
    ({"beta": 0.1, "ref_model_sync_steps": 8}, "ref_model_sync_steps: 8 has no effect .* sync_ref_model is false"),
    ({"loss_type": OWN, "epsilon": 0.1}, "epsilon: 0.1 has no effect with loss_type my/loss.py:fn: .* args"),
    ({"loss_type": OWN, "beta": 0.1}, "beta: 0.1 has no effect .* needs_reference = True"),
    ({"loss_type": OWN, "mask_truncated_completions": True}, "mask_truncated_completions: True has no effect .*per_sequence"),
    ({"loss_type": OWN, "mismatch_cap": 2.0}, "mismatch_cap: 2.0 has no effect with loss_type my/loss.py:fn: .* args"),
    ({"loss_type": OWN, "mismatch": "token_mask"}, "mismatch: token_mask has no effect with loss_type my/loss.py:fn"),
]

PREFERENCE: list[tuple[dict[str, Any], str]] = [
    ({"loss_type": "simpo"}, "loss_type: unknown loss 'simpo'; did you mean 'ipo'\\?"),
    ({"loss_type": "dapo"}, "loss_type: 'dapo' is a loss of grpo, not of dpo"),
    ({"loss_type": "ipo", "label_smoothing": 0.1}, "label_smoothing: 0.1 has no effect with loss_type ipo: only sigmoid and robust"),
    ({"loss_type": "hinge", "label_smoothing": 0.1}, "label_smoothing: 0.1 has no effect with loss_type hinge"),
    ({"loss_type": "sigmoid_norm", "label_smoothing": 0.1}, "label_smoothing: 0.1 has no effect with loss_type sigmoid_norm"),
    ({"loss_type": "robust"}, "label_smoothing: 0 makes loss_type robust the same as sigmoid"),
    ({"args": {"a": 1}}, "args: sigmoid takes no arguments of its own"),
    ({"loss_type": OWN, "beta": 0.2}, "beta: 0.2 has no effect with loss_type my/loss.py:fn"),
    ({"loss_type": OWN, "reference_free": True}, "reference_free: True has no effect with loss_type my/loss.py:fn"),
]


@pytest.mark.parametrize(("options", "message"), POLICY)
def test_policy(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        validate_loss(PolicyLossConfig(**options))


@pytest.mark.parametrize(("options", "message"), PREFERENCE)
def test_preference(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        validate_loss(PreferenceLossConfig(**options))


def test_sft() -> None:
    with pytest.raises(ValueError, match="loss_type: 'sigmoid' is a loss of dpo, not of sft; choose from nll"):
        validate_loss(SftLossConfig(loss_type="sigmoid"))
    with pytest.raises(ValueError, match="args: nll takes no arguments of its own"):
        validate_loss(SftLossConfig(args={"a": 1}))


@pytest.mark.parametrize("loss_type", POLICY_LOSSES)
def test_every_policy_loss_is_built_from_its_name_alone(loss_type: str) -> None:
    objective = make_objective(PolicyLossConfig(loss_type=loss_type), command="grpo", max_completion_length=8)
    assert objective.unit == ("sequence" if loss_type in ("grpo", "gspo", "sapo", "rloo") else "token")
    assert objective.needs_entropy
    assert not objective.needs_reference
    assert make_objective(PolicyLossConfig(loss_type=loss_type, beta=0.1), command="grpo", max_completion_length=8).needs_reference


def test_every_preference_loss_is_built() -> None:
    for loss_type in PREFERENCE_LOSSES:
        config = PreferenceLossConfig(loss_type=loss_type, label_smoothing=0.1 if loss_type == "robust" else 0.0)
        assert make_objective(config, command="dpo").unit == "pair"


def test_what_make_objective_refuses_itself() -> None:
    with pytest.raises(ValueError, match="SftLossConfig is not the section of the command grpo, expected PolicyLossConfig"):
        make_objective(SftLossConfig(), command="grpo")
    with pytest.raises(ValueError, match="dr_grpo divides by the completion limit: max_completion_length must be given"):
        make_objective(PolicyLossConfig(loss_type="dr_grpo"), command="grpo")
    with pytest.raises(ValueError, match="LossConfig is the section of no command"):
        validate_loss(LossConfig())


def test_sequence_corrections_keep_sequences_together() -> None:
    config = PolicyLossConfig(loss_type="dapo", mismatch="sequence_mask")
    assert make_objective(config, command="grpo").unit == "sequence"
    config = PolicyLossConfig(loss_type="dapo", mismatch="token_mask")
    assert make_objective(config, command="grpo").unit == "token"


def test_auto_mismatch() -> None:
    assert resolve_mismatch(PolicyLossConfig(), engine_is_learner=True).kind == "none"
    assert resolve_mismatch(PolicyLossConfig(), engine_is_learner=False).kind == "token_truncate"
    assert resolve_mismatch(PolicyLossConfig(loss_type="rloo"), engine_is_learner=False).kind == "sequence_truncate"
    chosen = resolve_mismatch(PolicyLossConfig(mismatch="geometric_mask", mismatch_cap=2.0, mismatch_floor=0.5), engine_is_learner=True)
    assert (chosen.kind, chosen.cap, chosen.floor) == ("geometric_mask", 2.0, 0.5)
