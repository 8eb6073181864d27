"""Every policy loss against TRL's own scoring and loss code, loss, gradients and metrics."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from surogate_rl.config.schema import PolicyLossConfig
from surogate_rl.objectives import make_objective, mean_metrics, seeds, totals_of

LIMIT = 16


def compare(tools: SimpleNamespace, step: Any, ours: dict[str, Any], theirs: dict[str, Any], *, proximal: bool = True) -> dict[str, float]:
    """Checks that loss and gradients agree; returns TRL's metrics after checking those that we share."""
    config = PolicyLossConfig(**ours)
    objective = make_objective(config, command="grpo", max_completion_length=LIMIT)
    batch, logp, entropy = tools.pack_step(
        step, loss_type=config.loss_type, scale_rewards=config.scale_rewards, beta=config.beta, proximal=proximal
    )
    result = seeds(objective, logp, entropy, batch, totals_of(objective, [batch]))
    trl = tools.run_trl_policy(step, proximal=proximal, max_completion_length=LIMIT, **theirs)

    assert result.loss == pytest.approx(trl.loss, rel=2e-5, abs=2e-6)
    for row, gradient in tools.per_completion(batch, result.dlogp).items():
        np.testing.assert_allclose(gradient, trl.dlogp[row], rtol=2e-4, atol=1e-6, err_msg=f"completion {row}")
    assert any(np.abs(gradient).max() > 1e-3 for gradient in trl.dlogp), "a comparison of zeros shows nothing"
    assert (result.dlogp[~batch.mask] == 0).all()
    if config.entropy_coef > 0:
        assert result.dentropy is not None
        for row, gradient in tools.per_completion(batch, result.dentropy).items():
            np.testing.assert_allclose(gradient, trl.dentropy[row], rtol=1e-4, atol=1e-8)
    else:
        assert result.dentropy is None
    shown = mean_metrics([result.metrics])
    shared = set(shown) & set(trl.metrics)
    for name in shared:
        assert shown[name] == pytest.approx(trl.metrics[name], rel=1e-4, abs=1e-5), name
    assert "entropy" in shared
    return {name: shown[name] for name in shared}


CASES: list[tuple[dict[str, Any], dict[str, Any]]] = [
    ({"loss_type": "grpo"}, {"loss_type": "grpo"}),
    ({"loss_type": "grpo", "beta": 0.3}, {"loss_type": "grpo", "beta": 0.3}),
    ({"loss_type": "grpo", "epsilon": 0.1, "epsilon_high": 0.3}, {"loss_type": "grpo", "epsilon": 0.1, "epsilon_high": 0.3}),
    ({"loss_type": "grpo", "delta": 1.3}, {"loss_type": "grpo", "delta": 1.3}),
    ({"loss_type": "grpo", "entropy_coef": 0.05}, {"loss_type": "grpo", "entropy_coef": 0.05}),
    ({"loss_type": "grpo", "scale_rewards": "batch"}, {"loss_type": "grpo", "scale_rewards": "batch"}),
    ({"loss_type": "grpo", "scale_rewards": "none"}, {"loss_type": "grpo", "scale_rewards": "none"}),
    ({"loss_type": "dapo"}, {"loss_type": "dapo"}),
    ({"loss_type": "dapo", "beta": 0.2, "entropy_coef": 0.01}, {"loss_type": "dapo", "beta": 0.2, "entropy_coef": 0.01}),
    ({"loss_type": "dapo", "delta": 1.25}, {"loss_type": "dapo", "delta": 1.25}),
    ({"loss_type": "dr_grpo", "scale_rewards": "none"}, {"loss_type": "dr_grpo", "scale_rewards": "none"}),
    ({"loss_type": "dr_grpo", "beta": 0.1}, {"loss_type": "dr_grpo", "beta": 0.1}),
    ({"loss_type": "gspo"}, {"loss_type": "grpo", "importance_sampling_level": "sequence"}),
    (
        {"loss_type": "gspo", "epsilon": 3e-3, "epsilon_high": 4e-3, "beta": 0.1},
        {"loss_type": "grpo", "importance_sampling_level": "sequence", "epsilon": 3e-3, "epsilon_high": 4e-3, "beta": 0.1},
    ),
    ({"loss_type": "cispo", "epsilon_high": 1.2}, {"loss_type": "cispo", "epsilon_high": 1.2}),
    ({"loss_type": "cispo"}, {"loss_type": "cispo", "epsilon_high": 5.0}),
    ({"loss_type": "sapo"}, {"loss_type": "sapo"}),
    (
        {"loss_type": "sapo", "sapo_temperature_pos": 0.7, "sapo_temperature_neg": 2.0, "beta": 0.1},
        {"loss_type": "sapo", "sapo_temperature_pos": 0.7, "sapo_temperature_neg": 2.0, "beta": 0.1},
    ),
    ({"loss_type": "rloo"}, {"rloo": True}),
    ({"loss_type": "rloo", "epsilon": 0.4, "epsilon_high": 0.6}, {"rloo": True, "epsilon": 0.4, "epsilon_high": 0.6}),
    ({"loss_type": "rloo", "beta": 0.2}, {"rloo": True, "beta": 0.2}),
    ({"loss_type": "rloo", "scale_rewards": "batch"}, {"rloo": True, "normalize_advantages": True}),
]


