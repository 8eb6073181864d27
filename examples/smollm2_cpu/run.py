"""Trains, and compares the model before and after on held-out questions, with McNemar's test on the same questions.

python examples/smollm2_cpu/run.py --model PATH [--questions 200] [--set key=value]...
"""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import time
from pathlib import Path

from rich.console import Console
from rich.table import Table

import surogate_rl
from surogate_rl.config import DatasetConfig, load_config
from surogate_rl.data import encode_prompt, load_tasks
from surogate_rl.learner import Learner
from surogate_rl.models import adapter_settings, load_adapter, load_model
from surogate_rl.rewards.numeric import Numeric
from surogate_rl.rollouts.engines.native import NativeEngine
from surogate_rl.rollouts.types import GenerateRequest, SamplingParams, Task

HERE = Path(__file__).resolve().parent
HELD_OUT_SEED = 1000
MAX_TOKENS = 32


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="HuggingFaceTB/SmolLM2-135M-Instruct", help="Hugging Face directory, hub id or GGUF file")
    parser.add_argument("--questions", type=int, default=100)
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", dest="overrides")
    arguments = parser.parse_args()
    config = load_config(HERE / "grpo.yaml", "grpo", [f"model={arguments.model}", *arguments.overrides])
    console = Console()

    tasks = held_out(config.datasets[0], arguments.model, arguments.questions)
    before = answers(arguments.model, None, tasks)
    started = time.perf_counter()
    result = surogate_rl.grpo(config)
    minutes = (time.perf_counter() - started) / 60
    after = answers(arguments.model, result.final_model, tasks)

    table = Table(title=f"{len(tasks)} held-out questions, greedy; {result.steps} steps in {minutes:.1f} minutes")
    for column in ("", "before", "after", "gained / lost", "McNemar p"):
        table.add_column(column, justify="right" if column else "left")
    summary: dict[str, object] = {"questions": len(tasks), "steps": result.steps, "minutes": round(minutes, 2)}
    for name, judge in (("answer right, any wording", right), ("nothing but the answer", bare)):
        old = [judge(text, task) for text, task in zip(before, tasks, strict=True)]
        new = [judge(text, task) for text, task in zip(after, tasks, strict=True)]
        gained = sum(b and not a for a, b in zip(old, new, strict=True))
        lost = sum(a and not b for a, b in zip(old, new, strict=True))
        p = mcnemar(gained, lost)
        table.add_row(name, f"{sum(old) / len(old):.3f}", f"{sum(new) / len(new):.3f}", f"{gained} / {lost}", f"{p:.1e}")
        summary[name] = {"before": sum(old) / len(old), "after": sum(new) / len(new), "gained": gained, "lost": lost, "p": p}
    console.print(table)
    for task, old_text, new_text in list(zip(tasks, before, after, strict=True))[:3]:
        console.print(f"Q: {task.columns['question']}\n   before: {old_text!r}\n   after:  {new_text!r}", highlight=False, markup=False)
    (result.output_dir / "comparison.json").write_text(json.dumps(summary, indent=1) + "\n")


def held_out(dataset: DatasetConfig, model: str, count: int) -> list[Task]:
    """Different questions of another seed, those left out that training may see."""
    tokenizer = load_model(model).tokenizer
    seen = {task.columns["question"] for task in load_tasks([dataset], tokenizer, max_prompt_length=None).items}
    fresh = dataset.model_copy(update={"seed": HELD_OUT_SEED, "size": 20 * count})
    chosen: list[Task] = []
    for task in load_tasks([fresh], tokenizer, max_prompt_length=None).items:
        if task.columns["question"] not in seen:
            seen.add(task.columns["question"])
            chosen.append(task)
    return chosen[:count]


def answers(model: str, adapter: Path | None, tasks: list[Task]) -> list[str]:
    """Greedy completions."""
    loaded = load_model(model)
    settings = adapter_settings(adapter) if adapter else None
    learner = Learner(loaded.spec, max_tokens=256, trainable=False, lora=settings)
    learner.load_weights(loaded.weights())
    if adapter:
        load_adapter(learner, adapter)
    engine = NativeEngine(learner, tokenizer=loaded.tokenizer, max_sequences=32, cache_tokens=32 * 256, valid_vocab=loaded.valid_vocab)
    params = SamplingParams(max_tokens=MAX_TOKENS, temperature=0.0, stop_ids=loaded.stop_ids)

    async def ask() -> list[str]:
        requests = [GenerateRequest(encode_prompt(task, loaded.tokenizer), params) for task in tasks]
        done = await asyncio.gather(*(engine.generate(request) for request in requests))
        await engine.close()
        return [str(loaded.tokenizer.decode(completion.tokens, skip_special_tokens=True)) for completion in done]

    return asyncio.run(ask())


def right(text: str, task: Task) -> bool:
    """The training reward: the last number is the answer."""
    return Numeric()(text, task.columns["answer"]) == 1.0


def bare(text: str, task: Task) -> bool:
    return text.strip() == str(task.columns["answer"])


def mcnemar(gained: int, lost: int) -> float:
    """Two-sided exact p of McNemar's test: the changes are a fair coin's under the null hypothesis."""
    changed = gained + lost
    tail = sum(math.comb(changed, k) for k in range(min(gained, lost) + 1)) / 2**changed if changed else 1.0
    return min(1.0, 2 * tail)


if __name__ == "__main__":
    main()
