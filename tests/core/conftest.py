"""Tiny models of each architecture with random weights, and what transformers says about them."""

import copy
from dataclasses import dataclass, field

import numpy as np
import pytest
import torch
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from surogate_rl import _core

torch.set_num_threads(1)

COMMON = {
    "vocab_size": 211,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "rms_norm_eps": 1e-5,
    "attn_implementation": "eager",
}
# Three segments; the first and the last are longer than a window of 8.
LENGTHS = (19, 1, 37)


@dataclass
class Case:
    model: torch.nn.Module
    spec: _core.ModelSpec
    tokens: np.ndarray = field(init=False)
    positions: np.ndarray = field(init=False)
    cu_seqlens: np.ndarray = field(init=False)
    targets: np.ndarray = field(init=False)

    def __post_init__(self) -> None:
        rng = np.random.default_rng(7)
        total = sum(LENGTHS)
        self.tokens = rng.integers(0, self.spec.vocab, total).astype(np.int32)
        self.positions = np.concatenate([np.arange(n) for n in LENGTHS]).astype(np.int32)
        self.cu_seqlens = np.concatenate([[0], np.cumsum(LENGTHS)]).astype(np.int32)
        # Two thirds of the positions have a target, and it need not be the next token.
        self.targets = np.where(rng.random(total) < 0.66, rng.integers(0, 200, total), -100).astype(np.int32)

    @property
    def arrays(self) -> tuple[np.ndarray, ...]:
        return self.tokens, self.positions, self.cu_seqlens, self.targets


def spec_of(config: object, **fields: object) -> _core.ModelSpec:
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    theta = config.rope_parameters["rope_theta"]
    frequencies = 1.0 / (theta ** (torch.arange(0, head_dim, 2, dtype=torch.int64).float() / head_dim))
    return _core.ModelSpec(
        layers=config.num_hidden_layers,
        hidden=config.hidden_size,
        heads=config.num_attention_heads,
        kv_heads=config.num_key_value_heads,
        head_dim=head_dim,
        ffn=config.intermediate_size,
        vocab=config.vocab_size,
        max_positions=config.max_position_embeddings,
        norm_eps=config.rms_norm_eps,
        tied=config.tie_word_embeddings,
        rope_inv_freq=frequencies.tolist(),
        **fields,
    )


def make_case(name: str, seed: int = 3, weight_scale: float = 3.0) -> Case:
    torch.manual_seed(seed)
    if name == "llama":
        config = LlamaConfig(**COMMON, tie_word_embeddings=True)
        case = Case(LlamaForCausalLM(config), spec_of(config))
    elif name == "llama-biases":
        config = LlamaConfig(**COMMON, tie_word_embeddings=False, attention_bias=True, mlp_bias=True)
        case = Case(LlamaForCausalLM(config), spec_of(config, qkv_bias=True, o_bias=True, mlp_bias=True))
    elif name == "qwen2":
        config = Qwen2Config(**COMMON, tie_word_embeddings=True)
        case = Case(Qwen2ForCausalLM(config), spec_of(config, qkv_bias=True))
    elif name == "qwen3":
        config = Qwen3Config(**COMMON, head_dim=12, tie_word_embeddings=False)
        case = Case(Qwen3ForCausalLM(config), spec_of(config, qk_norm=True))
    else:
        config = MistralConfig(**COMMON, head_dim=16, sliding_window=8, tie_word_embeddings=False)
        case = Case(MistralForCausalLM(config), spec_of(config, windows=[8, 8, 8]))
    with torch.no_grad():  # biases and norm weights are initialised to constants; make them count
        for parameter in case.model.parameters():
            if parameter.ndim == 1:
                parameter.add_(0.3 * torch.randn_like(parameter))
            else:
                parameter.mul_(weight_scale)
    return case


FAMILIES = ["llama", "llama-biases", "qwen2", "qwen3", "mistral"]


def core_name(name: str) -> str:
    return name.removeprefix("model.")


def make_learner(case: Case, **options: object) -> _core.Learner:
    learner = _core.Learner(case.spec, **{"max_tokens": 64, "threads": 1, **options})
    loaded = {core_name(name): value.detach().float().numpy() for name, value in case.model.named_parameters()}
    base = {name for name, _, _ in learner.tensors() if "lora" not in name}
    assert base == set(loaded)
    for name, value in loaded.items():
        learner.load(name, value)
    return learner


def reference(
    case: Case,
    dtype: torch.dtype,
    d_logp: np.ndarray,
    d_entropy: np.ndarray,
    temperature: float,
    valid_vocab: int,
    model: torch.nn.Module | None = None,
) -> tuple[np.ndarray, np.ndarray, dict[str, np.ndarray]]:
    """logp, entropy [T] and gradients by autograd, each segment by itself."""
    model = copy.deepcopy(model if model is not None else case.model).to(dtype)
    logps, entropies = [], []
    for begin, end in zip(case.cu_seqlens[:-1], case.cu_seqlens[1:], strict=True):
        tokens = torch.from_numpy(case.tokens[begin:end]).long()[None]
        logits = model(input_ids=tokens, use_cache=False).logits[0, :, :valid_vocab] / temperature
        log_probs = torch.log_softmax(logits, dim=-1)
        targets = torch.from_numpy(case.targets[begin:end]).long()
        has_target = (targets >= 0).to(dtype)
        logps.append(log_probs.gather(1, targets.clamp(min=0)[:, None])[:, 0] * has_target)
        entropies.append(-(log_probs.exp() * log_probs).sum(-1) * has_target)
    logp, entropy = torch.cat(logps), torch.cat(entropies)
    loss = (logp * torch.from_numpy(d_logp).to(dtype)).sum() + (entropy * torch.from_numpy(d_entropy).to(dtype)).sum()
    loss.backward()
    gradients = {name: p.grad.double().numpy() for name, p in model.named_parameters() if p.grad is not None}
    return logp.detach().double().numpy(), entropy.detach().double().numpy(), gradients


def relative(value: np.ndarray, truth: np.ndarray) -> float:
    return float(np.linalg.norm(value.astype(np.float64) - truth) / np.linalg.norm(truth))


def loss_seeds(case: Case) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(11)
    total = len(case.tokens)
    return rng.normal(size=total).astype(np.float32), (0.3 * rng.normal(size=total)).astype(np.float32)


class Tiny:
    """What the tests of this folder share."""

    families = FAMILIES
    case = staticmethod(make_case)
    learner = staticmethod(make_learner)
    reference = staticmethod(reference)
    relative = staticmethod(relative)
    seeds = staticmethod(loss_seeds)
    core_name = staticmethod(core_name)

    @staticmethod
    def gradients(learner: _core.Learner) -> dict[str, np.ndarray]:
        return {name: learner.gradient(name) for name, _, trainable in learner.tensors() if trainable}

    @staticmethod
    def segment(case: Case, index: int) -> tuple[np.ndarray, ...]:
        """One segment as a batch of its own."""
        begin, end = case.cu_seqlens[index : index + 2]
        rows = slice(begin, end)
        return case.tokens[rows], case.positions[rows], np.array([0, end - begin], dtype=np.int32), case.targets[rows]


@pytest.fixture(scope="session")
def tiny() -> type[Tiny]:
    return Tiny
