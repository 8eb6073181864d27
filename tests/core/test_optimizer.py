"""The update against torch.optim.AdamW, and what happens when it cannot be made."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import pytest
import torch


def test_updates_are_torchs(tiny: Any) -> None:
    """Three updates with clipping and decay on the matrices alone, from the same gradients as torch.optim.AdamW in float64."""
    case = tiny.case("llama-biases")
    model = copy.deepcopy(case.model).double()
    matrices = [p for p in model.parameters() if p.ndim == 2]
    vectors = [p for p in model.parameters() if p.ndim == 1]
    options = {"lr": 3e-3, "betas": (0.85, 0.97), "eps": 1e-7}
    adamw = torch.optim.AdamW([{"params": matrices, "weight_decay": 0.2}, {"params": vectors, "weight_decay": 0.0}], **options)
    learner = tiny.learner(case)
    rng = np.random.default_rng(0)
    for update in range(3):
        for name, parameter in model.named_parameters():
            gradient = (rng.normal(size=tuple(parameter.shape)) * 10.0 ** (-update)).astype(np.float32)
            learner.add_to_gradient(tiny.core_name(name), gradient)
            parameter.grad = torch.from_numpy(gradient).double()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 40.0)
        adamw.step()
        stats = learner.step(3e-3, max_grad_norm=40.0, beta1=0.85, beta2=0.97, epsilon=1e-7, weight_decay=0.2)
        assert stats.applied
        assert stats.step == update + 1 == learner.update_count
        assert stats.grad_norm == pytest.approx(float(norm), rel=1e-9)
        for name, parameter in model.named_parameters():
            core = tiny.core_name(name)
            np.testing.assert_allclose(learner.export(core), parameter.detach().numpy(), rtol=2e-6, atol=2e-7)
            state = adamw.state[parameter]
            for moment in ("exp_avg", "exp_avg_sq"):
                assert tiny.relative(learner.export_optimizer(f"{core}.{moment}"), state[moment].numpy()) < 1e-6
            assert not learner.gradient(core).any()


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_a_gradient_that_is_not_finite_changes_nothing(tiny: Any, bad: float) -> None:
    case = tiny.case("llama")
    learner = tiny.learner(case)
    d_logp, _ = tiny.seeds(case)
    learner.forward_backward(*case.arrays, d_logp)
    learner.step(1e-3)
    before = {name: learner.export(name) for name, _, _ in learner.tensors()}
    moments = {name: learner.export_optimizer(name) for name, _ in learner.optimizer_state()}
    d_logp[np.flatnonzero(case.targets >= 0)[3]] = bad
    learner.forward_backward(*case.arrays, d_logp)
    stats = learner.step(1e-3, max_grad_norm=1.0, weight_decay=0.1)
    assert not stats.applied
    assert not np.isfinite(stats.grad_norm)
    assert stats.step == 1 == learner.update_count
    for name, value in before.items():
        np.testing.assert_array_equal(learner.export(name), value)
        assert not learner.gradient(name).any()
    for name, value in moments.items():
        np.testing.assert_array_equal(learner.export_optimizer(name), value)
    learner.forward_backward(*case.arrays, tiny.seeds(case)[0])
    assert learner.step(1e-3).applied


def test_state_restores_a_run(tiny: Any) -> None:
    """Weights, moments and the update count are all that a run consists of."""
    case = tiny.case("qwen3")
    d_logp, _ = tiny.seeds(case)

    def update(learner: Any) -> None:
        learner.forward_backward(*case.arrays, d_logp)
        learner.step(2e-3, max_grad_norm=1.0, weight_decay=0.01)

    unbroken, resumed = tiny.learner(case), tiny.learner(case)
    update(unbroken)
    for name, _, _ in unbroken.tensors():
        resumed.load(name, unbroken.export(name))
    for name, _ in unbroken.optimizer_state():
        resumed.load_optimizer(name, unbroken.export_optimizer(name))
    resumed.update_count = unbroken.update_count
    update(unbroken)
    update(resumed)
    for name, _, _ in unbroken.tensors():
        np.testing.assert_array_equal(unbroken.export(name), resumed.export(name))


def test_only_the_adapter_is_updated(tiny: Any) -> None:
    case = tiny.case("mistral")
    learner = tiny.learner(case, lora_rank=4, lora_alpha=8, lora_targets=["q_proj", "lm_head"])
    before = {name: learner.export(name) for name, _, _ in learner.tensors()}
    d_logp, _ = tiny.seeds(case)
    for _ in range(2):
        learner.forward_backward(*case.arrays, d_logp)
        assert learner.step(1e-2, weight_decay=0.1).applied
    for name, _, trainable in learner.tensors():
        assert trainable == ("lora" in name)
        assert np.array_equal(before[name], learner.export(name)) != trainable, name
    with pytest.raises(ValueError, match="embed_tokens"):
        learner.gradient("embed_tokens.weight")


def test_exports_are_copies(tiny: Any) -> None:
    case = tiny.case("llama")
    learner = tiny.learner(case)
    value = learner.export("norm.weight")
    value[:] = 7.0
    assert not np.array_equal(learner.export("norm.weight"), value)
    logp, _ = learner.score(*case.arrays)
    kept = logp.copy()
    learner.load("norm.weight", value)
    learner.score(*case.arrays)
    np.testing.assert_array_equal(logp, kept)


@pytest.mark.parametrize(
    ("arguments", "match"),
    [
        ({"learning_rate": -1.0}, "learning_rate"),
        ({"learning_rate": float("nan")}, "learning_rate"),
        ({"learning_rate": 1.0, "max_grad_norm": -1.0}, "max_grad_norm"),
        ({"learning_rate": 1.0, "beta1": 1.0}, "beta1"),
        ({"learning_rate": 1.0, "beta2": -0.1}, "beta2"),
        ({"learning_rate": 1.0, "epsilon": -1e-8}, "epsilon"),
        ({"learning_rate": 1.0, "weight_decay": float("inf")}, "weight_decay"),
    ],
)
def test_bad_options(tiny: Any, arguments: dict[str, float], match: str) -> None:
    with pytest.raises(ValueError, match=f"step: {match}"):
        tiny.learner(tiny.case("llama")).step(**arguments)
