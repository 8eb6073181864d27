"""The engine around the native sampler: event loop, threads, stop strings."""

from __future__ import annotations

import asyncio
import gc
import threading
import time
import weakref
from collections.abc import Coroutine
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from tokenizers import Tokenizer, decoders
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import ByteLevel

from surogate_rl import _core
from surogate_rl.batch import NO_TARGET, PackedBatch
from surogate_rl.learner import Learner
from surogate_rl.rollouts.engines.native import NativeEngine
from surogate_rl.rollouts.engines.stop_strings import StopStrings
from surogate_rl.rollouts.types import Completion, GenerateRequest, SamplingParams

ASCII = 128


class Bytes:
    """A tokenizer of 256 tokens: id n is byte n, and a character of several bytes is several tokens."""

    def __init__(self) -> None:
        # The byte-level alphabet, in the order of the bytes that its characters stand for.
        printable = [*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
        others = [byte for byte in range(256) if byte not in printable]
        vocab = {chr(byte): byte for byte in printable} | {chr(256 + i): byte for i, byte in enumerate(others)}
        assert set(vocab) == set(ByteLevel.alphabet())
        self._inner = Tokenizer(WordLevel(vocab, unk_token="!"))
        self._inner.decoder = decoders.ByteLevel()
        self.calls = 0

    def decode(self, token_ids: list[int], *, skip_special_tokens: bool, clean_up_tokenization_spaces: bool) -> str:
        assert not clean_up_tokenization_spaces
        self.calls += 1
        return str(self._inner.decode(token_ids, skip_special_tokens=skip_special_tokens))


def make_learner(layers: int = 2, hidden: int = 32, seed: int = 0) -> Learner:
    spec = _core.ModelSpec(
        layers=layers,
        hidden=hidden,
        heads=4,
        kv_heads=2,
        head_dim=8,
        ffn=2 * hidden,
        vocab=256,
        max_positions=4096,
        rope_inv_freq=[1.0, 0.1, 0.01, 0.001],
        windows=[0] * layers,
    )
    learner = Learner(spec, max_tokens=512, threads=1, trainable=False)
    rng = np.random.default_rng(seed)
    for info in learner.tensors():
        value = np.ones(info.shape) if len(info.shape) == 1 else 0.2 * rng.standard_normal(info.shape)
        learner.load(info.name, value.astype(np.float32))
    return learner


def make_engine(learner: Learner | None = None, **options: Any) -> NativeEngine:
    options = {"tokenizer": Bytes(), "max_sequences": 8, "cache_tokens": 1024, "valid_vocab": ASCII} | options
    return NativeEngine(learner or make_learner(), **options)


def run(body: Coroutine[Any, Any, None]) -> None:
    asyncio.run(asyncio.wait_for(body, timeout=60))


def request(*prompt: int, **params: Any) -> GenerateRequest:
    return GenerateRequest(list(prompt) or [1, 2, 3], SamplingParams(**({"max_tokens": 20, "seed": 1} | params)))


def text_of(completion: Completion) -> str:
    return bytes(completion.tokens).decode()


async def underway(engine: NativeEngine, tokens: int = 1) -> None:
    """Waits until a request has sampled so many tokens."""
    while not any(len(r.tokens) >= tokens for r in list(engine._running.values())):
        await asyncio.sleep(0)


class Gate:
    """Lets an engine take one step and holds it in the next until it is opened: what is under way then is so on every machine."""

    def __init__(self, engine: NativeEngine) -> None:
        self._real, self._first, self._opened = engine._step, True, threading.Event()
        engine._step = self._step  # type: ignore[method-assign]

    def _step(self) -> None:
        if not self._first:
            assert self._opened.wait(60)
        self._first = False
        self._real()

    def open(self) -> None:
        self._opened.set()

    async def open_for(self, work: Coroutine[Any, Any, None]) -> None:
        """Opens once `work` has begun, and waits for that: a pause or an end that comes in the middle of a step."""
        task = asyncio.ensure_future(work)
        await asyncio.sleep(0)
        self.open()
        await task


# Generating -----------------------------------------------------------------------------------------------------------------------


def test_many_at_once_are_the_same_as_one_by_one() -> None:
    async def body() -> None:
        engine = make_engine()
        requests = [request(*range(1, 4 + i % 3), seed=(1 << 64) - 1 - i, max_tokens=5 + i) for i in range(20)]
        together = await asyncio.gather(*(engine.generate(r) for r in requests))
        assert [len(c.tokens) for c in together] == [r.params.max_tokens for r in requests]
        assert len({tuple(c.tokens) for c in together}) == 20
        for r, expected in zip(requests, together, strict=True):
            assert await engine.generate(r) == expected
            assert expected.finish_reason == "length"
            assert expected.versions == [0] * len(expected.tokens)
        await engine.close()

    run(body())


def test_logps_are_the_learners() -> None:
    async def body() -> None:
        learner = make_learner()
        engine = make_engine(learner)
        completion = await engine.generate(request(temperature=0.8))
        await engine.close()
        tokens = np.array([1, 2, 3, *completion.tokens], np.int32)
        size = len(tokens)
        targets = np.full(size, NO_TARGET, np.int32)
        targets[2 : size - 1] = tokens[3:]
        batch = PackedBatch(tokens, np.arange(size, dtype=np.int32), np.array([0, size], np.int32), targets, targets != NO_TARGET)
        scored = learner.score(batch, temperature=0.8, valid_vocab=ASCII).logp[2 : size - 1]
        assert np.abs(scored - completion.logps).max() < 1e-4

    run(body())


def test_the_event_loop_stays_free() -> None:
    async def body() -> None:
        engine = make_engine(make_learner(layers=6, hidden=256), max_sequences=16, cache_tokens=16 * 400)
        work = [asyncio.create_task(engine.generate(request(*([7] * 300), seed=i, max_tokens=60))) for i in range(16)]
        started, longest = time.monotonic(), 0.0
        ticks = 0
        while not all(task.done() for task in work):
            before = time.monotonic()
            await asyncio.sleep(0.001)
            longest = max(longest, time.monotonic() - before)
            ticks += 1
        total = time.monotonic() - started
        # Had the loop waited for even a tenth of the work, there would have been a gap.
        assert ticks > 5
        assert longest < max(0.1, total / 2)
        await engine.close()

    run(body())


def test_two_event_loops_share_an_engine() -> None:
    engine = make_engine()
    results: dict[str, Completion] = {}

    def work(name: str) -> None:
        results[name] = asyncio.run(engine.generate(request(max_tokens=50)))

    threads = [threading.Thread(target=work, args=(name,)) for name in ("a", "b")]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert results["a"] == results["b"]
    asyncio.run(engine.close())


def test_cancelling_aborts_and_frees_the_cache() -> None:
    async def body() -> None:
        # The cache holds one request of this size only, so the second can run only once the first is gone.
        engine = make_engine(cache_tokens=2048)
        gate = Gate(engine)
        long = request(max_tokens=2000)
        task = asyncio.create_task(engine.generate(long))
        await underway(engine)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        gate.open()
        completion = await engine.generate(replace(long, params=replace(long.params, max_tokens=30)))
        assert len(completion.tokens) == 30
        await engine.health()
        assert engine._running == {}
        await engine.close()

    run(body())


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"prompt": []}, "the prompt is empty"),
        ({"prompt": [256]}, r"prompt\[0\]: expected a token id of 0 to 255, got 256"),
        ({"prompt": [1 << 40]}, "prompt: a token id is out of range"),
        ({"seed": -1}, r"seed: expected 0 to 2\^64 - 1, got -1"),
        ({"seed": 1 << 64}, r"seed: expected 0 to 2\^64 - 1, got 18446744073709551616"),
        ({"max_tokens": 0}, "max_new_tokens: expected a positive number, got 0"),
        ({"max_tokens": 1100}, r"make 1103 positions, but the KV cache holds 1024 \(cache_tokens\)"),
        ({"max_tokens": 5000}, "make 5003 positions, but the model has max_positions 4096"),
        ({"temperature": -0.5}, "temperature: expected 0 .* got -0.5"),
        ({"stop": ("ab", "")}, "stop: a stop string is empty"),
    ],
)
def test_a_refused_request_does_not_harm_the_others(wrong: dict[str, Any], message: str) -> None:
    async def body() -> None:
        engine = make_engine()
        good = asyncio.create_task(engine.generate(request(max_tokens=40)))
        prompt = wrong.pop("prompt", [1, 2, 3])
        with pytest.raises(ValueError, match=message):
            await engine.generate(replace(request(**wrong), prompt=prompt))
        assert len((await good).tokens) == 40
        await engine.health()
        await engine.close()

    run(body())


