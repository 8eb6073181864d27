"""The native sampler against the learner, transformers and scipy."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from scipy.stats import chisquare
from transformers import AutoConfig, AutoModelForCausalLM, MinPLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

from surogate_rl import _core

torch.set_num_threads(1)

VOCAB = 83
VALID = 79
TARGETS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj", "lm_head")
COMMON = {
    "vocab_size": VOCAB,
    "hidden_size": 36,
    "intermediate_size": 50,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 12,
    "max_position_embeddings": 160,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
    "tie_word_embeddings": False,
    "rms_norm_eps": 1e-5,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
    "initializer_range": 0.25,  # far from uniform, so that the tests see differences
}
MODELS: dict[str, dict[str, Any]] = {
    "llama": {"model_type": "llama"},
    "llama-tied": {"model_type": "llama", "tie_word_embeddings": True, "num_key_value_heads": 6},
    "qwen2": {"model_type": "qwen2"},
    "qwen3": {"model_type": "qwen3", "head_dim": 20, "num_key_value_heads": 1},
    "mistral-window": {"model_type": "mistral", "sliding_window": 9},
}


def network(name: str) -> Any:
    """The model in transformers."""
    torch.manual_seed(3)
    options = COMMON | MODELS[name]
    config = AutoConfig.for_model(options.pop("model_type"), **options)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation="eager").eval()
    with torch.no_grad():
        for key, value in model.named_parameters():
            if value.ndim == 1:
                value.add_(0.1 * torch.randn_like(value) if "norm" in key else 0.5 * torch.randn_like(value))
    return model


def learner(model: Any, *, lora: bool = False, threads: int = 1) -> _core.Learner:
    """The same model in the core; with `lora`, under adapters far from zero."""
    config = model.config
    half = config.head_dim if getattr(config, "head_dim", None) else config.hidden_size // config.num_attention_heads
    windows = [getattr(config, "sliding_window", None) or 0] * config.num_hidden_layers if config.model_type == "mistral" else []
    spec = _core.ModelSpec(
        layers=config.num_hidden_layers,
        hidden=config.hidden_size,
        heads=config.num_attention_heads,
        kv_heads=config.num_key_value_heads,
        head_dim=half,
        ffn=config.intermediate_size,
        vocab=config.vocab_size,
        max_positions=config.max_position_embeddings,
        norm_eps=config.rms_norm_eps,
        tied=config.tie_word_embeddings,
        qk_norm=config.model_type == "qwen3",
        qkv_bias=config.model_type == "qwen2",
        rope_inv_freq=[10000.0 ** (-i / half) for i in range(0, half, 2)],
        windows=windows or [0] * config.num_hidden_layers,
    )
    targets = [t for t in TARGETS if t != "lm_head" or not spec.tied]
    adapters: dict[str, Any] = {"lora_rank": 3, "lora_alpha": 5.0, "lora_targets": targets} if lora else {}
    native = _core.Learner(spec, max_tokens=256, threads=threads, **adapters)
    values = model.state_dict()
    rng = np.random.default_rng(11)
    for key, shape, _ in native.tensors():
        adapter = "lora_" in key
        value = 0.3 * rng.standard_normal(shape) if adapter else values[key if key in values else f"model.{key}"].numpy()
        native.load(key, np.ascontiguousarray(value, dtype=np.float32))
    return native


@dataclass
class Request:
    prompt: list[int]
    options: dict[str, Any]


@dataclass
class Sample:
    tokens: list[int] = field(default_factory=list)
    logps: list[float] = field(default_factory=list)
    finish: str | None = None

    def take(self, token: int, logp: float, finish: str | None) -> None:
        assert self.finish is None
        self.tokens.append(token)
        self.logps.append(logp)
        self.finish = finish


def add(generator: _core.Generator, number: int, request: Request) -> None:
    generator.add(number, np.array(request.prompt, dtype=np.int32), **request.options)


def drain(generator: _core.Generator, samples: dict[int, Sample], steps: int | None = None) -> None:
    while generator.unfinished() and steps != 0:
        for number, token, logp, finish in generator.step():
            samples[number].take(token, logp, finish)
        steps = None if steps is None else steps - 1


def generate(generator: _core.Generator, requests: Sequence[Request], order: Iterable[int] | None = None) -> list[Sample]:
    samples = {i: Sample() for i in range(len(requests))}
    for i in order if order is not None else range(len(requests)):
        add(generator, i, requests[i])
    drain(generator, samples)
    assert all(sample.finish for sample in samples.values())
    return [samples[i] for i in range(len(requests))]


def mixture(count: int = 6, seed: int = 0) -> list[Request]:
    """Groups of equal prompts around block boundaries, each member at another temperature and length."""
    rng = np.random.default_rng(seed)
    requests = []
    for length in (1, 15, 16, 17, 33, 70):
        prompt = rng.integers(0, VALID, length).tolist()
        for member in range(count):
            options = {
                "max_new_tokens": 9 + 7 * member,
                "temperature": (1.0, 0.6, 1.4, 0.0)[member % 4],
                "seed": int(rng.integers(1 << 63)),
            }
            requests.append(Request(prompt, options))
    return requests


def scored(native: _core.Learner, request: Request, sample: Sample, valid: int) -> NDArray[np.float32]:
    """The learner's log-probabilities of what was sampled."""
    tokens = np.array(request.prompt + sample.tokens, dtype=np.int32)
    size, first = len(tokens), len(request.prompt) - 1
    targets = np.full(size, -100, dtype=np.int32)
    targets[first : size - 1] = tokens[first + 1 :]
    positions = np.arange(size, dtype=np.int32)
    temperature = request.options.get("temperature", 1.0) or 1.0
    logp, _ = native.score(tokens, positions, np.array([0, size], dtype=np.int32), targets, temperature=temperature, valid_vocab=valid)
    return logp[first : size - 1]


