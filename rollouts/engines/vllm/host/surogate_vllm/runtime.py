"""vLLM's asynchronous engine, as this program uses it."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import json
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Coroutine
from functools import partial
from typing import Any

from . import compat

_TURNS = 10  # of the event loop, after which whatever vLLM had handed over by then has reached its request


class Rejected(ValueError):
    """A request that vLLM refuses."""


class Dead(RuntimeError):
    """vLLM's engine core has ended."""


class Runtime:
    """One AsyncLLM with weights that came from the run, and the version of those.

    Args:
        settings: `model_config` (what config.json holds), `engine_args` (of vLLM, by name), `valid_vocab`, and
            `memory_bytes` of the GPU (0: as engine_args say).
        make: starts the engine.
    """

    def __init__(self, settings: dict[str, Any], make: Callable[[dict[str, Any]], Any] | None = None) -> None:
        self.version = -1
        self._adapter: Any = None  # what requests ask for: vLLM's own LoRA, or None
        self._adapter_folder = ""
        self._held = self._stopped = False
        self._broken: set[str] = set()  # "weights", "adapter": what an update has not replaced as a whole; nothing is sampled from that
        self._updating = asyncio.Lock()
        self._updates: set[asyncio.Task[dict[str, Any]]] = set()
        self._requests = 0
        self._under_way: dict[str, list[tuple[int, int]]] = {}  # by request: from which token on it has which version
        self._engine = (make or _start)(settings)

    async def generate(
        self, prompt: list[int], params: dict[str, Any], each: Callable[[list[int], list[float], list[int]], None], *, stream: bool = True
    ) -> str:
        """Samples one completion; `each` gets (tokens, log-probabilities, versions), with `stream` as they come, else once: vLLM then makes
        nothing of a token until the last one is there, which is the better part of what a token costs outside its kernels. Cancelling
        aborts it.

        Returns: "stop" or "length".
        """
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        self._requests += 1
        number = str(self._requests)
        make = partial(
            SamplingParams,
            max_tokens=params["max_tokens"],
            temperature=params["temperature"],
            top_p=params["top_p"],
            top_k=params["top_k"],
            min_p=params["min_p"],
            seed=params["seed"],
            stop_token_ids=params["stop_ids"],
            ignore_eos=True,  # the run's stop ids are all that stop it
            logprobs=0,
            flat_logprobs=not stream,
            detokenize=False,
            output_kind=RequestOutputKind.DELTA if stream else RequestOutputKind.FINAL_ONLY,
        )
        finish: str | None = None
        changes = self._under_way[number] = [(0, self.version)]
        try:
            with _errors():
                sampling = make()
                async for output in self._engine.generate({"prompt_token_ids": prompt}, sampling, number, lora_request=self._adapter):
                    (sample,) = output.outputs
                    tokens = list(sample.token_ids)
                    finish = sample.finish_reason
                    if tokens and stream:
                        logps = [position[token].logprob for position, token in zip(sample.logprobs, tokens, strict=True)]
                        each(tokens, logps, [self.version] * len(tokens))
                    elif tokens:
                        each(tokens, _sampled_logprobs(sample.logprobs, tokens), _versions(changes, len(tokens)))
        finally:
            del self._under_way[number]
        if finish not in ("stop", "length"):
            raise Dead(f"vLLM ended a request as {finish}")
        return finish

    def _raise_version(self, version: int) -> None:
        """From here on, tokens are of another version. While it is stopped: all that was sampled before has been handed over."""
        if self._under_way:
            so_far = compat.sampled_so_far(self._engine)
            for number, changes in self._under_way.items():
                changes.append((so_far.get(number, 0), version))
        self.version = version

    async def pause(self) -> None:
        """Holds every request until `resume`, through updates too."""
        self._held = True
        await self._stop()

    async def resume(self) -> None:
        self._held = False
        await self._go_on()

    async def _stop(self) -> None:
        """Stops between two steps; requests stay, and start over from their tokens afterwards (so with the weights of then).
        Returns when every token that was sampled has been handed over. Prefix caches are empty then."""
        if not self._stopped:
            with _errors():
                await compat.pause(self._engine)
            self._stopped = True
            for _ in range(_TURNS):
                await asyncio.sleep(0)

    async def _go_on(self) -> None:
        if self._stopped and not self._broken and not self._held:
            with _errors():
                await self._engine.resume_generation()
            self._stopped = False

    async def update(self, buckets: list[dict[str, Any]], version: int) -> dict[str, Any]:
        """Loads all weights. Requests that were running go on with them; if a check fails, nothing runs until an update succeeds.

        An update that was begun goes on to its end though who waits for it is cancelled: vLLM would refuse the next one.

        Returns: `problems` (empty: the engine has exactly what was sent), `tensors`, `packed`, and seconds of each part.
        """
        return await self._shielded(self._update(buckets, version))

    async def _shielded(self, update: Coroutine[Any, Any, dict[str, Any]]) -> dict[str, Any]:
        async def alone() -> dict[str, Any]:
            async with self._updating:
                return await update

        task = asyncio.create_task(alone())
        self._updates.add(task)
        task.add_done_callback(self._updated)
        return await asyncio.shield(task)

    def _updated(self, task: asyncio.Task[dict[str, Any]]) -> None:
        self._updates.discard(task)
        if not task.cancelled():
            task.exception()  # who waited for it has it; perhaps nobody does any more

    async def settled(self, limit: float) -> bool:
        """Whether every update has come to its end, after at most `limit` seconds."""
        return not self._updates or not (await asyncio.wait(self._updates, timeout=limit))[1]

    async def _update(self, buckets: list[dict[str, Any]], version: int) -> dict[str, Any]:
        from vllm.distributed.weight_transfer.base import WeightTransferUpdateRequest

        start = time.perf_counter()
        await self._stop()
        paused = time.perf_counter()
        self._broken.add("weights")
        with _errors():
            try:
                await self._engine.start_weight_update()
                for bucket in buckets:
                    await self._engine.update_weights(WeightTransferUpdateRequest(update_info=bucket))
                await compat.finish_weight_update(self._engine, version)
            except Exception:
                # workers that had no part in the failure would take the next update for a part of this one, and refuse it
                with contextlib.suppress(Exception):
                    await self._engine.collective_rpc("surogate_abandon")
                raise
        loaded = time.perf_counter()
        with _errors():
            reports = await self._engine.collective_rpc("surogate_verify")
        problems = list(dict.fromkeys(problem for report in reports for problem in report["problems"]))
        seconds = {"pause": paused - start, "load": loaded - paused, "verify": time.perf_counter() - loaded}
        if not problems:
            self._raise_version(version)
            self._broken.discard("weights")
            await self._go_on()
        return {"problems": problems, "tensors": reports[0]["tensors"], "packed": reports[0]["packed"], "seconds": seconds}

    async def update_adapter(self, config: dict[str, Any], tensors: bytes, version: int) -> dict[str, Any]:
        """Replaces the adapter, as `update` does the weights below it. vLLM takes adapters from a folder only.

        Args:
            config: what adapter_config.json holds.
            tensors: what adapter_model.safetensors holds.
        """
        return await self._shielded(self._update_adapter(config, tensors, version))

    async def _update_adapter(self, config: dict[str, Any], tensors: bytes, version: int) -> dict[str, Any]:
        from vllm.lora.request import LoRARequest

        start = time.perf_counter()
        await self._stop()
        paused = time.perf_counter()
        self._broken.add("adapter")
        folder = tempfile.mkdtemp(prefix="surogate-adapter-")
        with open(os.path.join(folder, "adapter_config.json"), "w", encoding="utf-8") as file:
            json.dump(config, file)
        with open(os.path.join(folder, "adapter_model.safetensors"), "wb") as binary:
            binary.write(tensors)
        with _errors():
            loaded = await self._engine.add_lora(LoRARequest("policy", 1, folder, load_inplace=True))
            load = time.perf_counter()
            arguments = (folder, 1, config["lora_alpha"] / config["r"])
            reports = await self._engine.collective_rpc("surogate_verify_adapter", args=arguments)
        # requests name the adapter without `load_inplace`, with which vLLM would read it again at every step
        self._adapter = LoRARequest("policy", 1, folder)
        shutil.rmtree(self._adapter_folder, ignore_errors=True)
        self._adapter_folder = folder
        problems = list(dict.fromkeys(problem for report in reports for problem in report))
        if not loaded:
            problems.append("vLLM did not load the adapter")
        if not problems:
            self._raise_version(version)
            self._broken.discard("adapter")
            await self._go_on()
        seconds = {"pause": paused - start, "load": load - paused, "verify": time.perf_counter() - load}
        return {"problems": problems, "seconds": seconds}

    async def ping(self) -> None:
        """Returns once the engine core has answered.

        Raises:
            Dead: it has ended.
        """
        with _errors():
            await self._engine.check_health()
            await self._engine.is_paused()

    async def layout(self) -> list[str]:
        """Names of the model's parameters."""
        with _errors():
            return list((await self._engine.collective_rpc("surogate_layout"))[0])

    def close(self) -> None:
        self._engine.shutdown()
        shutil.rmtree(self._adapter_folder, ignore_errors=True)


