"""The Python side of the learner: settings, checks, states; packing by its right values."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from surogate_rl.batch import NO_TARGET, PackedBatch
from surogate_rl.learner import ALL_LINEAR, Learner, LoraSettings

# LoRA settings --------------------------------------------------------------------------------------------------------------------


def test_targets() -> None:
    assert LoraSettings(4, 8.0).resolve(tied=True) == ALL_LINEAR
    assert "lm_head" not in ALL_LINEAR
    assert LoraSettings(4, 8.0, ["down_proj", "q_proj"]).resolve(tied=True) == ("q_proj", "down_proj")
    assert LoraSettings(4, 8.0, ["lm_head"]).resolve(tied=False) == ("lm_head",)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (
            LoraSettings(4, 8.0, ["q_porj"]),
            r"lora_target_modules: unknown module 'q_porj' \(did you mean q_proj\?\); known are q_proj, k_proj,",
        ),
        (LoraSettings(4, 8.0, "all_linear"), r"unknown module 'all_linear' \(did you mean all-linear\?\)"),
        (LoraSettings(4, 8.0, []), "lora_target_modules is empty; name some of q_proj"),
        (LoraSettings(4, 8.0, ["q_proj", "q_proj"]), "lora_target_modules names a module twice: q_proj, q_proj"),
        (LoraSettings(0, 8.0), "lora_rank must be at least 1, got 0"),
        (LoraSettings(4, 0.0), "lora_alpha must be a positive number, got 0.0"),
        (
            LoraSettings(4, 8.0, ["lm_head"]),
            r"lora_target_modules: lm_head cannot carry an adapter in this model, because its head is tied to the embedding "
            r"\(tie_word_embeddings: true\); remove lm_head from lora_target_modules",
        ),
    ],
)
def test_settings_that_are_refused(settings: LoraSettings, message: str, tiny: Callable[..., Any]) -> None:
    with pytest.raises(ValueError, match=message):
        tiny("qwen2").learner(settings)


# Checks ---------------------------------------------------------------------------------------------------------------------------


def test_batches_of_the_wrong_kind_are_refused_not_converted(tiny: Callable[..., Any], parity: Any) -> None:
    learner, good = tiny("llama").learner(), parity.make_sequences(1, 50).pack()
    with pytest.raises(ValueError, match=r"batch.tokens: expected int32 \[44\], got int64 \[44\]"):
        learner.score(dataclasses.replace(good, tokens=good.tokens.astype(np.int64)))
    with pytest.raises(ValueError, match=r"batch.targets: expected int32 \[44\], got int32 \[43\]"):
        learner.score(dataclasses.replace(good, targets=good.targets[:-1]))
    with pytest.raises(ValueError, match=r"dlogp: expected a float32 array \[44\], got float64 \[44\]"):
        learner.forward_backward(good, np.zeros(44))
    with pytest.raises(ValueError, match=r"dlogp: expected a float32 array \[44\], got float32 \[3\]"):
        learner.forward_backward(good, np.zeros(3, np.float32))
    with pytest.raises(ValueError, match=r"max_tokens = 16"):
        tiny("llama").learner(max_tokens=16).score(good)
    learner.forward(good)
    with pytest.raises(ValueError, match=r"(?i)pending"):
        learner.forward(good)
    learner.discard_pending()
    learner.forward(good)


def test_weights_are_checked(tiny: Callable[..., Any]) -> None:
    made = tiny("llama")
    learner = made.learner()
    weights = dict(made.loaded.weights())
    with pytest.raises(ValueError, match=r"1 weight\(s\) did not come: norm.weight"):
        learner.load_weights((n, v) for n, v in weights.items() if n != "norm.weight")
    with pytest.raises(ValueError, match=r"unknown weight 'norm.wait'"):
        learner.load_weights([("norm.wait", weights["norm.weight"])])
    with pytest.raises(ValueError, match=r"weight 'norm.weight' came twice"):
        learner.load_weights([("norm.weight", weights["norm.weight"])] * 2)
    with pytest.raises(ValueError, match=r"norm.weight: expected float32 \[48\], got float32 \[47\]"):
        learner.load_weights([("norm.weight", weights["norm.weight"][1:])])
    with pytest.raises(ValueError, match=r"norm.weight: expected float32 \[48\], got float64 \[48\]"):
        learner.load("norm.weight", weights["norm.weight"].astype(np.float64))
    with pytest.raises(ValueError, match=r"this model has no tensor 'layers.0.mlp.up.weight'; the nearest is layers"):
        learner.export("layers.0.mlp.up.weight")


def test_a_plan_that_does_not_fit_is_a_memory_error(tiny: Callable[..., Any]) -> None:
    made = tiny("llama")
    with pytest.raises(MemoryError, match="weights"):
        Learner(made.loaded.spec, max_tokens=64, threads=1, memory_limit=1000)
    planned = Learner.plan(made.loaded.spec, max_tokens=64, lora=LoraSettings(2, 4.0))
    assert planned == made.learner(LoraSettings(2, 4.0)).memory()
    assert sum(size for _, size in planned) > 4 * sum(p.numel() for p in made.model.parameters())


def test_closed(tiny: Callable[..., Any]) -> None:
    learner = tiny("llama").learner()
    learner.close()
    with pytest.raises(RuntimeError, match="this learner is closed"):
        learner.digest()


# State ----------------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("lora", [None, LoraSettings(2, 4.0, ["k_proj", "down_proj"])], ids=["full", "lora"])
def test_a_restored_learner_goes_on_with_the_same_bits(lora: LoraSettings | None, tiny: Callable[..., Any], parity: Any) -> None:
    made = tiny("qwen3")

    def run(learner: Learner, seeds: range) -> None:
        for seed in seeds:
            batch = parity.make_sequences(seed, 50)
            learner.forward_backward(batch.pack(), batch.dlogp)
            assert learner.step(1e-2, max_grad_norm=1.0, weight_decay=0.1).applied

    whole, first, second = made.learner(lora), made.learner(lora), made.learner(lora, seed=11)
    run(whole, range(6))
    run(first, range(3))
    state = first.state()
    assert set(state) == dict(first.iterate_state()).keys()
    assert (any(name.startswith("weight/layers.0.self_attn.q_proj") for name in state)) == (lora is None)
    second.load_state(state)
    assert second.digest() == first.digest()
    assert second.update_count == 3
    run(second, range(3, 6))
    assert second.digest() == whole.digest()
    assert second.update_count == 6


def test_states_that_do_not_fit(tiny: Callable[..., Any]) -> None:
    made = tiny("llama")
    learner = made.learner()
    state, before = learner.state(), learner.digest()
    with pytest.raises(ValueError, match=r"the state belongs to another learner: 1 entries missing \(weight/norm.weight\), 0 unknown"):
        learner.load_state({n: v for n, v in state.items() if n != "weight/norm.weight"})
    with pytest.raises(ValueError, match=r"weight/norm.weight: expected float32 \[48\], got float32 \[4\]"):
        learner.load_state({**{n: v * 2 for n, v in state.items()}, "weight/norm.weight": np.ones(4, np.float32)})
    with pytest.raises(ValueError, match="resume with the model and LoRA settings of the checkpoint"):
        made.learner(LoraSettings(2, 4.0)).load_state(state)
    assert learner.digest() == before


def test_weights_of_one_learner_fill_another(tiny: Callable[..., Any], parity: Any) -> None:
    one, two = tiny("qwen2").learner(), tiny("qwen2", seed=3).learner(trainable=False)
    assert one.digest() != two.digest()
    two.load_weights(one.weights())
    assert one.digest() == two.digest()
    batch = parity.make_sequences(1, 50)
    with pytest.raises(ValueError, match="trainable"):
        two.forward_backward(batch.pack(), batch.dlogp)


def test_the_digest_sees_one_bit(tiny: Callable[..., Any]) -> None:
    learner = tiny("llama").learner(LoraSettings(2, 4.0, ["q_proj"]))
    before, value = learner.digest(), learner.export("layers.1.self_attn.q_proj.lora_A")
    value.view(np.uint32)[1, 2] ^= 1
    learner.load("layers.1.self_attn.q_proj.lora_A", value)
    assert learner.digest() != before


# Packing --------------------------------------------------------------------------------------------------------------------------


def test_packed_segments_never_see_each_other(parity: Any, tmp_path: Any) -> None:
    """Qwen3, seed 0: the second segment's whole distribution equals the unpacked one, and does not move with the first segment."""
    torch.manual_seed(0)
    config = AutoConfig.for_model(
        "qwen3",
        hidden_size=64,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        num_hidden_layers=2,
        vocab_size=32,
        intermediate_size=128,
        max_position_embeddings=32,
        pad_token_id=None,
        bos_token_id=None,
        eos_token_id=None,
        rope_parameters={"rope_type": "default", "rope_theta": 1e6},
    )
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    model.save_pretrained(tmp_path)
    parity.save_tokenizer(tmp_path, size=32)
    from surogate_rl.models import load_model

    loaded = load_model(str(tmp_path))
    learner = Learner(loaded.spec, max_tokens=16, threads=1)
    learner.load_weights(loaded.weights())

    def second_segment(first: list[int]) -> np.ndarray[Any, Any]:
        """log-softmax [3, 32] of the second segment's three predicting positions: one pass for each id as the target."""
        tokens = np.array([*first, 4, 5, 6, 7], np.int32)
        positions = np.array([0, 1, 2, 0, 1, 2, 3], np.int32)
        columns = []
        for candidate in range(32):
            targets = np.array([2, 3, NO_TARGET, candidate, candidate, candidate, NO_TARGET], np.int32)
            batch = PackedBatch(tokens, positions, np.array([0, 3, 7], np.int32), targets, targets != NO_TARGET)
            assert batch.num_trained == 5
            stats = learner.score(batch)
            assert (stats.logp[targets == NO_TARGET] == 0).all()
            columns.append(stats.logp[3:6])
        return np.stack(columns, 1)

    packed = second_segment([1, 2, 3])
    with torch.no_grad():
        expected = torch.log_softmax(model(torch.tensor([[4, 5, 6, 7]])).logits[0, :3].double(), -1).numpy()
    np.testing.assert_allclose(packed, expected, atol=1e-5)
    np.testing.assert_array_equal(packed, second_segment([30, 8, 19]))
