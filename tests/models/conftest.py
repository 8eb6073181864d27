"""Tiny random models of every family, and the yardstick: transformers in float64 (the truth) and in float32 (what is allowed).

The rule: ||ours - truth|| / ||truth|| <= 2 * ||transformers float32 - truth|| / ||truth|| + FLOOR, for the log-probabilities, the
entropies and the gradient of every parameter, each summed over several random batches so that a lucky small denominator decides nothing.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel, PreTrainedTokenizerFast

from surogate_rl.batch import NO_TARGET, PackedBatch
from surogate_rl.learner import Learner, LoraSettings
from surogate_rl.models import LoadedModel, load_model

torch.set_num_threads(1)

# Two units in the last place of float32: the rounding of one product and one sum. Where transformers happens to err by less (a vector of
# a few numbers can, by luck), nothing that works in float32 can be asked to be twice as near.
FLOOR = 2 * 2.0**-23

SMALL = {
    "vocab_size": 61,
    "hidden_size": 48,
    "intermediate_size": 72,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "pad_token_id": None,  # else transformers leaves the padding's row untrained; here it is a token like any other, often the eos itself
    "bos_token_id": None,
    "eos_token_id": 2,
    "tie_word_embeddings": False,
    "rms_norm_eps": 1e-5,
}
DEFAULT_ROPE = {"rope_type": "default", "rope_theta": 10000.0}
LLAMA3_ROPE = {
    "rope_type": "llama3", "rope_theta": 500000.0, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}  # fmt: skip
YARN_ROPE = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 16}
ODD = {"hidden_size": 36, "num_attention_heads": 3, "num_key_value_heads": 1, "intermediate_size": 50}

MODELS: dict[str, dict[str, Any]] = {
    "llama": {"model_type": "llama", "head_dim": 16, "rope_parameters": DEFAULT_ROPE},
    "llama-tied-linear": {
        "model_type": "llama",
        **ODD,
        "tie_word_embeddings": True,
        "rope_parameters": {**DEFAULT_ROPE, "rope_type": "linear", "factor": 2.5},
    },
    "llama-biases-llama3": {
        "model_type": "llama",
        **ODD,
        "head_dim": 20,
        "attention_bias": True,
        "mlp_bias": True,
        "rope_parameters": LLAMA3_ROPE,
    },
    "llama-yarn": {"model_type": "llama", "head_dim": 16, "rope_parameters": YARN_ROPE},
    "mistral": {"model_type": "mistral", "head_dim": 16, "sliding_window": None, "rope_parameters": DEFAULT_ROPE},
    "mistral-window": {
        "model_type": "mistral",
        **ODD,
        "head_dim": 24,
        "sliding_window": 5,
        "rope_parameters": {**YARN_ROPE, "truncate": False},
    },
    "qwen2": {
        "model_type": "qwen2",
        "tie_word_embeddings": True,
        "sliding_window": 4,
        "use_sliding_window": False,
        "rope_parameters": DEFAULT_ROPE,
    },
    "qwen2-window": {
        "model_type": "qwen2",
        **ODD,
        "sliding_window": 4,
        "use_sliding_window": True,
        "max_window_layers": 1,
        "rope_parameters": {**YARN_ROPE, "mscale": 0.8, "mscale_all_dim": 0.5},
    },
    "qwen3": {"model_type": "qwen3", "head_dim": 32, "rope_parameters": {**DEFAULT_ROPE, "rope_theta": 1e6}},
    "qwen3-tied-bias-window": {
        "model_type": "qwen3",
        **ODD,
        "head_dim": 14,
        "attention_bias": True,
        "tie_word_embeddings": True,
        "use_sliding_window": True,
        "sliding_window": 3,
        "layer_types": ["sliding_attention", "full_attention"],
        "rope_parameters": DEFAULT_ROPE,
    },
}


def make_model(name: str, seed: int = 0, **changes: Any) -> PreTrainedModel:
    """A transformers model with every parameter random, norms and biases too, so that none hides behind ones and zeros."""
    values = {**SMALL, **MODELS[name], **changes}
    config = AutoConfig.for_model(values.pop("model_type"), **values)
    model: PreTrainedModel = AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation="sdpa").eval()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter_name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            if parameter_name.endswith("norm.weight"):
                parameter.copy_(1 + 0.2 * noise)
            elif parameter_name.endswith(".bias"):
                parameter.copy_(0.3 * noise)
            elif "embed_tokens" in parameter_name:
                parameter.copy_(0.7 * noise)
            else:
                parameter.copy_(noise / parameter.shape[1] ** 0.5)
    return model


def in_float64(model: PreTrainedModel) -> PreTrainedModel:
    """The model computed in float64 throughout. Its norms and its rotation force float32 whatever the weights are, so these two are lifted;
    the rotation's angle stays position times frequency in float32, which is the model's definition, and only its cosine and sine become
    exact."""
    model = copy.deepcopy(model).double()
    for module in model.modules():
        kind = type(module).__name__
        if kind.endswith("RMSNorm"):
            module.forward = _exact_norm(module)
        elif kind.endswith("RotaryEmbedding"):
            module.forward = _exact_rotation(module)
    return model


def _exact_norm(module: torch.nn.Module) -> Callable[..., torch.Tensor]:
    def forward(x: torch.Tensor) -> torch.Tensor:
        assert x.dtype == torch.float64
        return module.weight * (x * torch.rsqrt(x.square().mean(-1, keepdim=True) + module.variance_epsilon))

    return forward


def _exact_rotation(module: torch.nn.Module) -> Callable[..., tuple[torch.Tensor, torch.Tensor]]:
    def forward(x: torch.Tensor, position_ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        angle = (position_ids[..., None].float() * module.inv_freq.float()).double()
        angle = torch.cat((angle, angle), -1)
        return angle.cos() * module.attention_scaling, angle.sin() * module.attention_scaling

    return forward


@dataclass(frozen=True)
class Sequences:
    """Random sequences with a random set of trained positions; `dlogp` and `dentropy`, [T] over all of them, are the loss's derivatives."""

    tokens: list[NDArray[np.int32]]
    trained: list[NDArray[np.bool_]]
    dlogp: NDArray[np.float32]
    dentropy: NDArray[np.float32]

    def pack(self, which: Sequence[int] | None = None) -> PackedBatch:
        chosen = list(range(len(self.tokens))) if which is None else list(which)
        lengths = [len(self.tokens[i]) for i in chosen]
        targets = []
        for i in chosen:
            shifted = np.append(self.tokens[i][1:], NO_TARGET).astype(np.int32)
            targets.append(np.where(np.append(self.trained[i][1:], False), shifted, NO_TARGET).astype(np.int32))
        joined = np.concatenate(targets)
        return PackedBatch(
            tokens=np.concatenate([self.tokens[i] for i in chosen]),
            positions=np.concatenate([np.arange(n, dtype=np.int32) for n in lengths]),
            cu_seqlens=np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32),
            targets=joined,
            mask=joined != NO_TARGET,
        )

    def rows(self, index: int) -> slice:
        start = sum(len(t) for t in self.tokens[:index])
        return slice(start, start + len(self.tokens[index]))


