"""Log-probabilities, entropies and every gradient against transformers, and adapters against PEFT (the rule: conftest.py)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import peft
import pytest
import torch

from surogate_rl.learner import LoraSettings
from surogate_rl.models.adapter import file_name as adapter_file_name
from surogate_rl.models.family import Family

SEEDS = (1, 2, 3)
# AdamW divides a gradient by its own size plus epsilon. Where a gradient happens to be nearly zero, its rounding error (a share of the
# other gradients of the tensor, which are of the order of 5 here) must not become a share of a whole step, so epsilon is of their order.
EPSILON = 1.0


@pytest.mark.parametrize("packed", [True, False], ids=["packed", "unpacked"])
def test_every_gradient(model_name: str, packed: bool, tiny: Callable[..., Any], parity: Any) -> None:
    made = tiny(model_name)
    batches = [parity.make_sequences(seed, made.model.config.vocab_size) for seed in SEEDS]
    ours = parity.our_numbers(made.learner(), batches, Family.file_name, packed=packed)
    assert set(ours.gradients) == {name for name, _ in made.model.named_parameters()}
    parity.assert_parity(ours, parity.torch_numbers(made.model, batches), parity.torch_numbers(parity.in_float64(made.model), batches))


@pytest.mark.parametrize(("temperature", "valid_vocab"), [(0.6, 0), (1.7, 50), (1.0, 50)])
@pytest.mark.parametrize("name", ["llama", "qwen3-tied-bias-window"])
def test_temperature_and_valid_vocabulary(name: str, temperature: float, valid_vocab: int, tiny: Callable[..., Any], parity: Any) -> None:
    made = tiny(name)
    options = {"temperature": temperature, "valid_vocab": valid_vocab}
    batches = [parity.make_sequences(seed, valid_vocab or made.model.config.vocab_size) for seed in SEEDS]
    ours = parity.our_numbers(made.learner(), batches, Family.file_name, **options)
    theirs = parity.torch_numbers(made.model, batches, **options)
    parity.assert_parity(ours, theirs, parity.torch_numbers(parity.in_float64(made.model), batches, **options))


def test_one_long_sequence_past_the_trained_context(tiny: Callable[..., Any], parity: Any) -> None:
    """YaRN and windows at positions far beyond `original_max_position_embeddings`, where wrong frequencies would show."""
    for name in ("llama-yarn", "mistral-window", "llama-biases-llama3", "qwen2-window"):
        made = tiny(name, max_position_embeddings=400)
        batches = [parity.make_sequences(seed, made.model.config.vocab_size, lengths=(300,)) for seed in SEEDS[:2]]
        ours = parity.our_numbers(made.learner(max_tokens=320), batches, Family.file_name)
        parity.assert_parity(ours, parity.torch_numbers(made.model, batches), parity.torch_numbers(parity.in_float64(made.model), batches))


def test_recompute_gives_the_same_bits(model_name: str, tiny: Callable[..., Any], parity: Any) -> None:
    made = tiny(model_name)
    batches = [parity.make_sequences(5, made.model.config.vocab_size)]
    plain, recomputed = (parity.our_numbers(made.learner(recompute=on), batches, Family.file_name).series() for on in (False, True))
    for name, values in plain.items():
        np.testing.assert_array_equal(values[0], recomputed[name][0], err_msg=name)


def test_forward_backward_gives_the_bits_of_forward_then_backward(tiny: Callable[..., Any], parity: Any) -> None:
    made = tiny("qwen3")
    batch = parity.make_sequences(5, 61)
    packed, one, two = batch.pack(), made.learner(), made.learner()
    stats = one.forward(packed, temperature=0.8, valid_vocab=61)
    one.backward(batch.dlogp)
    np.testing.assert_array_equal(stats.logp, two.forward_backward(packed, batch.dlogp, temperature=0.8, valid_vocab=61).logp)
    np.testing.assert_array_equal(stats.logp, two.score(packed, temperature=0.8, valid_vocab=61).logp)
    for info in one.tensors():
        np.testing.assert_array_equal(one.gradient(info.name), two.gradient(info.name), err_msg=info.name)


LORA = {
    "all-linear": LoraSettings(3, 7.0),
    "q and down": LoraSettings(4, 4.0, ["q_proj", "down_proj"]),
    "k, o, up": LoraSettings(1, 2.0, ["k_proj", "o_proj", "up_proj"]),
}


def make_peft(model: torch.nn.Module, lora: LoraSettings) -> Any:
    """PEFT's own model with random A and B (its B starts as zero, which would hide A)."""
    config = peft.LoraConfig(
        r=lora.rank, lora_alpha=lora.alpha, target_modules=list(lora.resolve(tied=False)), lora_dropout=0.0, task_type="CAUSAL_LM"
    )
    model = peft.get_peft_model(model, config)
    generator = torch.Generator().manual_seed(9)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_" in name:
                parameter.copy_(0.3 * torch.randn(parameter.shape, generator=generator))
    return model


