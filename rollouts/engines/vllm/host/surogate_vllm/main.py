"""The engine's main process.

    python -m surogate_vllm.main --lifeline 4 --socket 5            started by the run, over sockets that it made
    python -m surogate_vllm.main --lifeline 4 --listen 127.0.0.1:0  started by the run, as a server
    python -m surogate_vllm.main --listen 0.0.0.0:8100              started by the user, on any machine (`surogate-rl vllm-server`)

vLLM starts further processes, which import this module again (as ``__mp_main__``).
"""

from __future__ import annotations

import argparse
import asyncio
import os
import signal
import socket
import sys

from . import compat, guard
from .server import Server

TOKEN = "SUROGATE_VLLM_TOKEN"
_LOOPBACK = ("127.0.0.1", "::1", "localhost")

if __name__ == "__mp_main__":
    guard.die_with_parent()


def main() -> int:
    parser = argparse.ArgumentParser(prog="surogate-rl vllm-server", description="A vLLM engine for surogate-rl runs.")
    parser.add_argument("--listen", metavar="HOST:PORT", help="serve runs over TCP, one at a time; port 0: any free one")
    parser.add_argument("--socket", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--lifeline", type=int, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if (arguments.listen is None) == (arguments.socket is None):
        parser.error("--listen HOST:PORT is needed")
    try:
        name, version = compat.installed()
    except compat.UnsupportedVersion as error:
        print(error, file=sys.stderr)
        return 2
    lifeline: socket.socket | None = None
    if arguments.lifeline is not None:
        lifeline = socket.socket(fileno=arguments.lifeline)
        guard.watch(lifeline)
    _end_on_signals()
    if lifeline is not None:
        import vllm.v1.engine.async_llm  # noqa: F401 (takes long; the run has its own start to make meanwhile)
    token = os.environ.get(TOKEN, "")
    if arguments.socket is not None:
        return asyncio.run(_serve_socket(socket.socket(fileno=arguments.socket)))
    host, _, port = arguments.listen.rpartition(":")
    if not port.isdigit():
        parser.error(f"--listen: expected HOST:PORT, got {arguments.listen}")
    if host not in _LOOPBACK and not token:
        parser.error(f"--listen {host}: a server that others can reach needs a secret; set {TOKEN}, here and where the run is")
    return asyncio.run(_serve_tcp(host, int(port), token, lifeline, f"{name} {version}"))


def _end_on_signals() -> None:
    """Whoever stops this process stops vLLM's too."""
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: guard.kill_group())


async def _serve_socket(connection: socket.socket) -> int:
    reader, writer = await asyncio.open_connection(sock=connection)
    server = Server(own=True, greeting=None)
    await server.serve(reader, writer)
    server.close()
    return 0


async def _serve_tcp(host: str, port: int, token: str, lifeline: socket.socket | None, what: str) -> int:
    server = Server(token, own=lifeline is not None)
    listening = await asyncio.start_server(server.serve, host, port)
    bound, number = listening.sockets[0].getsockname()[:2]
    if lifeline is not None:
        lifeline.sendall(f"{bound} {number}\n".encode())
    else:
        print(f"{what}: serving surogate-rl runs; base_url: tcp://{host}:{number}", flush=True)
    async with listening:
        await listening.serve_forever()
    return 0


if __name__ == "__main__":
    sys.exit(main())
