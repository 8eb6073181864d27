"""Whole GRPO steps with vLLM on the learner's GPU, at Qwen3 shapes with random weights: completions run to their end, so steps are alike.

    python benchmarks/gpu/grpo.py TOKENIZER [--size 0.6B] [--prompts 16] [--group 8] [--tokens 512] [--steps 8] [--set key=value ...]

TOKENIZER is a directory with a tokenizer, whose size is the vocabulary's. Prints a line of JSON with the medians over the steps but the
first two: the whole, what the engine was busy, and the rest by its parts, in seconds; completion tokens per second; the most memory that
was in use on the device. The same work as a peer's script that trains on "Count to N." with a reward for length.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import threading
from pathlib import Path
from typing import Any

import surogate_rl

SHAPES = {
    "0.6B": {"hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 28},
    "1.7B": {"hidden_size": 2048, "intermediate_size": 6144, "num_hidden_layers": 28},
    "tiny": {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2},
}
WARM = 2


class DeviceMemory(threading.Thread):
    """The most bytes in use on the GPU, by whatever process, while it runs."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self.most = 0
        self._ended = threading.Event()

    def run(self) -> None:
        import torch

        while torch.cuda.is_available() and not self._ended.wait(0.05):
            free, total = torch.cuda.mem_get_info()
            self.most = max(self.most, total - free)

    def stop(self) -> float:
        """Gigabytes."""
        self._ended.set()
        self.join()
        return self.most / 1e9


def make_model(tokenizer_dir: str, size: str, folder: Path) -> None:
    import torch
    from transformers import AutoTokenizer, Qwen3Config, Qwen3ForCausalLM

    tokenizer = AutoTokenizer.from_pretrained(tokenizer_dir)
    config = Qwen3Config(
        vocab_size=len(tokenizer), num_attention_heads=16, num_key_value_heads=8, head_dim=128, tie_word_embeddings=True,
        max_position_embeddings=8192, eos_token_id=tokenizer.eos_token_id, **SHAPES[size],
    )  # fmt: skip
    torch.set_default_dtype(torch.bfloat16)
    Qwen3ForCausalLM(config).save_pretrained(folder)
    torch.set_default_dtype(torch.float32)
    tokenizer.save_pretrained(folder)


def length_reward(completion: str) -> float:
    return float(len(completion))


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("tokenizer")
    parser.add_argument("--size", default="0.6B", choices=SHAPES)
    parser.add_argument("--prompts", type=int, default=16)
    parser.add_argument("--group", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=512)
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--keep", type=Path, help="directory for the run, kept afterwards")
    parser.add_argument("--set", action="append", default=[], metavar="key=value", help="changes the configuration, as of surogate-rl")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        root = given.keep or Path(scratch)
        root.mkdir(parents=True, exist_ok=True)
        make_model(given.tokenizer, given.size, root / "model")
        rows = root / "prompts.jsonl"
        rows.write_text("".join(json.dumps({"prompt": f"Count to {i}."}) + "\n" for i in range(4096)))
        config: dict[str, Any] = {
            "model": str(root / "model"),
            "output_dir": str(root / "run"),
            "datasets": [{"path": str(rows)}],
            "device": "cuda",
            "sequence_len": 1024,
            "per_device_train_batch_size": 32,  # the tokens of so many rows are a micro-batch
            "max_steps": given.steps,
            "learning_rate": 1e-6,
            "lr_scheduler_type": "constant",
            "optimizer_state_dtype": "bfloat16",
            "rollouts": {
                "engine": "vllm",
                "prompts_per_step": given.prompts,
                "num_generations": given.group,
                "max_completion_length": given.tokens,
            },
        }
        memory = DeviceMemory()
        memory.start()
        surogate_rl.grpo(config, rewards=[length_reward], overrides=given.set)
        peak = memory.stop()
        metrics = [json.loads(line) for line in (root / "run" / "metrics.jsonl").read_text().splitlines()]
    steps = [line for line in metrics if "step_time" in line][WARM:]
    parts = sorted({name for line in steps for name in line if name.startswith(("time/", "vllm/sync", "vllm/probe"))})
    medians = {name: round(statistics.median(line[name] for line in steps if name in line), 4) for name in ["step_time", *parts]}
    completions = given.prompts * given.group
    line = {
        "bench": "grpo", "size": given.size, "completions": completions, "max_tokens": given.tokens, "steps": len(steps),
        "set": given.set, **medians, "completion_tok_s": round(completions * given.tokens / medians["step_time"]),
        "beside_engine_s": round(statistics.median(s["step_time"] - s["time/generate"] for s in steps), 4), "device_gb": round(peak, 1),
        "each": [round(s["step_time"], 3) for s in steps],
    }  # fmt: skip
    print(json.dumps(line), flush=True)


if __name__ == "__main__":
    main()
