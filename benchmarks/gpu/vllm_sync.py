"""Giving the learner's weights to vLLM on the same GPU, and 128 completions of 512 tokens from it, with random weights of a known shape.

    python benchmarks/gpu/vllm_sync.py [0.6B|8B] [full|merged ...] [--transfer cuda_ipc|host] [--updates 6] [--layers N]

Prints lines of JSON: of each update (the first goes through vLLM's loader, later ones in place) the milliseconds of the whole without the
probe, of copying from the learner, and of loading with reading back; beside them what copying as many bytes takes on the device. Then the
medians, and the seconds of each generation.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, get_args

import torch
from shapes import SHAPES, make_learner, make_spec

from surogate_rl.rollouts.engines.vllm.engine import VllmEngine
from surogate_rl.rollouts.engines.vllm.options import VllmOptions
from surogate_rl.rollouts.engines.vllm.weights import Transfer
from surogate_rl.rollouts.types import GenerateRequest, SamplingParams

SEQUENCES, TOKENS, PROMPT, CONTEXT = 128, 512, 20, 1024
GENERATIONS = 3


def model_config(size: str, layers: int) -> dict[str, Any]:
    shape = SHAPES[size]
    return {
        "model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"], "vocab_size": shape["vocab"], "hidden_size": shape["hidden"],
        "intermediate_size": shape["ffn"], "num_hidden_layers": layers or shape["layers"], "num_attention_heads": shape["heads"],
        "num_key_value_heads": shape["kv_heads"], "head_dim": shape["head_dim"], "hidden_act": "silu", "max_position_embeddings": 40960,
        "rms_norm_eps": 1e-6, "rope_theta": 1e6, "rope_parameters": {"rope_type": "default", "rope_theta": 1e6},
        "tie_word_embeddings": shape["tied"], "attention_bias": False, "bos_token_id": None, "eos_token_id": None, "pad_token_id": None,
    }  # fmt: skip


def options(size: str, layers: int, mode: str, transfer: Transfer, python: str, log: Path) -> VllmOptions:
    shape = SHAPES[size]
    position = 4 * (layers or shape["layers"]) * shape["kv_heads"] * shape["head_dim"]
    arguments = {"max_model_len": CONTEXT, "max_num_seqs": SEQUENCES, "kv_cache_memory_bytes": SEQUENCES * CONTEXT * position, "seed": 0}
    return VllmOptions(
        model_config=model_config(size, layers),
        engine_args=arguments,
        dtype="bfloat16",
        valid_vocab=0,
        log=log,
        python=python,
        environments=({},),
        sync="merged" if mode == "merged" else "full",
        transfer=transfer,
        memory_bytes=40 << 30,
        probe_tolerance=0.2,
    )


def copy_floor(size: int) -> float:
    """Milliseconds of one copy of so many bytes on the device."""
    memory = torch.empty((2, size), dtype=torch.uint8, device="cuda")
    times = []
    for _ in range(5):
        torch.cuda.synchronize()
        started = time.perf_counter()
        memory[0].copy_(memory[1])
        torch.cuda.synchronize()
        times.append(time.perf_counter() - started)
    del memory
    torch.cuda.empty_cache()
    return 1e3 * min(times)


async def measure(size: str, layers: int, mode: str, given: argparse.Namespace) -> None:
    learner = make_learner(make_spec(size, layers=layers), 8192, lora=mode == "merged")
    engine = VllmEngine(learner, options(size, layers, mode, given.transfer, given.python, Path(given.log)))
    common = {"size": size, "mode": mode, "transfer": given.transfer}
    try:
        await engine.begin()
        found: list[dict[str, float]] = []
        for number in range(given.updates):
            probes: list[float] = []
            probe = engine._probe

            async def timed(replica: Any, probe: Any = probe, probes: list[float] = probes) -> float:
                started = time.perf_counter()
                gap: float = await probe(replica)
                probes.append(time.perf_counter() - started)
                return gap

            engine._probe = timed  # type: ignore[method-assign]
            await engine.update_weights(learner, number + 1)
            engine._probe = probe  # type: ignore[method-assign]
            metrics = engine.take_metrics()
            line = {
                "ms": 1e3 * (metrics["vllm/sync_seconds"] - probes[0]),
                **{f"{part}_ms": 1e3 * metrics[f"vllm/sync_{part}_seconds"] for part in ("export", "load", "verify")},
            }
            found.append(line)
            rounded = {name: round(value, 2) for name, value in line.items()}
            print(json.dumps({"bench": "vllm_update", **common, "number": number, **rounded, "gap": metrics["vllm/probe_gap"]}), flush=True)
        assert engine._snapshot is not None
        medians = {name: round(statistics.median(line[name] for line in found[1:]), 2) for name in found[0]}
        total = engine._snapshot.bytes
        print(
            json.dumps({"bench": "vllm_sync", **common, **medians, "bytes": total, "copy_floor_ms": round(copy_floor(total), 2)}),
            flush=True,
        )
        for _ in range(GENERATIONS):
            started = time.perf_counter()
            prompts = [[(7 * row + column) % 1000 for column in range(PROMPT)] for row in range(SEQUENCES)]
            requests = [GenerateRequest(prompt, SamplingParams(TOKENS, seed=row)) for row, prompt in enumerate(prompts)]
            completions = await asyncio.gather(*(engine.generate(request) for request in requests))
            assert all(len(completion.tokens) == TOKENS for completion in completions)
            seconds = time.perf_counter() - started
            print(
                json.dumps({"bench": "vllm_generate", **common, "sequences": SEQUENCES, "tokens": TOKENS, "s": round(seconds, 3)}),
                flush=True,
            )
    finally:
        await engine.close()
        learner.close()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("size", nargs="?", default="0.6B", choices=SHAPES)
    parser.add_argument("modes", nargs="*", default=["full", "merged"])
    parser.add_argument("--transfer", default="cuda_ipc", choices=get_args(Transfer))
    parser.add_argument("--updates", type=int, default=6)
    parser.add_argument("--layers", type=int, default=0)
    parser.add_argument("--python", default=sys.executable, help="interpreter that has vLLM")
    parser.add_argument("--log", default=str(Path(tempfile.gettempdir()) / "vllm_sync.log"), help="what vLLM prints")
    given = parser.parse_args()
    for mode in given.modes:
        asyncio.run(measure(given.size, given.layers, mode, given))


if __name__ == "__main__":
    main()
