"""The pictures of docs/budget.md: ``python benchmarks/budget_plots.py [--runs DIR]`` writes docs/budget/*.svg.

All but the last are simulations of a known law; with `--runs` the curves of the benchmark are drawn too.
"""

from __future__ import annotations

import argparse
import itertools
import math
import sys
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
from numpy.typing import NDArray

matplotlib.use("svg")
matplotlib.rcParams["svg.hashsalt"] = "budget"
from matplotlib import pyplot as plt  # noqa: E402

from surogate_rl.rollouts.budget.credit import EpisodePlan, Outcome, step_credits  # noqa: E402
from surogate_rl.rollouts.budget.depth import DepthBudget, DepthSettings, Observed  # noqa: E402
from surogate_rl.rollouts.budget.grid import DepthGrid  # noqa: E402
from surogate_rl.rollouts.budget.incidence import DepthLaw  # noqa: E402

sys.path.insert(0, str(Path(__file__).resolve().parent))
PICTURES = Path(__file__).resolve().parents[1] / "docs" / "budget"
COLOURS = {"ours": "#0b6e4f", "truth": "#222222", "wrong": "#c1440e", "other": "#3a6ea5", "soft": "#a0a0a0", "width": "#8a5a9e"}
ARM_COLOURS = {"off": "truth", "depth": "other", "width": "width", "both": "ours", "known": "wrong"}
Doubles = NDArray[np.float64]


def ends(success: list[float], other: list[float]) -> Doubles:
    """[K, 2]: probabilities of ending in each cell, with success or otherwise; what is left fails in the last one."""
    table, left = np.zeros((len(success), 2)), 1.0
    for cell, (won, lost) in enumerate(zip(success, other, strict=True)):
        table[cell] = left * won, left * (1 - won if cell == len(success) - 1 else lost)
        left -= table[cell].sum()
    return table


