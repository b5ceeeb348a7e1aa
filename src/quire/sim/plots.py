"""Line plots as SVG text: axes with round numbers, a line for each series. Colours are the page's (`page.py`)."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

WIDTH, HEIGHT = 460, 240
LEFT, RIGHT, TOP, BOTTOM = 58, 12, 26, 36
TICKS = 5


@dataclass(frozen=True)
class Line:
    name: str
    xs: Sequence[float]
    ys: Sequence[float]


def plot(
    title: str, x_name: str, y_name: str, lines: Sequence[Line], y_top: float | None = None, mark: float | None = None
) -> str:
    """`mark` is a value of x that is shown by a line of its own."""
    x_ticks = ticks(max([*(max(line.xs, default=0.0) for line in lines), mark or 0.0]))
    y_ticks = ticks(y_top if y_top is not None else max(max(line.ys, default=0.0) for line in lines))
    x_most, y_most = x_ticks[-1], y_ticks[-1]

    def x(value: float) -> float:
        return LEFT + (WIDTH - LEFT - RIGHT) * min(value, x_most) / x_most

    def y(value: float) -> float:
        return HEIGHT - BOTTOM - (HEIGHT - TOP - BOTTOM) * min(value, y_most) / y_most

    parts = [f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{escape(title)}">']
    parts.append(f'<text class="title" x="{LEFT}" y="14">{escape(title)}</text>')
    for value in y_ticks:
        parts.append(f'<line class="grid" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y(value):.1f}" y2="{y(value):.1f}"/>')
        parts.append(f'<text class="y" x="{LEFT - 6}" y="{y(value) + 3:.1f}">{number(value)}</text>')
    for value in x_ticks:
        parts.append(f'<text class="x" x="{x(value):.1f}" y="{HEIGHT - BOTTOM + 14}">{number(value)}</text>')
    parts.append(f'<text class="x" x="{(LEFT + WIDTH - RIGHT) / 2:.0f}" y="{HEIGHT - 6}">{escape(x_name)}</text>')
    middle = (TOP + HEIGHT - BOTTOM) / 2
    parts.append(f'<text class="x" transform="translate(12 {middle:.0f}) rotate(-90)">{escape(y_name)}</text>')
    if mark is not None:
        parts.append(f'<line class="mark" x1="{x(mark):.1f}" x2="{x(mark):.1f}" y1="{TOP}" y2="{HEIGHT - BOTTOM}"/>')
    for place, line in enumerate(lines):
        points = " ".join(f"{x(a):.1f},{y(b):.1f}" for a, b in zip(line.xs, line.ys, strict=True))
        parts.append(f'<polyline class="s{place}" points="{points}"/>')
        if len(lines) > 1:
            at = WIDTH - RIGHT - 90 * (len(lines) - place)
            parts.append(f'<text class="key s{place}" x="{at}" y="14">{escape(line.name)}</text>')
    return "".join(parts) + "</svg>"


def ticks(most: float) -> list[float]:
    """From 0 to a round number that is no less than `most`."""
    if not most > 0:
        return [0.0, 1.0]
    raw = most / TICKS
    power = 10.0 ** math.floor(math.log10(raw))
    step = next(round_one * power for round_one in (1, 2, 2.5, 5, 10) if round_one * power >= raw * (1 - 1e-9))
    return [step * i for i in range(math.ceil(most / step - 1e-9) + 1)]


def number(value: float) -> str:
    for unit, size in (("M", 1e6), ("k", 1e3)):
        if value >= 10 * size or (value >= size and value % size == 0):
            return f"{value / size:g}{unit}"
    return f"{value:.6g}"
