"""What must not change a bit (recomputation, threads, the way of asking), and what may only change rounding (packing, chunks)."""

from __future__ import annotations

import threading
from typing import Any

import numpy as np
import pytest

LORA = {"lora_rank": 4, "lora_alpha": 8, "lora_targets": ["q_proj", "v_proj", "o_proj", "down_proj"]}


def run(tiny: Any, case: Any, **options: Any) -> tuple[np.ndarray, dict[str, np.ndarray], dict[str, np.ndarray]]:
    """logp, gradients of two passes, and trained weights after two updates."""
    learner = tiny.learner(case, **options)
    d_logp, d_entropy = tiny.seeds(case)
    for name, shape, trainable in learner.tensors():
        if trainable and name.endswith("lora_B"):
            learner.load(name, np.random.default_rng(len(name)).normal(size=shape, scale=0.05).astype(np.float32))
    for _ in range(2):
        logp, _ = learner.forward(*case.arrays, temperature=0.9, entropy=True)
        learner.backward(d_logp, d_entropy)
    gradients = tiny.gradients(learner)
    for _ in range(2):
        learner.forward_backward(*case.arrays, d_logp)
        learner.step(1e-3, weight_decay=0.1, max_grad_norm=1.0)
    return logp, gradients, {name: learner.export(name) for name in gradients}


def assert_same_bits(first: Any, second: Any) -> None:
    assert first[0].tobytes() == second[0].tobytes()
    for one, other in zip(first[1:], second[1:], strict=True):
        assert one.keys() == other.keys()
        for name in one:
            assert one[name].tobytes() == other[name].tobytes(), name


@pytest.mark.parametrize("lora", [{}, LORA])
@pytest.mark.parametrize("family", ["llama", "qwen3", "mistral"])
def test_recompute_and_threads(tiny: Any, family: str, lora: dict[str, Any]) -> None:
    case = tiny.case(family)
    plain = run(tiny, case, **lora)
    assert_same_bits(plain, run(tiny, case, **lora, recompute=True))
    for threads in (2, 5):
        assert_same_bits(plain, run(tiny, case, **lora, **{"threads": threads}))


@pytest.mark.parametrize("head_rows", [0, 16])
def test_forward_backward_is_forward_and_backward(tiny: Any, head_rows: int) -> None:
    case = tiny.case("llama")
    d_logp, d_entropy = tiny.seeds(case)
    apart, at_once = (tiny.learner(case, head_rows=head_rows) for _ in range(2))
    logp, entropy = apart.forward(*case.arrays, entropy=True)
    apart.backward(d_logp, d_entropy)
    same_logp, same_entropy = at_once.forward_backward(*case.arrays, d_logp, d_entropy)
    np.testing.assert_array_equal(logp, same_logp)
    np.testing.assert_array_equal(entropy, same_entropy)
    scored = apart.score(*case.arrays, entropy=True)
    np.testing.assert_array_equal(logp, scored[0])
    np.testing.assert_array_equal(entropy, scored[1])
    one, other = tiny.gradients(apart), tiny.gradients(at_once)
    for name in one:
        np.testing.assert_array_equal(one[name], other[name], err_msg=name)


@pytest.mark.parametrize("family", ["llama", "qwen3", "mistral"])
def test_packed_is_unpacked(tiny: Any, family: str) -> None:
    case = tiny.case(family)
    d_logp, _ = tiny.seeds(case)
    packed, apart = tiny.learner(case), tiny.learner(case)
    logp, _ = packed.forward_backward(*case.arrays, d_logp)
    parts = []
    for index, (begin, end) in enumerate(zip(case.cu_seqlens[:-1], case.cu_seqlens[1:], strict=True)):
        parts.append(apart.forward_backward(*tiny.segment(case, index), d_logp[begin:end])[0])
    np.testing.assert_allclose(logp, np.concatenate(parts), atol=1e-5)
    one, other = tiny.gradients(packed), tiny.gradients(apart)
    for name in one:
        assert tiny.relative(one[name], other[name]) < 2e-5, name


def test_rows_without_a_seed_add_nothing(tiny: Any) -> None:
    """Seeds of zero leave out work, not results: the gradient is that of the other rows alone."""
    case = tiny.case("llama")
    d_logp, d_entropy = tiny.seeds(case)
    silent = np.random.default_rng(0).random(len(d_logp)) < 0.6
    d_logp[silent] = d_entropy[silent] = 0.0
    learner, fewer = tiny.learner(case, head_rows=8), tiny.learner(case, head_rows=64)
    logp, _ = learner.forward(*case.arrays, entropy=True)
    assert (logp[silent & (case.targets >= 0)] < 0).all()
    learner.backward(d_logp, d_entropy)
    targets = np.where(silent, -100, case.targets).astype(np.int32)
    fewer.forward_backward(*case.arrays[:3], targets, d_logp, d_entropy)
    one, other = tiny.gradients(learner), tiny.gradients(fewer)
    for name in one:
        assert tiny.relative(one[name], other[name]) < 2e-5, name

    learner.zero_gradients()
    nothing = np.zeros_like(d_logp)
    learner.forward(*case.arrays)
    learner.backward(nothing)
    learner.forward_backward(*case.arrays, nothing, nothing)
    assert not any(gradient.any() for gradient in tiny.gradients(learner).values())


def test_gradients_accumulate(tiny: Any) -> None:
    case = tiny.case("qwen2")
    d_logp, _ = tiny.seeds(case)
    once, thrice = tiny.learner(case), tiny.learner(case)
    once.forward_backward(*case.arrays, d_logp)
    for _ in range(3):
        thrice.forward_backward(*case.arrays, d_logp)
    one, other = tiny.gradients(once), tiny.gradients(thrice)
    for name in one:
        assert tiny.relative(other[name], 3.0 * one[name].astype(np.float64)) < 1e-5, name
    name = "layers.1.mlp.up_proj.weight"
    once.add_to_gradient(name, one[name])
    np.testing.assert_array_equal(once.gradient(name), 2 * one[name])


def test_calls_from_several_threads(tiny: Any) -> None:
    """Calls queue up: each thread gets the numbers that it would get alone."""
    case = tiny.case("llama")
    learner = tiny.learner(case, threads=2)
    batches = [tiny.segment(case, 0), tiny.segment(case, 2), case.arrays]
    alone = [learner.score(*batch)[0] for batch in batches]
    seeds = [np.ones(len(batch[0]), dtype=np.float32) for batch in batches]
    failures: list[BaseException] = []

    def work(index: int) -> None:
        try:
            for _ in range(20):
                np.testing.assert_array_equal(learner.score(*batches[index])[0], alone[index])
                np.testing.assert_array_equal(learner.forward_backward(*batches[index], seeds[index])[0], alone[index])
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=work, args=(index,)) for index in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures
