"""Times ours beside peers with SmolLM2-135M shapes in float32 on this CPU, and keeps the figures.

    python benchmarks/run.py [--model DIR] [--pairs 7] [--vllm-python PATH] [sft_full sft_lora generation generation_vllm]

The model is any Hugging Face directory or GGUF file; without --model random weights of SmolLM2-135M's shape serve (speed does not depend on
their values). generation_vllm needs the python of an environment with vLLM for the CPU, since it pins packages of its own.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from datetime import date
from pathlib import Path

from protocol import Worker, compare, machine, record
from worker import COLUMNS, GROUP, NEW_TOKENS, PROMPTS, ROWS

BENCHES = ("sft_full", "sft_lora", "generation", "generation_vllm")
PEERS = {"sft_full": "transformers", "sft_lora": "transformers + PEFT", "generation": "transformers", "generation_vllm": "vLLM (CPU)"}
WORK = {
    "sft_full": ROWS * COLUMNS,
    "sft_lora": ROWS * COLUMNS,
    "generation": PROMPTS * GROUP * NEW_TOKENS,
    "generation_vllm": PROMPTS * GROUP * NEW_TOKENS,
}


def random_model(directory: Path) -> Path:
    """SmolLM2-135M's shape with random weights, and a tokenizer of as many ids."""
    import torch
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    config = LlamaConfig(
        vocab_size=49152,
        hidden_size=576,
        intermediate_size=1536,
        num_hidden_layers=30,
        num_attention_heads=9,
        num_key_value_heads=3,
        max_position_embeddings=8192,
        rms_norm_eps=1e-5,
        rope_theta=100000.0,
        tie_word_embeddings=True,
    )
    torch.manual_seed(0)
    LlamaForCausalLM(config).save_pretrained(directory)
    tokenizer = Tokenizer(WordLevel({f"<{i}>": i for i in range(49152)}, unk_token="<0>"))
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="<0>", eos_token="<1>").save_pretrained(directory)
    return directory


def flops(bench: str) -> float:
    """Multiply-adds that cannot be avoided, twice: of the products with weights (attention's own are below 3% at these lengths)."""
    blocks = 30 * (576 * 960 + 576 * 576 + 3 * 576 * 1536)
    head = 49152 * 576
    if bench == "sft_full":
        return 6.0 * (blocks + head) * WORK[bench]
    if bench == "sft_lora":
        return 4.0 * (blocks + head) * WORK[bench]
    return 2.0 * (blocks + head) * WORK[bench]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("benches", nargs="*", metavar="BENCH", help=f"any of {', '.join(BENCHES)}; default: all that can run")
    parser.add_argument("--model")
    parser.add_argument("--pairs", type=int, default=7)
    parser.add_argument("--vllm-python")
    arguments = parser.parse_args()
    for bench in arguments.benches:
        if bench not in BENCHES:
            parser.error(f"unknown benchmark {bench}; known: {', '.join(BENCHES)}")
    benches = arguments.benches or [bench for bench in BENCHES if bench != "generation_vllm" or arguments.vllm_python]
    with tempfile.TemporaryDirectory() as scratch:
        model = arguments.model or str(random_model(Path(scratch)))
        for bench in benches:
            run(bench, model, arguments.pairs, arguments.vllm_python)


def run(bench: str, model: str, pairs: int, vllm_python: str | None) -> None:
    if bench == "generation_vllm" and not vllm_python:
        sys.exit("generation_vllm: name the python of an environment with vLLM for the CPU by --vllm-python")
    ours = Worker(bench, "ours", arguments=[model])
    peer = Worker(bench, "peer", python=vllm_python if bench == "generation_vllm" and vllm_python else sys.executable, arguments=[model])
    try:
        result = compare(ours, peer, pairs)
    finally:
        ours.close()
        peer.close()
    tokens = WORK[bench]
    floor = flops(bench) / result["gemm_gflops"] / 1e9
    line = {
        "bench": bench,
        "ours": round(tokens / result["ours_s"], 1),
        "peer": round(tokens / result["peer_s"], 1),
        "ratio": round(result["ratio"], 3),
        "unit": "tokens/s",
        "peer_name": PEERS[bench],
        "machine": machine(),
        "date": date.today().isoformat(),
        "command": f"python benchmarks/run.py {bench} --pairs {pairs}",
        "gemm_floor_s": round(floor, 3),
        "share_of_floor": round(floor / result["ours_s"], 3),
        **{key: value for key, value in result.items() if key not in ("ours_s", "peer_s", "ratio")},
    }
    path = record(line)
    print(
        f"{bench:<16} ours {line['ours']:>8} tok/s  {PEERS[bench]} {line['peer']:>8} tok/s  ratio {line['ratio']:.2f} "
        f"({result['rule']}; {result['good_pairs']} good of {len(result['pairs'])})  "
        f"peak {result['ours_peak_gb']:.2f} against {result['peer_peak_gb']:.2f} GB  "
        f"{100 * line['share_of_floor']:.0f}% of the matrix products' rate  -> {path}",
        flush=True,
    )


if __name__ == "__main__":
    main()