@pytest.mark.parametrize("lora", [False, True], ids=["full", "lora"])
@pytest.mark.parametrize("name", MODELS)
def test_logp_is_the_learners(name: str, lora: bool) -> None:
    native = learner(network(name), lora=lora)
    generator = _core.Generator(native, max_sequences=16, cache_tokens=2048, valid_vocab=VALID, prefill_chunk=40)
    requests = mixture()
    for request, sample in zip(requests, generate(generator, requests), strict=True):
        assert len(sample.tokens) == request.options["max_new_tokens"]
        assert sample.finish == "length"
        assert max(sample.tokens) < VALID
        assert np.abs(scored(native, request, sample, VALID) - sample.logps).max() < 1e-4


@pytest.mark.parametrize("name", MODELS)
def test_greedy_is_transformers_generate(name: str) -> None:
    model = network(name)
    generator = _core.Generator(learner(model), max_sequences=8, cache_tokens=1024)
    rng = np.random.default_rng(5)
    requests = [Request(rng.integers(0, VOCAB, n).tolist(), {"max_new_tokens": 40, "temperature": 0.0}) for n in (1, 5, 16, 50)]
    for request, sample in zip(requests, generate(generator, requests), strict=True):
        prompt = torch.tensor([request.prompt])
        with torch.no_grad():
            expected = model.generate(prompt, attention_mask=torch.ones_like(prompt), do_sample=False, max_new_tokens=40, use_cache=False)
        assert sample.tokens == expected[0, len(request.prompt) :].tolist()


def test_a_sample_depends_on_its_request_alone() -> None:
    model = network("qwen3")
    native = learner(model, lora=True)
    requests = mixture(count=4)
    together = generate(_core.Generator(native, max_sequences=24, cache_tokens=4096, valid_vocab=VALID), requests)
    assert len({tuple(sample.tokens) for sample in together}) > len(requests) * 0.7  # they are not all the same to begin with

    for request, expected in zip(requests, together, strict=True):
        alone = _core.Generator(native, max_sequences=1, cache_tokens=128, valid_vocab=VALID, prefill_chunk=7, block_size=32)
        assert generate(alone, [request]) == [expected]

    order = np.random.default_rng(1).permutation(len(requests)).tolist()
    assert generate(_core.Generator(native, max_sequences=5, cache_tokens=4096, valid_vocab=VALID), requests, order) == together
    for threads in (2, 3):
        other = learner(model, lora=True, threads=threads)
        assert generate(_core.Generator(other, max_sequences=24, cache_tokens=4096, valid_vocab=VALID), requests) == together


