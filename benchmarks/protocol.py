"""How two programs are compared on a machine whose speed wanders.

Virtual CPUs flip between one and two effective cores within seconds, so a time alone says little. Ours and the peer run in processes
of their own and take turns; a matrix product is timed before and after each pair. Pairs whose probes fall below 90% of the best one are
dropped, the ratio is the median over those that stay, and the raw pairs are kept beside it.
"""

from __future__ import annotations

import json
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import date
from pathlib import Path
from typing import Any

import numpy as np

RESULTS = Path(__file__).resolve().parent / "results"
WORKER = RESULTS.parent / "worker.py"
KEPT = 0.9
MOST_PAIRS = 40


@dataclass
class Worker:
    """A subject in a process of its own: `worker.py BENCH SIDE`; one line of JSON for each "go"."""

    bench: str
    side: str
    python: str = sys.executable
    arguments: Sequence[str] = ()
    ready: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        command = [self.python, str(WORKER), self.bench, self.side, *self.arguments]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self.ready = self._read()

    def go(self) -> dict[str, Any]:
        """One measurement: at least `seconds`, and `peak_bytes` of memory so far."""
        assert self._process.stdin is not None
        self._process.stdin.write("go\n")
        self._process.stdin.flush()
        return self._read()

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(timeout=60)

    def _read(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line.startswith("{"):
                return dict(json.loads(line))
        raise RuntimeError(f"benchmark worker {self.bench} {self.side} ended with code {self._process.wait()}")


def gemm_rate(size: int = 1536, seconds: float = 0.25) -> float:
    """GFLOP/s of a float32 matrix product right now, by numpy's BLAS on all cores."""
    a = np.ones((size, size), dtype=np.float32)
    b = np.ones((size, size), dtype=np.float32)
    done, started = 0, time.perf_counter()
    while (elapsed := time.perf_counter() - started) < seconds:
        np.matmul(a, b)
        done += 1
    return 2e-9 * size**3 * done / elapsed


def compare(ours: Worker, peer: Worker, pairs: int) -> dict[str, Any]:
    """Runs pairs until `pairs` of them are good (or `MOST_PAIRS` in all). Ratios are peer seconds / our seconds: above 1 we are faster."""
    raw: list[dict[str, Any]] = []
    probe = gemm_rate()
    while len(raw) < MOST_PAIRS:
        first, second = (ours, peer) if len(raw) % 2 == 0 else (peer, ours)
        results = {first.side: first.go(), second.side: second.go()}
        after = gemm_rate()
        raw.append(
            {"ours_s": results["ours"]["seconds"], "peer_s": results["peer"]["seconds"], "gflops": [round(probe, 1), round(after, 1)]}
        )
        probe = after
        peaks = {side: result["peak_bytes"] for side, result in results.items()}
        best = max(max(pair["gflops"]) for pair in raw)
        good = [pair for pair in raw if min(pair["gflops"]) >= KEPT * best]
        if len(good) >= pairs:
            break
    ratios = [pair["peer_s"] / pair["ours_s"] for pair in good]
    return {
        "ours_s": statistics.median(pair["ours_s"] for pair in good),
        "peer_s": statistics.median(pair["peer_s"] for pair in good),
        "ratio": statistics.median(ratios),
        "ratio_range": [min(ratios), max(ratios)],
        "good_pairs": len(good),
        "gemm_gflops": best,
        "ours_peak_gb": peaks["ours"] / 1e9,
        "peer_peak_gb": peaks["peer"] / 1e9,
        "pairs": raw,
    }


def machine() -> str:
    name = platform.processor() or platform.machine()
    for line in Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").exists() else []:
        if line.startswith("model name"):
            name = line.split(":", 1)[1].strip()
            break
    import os

    return f"{name}, {os.cpu_count()} cores, {platform.system()}"


def record(line: dict[str, Any]) -> Path:
    """Appends a line to today's file of results."""
    RESULTS.mkdir(exist_ok=True)
    path = RESULTS / f"{date.today().isoformat()}-cpu.jsonl"
    with path.open("a", encoding="utf-8") as file:
        file.write(json.dumps(line) + "\n")
    return path
