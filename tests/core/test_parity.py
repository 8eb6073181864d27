"""Log-probabilities, entropies and every gradient against transformers and PEFT in float64; twice their own float32 error is allowed."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

import numpy as np
import pytest
import torch
from peft import LoraConfig, get_peft_model

FAMILIES = ["llama", "llama-biases", "qwen2", "qwen3", "mistral"]
ALL_LINEAR = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]


def kind(name: str) -> str:
    """The parameter's place in its layer."""
    return ".".join(part for part in name.split(".") if not part.isdigit())


class Errors:
    """Relative errors, ours and the peer's, pooled over draws and layers: a single small tensor's error is luck as much as precision."""

    def __init__(self) -> None:
        self.ours: dict[str, list[float]] = defaultdict(list)
        self.peer: dict[str, list[float]] = defaultdict(list)

    def add(self, name: str, ours: float, peer: float) -> None:
        self.ours[kind(name)].append(ours)
        self.peer[kind(name)].append(peer)

    def check(self) -> None:
        for name, ours in self.ours.items():
            assert np.linalg.norm(ours) <= 2 * np.linalg.norm(self.peer[name]), name


@pytest.mark.parametrize("weight_scale", [1.0, 3.0])
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(("temperature", "valid_vocab", "head_rows"), [(1.0, 211, 0), (0.7, 200, 13)])
def test_full_model(tiny: Any, family: str, temperature: float, valid_vocab: int, head_rows: int, weight_scale: float) -> None:
    errors = Errors()
    for seed in range(3):
        case = tiny.case(family, seed=seed, weight_scale=weight_scale)
        d_logp, d_entropy = tiny.seeds(case)
        arguments = (d_logp, d_entropy, temperature, valid_vocab)
        true_logp, true_entropy, true_gradients = tiny.reference(case, torch.float64, *arguments)
        peer_logp, peer_entropy, peer_gradients = tiny.reference(case, torch.float32, *arguments)

        learner = tiny.learner(case, head_rows=head_rows)
        logp, entropy = learner.forward(*case.arrays, temperature=temperature, valid_vocab=valid_vocab, entropy=True)
        learner.backward(d_logp, d_entropy)
        errors.add("logp", tiny.relative(logp, true_logp), tiny.relative(peer_logp, true_logp))
        errors.add("entropy", tiny.relative(entropy, true_entropy), tiny.relative(peer_entropy, true_entropy))
        assert len(true_gradients) == len(learner.tensors())
        for name, truth in true_gradients.items():
            ours = learner.gradient(tiny.core_name(name))
            errors.add(name, tiny.relative(ours, truth), tiny.relative(peer_gradients[name], truth))
    errors.check()


def peft_model(case: Any, targets: list[str], seed: int) -> torch.nn.Module:
    torch.manual_seed(seed)
    model = get_peft_model(case.model, LoraConfig(r=4, lora_alpha=10, target_modules=targets, lora_dropout=0.0, task_type="CAUSAL_LM"))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter.normal_(0, 0.05)
    return model


