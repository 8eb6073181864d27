"""Line charts as SVG text, coloured by the page's CSS variables."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from html import escape
from itertools import pairwise

from surogate_rl.console import format_number

WIDTH, HEIGHT = 380, 190
LEFT, RIGHT, TOP, BOTTOM = 52, 10, 10, 24
MAX_POINTS = 300
SMOOTH_FROM = 60

Point = tuple[int, float | None]
Scale = Callable[[float], float]


def ticks(low: float, high: float, count: int = 4) -> list[float]:
    """Round numbers (1, 2, 5 times a power of ten) within [low, high], about ``count`` of them."""
    raw = (high - low) / max(count, 1)
    if not raw > 0 or not math.isfinite(raw):
        return [low]
    power = 10.0 ** math.floor(math.log10(raw))
    step = next(power * factor for factor in (1, 2, 5, 10) if power * factor >= raw * 0.999)
    first = math.ceil(low / step - 1e-9)
    last = math.floor(high / step + 1e-9)
    return [round(index * step, 12) for index in range(first, last + 1)]


def tick_label(value: float) -> str:
    """Short enough for the margin: ``0.25``, ``5e-07``, ``20k``, ``1.5M``, ``3B``."""
    for size, unit in ((1e9, "B"), (1e6, "M"), (1e4, "k")):
        if abs(value) >= size:
            return f"{value / min(size, 1e3 if unit == 'k' else size):.4g}{unit}"
    return f"{value:.4g}"


def running_mean(points: Sequence[Point], window: int) -> list[Point]:
    """The mean of the finite values among the ``window`` points around each point (fewer at the ends)."""
    smooth: list[Point] = []
    for index, (step, _) in enumerate(points):
        near = [value for _, value in points[max(0, index - window // 2) : index + window // 2 + 1] if value is not None]
        smooth.append((step, sum(near) / len(near) if near else None))
    return smooth


def is_noisy(points: Sequence[Point]) -> bool:
    """Whether a long curve goes up and down so much that its course is hard to see."""
    values = [value for _, value in points if value is not None]
    if len(values) < SMOOTH_FROM:
        return False
    return sum(abs(after - before) for before, after in pairwise(values)) > 8 * (max(values) - min(values))


def bounds(values: Sequence[float]) -> tuple[float, float]:
    """A range around the values, never empty."""
    low, high = min(values), max(values)
    if low == high:
        margin = abs(low) * 0.1 or 1.0
        return low - margin, high + margin
    margin = (high - low) * 0.05
    return low - margin, high + margin


def reduce(points: Sequence[Point], limit: int = MAX_POINTS) -> tuple[list[Point], list[tuple[int, float, float]]]:
    """At most ``limit`` points: means of equal shares, with the (step, lowest, highest) of each share, empty if none were joined."""
    if len(points) <= limit:
        return list(points), []
    means: list[Point] = []
    band: list[tuple[int, float, float]] = []
    for index in range(limit):
        share = points[index * len(points) // limit : (index + 1) * len(points) // limit]
        step = share[len(share) // 2][0]
        values = [value for _, value in share if value is not None]
        means.append((step, sum(values) / len(values) if values else None))
        if values:
            band.append((step, min(values), max(values)))
    return means, band


def line_chart(title: str, points: Sequence[Point]) -> str:
    """A card with the metric's name, its last value and its course over the steps. Gaps are where it was not finite."""
    finite = [value for _, value in points if value is not None]
    last = format_number(finite[-1]) if finite else "no finite value"
    head = f'<figcaption><span class="name">{escape(title)}</span><span class="last">{escape(last)}</span></figcaption>'
    if not finite:
        return f'<figure class="chart">{head}</figure>'
    smoothed = is_noisy(points)
    shown, band = reduce(points)
    x_low, x_high = min(step for step, _ in points), max(step for step, _ in points)
    if x_low == x_high:
        x_low, x_high = x_low - 1, x_high + 1
    y_low, y_high = bounds(finite)

    def x(step: float) -> float:
        return LEFT + (step - x_low) / (x_high - x_low) * (WIDTH - LEFT - RIGHT)

    def y(value: float) -> float:
        return TOP + (y_high - value) / (y_high - y_low) * (HEIGHT - TOP - BOTTOM)

    def path(run: Sequence[tuple[int, float]]) -> str:
        return " ".join(f"{x(step):.1f},{y(value):.1f}" for step, value in run)

    parts = [*_axes(x_low, x_high, y_low, y_high, x, y)]
    if band:
        edge = [f"{x(step):.1f},{y(high):.1f}" for step, _, high in band] + [
            f"{x(step):.1f},{y(low):.1f}" for step, low, _ in reversed(band)
        ]
        parts.append(f'<polygon class="band" points="{" ".join(edge)}"/>')
    runs = _runs(shown)
    for run in runs:
        if len(run) > 1:
            parts.append(f'<polyline class="{"line raw" if smoothed else "line"}" points="{path(run)}"/>')
    if smoothed:
        mean = [(step, value) for step, value in reduce(running_mean(points, len(points) // 20))[0] if value is not None]
        parts.append(f'<polyline class="line" points="{path(mean)}"/>')
    if len(finite) <= 40:
        parts += [f'<circle class="dot" cx="{x(step):.1f}" cy="{y(value):.1f}" r="2.2"/>' for run in runs for step, value in run]
    elif single := [run[0] for run in runs if len(run) == 1]:
        parts += [f'<circle class="dot" cx="{x(step):.1f}" cy="{y(value):.1f}" r="2.2"/>' for step, value in single]
    data = ";".join(f"{step},{x(step):.1f},{y(value):.1f},{format_number(value)}" for run in runs for step, value in run)
    label = escape(f"{title} over steps {points[0][0]} to {points[-1][0]}, last {last}", quote=True)
    svg = f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{label}" data-points="{data}">{"".join(parts)}</svg>'
    return f'<figure class="chart">{head}{svg}</figure>'


def _runs(points: Sequence[Point]) -> list[list[tuple[int, float]]]:
    """Stretches without a gap."""
    runs: list[list[tuple[int, float]]] = [[]]
    for step, value in points:
        if value is None:
            runs.append([])
        else:
            runs[-1].append((step, value))
    return [run for run in runs if run]


def _axes(x_low: float, x_high: float, y_low: float, y_high: float, x: Scale, y: Scale) -> list[str]:
    parts = []
    for value in ticks(y_low, y_high):
        parts.append(f'<line class="grid" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y(value):.1f}" y2="{y(value):.1f}"/>')
        parts.append(f'<text class="tick" x="{LEFT - 6}" y="{y(value) + 3.5:.1f}" text-anchor="end">{tick_label(value)}</text>')
    for value in ticks(x_low, x_high, 5):
        if value == int(value):
            parts.append(f'<text class="tick" x="{x(value):.1f}" y="{HEIGHT - 7}" text-anchor="middle">{tick_label(value)}</text>')
    return parts
