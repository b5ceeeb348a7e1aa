"""What several processes have counted, as one: the numbers of boards, told from process to process and added up.

Requests are counted by the process that has them, so their numbers are added. What engines count is known to all processes, and
to those that were there for longest best: of it the largest counts. Gauges are everybody's own.
"""

import copy
from collections.abc import Iterable, Sequence

from quire.obs.instruments import Board, Counter, Distribution, Gauge, Histogram, Instrument, Labels, Summary

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
