"""How far the learner's log-probabilities of a text lie from transformers', both in float32.

python benchmarks/agreement.py --model SmolLM2-135M-Instruct.Q4_1.gguf [--text FILE] [--tokens 1000]
"""

from __future__ import annotations

import argparse
import json
from datetime import date
from pathlib import Path

import numpy as np
import torch
from protocol import RESULTS, machine, record
from transformers import AutoModelForCausalLM

from surogate_rl.data.packing import PackSequence, pack
from surogate_rl.learner import Learner
from surogate_rl.models import load_model
from surogate_rl.models.gguf import converted_gguf


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True)
    parser.add_argument("--text", type=Path, default=RESULTS.parent.parent / "docs" / "budget.md")
    parser.add_argument("--tokens", type=int, default=1000, help="predicted ones")
    arguments = parser.parse_args()
    loaded = load_model(arguments.model)
    tokens = loaded.tokenizer(arguments.text.read_text(encoding="utf-8"))["input_ids"][: arguments.tokens + 1]
    learner = Learner(loaded.spec, max_tokens=len(tokens), trainable=False)
    learner.load_weights(loaded.weights())
    (batch,) = pack([[PackSequence(tokens=tokens, mask=np.arange(len(tokens)) > 0)]], len(tokens))
    ours = learner.score(batch).logp[: len(tokens) - 1]
    directory = converted_gguf(Path(arguments.model)) if arguments.model.endswith(".gguf") else arguments.model
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32, attn_implementation="sdpa").eval()
    ids = torch.tensor(tokens)
    with torch.no_grad():
        logp = torch.log_softmax(model(ids[None]).logits[0, :-1].double(), -1).gather(1, ids[1:, None])[:, 0].numpy()
    apart = np.abs(ours - logp)
    line = {
        "bench": "logp_agreement",
        "ours": float(ours.mean()),
        "peer": float(logp.mean()),
        "ratio": round(float(ours.mean() / logp.mean()), 6),
        "difference_mean": float(apart.mean()),
        "difference_max": float(apart.max()),
        "unit": f"mean log-probability of {len(tokens) - 1} tokens of {arguments.text.name}, float32",
        "peer_name": "transformers",
        "machine": machine(),
        "date": date.today().isoformat(),
        "command": f"python benchmarks/agreement.py --model {Path(arguments.model).name}",
    }
    record(line)
    print(json.dumps(line))


if __name__ == "__main__":
    main()