@pytest.mark.parametrize("name", ["llama", "mistral-window"])
def test_preempted_sequences_go_on_as_if_nothing_had_happened(name: str) -> None:
    native = learner(network(name))
    rng = np.random.default_rng(2)
    requests = [
        Request(rng.integers(0, VALID, 20 + group).tolist(), {"max_new_tokens": 90, "seed": 100 * group + member})
        for group in range(4)
        for member in range(3)
    ]
    roomy = _core.Generator(native, max_sequences=12, cache_tokens=4096, valid_vocab=VALID)
    tight = _core.Generator(native, max_sequences=12, cache_tokens=320, valid_vocab=VALID, prefill_chunk=13)
    expected = generate(roomy, requests)
    assert roomy.preemptions == 0
    assert generate(tight, requests) == expected
    assert tight.preemptions >= 5
    # The cache must be whole again: a request that needs nearly all of it still gets through.
    last = [Request(requests[0].prompt, {"max_new_tokens": 130, "seed": 1})]
    assert generate(tight, last) == generate(roomy, last)


def test_requests_come_and_go_between_steps() -> None:
    native = learner(network("llama"))
    requests = mixture(count=3, seed=4)
    expected = generate(_core.Generator(native, max_sequences=18, cache_tokens=4096, valid_vocab=VALID), requests)
    generator = _core.Generator(native, max_sequences=6, cache_tokens=512, valid_vocab=VALID, prefill_chunk=20)
    samples = {i: Sample() for i in range(len(requests))}
    aborted: set[int] = set()
    rng = np.random.default_rng(6)
    for i in rng.permutation(len(requests)).tolist():
        add(generator, i, requests[i])
        drain(generator, samples, steps=2)
        victim = int(rng.integers(len(requests)))
        known = victim in samples and samples[victim].finish is None
        if i % 3 == 0 and generator.abort(victim):
            assert known
            assert not generator.abort(victim)
            aborted.add(victim)
    drain(generator, samples)
    assert aborted
    for i, sample in samples.items():
        if i in aborted:
            size = len(sample.tokens)
            assert size < len(expected[i].tokens)
            assert (sample.tokens, sample.logps, sample.finish) == (expected[i].tokens[:size], expected[i].logps[:size], None)
        else:
            assert sample == expected[i]


def test_an_aborted_sequence_gives_its_blocks_back() -> None:
    native = learner(network("llama"))
    generator = _core.Generator(native, max_sequences=4, cache_tokens=160, valid_vocab=VALID, prefill_chunk=16)
    rng = np.random.default_rng(8)
    for i in range(60):  # aborted while waiting, while its prompt is computed, and while it decodes
        add(generator, i, Request(rng.integers(0, VALID, 60).tolist(), {"max_new_tokens": 90}))
        for _ in range(i % 7):
            generator.step()
        assert generator.abort(i)
        assert generator.unfinished() == 0
        assert generator.step() == []
    (sample,) = generate(generator, [Request([1, 2, 3], {"max_new_tokens": 157})])
    assert len(sample.tokens) == 157


def test_stop_ids_end_a_sequence_and_are_kept() -> None:
    native = learner(network("llama"))
    generator = _core.Generator(native, max_sequences=8, cache_tokens=1024)
    request = Request([5, 6, 7], {"max_new_tokens": 60, "seed": 9})
    (free,) = generate(generator, [request])
    at = next(i for i in range(5, 60) if free.tokens[i] not in free.tokens[:i])
    options = request.options | {"stop_ids": [VOCAB + 5, free.tokens[at]]}
    (stopped,) = generate(generator, [Request(request.prompt, options)])
    assert stopped == Sample(free.tokens[: at + 1], free.logps[: at + 1], "stop")
    last = request.options | {"stop_ids": [free.tokens[at]], "max_new_tokens": at + 1}
    (both,) = generate(generator, [Request(request.prompt, last)])
    assert both.finish == "stop"


def frequencies(generator: _core.Generator, prompt: list[int], count: int, **options: Any) -> NDArray[np.int64]:
    """How often each id came first (of `count` requests) after the prompt."""
    seeds = np.random.default_rng(12).integers(0, 1 << 63, count).tolist()
    requests = [Request(prompt, {"max_new_tokens": 1, "seed": seed, **options}) for seed in seeds]
    return np.bincount([sample.tokens[0] for sample in generate(generator, requests)], minlength=VOCAB)


