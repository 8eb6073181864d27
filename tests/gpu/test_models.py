"""Whole models in bf16 on the GPU beside transformers in bf16 on the same GPU: our error against float32 is at most twice theirs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, LlamaConfig, MistralConfig, Qwen2Config, Qwen3Config

pytestmark = pytest.mark.gpu

COMMON: dict[str, Any] = {
    "vocab_size": 512, "hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 4, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 512,
}  # fmt: skip
CONFIGS = {
    "llama": LlamaConfig(**COMMON, head_dim=64),
    "mistral": MistralConfig(**COMMON, head_dim=64, sliding_window=48),
    "qwen2": Qwen2Config(**COMMON, tie_word_embeddings=True),
    "qwen3": Qwen3Config(**COMMON, head_dim=128),
}
LENGTHS = (100, 37, 163)


def reference(model: Any, sequences: list[torch.Tensor], weights: list[torch.Tensor]) -> tuple[np.ndarray, dict[str, np.ndarray]]:
    logps = []
    total = torch.zeros((), device="cuda")
    for ids, weight in zip(sequences, weights, strict=True):
        logits = model(ids[None]).logits[0, :-1].float()
        logp = logits.log_softmax(-1).gather(1, ids[1:, None])[:, 0]
        logps.append(logp.detach().cpu().numpy())
        total = total + (logp * weight).sum()
    total.backward()
    gradients = {name.removeprefix("model."): p.grad.float().cpu().numpy() for name, p in model.named_parameters() if p.grad is not None}
    return np.concatenate(logps), gradients


def error(ours: np.ndarray, right: np.ndarray) -> float:
    return float(np.linalg.norm(ours.astype(np.float64) - right) / np.linalg.norm(right.astype(np.float64)))


@pytest.mark.parametrize("family", CONFIGS)
def test_error_is_at_most_twice_that_of_transformers(family: str, tmp_path: Path) -> None:
    from surogate_rl.batch import PackedBatch
    from surogate_rl.learner import Compute, Learner
    from surogate_rl.models.load import describe

    torch.manual_seed(0)
    config = CONFIGS[family]
    exact = AutoModelForCausalLM.from_config(config, dtype=torch.float32).cuda()
    # weights that bf16 holds exactly, so that only the computation differs
    with torch.no_grad():
        for parameter in exact.parameters():
            if parameter.ndim > 1:
                parameter.mul_(2.0)
            parameter.copy_(parameter.bfloat16().float())
    exact.save_pretrained(tmp_path)
    rounded = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16).cuda()
    sequences = [torch.randint(0, 512, (n,), device="cuda") for n in LENGTHS]
    weights = [torch.randn(n - 1, device="cuda") for n in LENGTHS]
    right_logp, right = reference(exact, sequences, weights)
    their_logp, theirs = reference(rounded, sequences, weights)

    _, fields = describe(AutoConfig.from_pretrained(tmp_path), json.loads((tmp_path / "config.json").read_text()), str(tmp_path))
    from surogate_rl import _core

    learner = Learner(_core.ModelSpec(**fields), max_tokens=sum(LENGTHS), compute=Compute(device="cuda", recipe="bfloat16"))
    names = {name.removeprefix("model."): p.detach().cpu().numpy() for name, p in exact.named_parameters()}
    learner.load_weights((info.name, names[info.name]) for info in learner.tensors())
    tokens = torch.cat(sequences).cpu().numpy().astype(np.int32)
    targets = np.concatenate([np.append(s[1:].cpu().numpy(), -100) for s in sequences]).astype(np.int32)
    dlogp = np.concatenate([np.append(w.cpu().numpy(), 0) for w in weights]).astype(np.float32)
    batch = PackedBatch(
        tokens=tokens,
        positions=np.concatenate([np.arange(n) for n in LENGTHS]).astype(np.int32),
        cu_seqlens=np.concatenate([[0], np.cumsum(LENGTHS)]).astype(np.int32),
        targets=targets,
        mask=targets >= 0,
    )
    logp = learner.forward(batch).logp[targets >= 0]
    learner.backward(dlogp)
    ratios = {"logp": error(logp, right_logp) / error(their_logp, right_logp)}
    for name, gradient in right.items():
        ratios[name] = error(learner.gradient(name), gradient) / max(error(theirs[name], gradient), 1e-9)
    worst = max(ratios, key=lambda name: ratios[name])
    print(
        f"{family}: logp ratio {ratios['logp']:.2f}, gradients mean {np.mean(list(ratios.values())):.2f}, worst {worst} {ratios[worst]:.2f}"
    )
    assert ratios[worst] <= 2.0, f"{worst}: {ratios[worst]:.2f} times the error of transformers"