def test_stop_strings_need_a_tokenizer() -> None:
    async def body() -> None:
        engine = make_engine(tokenizer=None)
        with pytest.raises(ValueError, match="stop strings need a tokenizer"):
            await engine.generate(request(stop=("x",)))
        await engine.close()

    run(body())


# Weights and pauses ---------------------------------------------------------------------------------------------------------------


def test_every_token_carries_the_version_it_was_sampled_with() -> None:
    async def body() -> None:
        learner = make_learner()
        engine = make_engine(learner)
        gate = Gate(engine)
        assert engine.version == 0
        await engine.update_weights(learner, 5)
        assert engine.version == 5
        task = asyncio.create_task(engine.generate(request(max_tokens=900)))
        await underway(engine)
        await gate.open_for(engine.pause())
        await engine.update_weights(learner, 6)
        await engine.resume()
        completion = await task
        assert completion.versions == sorted(completion.versions)
        assert set(completion.versions) == {5, 6}
        await engine.close()

    run(body())


def test_samples_follow_new_weights() -> None:
    async def body() -> None:
        learner, other = make_learner(), make_learner(seed=1)
        engine = make_engine(learner)
        old = await engine.generate(request())
        learner.load_weights(other.weights())
        await engine.update_weights(learner, 1)
        new = await engine.generate(request())
        fresh = make_engine(other)
        assert (await fresh.generate(request())).tokens == new.tokens != old.tokens
        await engine.close()
        await fresh.close()

    run(body())