def _sampled_logprobs(flat: Any, tokens: list[int]) -> list[float]:
    """Of vLLM's flat log-probabilities those of the sampled tokens, which come first at each position."""
    if [flat.token_ids[start] for start in flat.start_indices] != tokens:
        raise Dead("vLLM's log-probabilities are not those of the sampled tokens")
    return [flat.logprobs[start] for start in flat.start_indices]


def _versions(changes: list[tuple[int, int]], count: int) -> list[int]:
    """Of each of `count` tokens, from (first token, version) in order of time."""
    versions: list[int] = []
    for index, (first, version) in enumerate(changes):
        end = changes[index + 1][0] if index + 1 < len(changes) else count
        versions += [version] * (end - first)
    return versions


def _start(settings: dict[str, Any]) -> Any:
    """vLLM's engine with random weights."""
    from vllm import AsyncEngineArgs
    from vllm.v1.engine.async_llm import AsyncLLM

    from .receiver import BACKEND, Extension

    # vLLM reads a model from a folder. Its weights come from the run, so the config is all that this one holds.
    folder = tempfile.mkdtemp(prefix="surogate-vllm-")
    try:
        with open(os.path.join(folder, "config.json"), "w", encoding="utf-8") as file:
            json.dump(settings["model_config"], file)
        engine = AsyncLLM.from_engine_args(
            AsyncEngineArgs(
                model=folder,
                load_format="dummy",
                skip_tokenizer_init=True,
                # nothing but what the run asks for: no sampling parameters from files, temperature in the log-probabilities
                generation_config="vllm",
                logprobs_mode="processed_logprobs",
                weight_transfer_config={"backend": BACKEND},
                worker_extension_cls=f"{Extension.__module__}.{Extension.__qualname__}",
                additional_config={"surogate_valid_vocab": settings["valid_vocab"]},
                enable_prefix_caching=True,
                disable_log_stats=True,
                **_share_of_gpu(settings["memory_bytes"]),
                **_whole_prompts(),
                **settings["engine_args"],
            )
        )
        gc.collect()
        gc.freeze()  # what has been imported stays; looking through it again and again would hold up what is sampled
        return engine
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _share_of_gpu(memory: int) -> dict[str, float]:
    """vLLM counts memory in shares of a GPU, and refuses to start where its share is not free."""
    from vllm.platforms import current_platform

    if not memory or current_platform.is_cpu():
        return {}
    return {"gpu_memory_utilization": min(0.98, memory / current_platform.get_device_total_memory())}


def _whole_prompts() -> dict[str, bool]:
    """A prompt of which a step computes only a part makes vLLM take back that step's random numbers, which PyTorch's generator on the CPU
    cannot: the engine would end. So prompts are computed whole there, and wait for a step that has room for them."""
    from vllm.platforms import current_platform

    return {"enable_chunked_prefill": False} if current_platform.is_cpu() else {}


@contextlib.contextmanager
def _errors() -> Any:
    """vLLM's errors as this program's."""
    from vllm.v1.engine.exceptions import EngineDeadError

    try:
        yield
    except EngineDeadError as error:
        raise Dead(f"vLLM's engine core has ended: {error}") from error
    except compat.request_errors() as error:
        raise Rejected(str(error)) from error
