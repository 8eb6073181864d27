"""Log-probabilities leave vLLM's engine core without a call of Python for each array of each request.

At every step the core cuts three small arrays out of the batch's for each request, and its encoder calls back into Python for each of them:
for a hundred requests half a millisecond, under the lock that the scheduler needs too. Here a request's share is cut out of bytes, in the
very form that the encoder's callback would give it, which it then writes by itself. What is written is the same, byte for byte.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from vllm.v1 import outputs, serial_utils

_RAW = getattr(serial_utils, "CUSTOM_TYPE_RAW_VIEW", None)  # vLLM's mark of an array's bytes
_ARRAYS = 3  # ids, log-probabilities, ranks


class PackedLogprobs(outputs.LogprobsLists):  # type: ignore[misc]
    """A step's log-probabilities of all requests."""

    _parts: list[tuple[str, tuple[int, ...], int, bytes]] | None = None

    def slice_request(self, req_idx: int, num_positions: int) -> Any:
        """The share of one request, to be encoded."""
        if self.cu_num_generated_tokens is not None:
            return super().slice_request(req_idx, num_positions)
        if self._parts is None:
            self._parts = [(array.dtype.str, array.shape[1:], array[:1].nbytes, array.tobytes()) for array in self[:_ARRAYS]]
        first, end = req_idx, req_idx + num_positions
        arrays = (
            (dtype, (num_positions, *shape), serial_utils.msgpack.Ext(_RAW, data[first * row : end * row]))
            for dtype, shape, row, data in self._parts
        )
        return (*arrays, None)


def install() -> bool:
    """Has this process's steps packed so; whether this version of vLLM is one that encodes them as is done here."""
    if not _same_bytes():
        return False
    plain = outputs.LogprobsTensors.tolists

    def tolists(self: Any, *arguments: Any, **keywords: Any) -> PackedLogprobs:
        return PackedLogprobs(*plain(self, *arguments, **keywords))

    outputs.LogprobsTensors.tolists = tolists
    return True


def _same_bytes() -> bool:
    try:
        arrays = (np.arange(6, dtype=np.int32).reshape(3, 2), np.ones((3, 2), np.float32), np.arange(3))
        encoded = [
            [bytes(part) for part in serial_utils.MsgpackEncoder().encode(kind(*arrays).slice_request(1, 1))]
            for kind in (outputs.LogprobsLists, PackedLogprobs)
        ]
    except Exception:  # private parts of vLLM: whatever is different there
        return False
    return encoded[0] == encoded[1]
