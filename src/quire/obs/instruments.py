"""Counters, gauges, histograms and summaries as plain numbers, made into Prometheus families only when somebody asks.

They are written on the event loop and read there, so they need no locks: an observation is a search and an addition.
"""

from abc import ABC, abstractmethod
from bisect import bisect_left
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TypeVar

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, SummaryMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

Labels = tuple[str, ...]


class Instrument(ABC):
    """`labels` are the names of its own labels, beside those that all of a board share."""

    def __init__(self, name: str, help: str, labels: Labels = ()) -> None:  # noqa: A002
        self.name, self.help, self.labels = name, help, labels

    @abstractmethod
    def family(self, prefix: str, shared: Mapping[str, str]) -> Metric: ...


class Counter(Instrument):
    def __init__(self, name: str, help: str, labels: Labels = (), known: Iterable[Labels] = ()) -> None:  # noqa: A002
        """`known` label values are shown from the start, at zero."""
        super().__init__(name, help, labels)
        self.values: dict[Labels, float] = dict.fromkeys(known if labels else [()], 0.0)

    def add(self, amount: float = 1.0, *labels: str) -> None:
        self.values[labels] = self.values.get(labels, 0.0) + amount

    def family(self, prefix: str, shared: Mapping[str, str]) -> Metric:
        family = CounterMetricFamily(prefix + self.name, self.help, labels=[*shared, *self.labels])
        for labels, value in self.values.items():
            family.add_metric([*shared.values(), *labels], value)
        return family


class Gauge(Instrument):
    def __init__(self, name: str, help: str, labels: Labels = ()) -> None:  # noqa: A002
        super().__init__(name, help, labels)
        self.values: dict[Labels, float] = {}

    def set(self, value: float, *labels: str) -> None:
        self.values[labels] = value

    def family(self, prefix: str, shared: Mapping[str, str]) -> Metric:
        family = GaugeMetricFamily(prefix + self.name, self.help, labels=[*shared, *self.labels])
        for labels, value in self.values.items():
            family.add_metric([*shared.values(), *labels], value)
        return family


class _Distribution:
    __slots__ = ("counts", "sum")

    def __init__(self, buckets: int) -> None:
        self.counts = [0] * buckets
        self.sum = 0.0


class Histogram(Instrument):
    """`bounds` are the upper ends of the buckets, rising; one without an end is added."""

    def __init__(self, name: str, help: str, bounds: Sequence[float], labels: Labels = ()) -> None:  # noqa: A002
        super().__init__(name, help, labels)
        self.bounds = tuple(bounds)
        self.values: dict[Labels, _Distribution] = {} if labels else {(): _Distribution(len(self.bounds) + 1)}

    def observe(self, value: float, *labels: str) -> None:
        self.observe_all((value,), *labels)

    def observe_all(self, values: Iterable[float], *labels: str) -> None:
        found = self.values.get(labels)
        if found is None:
            found = self.values[labels] = _Distribution(len(self.bounds) + 1)
        counts, bounds = found.counts, self.bounds
        for value in values:
            counts[bisect_left(bounds, value)] += 1
            found.sum += value

    def family(self, prefix: str, shared: Mapping[str, str]) -> Metric:
        family = HistogramMetricFamily(prefix + self.name, self.help, labels=[*shared, *self.labels])
        ends = [*(repr(float(bound)) for bound in self.bounds), "+Inf"]
        for labels, found in self.values.items():
            so_far = 0
            buckets = []
            for end, count in zip(ends, found.counts, strict=True):
                so_far += count
                buckets.append((end, float(so_far)))
            family.add_metric([*shared.values(), *labels], buckets, sum_value=found.sum)
        return family


class Summary(Instrument):
    def __init__(self, name: str, help: str, labels: Labels = ()) -> None:  # noqa: A002
        super().__init__(name, help, labels)
        self.values: dict[Labels, tuple[int, float]] = {}

    def observe(self, value: float, *labels: str) -> None:
        count, total = self.values.get(labels, (0, 0.0))
        self.values[labels] = (count + 1, total + value)

    def family(self, prefix: str, shared: Mapping[str, str]) -> Metric:
        family = SummaryMetricFamily(prefix + self.name, self.help, labels=[*shared, *self.labels])
        for labels, (count, total) in self.values.items():
            family.add_metric([*shared.values(), *labels], count, total)
        return family


_Kind = TypeVar("_Kind", bound=Instrument)


class Board(Collector):
    """Instruments that share a prefix and labels."""

    def __init__(self, prefix: str, shared: Mapping[str, str]) -> None:
        self._prefix, self._shared = prefix, dict(shared)
        self._instruments: list[Instrument] = []

    def add(self, instrument: _Kind) -> _Kind:
        self._instruments.append(instrument)
        return instrument

    def collect(self) -> Iterator[Metric]:
        for instrument in self._instruments:
            yield instrument.family(self._prefix, self._shared)
