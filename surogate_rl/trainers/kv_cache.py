"""How large the sampler's KV cache is made."""

from __future__ import annotations

import os
from pathlib import Path

from surogate_rl._core import ModelSpec

SHARE_OF_AVAILABLE = 0.25


def available_bytes() -> int:
    """Memory that can be taken without swapping."""
    meminfo = Path("/proc/meminfo")
    if meminfo.is_file():
        for line in meminfo.read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def cache_tokens(spec: ModelSpec, sequences: int, longest: int, kv_cache_gb: float | None) -> int:
    """Positions of a cache that holds `sequences` of `longest` tokens, as far as memory allows.

    The bound is `kv_cache_gb`, or a quarter of what is free, but never below one sequence. A smaller cache costs time, not correctness:
    sequences wait, or are computed again.
    """
    per_token = 2 * 4 * spec.layers * spec.kv_heads * spec.head_dim  # keys and values, float32
    bound = kv_cache_gb * 2**30 if kv_cache_gb is not None else SHARE_OF_AVAILABLE * available_bytes()
    return max(longest + 16, min(sequences * longest, int(bound / per_token)))