def test_another_learner_is_refused() -> None:
    async def body() -> None:
        engine = make_engine()
        with pytest.raises(ValueError, match="make another engine for another learner"):
            await engine.update_weights(make_learner(), 1)
        await engine.close()

    run(body())


def test_nothing_is_sampled_during_a_pause() -> None:
    async def body() -> None:
        engine = make_engine()
        free = await engine.generate(request(max_tokens=500))
        gate = Gate(engine)
        task = asyncio.create_task(engine.generate(request(max_tokens=500)))
        await underway(engine)
        await gate.open_for(engine.pause())
        await engine.pause()  # twice is once
        (running,) = engine._running.values()
        size = len(running.tokens)
        assert 0 < size < 500
        await asyncio.sleep(0.1)
        assert len(running.tokens) == size
        late = asyncio.create_task(engine.generate(request(max_tokens=3)))
        await asyncio.sleep(0.05)
        assert not late.done()
        await engine.resume()
        assert await task == free
        assert (await late).tokens == free.tokens[:3]
        await engine.close()

    run(body())


# The end --------------------------------------------------------------------------------------------------------------------------


def test_close_cancels_what_is_pending_and_may_be_called_again() -> None:
    async def body() -> None:
        engine = make_engine()
        gate = Gate(engine)
        tasks = [asyncio.create_task(engine.generate(request(seed=i, max_tokens=800))) for i in range(20)]
        await underway(engine)
        await gate.open_for(engine.close())
        await engine.close()
        for task in tasks:
            with pytest.raises(RuntimeError, match="the native engine was closed before this request was finished"):
                await task
        for call in (engine.generate(request()), engine.health(), engine.pause()):
            with pytest.raises(RuntimeError, match="the native engine is closed"):
                await call

    run(body())


def test_close_during_a_pause() -> None:
    async def body() -> None:
        engine = make_engine()
        gate = Gate(engine)
        task = asyncio.create_task(engine.generate(request(max_tokens=800)))
        await underway(engine)
        await gate.open_for(engine.pause())
        await engine.close()
        with pytest.raises(RuntimeError, match="closed before this request"):
            await task

    run(body())


def test_a_closed_engine_gives_its_memory_back() -> None:
    engine = make_engine(cache_tokens=400_000)  # 200 MB
    native = weakref.ref(engine._generator)
    run(engine.close())
    gc.collect()
    assert native() is None