@pytest.mark.parametrize(("ours", "theirs"), CASES, ids=[" ".join(f"{k}={v}" for k, v in ours.items()) for ours, _ in CASES])
@pytest.mark.parametrize("seed", [0, 1])
def test_losses(tools: SimpleNamespace, ours: dict[str, Any], theirs: dict[str, Any], seed: int) -> None:
    metrics = compare(tools, tools.make_step(seed), ours, theirs)
    assert {"clip_ratio/low_mean", "clip_ratio/high_mean", "clip_ratio/region_mean"} <= set(metrics) or ours["loss_type"] in (
        "cispo",
        "sapo",
    )
    assert ("kl" in metrics) == ("beta" in ours)


@pytest.mark.parametrize("loss_type", ["grpo", "dapo", "dr_grpo", "cispo", "sapo"])
def test_without_proximal_the_ratio_is_one_and_the_gradient_is_the_policy_gradient(tools: SimpleNamespace, loss_type: str) -> None:
    theirs: dict[str, Any] = {"loss_type": loss_type}
    if loss_type == "cispo":
        theirs["epsilon_high"] = 5.0
    compare(tools, tools.make_step(3), {"loss_type": loss_type}, theirs, proximal=False)


@pytest.mark.parametrize("loss_type", ["grpo", "dapo", "dr_grpo", "gspo", "sapo"])
def test_masked_truncated_completions(tools: SimpleNamespace, loss_type: str) -> None:
    step = tools.make_step(5)
    assert 0 < sum(step.truncated) < len(step.truncated)
    theirs = {"loss_type": "grpo", "importance_sampling_level": "sequence"} if loss_type == "gspo" else {"loss_type": loss_type}
    ours = {"loss_type": loss_type, "mask_truncated_completions": True, "beta": 0.1, "entropy_coef": 0.02}
    # TRL counts a fully masked sequence as one with ratio 1 among gspo's clip metrics, so these differ by a factor.
    if loss_type == "gspo":
        objective = make_objective(PolicyLossConfig(**ours), command="grpo")
        batch, logp, entropy = tools.pack_step(step)
        result = seeds(objective, logp, entropy, batch, totals_of(objective, [batch]))
        trl = tools.run_trl_policy(step, mask_truncated_completions=True, beta=0.1, entropy_coef=0.02, **theirs)
        assert result.loss == pytest.approx(trl.loss, rel=2e-5)
        return
    compare(tools, step, ours, theirs | {"mask_truncated_completions": True, "beta": 0.1, "entropy_coef": 0.02})


def test_rloo_masks_truncated_completions_with_trls_gradient(tools: SimpleNamespace) -> None:
    step = tools.make_step(5)
    objective = make_objective(PolicyLossConfig(loss_type="rloo", mask_truncated_completions=True), command="grpo")
    batch, logp, entropy = tools.pack_step(step, loss_type="rloo")
    result = seeds(objective, logp, entropy, batch, totals_of(objective, [batch]))
    trl = tools.run_trl_policy(step, rloo=True, mask_truncated_completions=True)
    for row, gradient in tools.per_completion(batch, result.dlogp).items():
        np.testing.assert_allclose(gradient, trl.dlogp[row], rtol=2e-4, atol=1e-6)
    constant = sum(advantage for advantage, gone in zip(trl.advantages, step.truncated, strict=True) if gone) / len(trl.advantages)
    assert result.loss == pytest.approx(trl.loss + constant, rel=2e-5, abs=2e-6)


@pytest.mark.parametrize("mismatch", ["token_truncate", "token_mask", "sequence_truncate", "sequence_mask"])
@pytest.mark.parametrize("loss_type", ["grpo", "dapo", "dr_grpo", "gspo", "cispo", "sapo"])
def test_mismatch_correction(tools: SimpleNamespace, mismatch: str, loss_type: str) -> None:
    step = tools.make_step(7, noise=0.6)
    theirs: dict[str, Any] = {"loss_type": loss_type, "mismatch": mismatch, "clip_max": 1.4, "clip_min": 0.6, "beta": 0.1}
    if loss_type == "gspo":
        theirs |= {"loss_type": "grpo", "importance_sampling_level": "sequence"}
    if loss_type == "cispo":
        theirs["epsilon_high"] = 5.0
    ours = {"loss_type": loss_type, "mismatch": mismatch, "mismatch_cap": 1.4, "mismatch_floor": 0.6, "beta": 0.1}
    metrics = compare(tools, step, ours, theirs)
    assert {f"sampling/importance_sampling_ratio/{what}" for what in ("mean", "min", "max")} <= set(metrics)
    assert {"sampling/sampling_logp_difference/mean", "sampling/sampling_logp_difference/max"} <= set(metrics)


def test_unscored_completions_leave_the_group(tools: SimpleNamespace) -> None:
    """TRL keeps unscored rows in its divisor; dr_grpo's and grpo's gradients then differ by that factor alone."""
    step = tools.make_step(9)
    step.rewards[1] = None
    step.rewards[6] = None
    objective = make_objective(PolicyLossConfig(loss_type="grpo"), command="grpo")
    batch, logp, entropy = tools.pack_step(step)
    totals = totals_of(objective, [batch])
    assert totals.sequences == len(step.rewards) - 2
    result = seeds(objective, logp, entropy, batch, totals)
    trl = tools.run_trl_policy(step)
    scale = len(step.rewards) / totals.sequences
    ours = tools.per_completion(batch, result.dlogp)
    assert set(ours) == set(range(len(step.rewards))) - {1, 6}
    for row, gradient in ours.items():
        np.testing.assert_allclose(gradient, trl.dlogp[row] * scale, rtol=2e-4, atol=1e-6)
    assert (trl.dlogp[1] == 0).all()
    assert (trl.dlogp[6] == 0).all()
