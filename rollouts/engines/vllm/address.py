"""Addresses of engines."""

from __future__ import annotations


def parse_url(url: str) -> tuple[str, int]:
    """Host and port.

    Raises:
        ValueError: not ``tcp://host:port``.
    """
    scheme, _, address = url.partition("://")
    host, _, port = address.rstrip("/").rpartition(":")
    if scheme != "tcp" or not host or not port.isdigit() or not 0 < int(port) < 65536:
        raise ValueError(f"expected tcp://HOST:PORT of a server that 'surogate-rl vllm-server' runs, got '{url}'")
    return host.strip("[]"), int(port)
