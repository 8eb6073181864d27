"""A control: the right rewards in the wrong order."""

import random
from typing import Any


def shuffled_exact_match(prompts: list[str], completions: list[str], answer: list[str], **columns: Any) -> list[float]:
    rewards = [float(completion == right) for completion, right in zip(completions, answer, strict=True)]
    random.Random("".join(prompts) + "".join(completions)).shuffle(rewards)
    return rewards