def make_sequences(seed: int, vocab: int, lengths: Sequence[int] = (9, 1, 13, 4, 17)) -> Sequences:
    rng = np.random.default_rng(seed)
    tokens = [rng.integers(0, vocab, n).astype(np.int32) for n in lengths]
    trained = [rng.random(n) < 0.7 for n in lengths]
    total = sum(lengths)
    return Sequences(tokens, trained, rng.standard_normal(total, np.float32), rng.standard_normal(total, np.float32))


@dataclass
class Numbers:
    """What one implementation says: log-probabilities, entropies and gradients by file name, each a list over batches."""

    logp: list[NDArray[Any]] = field(default_factory=list)
    entropy: list[NDArray[Any]] = field(default_factory=list)
    gradients: dict[str, list[NDArray[Any]]] = field(default_factory=dict)

    def series(self) -> dict[str, list[NDArray[Any]]]:
        return {"logp": self.logp, "entropy": self.entropy, **self.gradients}


def torch_numbers(
    model: torch.nn.Module, batches: Sequence[Sequences], *, temperature: float = 1.0, valid_vocab: int = 0, entropy: bool = True
) -> Numbers:
    """Each sequence on its own through a transformers (or PEFT) model, gradients by autograd."""
    out = Numbers()
    for batch in batches:
        model.zero_grad(set_to_none=True)
        packed = batch.pack()
        dtype = next(model.parameters()).dtype
        logp, entropies = torch.zeros(packed.num_tokens, dtype=dtype), torch.zeros(packed.num_tokens, dtype=dtype)
        for index, tokens in enumerate(batch.tokens):
            logits = model(input_ids=torch.from_numpy(tokens).long()[None], use_cache=False).logits[0] / temperature
            table = torch.log_softmax(logits[:, : valid_vocab or None], -1)
            rows, targets = batch.rows(index), torch.from_numpy(packed.targets[batch.rows(index)]).long()
            has = targets != NO_TARGET
            picked = table.gather(1, targets.clamp(min=0)[:, None])[:, 0]
            logp = torch.cat((logp[: rows.start], torch.where(has, picked, 0.0), logp[rows.stop :]))
            entropies = torch.cat((entropies[: rows.start], torch.where(has, -(table.exp() * table).sum(-1), 0.0), entropies[rows.stop :]))
        loss = (torch.from_numpy(batch.dlogp).to(dtype) * logp).sum()
        if entropy:
            loss = loss + (torch.from_numpy(batch.dentropy).to(dtype) * entropies).sum()
        loss.backward()
        out.logp.append(logp.detach().numpy())
        out.entropy.append(entropies.detach().numpy())
        for name, parameter in model.named_parameters():
            if parameter.requires_grad:
                gradient = parameter.grad if parameter.grad is not None else torch.zeros_like(parameter)
                out.gradients.setdefault(name, []).append(gradient.detach().numpy().copy())
    return out


