"""A dense reward for tests: random weights earn some of it, so that every step has a gradient."""


def digits_in_order(completion: str, answer: str) -> float:
    return sum(a == b for a, b in zip(completion, answer, strict=False)) / len(answer) + 0.01 * len(completion)