def adapter_name(name: str) -> str:
    return name.removeprefix("base_model.model.").removeprefix("model.").replace(".default.weight", "")


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize(
    ("family", "targets"),
    [
        ("llama", ALL_LINEAR),
        ("qwen3", ["q_proj", "v_proj"]),
        ("qwen2", ["k_proj", "up_proj"]),
        ("mistral", ["o_proj"]),
        ("llama-biases", ["gate_proj", "down_proj"]),
        ("qwen3", ["lm_head"]),
        ("mistral", [*ALL_LINEAR, "lm_head"]),
    ],
)
def test_adapter_against_peft(tiny: Any, family: str, targets: list[str], recompute: bool) -> None:
    errors = Errors()
    for seed in range(3):
        case = tiny.case(family, seed=seed)
        learner = tiny.learner(case, lora_rank=4, lora_alpha=10, lora_targets=targets, recompute=recompute)
        model = peft_model(case, targets, seed)
        d_logp, d_entropy = tiny.seeds(case)
        true_logp, _, true_gradients = tiny.reference(case, torch.float64, d_logp, d_entropy, 0.7, 200, model=model)
        peer_logp, _, peer_gradients = tiny.reference(case, torch.float32, d_logp, d_entropy, 0.7, 200, model=model)

        adapters = {adapter_name(name): p.detach().numpy() for name, p in model.named_parameters() if "lora" in name}
        assert set(adapters) == {name for name, _, trainable in learner.tensors() if trainable}
        for name, value in adapters.items():
            learner.load(name, value)
        logp, _ = learner.forward(*case.arrays, temperature=0.7, valid_vocab=200, entropy=True)
        learner.backward(d_logp, d_entropy)
        errors.add("logp", tiny.relative(logp, true_logp), tiny.relative(peer_logp, true_logp))
        assert len(true_gradients) == len(adapters)
        for name, truth in true_gradients.items():
            ours = learner.gradient(adapter_name(name))
            errors.add(name, tiny.relative(ours, truth), tiny.relative(peer_gradients[name], truth))
    errors.check()


def test_adapter_choice(tiny: Any) -> None:
    """live, initial and off are three different models; initial is what snapshot_adapter() saw."""
    case = tiny.case("llama")
    options = {"lora_rank": 4, "lora_alpha": 10, "lora_targets": ALL_LINEAR}
    learner = tiny.learner(case, **options)
    base = tiny.learner(case).score(*case.arrays)[0]
    for choice in ("live", "initial", "off"):  # fresh: B is zero
        np.testing.assert_array_equal(learner.score(*case.arrays, adapter=choice)[0], base)

    states = []
    for seed in (1, 2):
        model = peft_model(tiny.case("llama"), ALL_LINEAR, seed)
        for name, parameter in model.named_parameters():
            if "lora" in name:
                learner.load(adapter_name(name), parameter.detach().numpy())
        if seed == 1:
            with pytest.raises(ValueError, match="snapshot_adapter"):
                learner.score(*case.arrays, adapter="initial")
            learner.snapshot_adapter()
        zeros = np.zeros(len(case.tokens), dtype=np.float32)
        states.append(tiny.reference(case, torch.float64, zeros, zeros, 1.0, 211, model=model)[0])
    for choice, truth in (("initial", states[0]), ("live", states[1]), ("off", base)):
        np.testing.assert_allclose(learner.score(*case.arrays, adapter=choice)[0], truth, atol=2e-5)
    assert np.abs(states[0] - states[1]).max() > 1e-2
    assert np.abs(states[0] - base).max() > 1e-2


def test_fresh_adapter_initialisation(tiny: Any) -> None:
    """A is uniform in +-1/sqrt(in) as PEFT's, a function of seed and name; B is zero."""
    case = tiny.case("qwen3")
    options = {"lora_rank": 16, "lora_alpha": 32, "lora_targets": ALL_LINEAR}
    first, same, other = (tiny.learner(case, seed=seed, **options) for seed in (5, 5, 6))
    names = [name for name, _, _ in first.tensors() if name.endswith("lora_A")]
    values = np.concatenate([first.export(name).ravel() * np.sqrt(first.export(name).shape[1]) for name in names])
    assert np.abs(values).max() <= 1.0
    assert np.abs(values).max() > 0.999
    assert abs(values.mean()) < 4 / np.sqrt(3 * values.size)
    assert values.var() == pytest.approx(1 / 3, rel=0.03)
    assert len({first.export(name).tobytes() for name in names}) == len(names)
    for name in names:
        np.testing.assert_array_equal(first.export(name), same.export(name))
        assert not np.array_equal(first.export(name), other.export(name))
        assert not first.export(name.replace("lora_A", "lora_B")).any()
    smaller = tiny.learner(case, seed=5, lora_rank=16, lora_alpha=32, lora_targets=["v_proj"])
    np.testing.assert_array_equal(smaller.export("layers.1.self_attn.v_proj.lora_A"), first.export("layers.1.self_attn.v_proj.lora_A"))