def p_value(counts: NDArray[np.int64], probabilities: NDArray[np.float64]) -> float:
    """Of Pearson's test; ids that are too rare for it are taken together."""
    total = counts.sum()
    assert counts[probabilities == 0].sum() == 0
    common = probabilities * total >= 5
    rare = ~common & (probabilities > 0)
    observed, expected = counts[common], probabilities[common] * total
    if rare.any():
        observed, expected = np.append(observed, counts[rare].sum()), np.append(expected, probabilities[rare].sum() * total)
    return float(chisquare(observed, expected * (total / expected.sum())).pvalue)


def last_logits(model: Any, prompt: list[int], temperature: float) -> torch.Tensor:
    with torch.no_grad():
        return copy.deepcopy(model).double()(torch.tensor([prompt])).logits[:, -1] / temperature


@pytest.mark.parametrize("temperature", [0.7, 1.0, 1.8])
def test_frequencies_follow_the_softmax(temperature: float) -> None:
    model = network("llama")
    prompt = [3, 1, 4, 1, 5]
    generator = _core.Generator(learner(model), max_sequences=64, cache_tokens=4096, valid_vocab=VALID)
    logits = last_logits(model, prompt, temperature)
    logits[:, VALID:] = -torch.inf
    counts = frequencies(generator, prompt, 8000, temperature=temperature)
    assert p_value(counts, logits.softmax(-1)[0].numpy()) > 0.01
    # ... and the test is sharp enough to tell another temperature.
    assert p_value(counts, (logits * 1.2).softmax(-1)[0].numpy()) < 1e-6


def test_positions_of_one_seed_are_independent() -> None:
    """The second token, given the first, follows the model too, and so does the pair: a draw is not used twice."""
    model = network("llama")
    prompt = [3, 1, 4, 1, 5]
    generator = _core.Generator(learner(model), max_sequences=64, cache_tokens=4096)
    seeds = range(8000)  # consecutive seeds must do as well as random ones
    pairs = [tuple(s.tokens) for s in generate(generator, [Request(prompt, {"max_new_tokens": 2, "seed": seed}) for seed in seeds])]
    first = np.bincount([a for a, _ in pairs], minlength=VOCAB)
    assert p_value(first, last_logits(model, prompt, 1.0).softmax(-1)[0].numpy()) > 0.01
    for token in np.argsort(first)[-3:].tolist():
        second = np.bincount([b for a, b in pairs if a == token], minlength=VOCAB)
        assert p_value(second, last_logits(model, [*prompt, token], 1.0).softmax(-1)[0].numpy()) > 0.01


FILTERS: dict[str, tuple[dict[str, Any], list[Any]]] = {
    "top_k": ({"top_k": 5}, [TopKLogitsWarper(5)]),
    "top_p": ({"top_p": 0.6}, [TopPLogitsWarper(0.6)]),
    "min_p": ({"min_p": 0.3}, [MinPLogitsWarper(0.3)]),
    "all": ({"top_k": 12, "top_p": 0.8, "min_p": 0.1}, [TopKLogitsWarper(12), TopPLogitsWarper(0.8), MinPLogitsWarper(0.1)]),
    "top_p of nothing": ({"top_p": 1e-6}, [TopPLogitsWarper(1e-6)]),
    "top_k beyond": ({"top_k": 10_000}, []),
}


@pytest.mark.parametrize("name", FILTERS)
def test_filters_leave_what_transformers_leaves(name: str) -> None:
    options, warpers = FILTERS[name]
    model = network("llama")
    native = learner(model)
    prompt = [9, 2, 6]
    generator = _core.Generator(native, max_sequences=64, cache_tokens=4096)
    logits = last_logits(model, prompt, 1.5)
    for warper in warpers:
        logits = warper(torch.tensor([prompt]), logits)
    probabilities = logits.softmax(-1)[0].numpy()
    counts = frequencies(generator, prompt, 3000, temperature=1.5, **options)
    kept = probabilities > 0
    assert not counts[~kept].any()
    if kept.sum() > 1:
        assert p_value(counts, probabilities) > 0.01
    # The log-probability is the unfiltered one.
    request = Request(prompt, {"max_new_tokens": 20, "temperature": 1.5, **options})
    (sample,) = generate(generator, [request])
    assert np.abs(scored(native, request, sample, 0) - sample.logps).max() < 1e-4


