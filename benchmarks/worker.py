"""One side of a comparison: prepares, then does the work once for each line on its standard input."""

from __future__ import annotations

import json
import os
import resource
import sys
import time
from collections.abc import Callable
from pathlib import Path

os.environ.setdefault("HF_HUB_OFFLINE", "1")

Work = Callable[[], object]
PROMPTS, GROUP, PROMPT_TOKENS, NEW_TOKENS = 4, 8, 64, 64
ROWS, COLUMNS = 2, 512
LEARNING_RATE = 1e-5


def peak_bytes() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def serve(work: Work) -> None:
    work()
    work()  # twice: the first one pays for what is made once
    print(json.dumps({"peak_bytes": peak_bytes()}), flush=True)
    for _ in sys.stdin:
        started = time.perf_counter()
        work()
        print(json.dumps({"seconds": time.perf_counter() - started, "peak_bytes": peak_bytes()}), flush=True)


def token_rows(rows: int, columns: int, vocab: int) -> list[list[int]]:
    """The same pseudo-random ids for both sides."""
    import random

    rng = random.Random(0)
    return [[rng.randrange(vocab) for _ in range(columns)] for _ in range(rows)]


def ours_training(model: Path, lora: bool) -> Work:
    import numpy as np

    from surogate_rl.data.packing import PackSequence, pack
    from surogate_rl.learner import Learner, LoraSettings
    from surogate_rl.models import load_model
    from surogate_rl.objectives import NegativeLogLikelihood, seeds, totals_of

    loaded = load_model(str(model))
    learner = Learner(loaded.spec, max_tokens=ROWS * COLUMNS, lora=LoraSettings(16, 32.0) if lora else None)
    learner.load_weights(loaded.weights())
    rows = token_rows(ROWS, COLUMNS, loaded.spec.vocab)
    objective = NegativeLogLikelihood()

    def work() -> float:
        units = [[PackSequence(tokens=row, mask=np.arange(COLUMNS) > 0, id=i)] for i, row in enumerate(rows)]
        (batch,) = pack(units, ROWS * COLUMNS)
        totals = totals_of(objective, [batch])
        stats = learner.forward_backward(batch, objective.known_seeds(batch, totals))
        loss = seeds(objective, stats.logp, None, batch, totals).loss
        learner.step(LEARNING_RATE, max_grad_norm=1.0)
        return loss

    return work


def peer_training(model: Path, lora: bool) -> Work:
    import torch
    from transformers import AutoModelForCausalLM

    network = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    if lora:
        from peft import LoraConfig, get_peft_model

        targets = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
        network = get_peft_model(network, LoraConfig(r=16, lora_alpha=32, target_modules=targets, task_type="CAUSAL_LM"))
    network.config.use_cache = False
    network.train()
    parameters = [p for p in network.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(parameters, lr=LEARNING_RATE, weight_decay=0.0, fused=True)
    ids = torch.tensor(token_rows(ROWS, COLUMNS, network.config.vocab_size))

    def work() -> float:
        loss = network(input_ids=ids, labels=ids).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return loss.item()

    return work


def ours_generation(model: Path) -> Work:
    import asyncio

    from surogate_rl.learner import Learner
    from surogate_rl.models import load_model
    from surogate_rl.rollouts.engines.native import NativeEngine
    from surogate_rl.rollouts.types import GenerateRequest, SamplingParams

    loaded = load_model(str(model))
    learner = Learner(loaded.spec, max_tokens=256, trainable=False)
    learner.load_weights(loaded.weights())
    prompts = token_rows(PROMPTS, PROMPT_TOKENS, loaded.spec.vocab)
    sequences = PROMPTS * GROUP
    engine = NativeEngine(
        learner,
        tokenizer=loaded.tokenizer,
        max_sequences=sequences,
        cache_tokens=sequences * (PROMPT_TOKENS + NEW_TOKENS + 16),
        valid_vocab=loaded.valid_vocab,
    )
    version = 0

    async def all_of_them() -> int:
        # weights change between steps of training: nothing may be kept from the last time
        await engine.update_weights(learner, version)
        requests = [
            GenerateRequest(prompt, SamplingParams(max_tokens=NEW_TOKENS, seed=100 * i + k))
            for i, prompt in enumerate(prompts)
            for k in range(GROUP)
        ]
        done = await asyncio.gather(*(engine.generate(request) for request in requests))
        return sum(len(completion.tokens) for completion in done)

    loop = asyncio.new_event_loop()

    def work() -> None:
        nonlocal version
        version += 1
        assert loop.run_until_complete(all_of_them()) == sequences * NEW_TOKENS

    return work


def peer_generation(model: Path) -> Work:
    import torch
    from transformers import AutoModelForCausalLM

    network = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval()
    prompts = torch.tensor(token_rows(PROMPTS, PROMPT_TOKENS, network.config.vocab_size))
    mask = torch.ones_like(prompts)

    def work() -> None:
        with torch.no_grad():
            out = network.generate(
                prompts,
                attention_mask=mask,
                do_sample=True,
                temperature=1.0,
                top_k=0,
                top_p=1.0,
                num_return_sequences=GROUP,
                max_new_tokens=NEW_TOKENS,
                min_new_tokens=NEW_TOKENS,
                pad_token_id=0,
            )
        assert out.shape == (PROMPTS * GROUP, PROMPT_TOKENS + NEW_TOKENS)

    return work


def peer_vllm(model: Path) -> Work:
    from vllm import LLM, SamplingParams

    engine = LLM(str(model), dtype="float32", max_model_len=256, enable_prefix_caching=True, max_num_seqs=PROMPTS * GROUP)
    vocab = engine.get_tokenizer().vocab_size
    prompts = [{"prompt_token_ids": row} for row in token_rows(PROMPTS, PROMPT_TOKENS, vocab)]
    params = SamplingParams(n=GROUP, temperature=1.0, max_tokens=NEW_TOKENS, min_tokens=NEW_TOKENS, ignore_eos=True, logprobs=0, seed=1)

    def work() -> None:
        engine.reset_prefix_cache()
        done = engine.generate(prompts, params, use_tqdm=False)
        assert sum(len(out.token_ids) for request in done for out in request.outputs) == PROMPTS * GROUP * NEW_TOKENS

    return work


def main(bench: str, side: str, model: str) -> None:
    path = Path(model)
    makers: dict[tuple[str, str], Callable[[], Work]] = {
        ("sft_full", "ours"): lambda: ours_training(path, lora=False),
        ("sft_full", "peer"): lambda: peer_training(path, lora=False),
        ("sft_lora", "ours"): lambda: ours_training(path, lora=True),
        ("sft_lora", "peer"): lambda: peer_training(path, lora=True),
        ("generation", "ours"): lambda: ours_generation(path),
        ("generation", "peer"): lambda: peer_generation(path),
        ("generation_vllm", "ours"): lambda: ours_generation(path),
        ("generation_vllm", "peer"): lambda: peer_vllm(path),
    }
    serve(makers[bench, side]())


if __name__ == "__main__":
    if sys.argv[2] == "peer" and sys.argv[1] == "generation_vllm":
        # vLLM starts its engine in a process of its own, which must find this module as main
        os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
        os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")  # GiB; by default it takes nearly all memory
    main(*sys.argv[1:4])
