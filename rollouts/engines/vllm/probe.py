"""The last check after a weight update: does the engine's log-probability of what it samples agree with the learner's?

Checksums show that the bytes are there; this shows that both compute the same function of them (positions, norms, temperature, the mask of
ids beyond the tokenizer), by the very path that rollouts take.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from surogate_rl.data.packing import PackSequence, pack
from surogate_rl.learner import Learner
from surogate_rl.rollouts.seeds import derive_seed

PROMPT_LENGTHS = (1, 5, 17, 33)
TOKENS = 16


@dataclass(frozen=True)
class Probe:
    """One prompt and what the engine sampled behind it."""

    prompt: list[int]
    tokens: list[int]
    logps: list[float]


def prompts(vocab: int, context: int) -> list[list[int]]:
    """Fixed prompts of random ids. Those, and their completions, fit into `context` tokens."""
    found = []
    for number, length in enumerate(PROMPT_LENGTHS):
        length = min(length, max(1, context - TOKENS))
        found.append([derive_seed(number, position) % vocab for position in range(length)])
    return found


def gap(probes: Sequence[Probe], learner: Learner, *, temperature: float, valid_vocab: int) -> float:
    """Mean absolute difference between the engine's log-probabilities and the learner's, in nats."""
    sequences = [
        PackSequence(
            tokens=[*probe.prompt, *probe.tokens],
            mask=[False] * len(probe.prompt) + [True] * len(probe.tokens),
            per_token={"behaviour_logp": np.asarray([0.0] * len(probe.prompt) + probe.logps, np.float32)},
            id=number,
        )
        for number, probe in enumerate(probes)
    ]
    differences: list[float] = []
    for batch in pack([[sequence] for sequence in sequences], learner.max_tokens):
        logp = learner.score(batch, temperature=temperature, valid_vocab=valid_vocab).logp
        differences += np.abs(logp - batch.per_token["behaviour_logp"])[batch.mask].tolist()
    return float(np.mean(differences))
