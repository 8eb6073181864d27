"""How two programs are compared on a machine whose speed wanders.

Virtual CPUs flip between one and two effective cores within seconds, so a time alone says little. Ours and the peer run in processes
of their own and take turns; a matrix product is timed before and after each pair. Pairs whose probes fall below 90% of the best one are
dropped and the ratio is the median over those that stay; where too few stay, `summary` says what is taken instead. The raw pairs are kept.
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
Pair = dict[str, Any]  # ours_s, peer_s, and the probes before and after


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
    """GFLOP/s of a float32 matrix product right now, by numpy's BLAS on all cores: the median of some ten, so that one hiccup of a few
    milliseconds does not look like a core that is gone."""
    a = np.ones((size, size), dtype=np.float32)
    b = np.ones((size, size), dtype=np.float32)
    taken: list[float] = []
    while sum(taken) < seconds:
        started = time.perf_counter()
        np.matmul(a, b)
        taken.append(time.perf_counter() - started)
    return 2e-9 * size**3 / statistics.median(taken)


def compare(ours: Worker, peer: Worker, pairs: int) -> dict[str, Any]:
    """Runs pairs until `pairs` of them are good (or `MOST_PAIRS` in all); the result is `summary`'s."""
    raw: list[Pair] = []
    peaks: dict[str, float] = {}
    probe = gemm_rate()
    while len(raw) < MOST_PAIRS and len(good_ones(raw)) < pairs:
        first, second = (ours, peer) if len(raw) % 2 == 0 else (peer, ours)
        results = {first.side: first.go(), second.side: second.go()}
        after = gemm_rate()
        pair = {"ours_s": results["ours"]["seconds"], "peer_s": results["peer"]["seconds"], "gflops": [round(probe, 1), round(after, 1)]}
        probe = after
        raw.append(pair)
        peaks = {side: result["peak_bytes"] / 1e9 for side, result in results.items()}
        print(
            f"{ours.bench} pair {len(raw)}: ours {pair['ours_s']:.3f} s, peer {pair['peer_s']:.3f} s, probes {pair['gflops']} GFLOP/s; "
            f"{len(good_ones(raw))} of {pairs} good",
            file=sys.stderr,
            flush=True,
        )
    return summary(raw, pairs) | {"ours_peak_gb": peaks["ours"], "peer_peak_gb": peaks["peer"], "pairs": raw}


def good_ones(raw: Sequence[Pair]) -> list[Pair]:
    """Those with probes of at least `KEPT` of the best on either side."""
    best = max((max(pair["gflops"]) for pair in raw), default=0.0)
    return [pair for pair in raw if min(pair["gflops"]) >= KEPT * best]


def summary(raw: Sequence[Pair], pairs: int) -> dict[str, Any]:
    """Ratios are peer seconds / our seconds: above 1 we are faster.

    The ratio is the median over the good pairs where there are `pairs` of them. On a host that never keeps still that long it is the lower
    of two that need no quiet pair: the median over all pairs, and each side's fastest tenth (its tenth percentile) against the other's.
    """
    good, ours, peer = good_ones(raw), [pair["ours_s"] for pair in raw], [pair["peer_s"] for pair in raw]
    ratios = np.array(peer) / np.array(ours)
    medians = np.median(np.random.default_rng(0).choice(ratios, (4000, len(ratios))), axis=1)
    fastest = [float(np.quantile(times, 0.1)) for times in (ours, peer)]
    quiet = len(good) >= pairs
    if quiet:
        ours, peer = [pair["ours_s"] for pair in good], [pair["peer_s"] for pair in good]
        ratio, rule = statistics.median(b / a for a, b in zip(ours, peer, strict=True)), "median of the good pairs"
    else:
        ratio, rule = min((float(np.median(ratios)), "median of all pairs"), (fastest[1] / fastest[0], "fastest tenths"))
    return {
        "ours_s": statistics.median(ours) if rule != "fastest tenths" else fastest[0],
        "peer_s": statistics.median(peer) if rule != "fastest tenths" else fastest[1],
        "ratio": ratio,
        "rule": rule,
        "ratio_of_all": float(np.median(ratios)),
        "ratio_of_all_95": np.quantile(medians, [0.025, 0.975]).tolist(),
        "ratio_of_fastest": fastest[1] / fastest[0],
        "good_pairs": len(good),
        "gemm_gflops": max(max(pair["gflops"]) for pair in raw),
    }


def machine() -> str:
    name = platform.processor() or platform.machine()
    for line in Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").exists() else []:
        if line.startswith("model name"):
            name = line.split(":", 1)[1].strip()
            break
    import os

    return f"{name}, {os.cpu_count()} cores, {platform.system()}"


def record(line: dict[str, Any], kind: str = "cpu") -> Path:
    """Appends a line to today's file of results of that kind."""
    RESULTS.mkdir(exist_ok=True)
    path = RESULTS / f"{date.today().isoformat()}-{kind}.jsonl"
    with path.open("a", encoding="utf-8") as file:
        file.write(json.dumps(line) + "\n")
    return path
