"""Counters, gauges, histograms and summaries as plain numbers, made into Prometheus families only when somebody asks.

They are written on the event loop and read there, so they need no locks: an observation is a search and an addition.
Prometheus' library is needed only to write them out (`family`).
"""

from abc import ABC, abstractmethod
from bisect import bisect_left
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import accumulate
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    from prometheus_client.metrics_core import Metric

Labels = tuple[str, ...]


class Instrument(ABC):
    """`labels` are the names of its own labels, beside those that all of a board share."""

    def __init__(self, name: str, help: str, labels: Labels = ()) -> None:  # noqa: A002
        self.name, self.help, self.labels = name, help, labels

    @abstractmethod
    def family(self, prefix: str, shared: Mapping[str, str]) -> "Metric": ...


class Counter(Instrument):
    def __init__(self, name: str, help: str, labels: Labels = (), known: Iterable[Labels] = ()) -> None:  # noqa: A002
        """`known` label values are shown from the start, at zero."""
        super().__init__(name, help, labels)
        self.values: dict[Labels, float] = dict.fromkeys(known if labels else [()], 0.0)

    def add(self, amount: float = 1.0, *labels: str) -> None:
        self.values[labels] = self.values.get(labels, 0.0) + amount

    def family(self, prefix: str, shared: Mapping[str, str]) -> "Metric":
        from prometheus_client.core import CounterMetricFamily

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

    def family(self, prefix: str, shared: Mapping[str, str]) -> "Metric":
        from prometheus_client.core import GaugeMetricFamily

        family = GaugeMetricFamily(prefix + self.name, self.help, labels=[*shared, *self.labels])
        for labels, value in self.values.items():
            family.add_metric([*shared.values(), *labels], value)
        return family


class Distribution:
    __slots__ = ("counts", "sum")

    def __init__(self, buckets: int) -> None:
        self.counts = [0] * buckets
        self.sum = 0.0


class Histogram(Instrument):
    """`bounds` are the upper ends of the buckets, rising; one without an end is added."""

    def __init__(self, name: str, help: str, bounds: Sequence[float], labels: Labels = ()) -> None:  # noqa: A002
        super().__init__(name, help, labels)
        self.bounds = tuple(bounds)
        self.values: dict[Labels, Distribution] = {} if labels else {(): Distribution(len(self.bounds) + 1)}

    def observe(self, value: float, *labels: str) -> None:
        self.observe_all((value,), *labels)

    def observe_all(self, values: Iterable[float], *labels: str) -> None:
        found = self.values.get(labels)
        if found is None:
            found = self.values[labels] = Distribution(len(self.bounds) + 1)
        counts, bounds = found.counts, self.bounds
        for value in values:
            counts[bisect_left(bounds, value)] += 1
            found.sum += value

    def family(self, prefix: str, shared: Mapping[str, str]) -> "Metric":
        from prometheus_client.core import HistogramMetricFamily

        family = HistogramMetricFamily(prefix + self.name, self.help, labels=[*shared, *self.labels])
        for labels, found in self.values.items():
            family.add_metric([*shared.values(), *labels], self.buckets(found), sum_value=found.sum)
        return family

    def buckets(self, found: Distribution) -> list[tuple[str, float]]:
        """Upper ends, and how many values are at most that."""
        ends = [*(repr(float(bound)) for bound in self.bounds), "+Inf"]
        return list(zip(ends, map(float, accumulate(found.counts)), strict=True))


class Summary(Instrument):
    def __init__(self, name: str, help: str, labels: Labels = ()) -> None:  # noqa: A002
        super().__init__(name, help, labels)
        self.values: dict[Labels, tuple[int, float]] = {}

    def observe(self, value: float, *labels: str) -> None:
        count, total = self.values.get(labels, (0, 0.0))
        self.values[labels] = (count + 1, total + value)

    def family(self, prefix: str, shared: Mapping[str, str]) -> "Metric":
        from prometheus_client.core import SummaryMetricFamily

        family = SummaryMetricFamily(prefix + self.name, self.help, labels=[*shared, *self.labels])
        for labels, (count, total) in self.values.items():
            family.add_metric([*shared.values(), *labels], count, total)
        return family


_Kind = TypeVar("_Kind", bound=Instrument)


class Board:
    """Instruments that share a prefix and labels. To Prometheus' library it is a collector."""

    def __init__(self, prefix: str, shared: Mapping[str, str]) -> None:
        self.prefix, self.shared = prefix, dict(shared)
        self.instruments: list[Instrument] = []

    def add(self, instrument: _Kind) -> _Kind:
        self.instruments.append(instrument)
        return instrument

    def collect(self) -> "Iterator[Metric]":
        for instrument in self.instruments:
            yield instrument.family(self.prefix, self.shared)


class Boards:
    """Boards with the same instruments and other labels, as one collector: a metric is one family. Those of `whole` have
    instruments that nobody divides, under the labels that all boards agree about."""

    def __init__(self, boards: Sequence[Board], whole: Iterable[Instrument] = ()) -> None:
        self._boards, self._whole = boards, {instrument.name: instrument for instrument in whole}
        first = boards[0].shared
        self._agreed = {name: value for name, value in first.items() if all(board.shared[name] == value for board in boards)}

    def collect(self) -> "Iterator[Metric]":
        for same in zip(*(board.instruments for board in self._boards), strict=True):
            prefix, name = self._boards[0].prefix, same[0].name
            if name in self._whole:
                yield self._whole[name].family(prefix, self._agreed)
                continue
            families = [one.family(prefix, board.shared) for one, board in zip(same, self._boards, strict=True)]
            families[0].samples += [sample for family in families[1:] for sample in family.samples]
            yield families[0]