def our_numbers(
    learner: Learner,
    batches: Sequence[Sequences],
    name_of: Callable[[str], str],
    *,
    packed: bool = True,
    temperature: float = 1.0,
    valid_vocab: int = 0,
) -> Numbers:
    """The same from the learner; packed into one batch, or one sequence at a time."""
    out = Numbers()
    for batch in batches:
        learner.zero_gradients()
        count = len(batch.tokens)
        logp, entropy = [], []
        for which in [range(count)] if packed else [[i] for i in range(count)]:
            seeds = np.concatenate([np.arange(*batch.rows(i).indices(len(batch.dlogp))) for i in which])
            stats = learner.forward(batch.pack(which), temperature=temperature, valid_vocab=valid_vocab, entropy=True)
            assert stats.entropy is not None
            learner.backward(batch.dlogp[seeds], batch.dentropy[seeds])
            logp.append(stats.logp)
            entropy.append(stats.entropy)
        out.logp.append(np.concatenate(logp))
        out.entropy.append(np.concatenate(entropy))
        for info in learner.tensors():
            if info.trainable:
                out.gradients.setdefault(name_of(info.name), []).append(learner.gradient(info.name))
    return out


def error(got: Sequence[NDArray[Any]], truth: Sequence[NDArray[Any]]) -> float:
    """Norm-wise relative error over all batches; absolute where the truth is zero."""
    difference = np.sqrt(sum(float(np.square(g.astype(np.float64) - t).sum()) for g, t in zip(got, truth, strict=True)))
    size = np.sqrt(sum(float(np.square(t.astype(np.float64)).sum()) for t in truth))
    return float(difference / size) if size > 0 else float(difference)


def assert_parity(ours: Numbers, theirs: Numbers, truth: Numbers) -> None:
    """The rule of this file, for every series; the message lists all that break it."""
    ours_all, theirs_all, truth_all = ours.series(), theirs.series(), truth.series()
    assert ours_all.keys() == truth_all.keys() == theirs_all.keys()
    broken = []
    for name, values in truth_all.items():
        assert any(np.any(v) for v in values), f"{name}: a zero reference proves nothing here"
        allowed, got = 2 * error(theirs_all[name], values) + FLOOR, error(ours_all[name], values)
        if not got <= allowed:
            broken.append(f"{name}: error {got:.2e}, allowed {allowed:.2e}")
    assert not broken, "\n".join(broken)


def save_tokenizer(directory: Path, size: int = 50) -> None:
    words = ["<unk>", "<bos>", "<eos>", *(f"w{i}" for i in range(size - 3))]
    inner = Tokenizer(WordLevel({word: i for i, word in enumerate(words)}, unk_token="<unk>"))
    inner.pre_tokenizer = Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=inner, unk_token="<unk>", eos_token="<eos>", pad_token="<eos>").save_pretrained(directory)


@dataclass(frozen=True)
class Tiny:
    """A model saved by transformers, and what loading it gave."""

    model: PreTrainedModel
    directory: Path
    loaded: LoadedModel

    def learner(self, lora: LoraSettings | None = None, **options: Any) -> Learner:
        learner = Learner(self.loaded.spec, max_tokens=options.pop("max_tokens", 64), threads=1, lora=lora, **options)
        learner.load_weights(self.loaded.weights())
        return learner


@pytest.fixture
def tiny(tmp_path: Path) -> Callable[..., Tiny]:
    """``tiny(name, **config changes)`` -> a random model that transformers saved and we loaded."""
    made = iter(range(100))

    def make(name: str, **changes: Any) -> Tiny:
        directory = tmp_path / f"{name}-{next(made)}"
        model = make_model(name, **changes)
        model.save_pretrained(directory)
        save_tokenizer(directory)
        return Tiny(model, directory, load_model(str(directory)))

    return make


class Parity:
    """The functions of this file, as tests reach them (test folders are no packages)."""

    FLOOR = FLOOR
    MODELS = MODELS
    make_model = staticmethod(make_model)
    in_float64 = staticmethod(in_float64)
    make_sequences = staticmethod(make_sequences)
    torch_numbers = staticmethod(torch_numbers)
    our_numbers = staticmethod(our_numbers)
    assert_parity = staticmethod(assert_parity)
    error = staticmethod(error)
    save_tokenizer = staticmethod(save_tokenizer)


@pytest.fixture
def parity() -> type[Parity]:
    return Parity


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """A test that asks for `model_name` runs for every model."""
    if "model_name" in metafunc.fixturenames:
        metafunc.parametrize("model_name", list(MODELS))
