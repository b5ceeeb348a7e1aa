"""Counters, gauges, histograms and summaries as plain values, converted to Prometheus families only on a scrape.

They are written and read on the event loop, so they need no locks: an observation is a search and an addition. Prometheus'
library is needed only to write them out (`family`).

With several API processes, boards are added up. Requests are counted by the process that has them, so their
values are added. Engine values are known to all processes: the largest counts. Gauges belong to each process.
"""

import copy
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
    instruments that are not divided, under the labels that all boards agree about."""

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


Values = list[tuple[Labels, list[float]]]
BoardState = dict[str, Values]  # by the instrument's name


def take(board: Board) -> BoardState:
    return {one.name: _values(one) for one in board.instruments if not isinstance(one, Gauge)}


def total(boards: Sequence[Board], others: Iterable[Sequence[BoardState]], of_engines: frozenset[str]) -> list[Board]:
    """Boards like these, with the numbers of others as well."""
    made = [copy.deepcopy(board) for board in boards]
    for states in others:
        for board, state in zip(made, states, strict=True):
            for one in board.instruments:
                for labels, numbers in state.get(one.name, ()):
                    _put(one, tuple(labels), numbers, one.name in of_engines)
    return made


def add_states(one: Sequence[BoardState], other: Sequence[BoardState], of_engines: frozenset[str]) -> list[BoardState]:
    """Of two processes that are gone."""
    return [_add(mine, theirs, of_engines) for mine, theirs in zip(one, other, strict=True)]


def _add(mine: BoardState, theirs: BoardState, of_engines: frozenset[str]) -> BoardState:
    added: BoardState = {}
    for name in dict.fromkeys((*mine, *theirs)):
        values = {tuple(labels): numbers for labels, numbers in mine.get(name, ())}
        for labels, numbers in theirs.get(name, ()):
            old = values.get(tuple(labels), [0.0] * len(numbers))
            join = max if name in of_engines else float.__add__
            values[tuple(labels)] = [join(float(a), float(b)) for a, b in zip(old, numbers, strict=True)]
        added[name] = list(values.items())
    return added


def _values(one: Instrument) -> Values:
    match one:
        case Counter():
            return [(labels, [value]) for labels, value in one.values.items()]
        case Histogram():
            return [(labels, [*map(float, found.counts), found.sum]) for labels, found in one.values.items()]
        case Summary():
            return [(labels, [float(count), size]) for labels, (count, size) in one.values.items()]
    return []


def _put(one: Instrument, labels: Labels, numbers: Sequence[float], of_engine: bool) -> None:
    match one:
        case Counter() if of_engine:
            one.values[labels] = max(one.values.get(labels, 0.0), numbers[0])
        case Counter():
            one.add(numbers[0], *labels)
        case Histogram():
            found = one.values.setdefault(labels, Distribution(len(one.bounds) + 1))
            found.counts = [mine + int(theirs) for mine, theirs in zip(found.counts, numbers[:-1], strict=True)]
            found.sum += numbers[-1]
        case Summary():
            count, size = one.values.get(labels, (0, 0.0))
            one.values[labels] = (count + int(numbers[0]), size + numbers[1])