def test_a_failure_reaches_everyone_with_its_cause() -> None:
    async def body() -> None:
        learner = make_learner()
        engine = make_engine(learner)
        gate = Gate(engine)
        tasks = [asyncio.create_task(engine.generate(request(seed=i, max_tokens=1000))) for i in range(10)]
        await underway(engine)
        learner.load("norm.weight", np.full(32, np.nan, np.float32))
        gate.open()
        for task in tasks:
            with pytest.raises(RuntimeError, match=r"the native engine failed: RuntimeError: .* are not finite") as caught:
                await task
            assert "not finite" in str(caught.value.__cause__)
        for call in (engine.health(), engine.generate(request()), engine.update_weights(learner, 2)):
            with pytest.raises(RuntimeError, match="not finite"):
                await call
        await engine.close()

    run(body())


# Stop strings ---------------------------------------------------------------------------------------------------------------------


def test_a_stop_string_ends_a_completion_with_the_token_that_completes_it() -> None:
    async def body() -> None:
        engine = make_engine()
        free = await engine.generate(request(max_tokens=60))
        text = text_of(free)
        stop = text[20:24]  # four tokens
        end = text.index(stop) + len(stop)
        completion = await engine.generate(request(max_tokens=60, stop=("no such text", stop)))
        assert completion == Completion(free.tokens[:end], free.logps[:end], "stop", free.versions[:end])
        # The request after it is not disturbed, and on the last token it is a stop, not a limit.
        last = await engine.generate(request(max_tokens=end, stop=(stop,)))
        assert last == completion
        await engine.close()

    run(body())


def first_stop(text: str | bytes, *stop: str) -> int | None:
    """Tokens, of one byte each, that it takes until a stop string is complete."""
    stream = text.encode() if isinstance(text, str) else text
    matcher = StopStrings(Bytes(), stop)
    return next((i for i, byte in enumerate(stream, 1) if matcher.feed(byte)), None)


def test_stop_strings_over_bytes() -> None:
    assert first_stop("hello world", "lo w") == 7
    assert first_stop("hello", "x") is None
    assert first_stop("aaab", "aab") == 4
    assert first_stop("ab", "b", "ab") == 2
    assert first_stop("x\n\ny", "\n\n") == 3
    # A character of two, three or four bytes is complete with its last byte only.
    assert first_stop("né", "é") == 3
    assert first_stop("a€b", "€") == 4
    assert first_stop("a😀b", "😀b") == 6
    assert first_stop("日本語", "本") == 6
    # Bytes that are no character are not waited for: before, between and after.
    assert first_stop(b"\xff\xfeEND", "END") == 5
    assert first_stop(b"\x80" * 40 + b"END\x80", "END") == 43
    assert first_stop(b"E\xc3END", "END") == 5
    assert first_stop(b"\xf0\x9fEND", "END") == 5


class Pieces:
    """A tokenizer with the habits of real ones: the first word loses its space, and a piece may end within a character."""

    pieces = (b" Hello", b" wor", b"ld", b" END\xe2", b"\x82", b"\xac!", b" ", b"<|end|>")

    def decode(self, token_ids: list[int], *, skip_special_tokens: bool, clean_up_tokenization_spaces: bool) -> str:
        assert not skip_special_tokens
        text = b"".join(self.pieces[i] for i in token_ids).decode(errors="replace")
        return text.removeprefix(" ")


@pytest.mark.parametrize(
    ("stop", "tokens"),
    [
        ("o w", 2),  # over two tokens, with a space that only context keeps
        ("Hello world", 3),
        ("END", 4),  # the token also begins a character that is not complete
        ("D€", 6),
        ("€!", 6),
        ("! <", 8),
        ("<|end|>", 8),
        (" Hello", None),  # the very first space is lost, as in the text that people see
    ],
)
def test_stop_strings_over_pieces(stop: str, tokens: int | None) -> None:
    matcher = StopStrings(Pieces(), [stop])
    assert next((i for i in range(8) if matcher.feed(i)), -1) + 1 == (tokens or 0)


def test_decoding_stays_incremental() -> None:
    sizes: list[int] = []

    class Counting(Bytes):
        def decode(self, token_ids: list[int], **options: Any) -> str:
            sizes.append(len(token_ids))
            return super().decode(token_ids, **options)

    matcher = StopStrings(Counting(), ["never there"])
    rng = np.random.default_rng(0)
    assert not any(matcher.feed(int(byte)) for byte in rng.integers(0, 256, 3000))
    assert max(sizes) <= 24
