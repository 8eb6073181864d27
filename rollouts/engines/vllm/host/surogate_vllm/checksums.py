"""Checksums of tensors that lie in one piece of memory, computed where the memory is: a few launches for all tensors, one copy to the host.

A tensor starts at a multiple of ROW bytes and has its rows for itself. Of its 64-bit words w, n to a row, it has two sums modulo 2^64: the
plain one, which any single change alters, and one with odd factors that depend on a word's place, which an exchange alters.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

ROW = 4096  # bytes
_WORDS = ROW // 8
_PIECE = (32 << 20) // ROW  # rows that are multiplied at a time: what it takes beside the memory itself
_GOLDEN = 0x9E3779B97F4A7C15  # 2^64 over the golden ratio


def rows_of(size: int) -> int:
    """Rows that `size` bytes take."""
    return -(-size // ROW)


def checksums(memory: torch.Tensor, places: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
    """Waits for the device once, if there is any place.

    Args:
        memory: uint8 [n * ROW], of any device.
        places: (offset, length) in bytes of each tensor, the offset a multiple of ROW.
    """
    if not places:
        return []
    words = memory.view(torch.int64).view(-1, _WORDS)
    rows, device = len(words), memory.device
    factors = torch.arange(1, _WORDS + 1, dtype=torch.int64, device=device).mul_(_signed(_GOLDEN)).bitwise_or_(1)
    sums = torch.zeros((2, rows + 1), dtype=torch.int64, device=device)  # of the rows; the first is before all of them
    scratch = torch.empty((min(rows, _PIECE), _WORDS), dtype=torch.int64, device=device)
    for first in range(0, rows, _PIECE):
        piece = words[first : first + _PIECE]
        torch.sum(piece, dim=1, out=sums[0, first + 1 : first + 1 + len(piece)])
        torch.mul(piece, factors, out=scratch[: len(piece)])
        torch.sum(scratch[: len(piece)], dim=1, out=sums[1, first + 1 : first + 1 + len(piece)])
    sums[1, 1:] *= torch.arange(1, 2 * rows, 2, dtype=torch.int64, device=device)
    sums = sums.cumsum(dim=1)  # exact: integers modulo 2^64
    ends = torch.tensor([[offset // ROW, offset // ROW + rows_of(length)] for offset, length in places], device=device)
    found = (sums[:, ends[:, 1]] - sums[:, ends[:, 0]]).T.tolist()
    return [(plain, weighted) for plain, weighted in found]


def _signed(value: int) -> int:
    return value - (1 << 64) if value >= 1 << 63 else value
