"""Seeds of samples: a function of the run's seed and of what is sampled, never of the order in which things arrive."""

from __future__ import annotations

_MASK = (1 << 64) - 1


def derive_seed(*parts: int) -> int:
    """Mixes integers into one of 64 bits (the finaliser of SplitMix64 over a running sum; Steele, Lea, Flood 2014)."""
    state = 0
    for part in parts:
        state = (state + (part & _MASK) + 0x9E3779B97F4A7C15) & _MASK
        state = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
        state = ((state ^ (state >> 27)) * 0x94D049BB133111EB) & _MASK
        state ^= state >> 31
    return state
