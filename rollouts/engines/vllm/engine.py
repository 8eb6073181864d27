"""The engine in another process: vLLM, given the learner's weights after each update."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterable, Sequence
from typing import Any

from surogate_rl.learner import Learner
from surogate_rl.rollouts.engines.stop_strings import Decoder, StopStrings
from surogate_rl.rollouts.engines.vllm import probe
from surogate_rl.rollouts.engines.vllm.device_weights import DeviceSnapshot
from surogate_rl.rollouts.engines.vllm.errors import EngineFailed, EngineGone, SyncFailed
from surogate_rl.rollouts.engines.vllm.options import VllmOptions
from surogate_rl.rollouts.engines.vllm.process import EngineProcess
from surogate_rl.rollouts.engines.vllm.replica import Replica
from surogate_rl.rollouts.engines.vllm.weights import HostSnapshot, Snapshot
from surogate_rl.rollouts.types import Completion, FinishReason, GenerateRequest, SamplingParams

_SEEDS = 1 << 64
_SEED_MASK = (1 << 63) - 1  # vLLM's seeds are signed


class VllmEngine:
    """Samples with vLLM. Processes start when this is made, and get ready while the caller goes on with something else.

    The first request, or the first `update_weights`, gives the learner's weights to every replica; so a run that was resumed never samples
    from anything else. An engine that ends or falls silent is started again with the weights of the last update and gets its requests once
    more: they have seeds, so nothing but time is lost. All methods are for one event loop.

    Args:
        learner: whose weights are sampled from.
        tokenizer: decodes tokens for stop strings; None if no request will have any.
        processes: that have been started beforehand, one for each replica (see `launch`); the engine's from here on.

    Raises:
        EngineFailed: an interpreter cannot be started.
    """

    shares_weights = False

    def __init__(
        self, learner: Learner, options: VllmOptions, *, tokenizer: Decoder | None = None, processes: Sequence[EngineProcess] = ()
    ) -> None:
        self.options = options
        self._learner = learner
        self._tokenizer = tokenizer
        self._version = 0
        self._synced = False
        self._closed = False
        self._failure: BaseException | None = None
        self._paused = False
        self._starting: asyncio.Task[None] | None = None
        self._sync = asyncio.Lock()
        self._recovering: dict[int, asyncio.Task[None]] = {}
        self._snapshot: Snapshot | None = None
        self._metrics: dict[str, float] = {}
        self._restarts_told = 0
        self.replicas: list[Replica] = []
        try:
            for number, url in enumerate(options.base_urls or [None] * len(options.environments)):
                self.replicas.append(Replica(options, number, url, processes[number] if processes else None))
        except BaseException:
            for replica in self.replicas:
                replica.kill()
            raise

    @property
    def version(self) -> int:
        """Of the weights that the next token is sampled with."""
        return self._version

    def take_metrics(self) -> dict[str, float]:
        """What was measured since the last call: seconds of start-up and of each part of a sync, the probe's gap, restarts."""
        taken, self._metrics = self._metrics, {}
        restarts = sum(replica.restarts for replica in self.replicas)
        if restarts != self._restarts_told:  # wherever it was noticed: by a request, in a sync or by the probe
            self._restarts_told = restarts
            taken["vllm/restarts"] = float(restarts)
        return taken

    async def begin(self) -> None:
        """Lets the engines get ready in the background."""
        if self._starting is None:
            self._starting = asyncio.create_task(self._start())
            self._starting.add_done_callback(_seen)

    async def _start(self) -> None:
        await _all(replica.connect() for replica in self.replicas)
        self._metrics["vllm/start_seconds"] = max(replica.start_seconds for replica in self.replicas)

    async def _ready(self) -> None:
        self._require_open()
        await self.begin()
        assert self._starting is not None
        await asyncio.shield(self._starting)

    def _require_open(self) -> None:
        if self._failure is not None:
            raise self._failure
        if self._closed:
            raise RuntimeError("the vLLM engine is closed")

    # Generation -------------------------------------------------------------------------------------------------------------------

    async def generate(self, request: GenerateRequest) -> Completion:
        """Samples one completion. Cancelling the awaiting task aborts the request.

        Raises:
            ValueError: the prompt or a parameter is out of range.
            EngineFailed: the engine cannot be kept alive.
            RuntimeError: the engine is closed.
        """
        params = request.params
        if params.stop:
            if self._tokenizer is None:
                raise ValueError("stop strings need a tokenizer; make the engine with one, or use stop_ids")
            if not all(params.stop):
                raise ValueError("stop: a stop string is empty")
        if not 0 <= params.seed < _SEEDS:
            raise ValueError(f"seed: expected 0 to 2^64 - 1, got {params.seed}")
        # up to 0.31 vLLM asks its tokenizer alone, which it has none of here; on a GPU such an id would end the engine
        vocab = self._learner.spec.vocab
        for place, token in enumerate(request.prompt):
            if not 0 <= token < vocab:
                raise ValueError(f"prompt[{place}]: expected a token id of 0 to {vocab - 1}, got {token}")
        await self._ready()
        if not self._synced:
            async with self._sync:
                if not self._synced:
                    await self._update(self._learner, self._version)
        while True:
            self._require_open()
            replica = min((replica for replica in self.replicas), key=lambda replica: (replica.weights < 0, replica.running))
            if replica.weights < 0:
                await self._recover(replica)
            restarts = replica.restarts
            try:
                return await self._sample(replica, request)
            except EngineGone as error:
                if replica.restarts == restarts:
                    replica.kill(str(error))  # it may be half dead: its core gone, its socket still open
                    await self._recover(replica)

    async def _sample(self, replica: Replica, request: GenerateRequest) -> Completion:
        prompt, params = [int(token) for token in request.prompt], _params(request.params)
        if not request.params.stop:
            answer = await replica.generate(prompt, params, None)
            return Completion(answer["tokens"], answer["logps"], answer["finish"], answer["versions"])
        assert self._tokenizer is not None
        return await _Streamed(StopStrings(self._tokenizer, request.params.stop)).run(replica, prompt, params)

    async def _recover(self, replica: Replica) -> None:
        """Starts a replica again, with the weights that it had; those who wait share one attempt."""
        task = self._recovering.get(replica.number)
        if task is None:
            task = asyncio.create_task(self._restart(replica))
            self._recovering[replica.number] = task
            task.add_done_callback(lambda _: self._recovering.pop(replica.number, None))
            task.add_done_callback(_seen)
        await asyncio.shield(task)

    async def _restart(self, replica: Replica) -> None:
        async with self._sync:
            if replica.weights >= 0 and replica.alive:
                return
            self._require_open()
            await self._replace(replica, None)
            while True:
                if self._snapshot is not None:
                    await self._give(replica, self._snapshot, self._version)
                if not self._paused:
                    return
                try:
                    await replica.call("pause", timeout=self.options.timeout)
                    return
                except EngineGone as error:
                    await self._replace(replica, error)

    async def _replace(self, replica: Replica, gone: EngineGone | None) -> None:
        """Ends a replica that is gone, or half of it, and starts it again until it stands. It has no weights then.

        Raises:
            EngineFailed: it cannot be kept alive; the message says what `gone` does.
        """
        while True:
            if gone is not None:
                replica.kill(str(gone))
            try:
                await replica.restart()
                return
            except EngineGone as error:
                gone = error
            except EngineFailed as error:
                self._failure = error
                raise

    # Weights ----------------------------------------------------------------------------------------------------------------------

    async def update_weights(self, learner: Learner, version: int) -> None:
        """Gives the learner's present weights, as `version`, to every replica, and proves that they have them. The learner must be idle.

        Requests under way are held, and go on with the new weights: their tokens stay, with the version of each, and their keys and
        values are computed again.

        Raises:
            SyncFailed: a replica does not have these weights, or computes something else from them; names the tensors.
            EngineFailed: the engine cannot be kept alive.
        """
        await self._ready()
        async with self._sync:
            await self._update(learner, version)

    async def _update(self, learner: Learner, version: int) -> None:
        self._require_open()
        started = time.perf_counter()
        if self._snapshot is None or learner is not self._learner:
            self._learner = learner
            if self._snapshot is not None:
                self._snapshot.close()
            kind = DeviceSnapshot if self.options.transfer == "cuda_ipc" else HostSnapshot
            self._snapshot = kind(learner, self.options.torch_dtype, merge=self.options.sync == "merged")
        lost = await asyncio.to_thread(self._snapshot.fill)
        exported = time.perf_counter()
        reports = await _all(self._give(replica, self._snapshot, version) for replica in self.replicas)
        given = time.perf_counter()
        self._version = version
        gaps = await _all(self._probe(replica) for replica in self.replicas)
        self._synced = True
        self._metrics |= {
            "vllm/sync_seconds": time.perf_counter() - started,
            "vllm/sync_export_seconds": exported - started,
            "vllm/sync_load_seconds": given - exported,
            "vllm/sync_verify_seconds": max(report["seconds"]["verify"] for report in reports),
            "vllm/probe_gap": max(gaps),
        }
        if self.options.sync == "merged":
            self._metrics["vllm/lost_delta"] = lost

    async def _give(self, replica: Replica, snapshot: Snapshot, version: int) -> dict[str, Any]:
        while True:
            try:
                return await replica.update(snapshot, version)
            except EngineGone as error:
                await self._replace(replica, error)
            except EngineFailed as error:  # SyncFailed among them
                self._failure = error
                raise

    async def _probe(self, replica: Replica) -> float:
        """
        Raises:
            SyncFailed: the engine's log-probabilities are not the learner's.
        """
        options, learner = self.options, self._learner
        context = min(options.engine_args["max_model_len"], learner.max_tokens)
        asked = probe.prompts(options.valid_vocab or learner.spec.vocab, context)
        tokens = min(probe.TOKENS, context - 1)
        while True:
            try:
                if self._paused:
                    await replica.call("resume", timeout=options.timeout)
                answers = await _all(
                    replica.generate(prompt, _params(SamplingParams(tokens, options.probe_temperature, seed=number)), None)
                    for number, prompt in enumerate(asked)
                )
                if self._paused:
                    await replica.call("pause", timeout=options.timeout)
                break
            except EngineGone as error:
                await self._replace(replica, error)
                assert self._snapshot is not None
                await self._give(replica, self._snapshot, self._version)
        probes = [probe.Probe(prompt, answer["tokens"], answer["logps"]) for prompt, answer in zip(asked, answers, strict=True)]
        gap = await asyncio.to_thread(probe.gap, probes, learner, temperature=options.probe_temperature, valid_vocab=options.valid_vocab)
        if not gap <= options.probe_tolerance:
            self._failure = SyncFailed(
                f"weight sync: {replica.name} has the learner's weights but not its log-probabilities: they differ by {gap:.4f} nats on "
                f"average, more than rollouts.vllm.probe_tolerance ({options.probe_tolerance:g}); either the two do not compute the same "
                "model, or the engine's number format is too coarse for it (rollouts.vllm.dtype: float32)"
            )
            raise self._failure
        return gap

    # Life -------------------------------------------------------------------------------------------------------------------------

    async def pause(self) -> None:
        """Returns when no decode step is under way; none starts before `resume`. Requests stay where they are."""
        await self._ready()
        async with self._sync:
            self._paused = True
            await _all(replica.call("pause", timeout=self.options.timeout) for replica in self.replicas if replica.weights >= 0)

    async def resume(self) -> None:
        """Goes on after `pause`."""
        async with self._sync:
            self._paused = False
            await _all(replica.call("resume", timeout=self.options.timeout) for replica in self.replicas if replica.weights >= 0)

    async def health(self) -> None:
        """
        Raises:
            EngineGone: a replica does not answer (a request would start it again).
            EngineFailed: the engine cannot serve.
            RuntimeError: it is closed.
        """
        await self._ready()
        await _all(replica.call("ping", timeout=self.options.timeout) for replica in self.replicas)

    async def close(self) -> None:
        """Ends every process that was started here; requests that are not finished raise. May be called again."""
        if self._closed:
            return
        self._closed = True
        tasks = [task for task in (self._starting, *self._recovering.values()) if task is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await asyncio.gather(*(replica.close() for replica in self.replicas))
        if self._snapshot is not None:
            self._snapshot.close()


class _Streamed:
    """A completion whose stop strings are looked for here, with the run's own tokenizer, token by token as the native engine does."""

    def __init__(self, stop: StopStrings) -> None:
        self._stop = stop
        self._tokens: list[int] = []
        self._logps: list[float] = []
        self._versions: list[int] = []
        self._stopped = asyncio.Event()

    def _event(self, parts: list[Any]) -> None:
        for token, logp, version in zip(*parts, strict=True):
            if self._stopped.is_set():
                return  # sampled before the engine heard of the stop
            self._tokens.append(token)
            self._logps.append(logp)
            self._versions.append(version)
            if self._stop.feed(token):
                self._stopped.set()

    async def run(self, replica: Replica, prompt: list[int], params: dict[str, Any]) -> Completion:
        generating = asyncio.ensure_future(replica.generate(prompt, params, self._event))
        stopping = asyncio.ensure_future(self._stopped.wait())
        try:
            await asyncio.wait((generating, stopping), return_when=asyncio.FIRST_COMPLETED)
            finish: FinishReason = "stop"
            if not self._stopped.is_set():
                finish = generating.result()["finish"]
        finally:
            generating.cancel()
            stopping.cancel()
            await asyncio.gather(generating, stopping, return_exceptions=True)
        return Completion(self._tokens, self._logps, finish, self._versions)


def _params(params: SamplingParams) -> dict[str, Any]:
    return {
        "max_tokens": params.max_tokens,
        "temperature": params.temperature,
        "top_p": params.top_p,
        "top_k": params.top_k,
        "min_p": params.min_p,
        "seed": params.seed & _SEED_MASK,
        "stop_ids": list(params.stop_ids),
    }


async def _all(work: Iterable[Any]) -> list[Any]:
    """Runs them together; the first error cancels the others."""
    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(each) for each in work]
    except BaseExceptionGroup as errors:
        first: BaseException = errors
        while isinstance(first, BaseExceptionGroup):
            first = first.exceptions[0]
        raise first from None
    return [task.result() for task in tasks]


def _seen(task: asyncio.Task[None]) -> None:
    """Whoever waits for the task gets its error; if nobody does, it is no news for the event loop either."""
    if not task.cancelled():
        task.exception()
