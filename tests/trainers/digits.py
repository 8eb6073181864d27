"""Rewards for tests."""


def digits_in_order(completion: str, answer: str) -> float:
    """Dense: random weights earn some of it, so that every step has a gradient."""
    return sum(a == b for a, b in zip(completion, answer, strict=False)) / len(answer) + 0.01 * len(completion)


def first_digit(completion: str, answer: str) -> float:
    """Sparse: many groups have none."""
    return float(completion[:1] == answer[:1])