def test_filters_worked_out_by_hand() -> None:
    """All weights zero but the head's bias-like column: the logits are known numbers."""
    model = network("llama")
    native = learner(model)
    shapes = {name: shape for name, shape, _ in native.tensors()}
    for name, shape in shapes.items():
        if name.startswith("layers.") and "norm" not in name:
            native.load(name, np.zeros(shape, np.float32))
    hidden, vocab = shapes["lm_head.weight"][1], shapes["lm_head.weight"][0]
    embedding = np.zeros((vocab, hidden), np.float32)
    embedding[:, 0] = 1.0
    native.load("embed_tokens.weight", embedding)
    native.load("norm.weight", np.full(hidden, 1.0 / np.sqrt(hidden / (1 + hidden * 1e-5)), np.float32))
    head = np.full((vocab, hidden), -50.0, np.float32)
    head[[10, 20, 30, 40], 0] = np.log([8.0, 4.0, 3.0, 1.0])  # probabilities 1/2, 1/4, 3/16, 1/16
    native.load("lm_head.weight", head)
    generator = _core.Generator(native, max_sequences=64, cache_tokens=4096)

    def seen(**options: Any) -> set[int]:
        return set(np.flatnonzero(frequencies(generator, [0], 400, **options)).tolist())

    assert seen() == {10, 20, 30, 40}
    assert seen(top_k=2) == {10, 20}
    assert seen(top_p=0.7) == {10, 20}
    assert seen(top_p=0.76) == {10, 20, 30}
    assert seen(min_p=0.3) == {10, 20, 30}
    assert seen(min_p=0.6) == {10}
    assert seen(top_k=3, top_p=0.79) == {10, 20}  # of 15/16: 8/15 + 4/15 = 0.8 is enough
    assert seen(temperature=0.0) == {10}
    (sample,) = generate(generator, [Request([0], {"max_new_tokens": 1, "temperature": 0.0})])
    assert sample.logps[0] == pytest.approx(np.log(0.5), abs=1e-5)
    head[[10, 20]] = head[[20]]
    native.load("lm_head.weight", head)
    generator.weights_changed()
    (tie,) = generate(generator, [Request([0], {"max_new_tokens": 1, "temperature": 0.0})])
    assert tie.tokens == [10]  # the lowest id


def test_a_prompt_is_computed_anew_after_the_weights_changed() -> None:
    native = learner(network("llama"))
    generator = _core.Generator(native, max_sequences=8, cache_tokens=1024, valid_vocab=VALID, prefill_chunk=16)
    request = Request(list(range(40)), {"max_new_tokens": 12, "seed": 3})
    (before,) = generate(generator, [request])
    add(generator, 7, Request(list(range(1, 41)), {"max_new_tokens": 12, "seed": 3}))
    generator.step()  # this prompt is half computed when the weights change
    name = "layers.0.self_attn.k_proj.weight"
    native.load(name, native.export(name) * np.float32(1.5))
    generator.weights_changed()
    other = Sample()
    drain(generator, {7: other})
    (after,) = generate(generator, [request])
    assert after.logps != before.logps
    assert np.abs(scored(native, request, after, VALID) - after.logps).max() < 1e-4
    assert np.abs(scored(native, Request(list(range(1, 41)), request.options), other, VALID) - other.logps).max() < 1e-4


