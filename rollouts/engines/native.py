"""The engine in this process: the core's sampler over the learner's own weights, on a thread of its own."""

from __future__ import annotations

import asyncio
import threading
from collections import defaultdict, deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from surogate_rl import _core
from surogate_rl.rollouts.engines.stop_strings import Decoder, StopStrings
from surogate_rl.rollouts.types import Completion, FinishReason, GenerateRequest, SamplingParams

if TYPE_CHECKING:
    from surogate_rl.learner import Learner

_SEEDS = 1 << 64


@dataclass
class _Reply:
    """A future of some event loop, to be settled from the worker's thread."""

    loop: asyncio.AbstractEventLoop
    future: asyncio.Future[Any]


@dataclass
class _Request:
    id: int
    prompt: NDArray[np.int32]
    params: SamplingParams
    reply: _Reply
    stop: StopStrings | None
    tokens: list[int] = field(default_factory=list)
    logps: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)

    def completion(self, reason: FinishReason) -> Completion:
        return Completion(self.tokens, self.logps, reason, self.versions)


@dataclass
class _Update:
    version: int
    reply: _Reply


@dataclass
class _Abort:
    id: int


class NativeEngine:
    """Samples with the learner's weights as they are: nothing is copied, an update only drops cached prompts.

    A completion depends on its request's prompt, parameters and seed alone (and the weights), bit for bit, whatever else is being sampled.
    All work is done on one worker thread, so the event loop stays free; `generate` may be called from several event loops.

    Args:
        learner: whose weights are sampled from; kept alive by the engine.
        tokenizer: decodes tokens for stop strings; None if no request will have any.
        max_sequences: sequences decoded together; further requests wait their turn.
        cache_tokens: positions that the KV cache holds, of all sequences together. 0: 512 for each of `max_sequences`, and enough for one
            of 4,096. When it is full, the youngest sequences wait and are computed again later.
        valid_vocab: ids from there on are never sampled and count as impossible (0: all are valid).

    Raises:
        MemoryError: the cache does not fit; the message itemises what each part costs.
        ValueError: an argument is out of range.
    """

    def __init__(
        self, learner: Learner, *, tokenizer: Decoder | None = None, max_sequences: int, cache_tokens: int = 0, valid_vocab: int = 0
    ) -> None:
        self._learner: _core.Learner | None = learner.native
        self._generator: _core.Generator | None = _core.Generator(
            learner.native, max_sequences=max_sequences, cache_tokens=cache_tokens, valid_vocab=valid_vocab
        )
        self._tokenizer = tokenizer
        # What both sides touch, under this lock; the worker alone touches the generator and the running requests.
        self._changed = threading.Condition()
        self._commands: deque[_Request | _Update | _Abort] = deque()
        self._pausing: list[_Reply] = []
        self._next_id = 0
        self._version = 0
        self._paused = False
        self._stepping = False
        self._closed = False
        self._failure: BaseException | None = None
        self._running: dict[int, _Request] = {}
        self._worker = threading.Thread(target=self._work, name="native-engine", daemon=True)
        self._worker.start()

    @property
    def version(self) -> int:
        """Of the weights that the next token is sampled with."""
        return self._version

    @property
    def shares_weights(self) -> bool:
        return True

    async def generate(self, request: GenerateRequest) -> Completion:
        """Samples one completion. Cancelling the awaiting task aborts the request.

        Raises:
            ValueError: the prompt or a parameter is out of range, or the request could never fit into the cache.
            RuntimeError: the engine is closed, is closed while this runs, or failed.
        """
        params = request.params
        stop: StopStrings | None = None
        if params.stop:
            if self._tokenizer is None:
                raise ValueError("stop strings need a tokenizer; make the engine with one, or use stop_ids")
            if not all(params.stop):
                raise ValueError("stop: a stop string is empty")
            stop = StopStrings(self._tokenizer, params.stop)
        if not 0 <= params.seed < _SEEDS:
            raise ValueError(f"seed: expected 0 to 2^64 - 1, got {params.seed}")
        try:
            prompt = np.array(request.prompt, dtype=np.int32)
        except OverflowError as error:
            raise ValueError(f"prompt: a token id is out of range: {error}") from None
        reply = _reply()
        with self._changed:
            self._require_open()
            number = self._next_id
            self._next_id += 1
            self._submit(_Request(number, prompt, params, reply, stop))
        try:
            completion: Completion = await reply.future
        except asyncio.CancelledError:
            with self._changed:
                self._submit(_Abort(number))
            raise
        return completion

    async def update_weights(self, learner: Learner, version: int) -> None:
        """The learner's weights have changed: forgets cached prompts, and gives `version` to every token from now on.

        Sequences that are running keep the keys and values of the tokens that they have.

        Raises:
            ValueError: another learner than the one that the engine was made with.
            RuntimeError: the engine is closed or failed.
        """
        reply = _reply()
        with self._changed:
            self._require_open()
            if learner.native is not self._learner:
                raise ValueError(
                    "the native engine samples from the learner that it was made with; make another engine for another learner"
                )
            self._submit(_Update(version, reply))
        await reply.future

    async def pause(self) -> None:
        """Returns when no decode step is under way; none starts before `resume`. Requests stay where they are."""
        reply = _reply()
        with self._changed:
            self._require_open()
            self._paused = True
            if not self._stepping:
                return
            self._pausing.append(reply)
        await reply.future

    async def resume(self) -> None:
        """Goes on after `pause`."""
        with self._changed:
            self._paused = False
            self._changed.notify_all()

    async def health(self) -> None:
        """
        Raises:
            RuntimeError: the engine is closed, or its worker failed (the cause is attached).
        """
        with self._changed:
            self._require_open()

    async def close(self) -> None:
        """Ends the worker and gives the memory back; requests that are not finished raise RuntimeError. May be called again."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        await asyncio.to_thread(self._worker.join)
        self._generator = None
        self._learner = None

    # Under the lock.

    def _require_open(self) -> None:
        if self._failure is not None:
            raise _failed(self._failure) from self._failure
        if self._closed:
            raise RuntimeError("the native engine is closed")

    def _submit(self, command: _Request | _Update | _Abort) -> None:
        self._commands.append(command)
        self._changed.notify_all()

    # On the worker's thread.

    def _work(self) -> None:
        try:
            while (commands := self._next()) is not None:
                self._obey(commands)
                if self._begin_step():
                    self._step()
        except BaseException as error:
            self._end(error)
        else:
            self._end(None)

    def _next(self) -> list[_Request | _Update | _Abort] | None:
        """Waits for something to do: the commands that came, or None once closed."""
        with self._changed:
            self._stepping = False
            paused, self._pausing = self._pausing, []
            _settle([(reply, None) for reply in paused])
            while not (self._closed or self._commands or (self._running and not self._paused)):
                self._changed.wait()
            if self._closed:
                return None
            commands = list(self._commands)
            self._commands.clear()
            return commands

    def _begin_step(self) -> bool:
        with self._changed:
            self._stepping = bool(self._running) and not self._paused and not self._closed
            return self._stepping

    def _obey(self, commands: list[_Request | _Update | _Abort]) -> None:
        assert self._generator is not None
        for command in commands:
            if isinstance(command, _Request):
                self._add(command)
            elif isinstance(command, _Update):
                self._generator.weights_changed()
                self._version = command.version
                _settle([(command.reply, None)])
            elif self._running.pop(command.id, None) is not None:
                self._generator.abort(command.id)

    def _add(self, request: _Request) -> None:
        assert self._generator is not None
        params = request.params
        try:
            self._generator.add(
                request.id,
                request.prompt,
                max_new_tokens=params.max_tokens,
                temperature=params.temperature,
                top_p=params.top_p,
                top_k=params.top_k,
                min_p=params.min_p,
                seed=params.seed,
                stop_ids=params.stop_ids,
            )
        except (ValueError, TypeError) as error:
            _settle([(request.reply, error)])
        else:
            self._running[request.id] = request

    def _step(self) -> None:
        assert self._generator is not None
        finished: list[tuple[_Reply, object]] = []
        for number, token, logp, finish in self._generator.step():
            request = self._running[number]
            request.tokens.append(token)
            request.logps.append(logp)
            request.versions.append(self._version)
            reason: FinishReason | None = None if finish is None else ("stop" if finish == "stop" else "length")
            if request.stop is not None and request.stop.feed(token):
                if reason is None:
                    self._generator.abort(number)
                reason = "stop"
            if reason is not None:
                del self._running[number]
                finished.append((request.reply, request.completion(reason)))
        _settle(finished)

    def _end(self, error: BaseException | None) -> None:
        """Nobody may wait for a worker that is gone."""
        with self._changed:
            self._failure = error
            self._closed = True
            self._stepping = False
            left = [request.reply for request in self._running.values()]
            left += [command.reply for command in self._commands if not isinstance(command, _Abort)]
            left += self._pausing
            self._running.clear()
            self._commands.clear()
            self._pausing = []
        outcome: list[tuple[_Reply, object]] = []
        for reply in left:
            if error is None:
                outcome.append((reply, RuntimeError("the native engine was closed before this request was finished")))
            else:
                problem = _failed(error)
                problem.__cause__ = error
                outcome.append((reply, problem))
        _settle(outcome)


def _reply() -> _Reply:
    loop = asyncio.get_running_loop()
    return _Reply(loop, loop.create_future())


def _failed(error: BaseException) -> RuntimeError:
    return RuntimeError(f"the native engine failed: {type(error).__name__}: {error}")


def _settle(outcomes: list[tuple[_Reply, Any]]) -> None:
    """Hands results and exceptions over to their event loops, each loop woken once."""
    by_loop: defaultdict[asyncio.AbstractEventLoop, list[tuple[asyncio.Future[Any], Any]]] = defaultdict(list)
    for reply, outcome in outcomes:
        by_loop[reply.loop].append((reply.future, outcome))
    for loop, settled in by_loop.items():
        try:
            loop.call_soon_threadsafe(_settle_here, settled)
        except RuntimeError:
            continue  # the loop is closed, so nobody waits any more


def _settle_here(outcomes: list[tuple[asyncio.Future[Any], Any]]) -> None:
    for future, outcome in outcomes:
        if future.done():
            continue  # cancelled meanwhile
        if isinstance(outcome, BaseException):
            future.set_exception(outcome)
        else:
            future.set_result(outcome)