def lora_name(core_name: str) -> str:
    return adapter_file_name(core_name).replace(".lora_A.", ".lora_A.default.").replace(".lora_B.", ".lora_B.default.")


@pytest.mark.parametrize("which", list(LORA))
@pytest.mark.parametrize("name", ["llama-biases-llama3", "mistral", "qwen2", "qwen3-tied-bias-window"])
def test_lora_against_peft(name: str, which: str, tiny: Callable[..., Any], parity: Any) -> None:
    made, lora = tiny(name), LORA[which]
    learner = made.learner(lora)
    theirs = make_peft(made.model, lora)
    adapters = {name: parameter for name, parameter in theirs.named_parameters() if parameter.requires_grad}
    trainable = [info.name for info in learner.tensors() if info.trainable]
    assert {lora_name(core_name) for core_name in trainable} == set(adapters)
    for core_name in trainable:
        learner.load(core_name, adapters[lora_name(core_name)].detach().numpy())
    batches = [parity.make_sequences(seed, made.model.config.vocab_size) for seed in SEEDS]
    ours = parity.our_numbers(learner, batches, lora_name)
    parity.assert_parity(ours, parity.torch_numbers(theirs, batches), parity.torch_numbers(parity.in_float64(theirs), batches))
    with theirs.disable_adapter(), torch.no_grad():
        ids = torch.from_numpy(batches[0].tokens[2]).long()[None]
        logp = torch.log_softmax(theirs(ids).logits[0], -1)[:-1].gather(1, ids[0, 1:, None])[:, 0].numpy()
    alone = batches[0].pack([2])
    np.testing.assert_allclose(learner.score(alone, adapter="off").logp[:-1], np.where(alone.mask[:-1], logp, 0), rtol=1e-6, atol=2e-6)


def test_lora_on_an_untied_head(tiny: Callable[..., Any], parity: Any) -> None:
    made, lora = tiny("llama"), LoraSettings(2, 8.0, ["v_proj", "lm_head"])
    learner, theirs = made.learner(lora), make_peft(made.model, lora)
    adapters = {name: parameter for name, parameter in theirs.named_parameters() if parameter.requires_grad}
    for info in learner.tensors():
        if info.trainable:
            learner.load(info.name, adapters[lora_name(info.name)].detach().numpy())
    batches = [parity.make_sequences(seed, 61) for seed in SEEDS]
    ours = parity.our_numbers(learner, batches, lora_name)
    parity.assert_parity(ours, parity.torch_numbers(theirs, batches), parity.torch_numbers(parity.in_float64(theirs), batches))


def test_a_fresh_adapter_changes_nothing_and_starts_as_kaiming(tiny: Callable[..., Any], parity: Any) -> None:
    made = tiny("qwen3")
    batch = parity.make_sequences(1, 61).pack()
    fresh = made.learner(LoraSettings(8, 16.0), seed=3)
    np.testing.assert_array_equal(fresh.score(batch).logp, fresh.score(batch, adapter="off").logp)
    np.testing.assert_array_equal(fresh.score(batch).logp, made.learner(LoraSettings(8, 16.0), seed=4).score(batch).logp)
    a = fresh.export("layers.0.mlp.gate_proj.lora_A")
    assert not fresh.export("layers.0.mlp.gate_proj.lora_B").any()
    bound = 1 / np.sqrt(a.shape[1])  # kaiming_uniform_(a=sqrt(5)), as PEFT draws it
    assert np.abs(a).max() <= bound
    assert a.std() == pytest.approx(bound / np.sqrt(3), rel=0.15)
    assert not np.array_equal(a, made.learner(LoraSettings(8, 16.0), seed=4).export("layers.0.mlp.gate_proj.lora_A"))


