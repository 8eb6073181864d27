"""length: a penalty for length."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Length:
    """A reward between -1 and 0 by the number n of tokens that the policy sampled. One of two forms:

    * ``max_completion_len`` L with ``soft_punish_cache`` c: the soft overlong punishment of DAPO (eq. 13, arXiv 2503.14476):
      0 up to L - c, then down linearly, ((L - c) - n) / c, to -1 at L and beyond.
    * ``target`` t: -min(1, |n - t| / t): 0 at the target, -1 at nothing and at twice the target.
    """

    max_completion_len: int | None = None
    soft_punish_cache: int = 0
    target: int | None = None

    def __post_init__(self) -> None:
        if (self.max_completion_len is None) == (self.target is None):
            raise ValueError("give either max_completion_len (with soft_punish_cache) or target, in tokens")
        if self.target is not None:
            if self.target < 1:
                raise ValueError(f"target is {self.target}, expected at least 1 token")
            if self.soft_punish_cache:
                raise ValueError("soft_punish_cache goes with max_completion_len, not with target")
        if self.max_completion_len is not None and not 0 <= self.soft_punish_cache <= self.max_completion_len:
            raise ValueError(f"soft_punish_cache is {self.soft_punish_cache}, expected 0 to max_completion_len ({self.max_completion_len})")

    def __call__(self, tokens: list[int]) -> float:
        count = len(tokens)
        if self.target is not None:
            return -min(1.0, abs(count - self.target) / self.target)
        assert self.max_completion_len is not None
        free = self.max_completion_len - self.soft_punish_cache
        if count <= free:
            return 0.0
        return (free - count) / self.soft_punish_cache if count <= self.max_completion_len else -1.0
