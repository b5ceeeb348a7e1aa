"""Measured steps of an engine, which calibrate a simulation. The module handles sizes and seconds, no engine."""

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from statistics import median
from typing import Any

KIND = "steps"
FIELDS = ("rows", "tokens", "keys", "pairs", "seconds")


@dataclass(frozen=True)
class StepPoint:
    """A step: `keys` attended to by decode rows, `pairs` of a query and a key in prefill rows."""

    rows: int
    tokens: int
    keys: float
    pairs: float
    seconds: float


@dataclass(frozen=True)
class TimedTurn:
    """One iteration of the engine loop: its step, and processor time outside of the step."""

    point: StepPoint
    host: float  # seconds


def summarize(turns: Iterable[tuple[Any, TimedTurn]]) -> list[StepPoint]:
    """Return the median step of the turns with the same label."""
    groups: dict[Any, list[StepPoint]] = defaultdict(list)
    for label, turn in turns:
        groups[label].append(turn.point)
    return [
        StepPoint(
            points[0].rows,
            points[0].tokens,
            sum(point.keys for point in points) / len(points),
            sum(point.pairs for point in points) / len(points),
            median(point.seconds for point in points),
        )
        for points in groups.values()
    ]


def host_times(turns: Iterable[TimedTurn]) -> tuple[float, float]:
    """Return processor seconds per step and per row: the line through the medians of the fewest and the most rows."""
    return _line((turn.point.rows, turn.host) for turn in turns)


def _line(points: Iterable[tuple[int, float]]) -> tuple[float, float]:
    groups: dict[int, list[float]] = defaultdict(list)
    for count, seconds in points:
        groups[count].append(max(0.0, seconds))
    if not groups:
        return 0.0, 0.0
    few, many = min(groups), max(groups)
    least, most = median(groups[few]), median(groups[many])
    row = max(0.0, (most - least) / (many - few)) if many > few else 0.0
    return max(0.0, least - few * row), row


def admission_times(turns: Iterable[tuple[int, float]], host: tuple[float, float]) -> tuple[float, float]:
    """Return the additional processor seconds of a step with new requests, and of each of them.

    turns: (new requests of a step without other rows, seconds)
    host: of `host_times`
    """
    return _line((count, seconds - host[0] - host[1] * count) for count, seconds in turns)


def as_json(points: Iterable[StepPoint]) -> list[dict[str, Any]]:
    return [asdict(point) for point in points]


def lines(points: Iterable[StepPoint], host: tuple[float, float], admission: tuple[float, float]) -> list[str]:
    found = [f"{'rows':>6}{'tokens':>8}{'keys':>10}{'pairs':>12}{'ms':>10}"]
    found += [f"{p.rows:>6}{p.tokens:>8}{p.keys:>10,.0f}{p.pairs:>12,.0f}{1000 * p.seconds:>10.3f}" for p in points]
    text = f"processor time outside of a step: {1e6 * host[0]:.0f} µs, and {1e6 * host[1]:.2f} µs for each row"
    return [
        *found,
        f"{text}; {1e6 * admission[0]:.0f} µs more with new requests, and {1e6 * admission[1]:.0f} µs for each of them",
    ]
