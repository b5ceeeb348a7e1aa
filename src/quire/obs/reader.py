"""Metrics as objects, for programs that hold the engine in their hands (`LLM.get_metrics`). The classes are vLLM's."""

from collections.abc import Iterator
from dataclasses import dataclass

from quire.obs import instruments


@dataclass
class Metric:
    """`labels` have the model's name and the engine's number, and the metric's own."""

    name: str
    labels: dict[str, str]


@dataclass
class Counter(Metric):
    value: int


@dataclass
class Vector(Metric):
    """Counters that belong together, such as one per position."""

    values: list[int]


@dataclass
class Gauge(Metric):
    value: float


@dataclass
class Histogram(Metric):
    """`buckets`: upper end -> how many were at most that; the last one is +Inf."""

    count: int
    sum: float
    buckets: dict[str, int]


def read(board: instruments.Board) -> list[Metric]:
    return [metric for instrument in board.instruments for metric in _of(instrument, board)]


def _of(instrument: instruments.Instrument, board: instruments.Board) -> Iterator[Metric]:
    name = board.prefix + instrument.name

    def labelled(own: instruments.Labels) -> dict[str, str]:
        return {**board.shared, **dict(zip(instrument.labels, own, strict=True))}

    match instrument:
        case instruments.Counter():
            for own, value in instrument.values.items():
                yield Counter(name, labelled(own), int(value))
        case instruments.Gauge():
            for own, value in instrument.values.items():
                yield Gauge(name, labelled(own), value)
        case instruments.Histogram():
            for own, found in instrument.values.items():
                buckets = {end: int(count) for end, count in instrument.buckets(found)}
                yield Histogram(name, labelled(own), buckets["+Inf"], found.sum, buckets)