def draw(table: Doubles, rng: np.random.Generator, count: int) -> list[tuple[int, bool]]:
    flat = rng.choice(table.size, size=count, p=table.reshape(-1))
    return [(int(place) // 2 + 1, place % 2 == 0) for place in flat]


def incidence() -> None:
    table = ends([0.08, 0.12, 0.12, 0.1, 0.07, 0.05, 0.04, 0.04, 0.03, 0.03, 0.03, 0.03], [0.05, 0.08, *[0.1] * 10])
    rng, cap, explore, count = np.random.default_rng(4), 4, 0.25, 500
    law, plain, seen = DepthLaw(12), DepthLaw(12), np.zeros(13)
    for cell, won in draw(table, rng, count):
        on = rng.random() < explore
        if cell <= cap:
            law.add_end(cell, success=won, reward=float(won))
        elif on:
            law.add_end(cell, success=won, reward=float(won), cap=cap, explore=explore)
        else:
            law.add_cut(cap)
        plain.add_end(cell, success=won, reward=float(won))
        if won and (cell <= cap or on):
            seen[cell:] += 1 / count
    depth = np.arange(13)
    found = [law.estimate().success_by(k) for k in range(1, 13)]
    naive = 1 - np.cumprod(1 - plain.success / np.maximum(plain.entered, 1))
    figure, axes = plt.subplots(figsize=(7, 3.8))
    axes.plot(depth, np.concatenate([[0], np.cumsum(table[:, 0])]), color=COLOURS["truth"], label="the law")
    axes.errorbar(
        depth[1:],
        [one.value for one in found],
        yerr=[[one.value - one.low for one in found], [one.high - one.value for one in found]],
        fmt="o",
        color=COLOURS["ours"],
        capsize=3,
        label="estimate, 95% limits",
    )
    axes.plot(depth[1:], naive, "--", color=COLOURS["wrong"], label="failures taken for censored")
    axes.plot(depth, seen, ":", color=COLOURS["other"], label="cut episodes taken for failures")
    axes.axvline(cap, color=COLOURS["soft"], linewidth=1)
    axes.text(cap + 0.1, 0.02, "cap", color=COLOURS["soft"])
    axes.set(xlabel="depth (turns)", ylabel="success by depth", xlim=(0, 12.3), ylim=(0, None))
    axes.set_title(f"{count} episodes, cut after turn {cap} but for a quarter", fontsize=10)
    axes.legend(frameon=False, fontsize=8, loc="lower right")
    save(figure, "incidence")


def shift() -> None:
    early = ends([0.25, 0.3, 0.2, 0.03, *[0.004] * 8], [0.02] * 12)
    late = ends([0.0, 0.02, 0.03, 0.05, 0.1, 0.2, 0.25, 0.3, 0.2, 0.02, 0.01, 0.01], [0.01] * 12)
    rng, steps, at = np.random.default_rng(3), 200, 100
    budget = DepthBudget(DepthSettings(), DepthGrid.of("turns", 12))
    ours, known, average = [], [], 12.0
    for step in range(steps):
        episodes, wins = [], []
        probe = step < 2 or step % 8 == 7
        limit = 12 if probe else math.ceil(average)
        known.append(min(average, 12.0))
        for place, (cell, won) in enumerate(draw(early if step < at else late, rng, 64)):
            plan = budget.plan(step * 64 + place, seed=step * 1_000_003 + place)
            reached = plan.cap is not None and cell > plan.cap
            cut = reached and not plan.went_on
            deep = plan.cap if cut and plan.cap is not None else cell
            episodes.append(Observed(0, plan, deep, reached, float(won and not cut), deep))
            if won and cell <= limit:
                wins.append(cell)
        ours.append(np.mean([12 if e.plan.cap is None else e.plan.cap for e in episodes]))
        if wins:
            quantile = float(np.quantile(wins, 0.8))
            average = quantile if step == 0 else 0.7 * average + 0.3 * quantile
        budget.observe(episodes)
    needed = [int(np.argmax(np.cumsum(t[:, 0]) >= 0.9 * t[:, 0].sum())) + 1 for t in (early, late)]
    figure, axes = plt.subplots(figsize=(7, 3.4))
    axes.plot([0, at, at, steps], [needed[0]] * 2 + [needed[1]] * 2, color=COLOURS["truth"], linewidth=1, label="depth of 90% of success")
    axes.plot(ours, color=COLOURS["ours"], label="cap")
    axes.plot(known, color=COLOURS["wrong"], linewidth=1, label="0.8 quantile of successes under its own cap")
    axes.set(xlabel="step", ylabel="turns", ylim=(0, 12.5), xlim=(0, steps))
    axes.set_title("After 100 steps success moves from turn 2 to turn 7", fontsize=10)
    axes.legend(frameon=False, fontsize=8)
    save(figure, "shift")


ENDS = {"000": 1.0, "001": 0.0, "10": 0.25, "111": 1.0, "0100": 0.0, "0101": 1.0, "0110": 1.0, "0111": 0.0}
ENDS |= {"1100": 0.0, "1101": 1.0}
LOGITS = {"": 0.3, "0": -0.4, "1": 0.8, "00": 0.1, "01": -0.9, "11": 0.2, "010": -1.1, "011": 0.7, "110": 0.4}


def noise() -> None:
    """Exact standard deviation of the gradient of a group of two, over e, in the example of the tests."""
    cap = 2

    def one(state: str) -> float:
        return 1 / (1 + math.exp(-LOGITS[state]))

    chance = {a: math.prod(one(a[:i]) if c == "1" else 1 - one(a[:i]) for i, c in enumerate(a)) for a in ENDS}
    score = {a: np.array([sum(((c == "1") - one(a[:i])) * (a[:i] == state) for i, c in enumerate(a)) for state in LOGITS]) for a in ENDS}
    early = np.array([len(state) < cap for state in LOGITS])
    beyond = sum(chance[a] for a in ENDS if len(a) > cap)
    value = sum(chance[a] * r for a, r in ENDS.items() if len(a) > cap) / beyond
    exact = sum(chance[a] * r * score[a] for a, r in ENDS.items())

    def spread(explore: float, v: float) -> float:
        total = 0.0
        options = [(a, g, chance[a] * (explore if g else 1 - explore)) for a in ENDS for g in (True, False)]
        options = [option for option in options if option[2] > 0]
        for pair in itertools.product(options, repeat=2):
            outcomes = [
                Outcome(
                    EpisodePlan(cap=cap if explore < 1 else None, explore=explore, went_on=g, value=v),
                    ENDS[a],
                    explore < 1 and len(a) > cap,
                )
                for a, g, _ in pair
            ]
            (credits,) = step_credits([outcomes])
            gradient = np.zeros(len(LOGITS))
            for (a, g, _), credit in zip(pair, credits, strict=True):
                cut = explore < 1 and len(a) > cap and not g
                gradient += np.where(early, credit.before, 0.0 if cut else credit.after) * score[a] / 2
            total += pair[0][2] * pair[1][2] * float(((gradient - exact) ** 2).sum())
        return math.sqrt(total)

    grid = np.array([0.05, 0.075, 0.1, 0.15, 0.2, 0.25, 0.35, 0.5, 0.7, 0.9])
    plain = spread(1.0, 0.0)
    figure, axes = plt.subplots(figsize=(7, 3.4))
    axes.plot(grid, [spread(e, value) / plain for e in grid], "o-", color=COLOURS["ours"], label="V right")
    axes.plot(grid, [spread(e, 0.0) / plain for e in grid], "o-", color=COLOURS["wrong"], label="V = 0")
    axes.axhline(1, color=COLOURS["soft"], linewidth=1)
    axes.set(xlabel="e, the probability of going on", ylabel="noise / that without a cap", xscale="log", ylim=(0, None))
    axes.set_xticks([0.05, 0.1, 0.25, 0.5, 0.9], ["0.05", "0.1", "0.25", "0.5", "0.9"])
    axes.minorticks_off()
    axes.set_title(f"Exact; {beyond:.0%} of the episodes reach the cap, and succeed then with {value:.2f}", fontsize=10)
    axes.legend(frameon=False, fontsize=8)
    save(figure, "noise")


def benchmark(runs: Path) -> None:
    from budget_report import BELOW, Arm, load, price_of

    found = load(runs / "runs.jsonl")
    names = [name for name in ("keypad", "letters", "sorting") if name in found]
    figure, all_axes = plt.subplots(1, len(names), figsize=(4 * len(names), 3.6), squeeze=False)
    for axes, name in zip(all_axes[0], names, strict=True):
        by_arm: dict[str, dict[int, Any]] = found[name]
        price = price_of(runs, name)
        for arm, colour in ARM_COLOURS.items():
            if arm in by_arm:
                one = Arm(list(by_arm[arm].values()), price)
                mean, cost = one.reward.mean(axis=0), one.costs["tokens"].mean(axis=0)
                error = one.reward.std(axis=0, ddof=1) / math.sqrt(len(one.reward)) if len(one.reward) > 1 else np.zeros_like(mean)
                axes.plot(cost, mean, color=COLOURS[colour], label=arm)
                axes.fill_between(cost, mean - error, mean + error, color=COLOURS[colour], alpha=0.12, linewidth=0)
                if arm == "off":
                    axes.axhline(one.late.mean() - BELOW, color=COLOURS["soft"], linewidth=1)
        axes.set(xlabel="tokens, at a price in seconds", title=f"{name} ({len(by_arm['off'])} seeds)")
    all_axes[0][0].set_ylabel("held-out reward")
    all_axes[0][0].legend(frameon=False, fontsize=8)
    save(figure, "benchmark")


def save(figure: Any, name: str) -> None:
    PICTURES.mkdir(parents=True, exist_ok=True)
    figure.tight_layout()
    figure.savefig(PICTURES / f"{name}.svg", metadata={"Date": None})
    figure.savefig(f"/tmp/budget-{name}.png", dpi=80) if "--png" in sys.argv else None
    plt.close(figure)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=Path)
    parser.add_argument("--png", action="store_true", help="pictures to look at in /tmp too")
    arguments = parser.parse_args()
    incidence()
    shift()
    noise()
    if arguments.runs is not None:
        benchmark(arguments.runs)
