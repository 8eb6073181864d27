"""A curve in the terminal, and the same as a picture."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

Points = Sequence[tuple[int, float]]


def terminal_plot(points: Points, title: str, width: int = 60, height: int = 12) -> str:
    """Values from 0 to 1 over steps, in plain characters."""
    rows = [[" "] * width for _ in range(height)]
    last = max((step for step, _ in points), default=1)
    for step, value in points:
        column = min(width - 1, round((step - 1) / max(1, last - 1) * (width - 1)))
        row = min(height - 1, max(0, round((1.0 - value) * (height - 1))))
        rows[row][column] = "*"
    lines = [title]
    for number, row in enumerate(rows):
        label = f"{1.0 - number / (height - 1):4.2f}" if number % 3 == 0 or number == height - 1 else "    "
        lines.append(f"{label} |{''.join(row)}")
    lines.append("     +" + "-" * width)
    lines.append(f"      1{str(last).rjust(width - 1)}")
    return "\n".join(lines)


def write_svg(path: Path, curves: Mapping[str, Points], width: int = 640, height: int = 320) -> Path:
    """Curves of values between 0 and 1 over steps, with a legend; readable on light and dark pages."""
    left, right, top, bottom = 48, 16, 36, 36
    last = max((step for points in curves.values() for step, _ in points), default=1) or 1
    colours = ["#2a78d6", "#d9822b", "#3a9d5d", "#8e5bc0"]

    def place(step: int, value: float) -> str:
        x = left + (width - left - right) * step / last
        y = top + (height - top - bottom) * (1.0 - value)
        return f"{x:.1f},{y:.1f}"

    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" font-family="sans-serif" font-size="12">',
        f'<rect width="{width}" height="{height}" fill="#ffffff"/>',
    ]
    for tick in (0.0, 0.25, 0.5, 0.75, 1.0):
        x1, y = place(0, tick).split(",")
        parts.append(f'<line x1="{x1}" x2="{width - right}" y1="{y}" y2="{y}" stroke="#dddddd"/>')
        parts.append(f'<text x="{left - 8}" y="{float(y) + 4:.1f}" text-anchor="end" fill="#444444">{tick:.2f}</text>')
    parts.append(f'<text x="{width - right}" y="{height - 10}" text-anchor="end" fill="#444444">step {last}</text>')
    for number, (name, points) in enumerate(curves.items()):
        colour = colours[number % len(colours)]
        line = " ".join(place(step, value) for step, value in points)
        parts.append(f'<polyline points="{line}" fill="none" stroke="{colour}" stroke-width="2"/>')
        parts.append(f'<text x="{left + 160 * number}" y="20" fill="{colour}">{name}</text>')
    parts.append("</svg>")
    path.write_text("\n".join(parts) + "\n", encoding="utf-8")
    return path