@pytest.mark.parametrize("name", ["llama-biases-llama3", "qwen2", "qwen3-tied-bias-window"])
@pytest.mark.parametrize(("max_grad_norm", "weight_decay"), [(0.0, 0.0), (0.5, 0.1)])
def test_adamw_against_torch(name: str, max_grad_norm: float, weight_decay: float, tiny: Callable[..., Any], parity: Any) -> None:
    """Five steps with clipping; the change of every weight by the rule, and torch's norm. Decay on matrices only."""
    made = tiny(name)
    batches = [parity.make_sequences(seed, made.model.config.vocab_size) for seed in range(5)]
    learner = made.learner()
    start = {name: parameter.detach().numpy().copy() for name, parameter in made.model.named_parameters()}
    options: dict[str, Any] = {"betas": (0.8, 0.95), "weight_decay": weight_decay}

    def torch_changes(model: torch.nn.Module) -> tuple[list[float], dict[str, np.ndarray[Any, Any]]]:
        parameters = list(model.parameters())
        groups = [
            {"params": [p for p in parameters if p.ndim == 2], "weight_decay": weight_decay},
            {"params": [p for p in parameters if p.ndim == 1], "weight_decay": 0.0},
        ]
        optimizer = torch.optim.AdamW(groups, lr=3e-3, betas=options["betas"], eps=EPSILON)
        norms = []
        for batch in batches:
            parity.torch_numbers(model, [batch], entropy=False)
            norms.append(float(torch.nn.utils.clip_grad_norm_(parameters, max_grad_norm or float("inf"))))
            optimizer.step()
        return norms, {name: p.detach().double().numpy() - start[name] for name, p in model.named_parameters()}

    truth_norms, truth = torch_changes(parity.in_float64(made.model))
    _, theirs = torch_changes(made.model)
    for number, batch in enumerate(batches):
        learner.forward(batch.pack())
        learner.backward(batch.dlogp)
        stats = learner.step(3e-3, max_grad_norm=max_grad_norm, epsilon=EPSILON, **options)
        assert stats.applied
        assert stats.step == number + 1
        assert stats.grad_norm == pytest.approx(truth_norms[number], rel=1e-5)
    broken = []
    for info in learner.tensors():
        key = Family.file_name(info.name)
        change = learner.export(info.name).astype(np.float64) - start[key]
        # The change is read off weights in float32: their spacing is a share of it that no implementation can undercut.
        spacing = np.spacing(np.abs(start[key])).astype(np.float64)
        floor = parity.FLOOR + float(np.linalg.norm(spacing) / np.linalg.norm(truth[key]))
        got, allowed = parity.error([change], [truth[key]]), 2 * parity.error([theirs[key]], [truth[key]]) + floor
        if got > allowed:
            broken.append(f"{key}: {got:.2e}, allowed {allowed:.2e}")
    assert not broken, "\n".join(broken)


@pytest.mark.parametrize("lora", [None, LoraSettings(2, 4.0)], ids=["full", "lora"])
def test_a_gradient_that_is_not_finite_changes_nothing(lora: LoraSettings | None, tiny: Callable[..., Any], parity: Any) -> None:
    learner = tiny("llama").learner(lora)
    batch = parity.make_sequences(1, 61)
    learner.forward_backward(batch.pack(), batch.dlogp)
    assert learner.step(1e-2).applied
    before, digest = learner.state(), learner.digest()
    poison = batch.dlogp.copy()
    poison[np.flatnonzero(batch.pack().mask)[0]] = np.nan
    learner.forward_backward(batch.pack(), poison)
    stats = learner.step(1e-2)
    assert not stats.applied
    assert not np.isfinite(stats.grad_norm)
    assert learner.digest() == digest
    for name, value in learner.state().items():
        np.testing.assert_array_equal(value, before[name], err_msg=name)
    learner.forward_backward(batch.pack(), batch.dlogp)
    assert learner.step(1e-2).applied
