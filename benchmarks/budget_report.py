"""From the runs of `budget.py` to figures: cost to reach the target, where runs end, and how sure that is."""

from __future__ import annotations

import json
import platform
from collections import defaultdict
from collections.abc import Iterator, Sequence
from datetime import date
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

RESAMPLINGS, BELOW, LAST = 2000, 0.02, 3
COMMAND = "python benchmarks/budget.py all --work DIR && python benchmarks/budget.py calibrate --work DIR && "
COMMAND += "python benchmarks/budget.py report --work DIR"
Doubles = NDArray[np.float64]


class Arm:
    """The runs of one arm on one task, a row for each of `seeds`.

    Attributes:
        reward: [seeds, evaluations], means over three evaluations.
        costs: by measure, [seeds, evaluations]: spent until each.
        late: [seeds], mean of the last quarter of the evaluations.
    """

    def __init__(self, runs: Sequence[dict[str, Any]], prices: tuple[float, float]) -> None:
        raw = np.array([[value for _, value in run["evaluations"]] for run in runs])
        self.reward = np.stack([_smooth(row) for row in raw])
        self.late = raw[:, -max(raw.shape[1] // 4, 1) :].mean(axis=1)
        at = [step for step, _ in runs[0]["evaluations"]]
        spent = [np.array(run["sampled_tokens"]) * prices[0] + np.array(run["trained_tokens"]) * prices[1] for run in runs]
        self.costs = {
            "tokens": np.stack([_until(row, at) for row in spent]),
            "cpu": np.stack([_until(np.array(run["cpu_seconds"]), at) for run in runs]),
            "wall": np.stack([_until(np.array(run["seconds"]), at) for run in runs]),
        }

    def to_reach(self, target: float, measure: str, rows: Sequence[int] | None = None) -> float:
        """Cost at which the mean curve first reaches `target`; infinite if it does not."""
        chosen = list(range(len(self.reward))) if rows is None else list(rows)
        curve, cost = self.reward[chosen].mean(axis=0), self.costs[measure][chosen].mean(axis=0)
        above = np.flatnonzero(curve >= target)
        if above.size == 0:
            return float("inf")
        first = int(above[0])
        if first == 0:
            return float(cost[0])
        part = (target - curve[first - 1]) / (curve[first] - curve[first - 1])
        return float(cost[first - 1] + part * (cost[first] - cost[first - 1]))


def _smooth(row: Doubles) -> Doubles:
    return np.array([row[max(0, i - 1) : i + 2].mean() for i in range(row.size)])


def _until(steps: Doubles, at: Sequence[int]) -> Doubles:
    return np.concatenate([[0.0], np.cumsum(steps)])[list(at)]


def load(path: Path) -> dict[str, dict[str, dict[int, dict[str, Any]]]]:
    """By task, arm and seed."""
    found: dict[str, dict[str, dict[int, dict[str, Any]]]] = defaultdict(lambda: defaultdict(dict))
    for line in path.read_text(encoding="utf-8").splitlines():
        run = json.loads(line)
        found[run["task"]][run["arm"]][run["seed"]] = run
    return found


def prices(runs: Sequence[dict[str, Any]]) -> tuple[float, float]:
    """Seconds of CPU for a sampled and for a trained token: least squares over all steps, what a step costs anyway taken apart."""
    sampled, trained, seconds = (
        np.concatenate([np.array(run[name][1:]) for run in runs]) for name in ("sampled_tokens", "trained_tokens", "cpu_seconds")
    )
    table = np.stack([sampled, trained, np.ones_like(sampled)], axis=1)
    usual = seconds < np.quantile(seconds, 0.98)  # steps that the machine held up
    (sample, train, _), *_ = np.linalg.lstsq(table[usual], seconds[usual], rcond=None)
    if train <= 0 or sample <= 0:  # they go together too closely to be told apart: one price for both
        ratio = seconds[usual].sum() / (sampled[usual].sum() + trained[usual].sum())
        return float(ratio), float(ratio)
    return float(sample), float(train)


def price_of(work: Path, task: str) -> tuple[float, float]:
    """From the calibration on a quiet machine, or where there is none from all runs."""
    path = work / "calibration.jsonl"
    found = load(path if path.exists() else work / "runs.jsonl")[task]
    return prices([run for runs in found.values() for run in runs.values()])


def report(work: Path) -> Iterator[dict[str, Any]]:
    for task, by_arm in sorted(load(work / "runs.jsonl").items()):
        price = price_of(work, task)
        off = Arm(list(by_arm["off"].values()), price)
        target = float(off.late.mean()) - BELOW
        for name, runs in by_arm.items():
            for peer in ("off", "known", "known_longer"):
                if peer in by_arm and peer != name:
                    yield from _costs(task, (name, runs), (peer, by_arm[peer]), target, price)
            if name != "off":
                yield _spent(task, (name, runs), by_arm["off"], target, price)
                yield _final(task, (name, runs), by_arm["off"], target)


def _common(seeds: Sequence[int], target: float) -> dict[str, Any]:
    return {
        "machine": f"{platform.processor() or platform.machine()}, 2 cores, shared",
        "date": date.today().isoformat(),
        "command": COMMAND,
        "seeds": len(seeds),
        "target": round(target, 4),
    }


def _costs(
    task: str,
    own: tuple[str, dict[int, dict[str, Any]]],
    other: tuple[str, dict[int, dict[str, Any]]],
    target: float,
    price: tuple[float, float],
) -> Iterator[dict[str, Any]]:
    """What both arms spend until the target, over the seeds that both have."""
    seeds = sorted(own[1].keys() & other[1].keys())
    arm, peer = (Arm([runs[seed] for seed in seeds], price) for runs in (own[1], other[1]))
    for measure, unit in (("tokens", "CPU seconds to the target by tokens at a fitted price"), ("cpu", "CPU seconds to the target")):
        ours, theirs = arm.to_reach(target, measure), peer.to_reach(target, measure)
        reached = bool(np.isfinite(theirs))
        least = theirs if reached else float(peer.costs[measure][:, -1].mean())
        line = {
            "bench": f"budget_{task}_{own[0]}_over_{other[0]}_{measure}",
            "ours": round(ours, 3) if np.isfinite(ours) else None,
            "peer": round(least, 3),
            "ratio": round(least / ours, 3) if np.isfinite(ours) else None,
            "unit": unit,
            "ratio_range": _limits(arm, peer, target, measure),
            "peer_reached": reached,
        }
        if measure == "tokens":
            line["price_us"] = [round(value * 1e6, 2) for value in price]
        yield line | _common(seeds, target)


def _spent(
    task: str, own: tuple[str, dict[int, dict[str, Any]]], off: dict[int, dict[str, Any]], target: float, price: tuple[float, float]
) -> dict[str, Any]:
    """Tokens of as many steps as `off` has, seed by seed: what a step saves, whatever becomes of the reward (see the line `final`)."""
    seeds = sorted(own[1].keys() & off.keys())
    count = len(off[seeds[0]]["sampled_tokens"])
    ours, plain = (
        np.array([sum(runs[s]["sampled_tokens"][:count]) * price[0] + sum(runs[s]["trained_tokens"][:count]) * price[1] for s in seeds])
        for runs in (own[1], off)
    )
    ratios = plain / ours
    return {
        "bench": f"budget_{task}_{own[0]}_over_off_spent",
        "ours": round(float(ours.mean()), 3),
        "peer": round(float(plain.mean()), 3),
        "ratio": round(float(plain.mean() / ours.mean()), 3),
        "unit": "CPU seconds for all steps by tokens at a fitted price",
        "ratio_range": [round(float(ratios.min()), 3), round(float(ratios.max()), 3)],
    } | _common(seeds, target)


def _final(task: str, own: tuple[str, dict[int, dict[str, Any]]], off: dict[int, dict[str, Any]], target: float) -> dict[str, Any]:
    """Means of three evaluations after as many steps as `off` has."""
    seeds = sorted(own[1].keys() & off.keys())
    count = len(off[seeds[0]]["evaluations"])
    ours, plain = (
        np.array([[v for _, v in runs[s]["evaluations"]][count - LAST : count] for s in seeds]).mean(axis=1) for runs in (own[1], off)
    )
    difference = ours - plain
    error = float(difference.std(ddof=1) / np.sqrt(difference.size)) if difference.size > 1 else float("nan")
    return {
        "bench": f"budget_{task}_{own[0]}_final",
        "ours": round(float(ours.mean()), 4),
        "peer": round(float(plain.mean()), 4),
        "ratio": None,
        "unit": "held-out reward at the end, against off",
        "difference": round(float(difference.mean()), 4),
        "difference_low": round(float(difference.mean()) - _t(difference.size) * error, 4),
        "by_seed": [round(float(value), 4) for value in ours],
    } | _common(seeds, target)


def _limits(ours: Arm, peer: Arm, target: float, measure: str) -> list[float | None]:
    """95% limits of the ratio over resampled seeds; what is not reached counts as all that was spent (for ours: as a ratio of 0)."""
    rng, ratios = np.random.default_rng(0), []
    count = len(ours.reward)
    for _ in range(RESAMPLINGS):
        rows = rng.integers(0, count, size=count).tolist()
        own, other = ours.to_reach(target, measure, rows), peer.to_reach(target, measure, rows)
        if not np.isfinite(other):
            other = float(peer.costs[measure][rows, -1].mean())
        ratios.append(other / own if np.isfinite(own) and own > 0 else 0.0)
    low, high = np.quantile(ratios, [0.025, 0.975])
    return [round(float(low), 3), round(float(high), 3)]


def _t(count: int) -> float:
    """Two-sided 95% quantile of Student's t, by its expansion around the normal one (Hill 1970); within 0.5% from 5 runs on."""
    z, n = 1.959964, count - 1
    return (
        z + (z**3 + z) / (4 * n) + (5 * z**5 + 16 * z**3 + 3 * z) / (96 * n**2) + (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / (384 * n**3)
    )
