"""Frames between a run and its engine: a JSON header and raw bytes after it.

    uint32 header length | uint64 body length | header (UTF-8 JSON) | body

Requests are {"id", "op", ...}; each is answered by exactly one {"id", "ok": ...} or {"id", "error": {"kind", "message"}}. A streamed
generation sends {"id", "event": ...} before that. The first request is ``hello``, small and without a body; nothing else is read before it
has been answered with ok. JSON carries a float's repr, so log-probabilities arrive bit for bit; and there is no pickle, so that a
connection can do nothing but what the operations offer.
"""

from __future__ import annotations

import asyncio
import json
import struct
from typing import Any

PROTOCOL = 1

_HEAD = struct.Struct(">IQ")
_MAX_HEADER = 256 << 20
_MAX_BODY = 16 << 30

Header = dict[str, Any]


class WireError(ConnectionError):
    """What came is no frame: the other side is no engine of ours."""


def encode(header: Header, body_length: int = 0) -> bytes:
    """The frame up to its body."""
    text = json.dumps(header, separators=(",", ":")).encode()
    return _HEAD.pack(len(text), body_length) + text


async def receive(reader: asyncio.StreamReader, *, max_header: int = _MAX_HEADER, max_body: int = _MAX_BODY) -> tuple[Header, bytes]:
    """The next frame.

    Args:
        max_header, max_body: bytes that it may have; nothing of a larger one is read.

    Raises:
        EOFError: the other side has closed (asyncio.IncompleteReadError, if in the middle of a frame).
        WireError: this is no frame.
    """
    header_length, body_length = _HEAD.unpack(await reader.readexactly(_HEAD.size))
    if header_length > max_header or body_length > max_body:
        raise WireError("what came is no frame of this protocol")
    try:
        header = json.loads(await reader.readexactly(header_length))
    except ValueError as error:
        raise WireError(f"what came is no frame of this protocol ({error})") from None
    body = await reader.readexactly(body_length) if body_length else b""
    if not isinstance(header, dict):
        raise WireError("what came is no frame of this protocol")
    return header, body