def test_logits_that_are_not_finite_are_an_error_and_lose_nothing() -> None:
    native = learner(network("llama"))
    generator = _core.Generator(native, max_sequences=8, cache_tokens=1024, valid_vocab=VALID)
    request = Request([1, 2, 3], {"max_new_tokens": 20, "seed": 5})
    (expected,) = generate(generator, [request])
    sample = Sample()
    add(generator, 0, request)
    drain(generator, {0: sample}, steps=4)
    good = native.export("norm.weight")
    bad = good.copy()
    bad[3] = np.nan
    native.load("norm.weight", bad)
    with pytest.raises(RuntimeError, match=r"request 0: the logits behind position 6 are not finite"):
        generator.step()
    native.load("norm.weight", good)
    drain(generator, {0: sample})
    assert sample == expected


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"prompt": []}, "request 1: the prompt is empty; it must have at least one token"),
        ({"prompt": [1, VOCAB]}, rf"request 1: prompt\[1\]: expected a token id of 0 to {VOCAB - 1}, got {VOCAB}"),
        ({"prompt": [-1]}, rf"request 1: prompt\[0\]: expected a token id of 0 to {VOCAB - 1}, got -1"),
        ({"max_new_tokens": 0}, "request 1: max_new_tokens: expected a positive number, got 0"),
        ({"temperature": -1.0}, r"request 1: temperature: expected 0 \(greedy\) or a finite number from 0.001 on, got -1"),
        ({"temperature": float("nan")}, "request 1: temperature: "),
        ({"top_p": 0.0}, "request 1: top_p: expected more than 0 and at most 1, got 0"),
        ({"top_p": 1.5}, "request 1: top_p: expected more than 0 and at most 1, got 1.5"),
        ({"top_k": -2}, r"request 1: top_k: expected 0 \(off\) or a positive number, got -2"),
        ({"min_p": 1.5}, "request 1: min_p: expected 0 to 1, got 1.5"),
        ({"id": 0}, "request 0: this id is in use by a request that is not finished"),
        (
            {"prompt": [1] * 100, "max_new_tokens": 61},
            "request 1: a prompt of 100 tokens and max_new_tokens 61 make 161 positions, but the model has max_positions 160; "
            "shorten either",
        ),
        (
            {"prompt": [1] * 50, "max_new_tokens": 47},
            r"request 1: a prompt of 50 tokens and max_new_tokens 47 make 97 positions, but the KV cache holds 96 \(cache_tokens\); "
            "enlarge it or shorten either",
        ),
    ],
)
def test_refused_requests(options: dict[str, Any], message: str) -> None:
    generator = _core.Generator(learner(network("llama")), max_sequences=2, cache_tokens=90)
    assert generator.cache_tokens == 96
    add(generator, 0, Request([1], {"max_new_tokens": 1}))
    arguments: dict[str, Any] = {"id": 1, "prompt": [1], "max_new_tokens": 2} | options
    arguments["prompt"] = np.array(arguments["prompt"], dtype=np.int32)
    with pytest.raises(ValueError, match=message):
        generator.add(**arguments)
    assert generator.unfinished() == 1


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_sequences": 0}, "max_sequences: expected a positive number, got 0"),
        ({"prefill_chunk": 0}, "prefill_chunk: expected a positive number, got 0"),
        ({"block_size": 24}, "block_size: expected a positive multiple of 16, got 24"),
        ({"cache_tokens": -1}, r"cache_tokens: expected 0 \(automatic\) or a positive number, got -1"),
        ({"valid_vocab": VOCAB + 1}, rf"valid_vocab: expected 0 \(all\) to {VOCAB}, got {VOCAB + 1}"),
    ],
)
def test_refused_options(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        _core.Generator(learner(network("llama")), **options)


def test_memory_is_planned_and_itemised() -> None:
    native = learner(network("llama"))
    spec = _core.ModelSpec(
        layers=3, hidden=36, heads=6, kv_heads=2, head_dim=12, ffn=50, vocab=VOCAB, max_positions=160,
        rope_inv_freq=[1.0] * 6, windows=[0] * 3,
    )  # fmt: skip
    plan = dict(_core.Generator.plan(spec, max_sequences=4, cache_tokens=320))
    assert plan["KV cache (320 tokens)"] == 3 * 2 * 320 * 24 * 4
    assert len(plan) == 3
    automatic = [name for name, _ in _core.Generator.plan(spec, max_sequences=4)]
    assert automatic[0] == "KV cache (640 tokens)"  # 4 x the model's 160 positions
    made = _core.Generator(native, max_sequences=4, cache_tokens=320, valid_vocab=VALID)
    assert made.memory() == _core.Generator.plan(spec, max_sequences=4, cache_tokens=320, valid_vocab=VALID)
    with pytest.raises(MemoryError, match=r"KV cache \(1600000000 tokens\): .*GiB[^$]*\nTo need less: lower rollouts.kv_cache_gb"):
        _core.Generator(native, cache_tokens=1_600_000_000)
