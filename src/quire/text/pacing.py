"""Long work on an event loop in time slices of a few milliseconds, between which other tasks run.

JSON is encoded in chunks, and the values of a `LazyList` are made while they are encoded.
"""

import asyncio
import time
from collections import deque
from collections.abc import Iterable, Iterator
from typing import Any
from weakref import WeakKeyDictionary

import msgspec

TIME_SLICE_S = 0.005  # seconds
SLICE_VALUES = 1 << 15  # characters of a string, or values, that are written at a time
FEW = 64  # values that are taken from a lazy list at a time

_encode = msgspec.json.Encoder().encode
_SCALARS = frozenset({int, float, bool, type(None)})


class _Turns:
    """The time that sliced work has used in this round of an event loop. When it is used up, tasks wait for a later round.

    It holds no reference to the loop.
    """

    def __init__(self) -> None:
        self._waiting: deque[asyncio.Future[None]] = deque()
        self._armed = False
        self.used = 0.0

    def spend(self, seconds: float) -> None:
        self.used += seconds
        if not self._armed:
            self._armed = True
            asyncio.get_running_loop().call_soon(self._next_round)

    async def wait(self) -> None:
        turn = asyncio.get_running_loop().create_future()
        self._waiting.append(turn)
        await turn

    def _next_round(self) -> None:
        self._armed, self.used = False, 0.0
        while self._waiting:
            turn = self._waiting.popleft()
            if not turn.done():
                turn.set_result(None)
                self.spend(0.0)
                return


_turns: WeakKeyDictionary[asyncio.AbstractEventLoop, _Turns] = WeakKeyDictionary()


class Pace:
    """Await it before every part of long work: it waits when sliced work has used its time in a round of the event loop.

    The time between two awaits counts as work; call `begin` after awaiting anything else.
    """

    __slots__ = ("_since", "_turns")

    def __init__(self) -> None:
        loop = asyncio.get_running_loop()
        turns = _turns.get(loop)
        self._turns = turns if turns is not None else _turns.setdefault(loop, _Turns())
        self._since = 0.0

    def begin(self) -> None:
        self._since = 0.0

    async def __call__(self) -> None:
        turns = self._turns
        if self._since:
            turns.spend(time.perf_counter() - self._since)
        while turns.used > TIME_SLICE_S:
            await turns.wait()
        self._since = time.perf_counter()


class LazyList:
    """A JSON list whose values are made when they are encoded. It can be encoded once, by `json_chunks`."""

    __slots__ = ("values",)

    def __init__(self, values: Iterable[Any]) -> None:
        self.values = iter(values)


async def json_chunks(value: Any, end: int = 1 << 20) -> list[bytes]:
    """Return the JSON of a value in chunks of about `end` bytes. The depth must have been checked before."""
    if is_light(value):
        return [_encode(value)]
    pace = Pace()
    chunks: list[bytes] = []
    gathered: list[bytes] = []
    size = 0
    await pace()
    for part in _parts(value):
        gathered.append(part)
        size += len(part)
        if size >= end:
            chunks.append(b"".join(gathered))
            gathered, size = [], 0
        await pace()
    return [*chunks, b"".join(gathered)] if gathered else chunks


def is_light(value: Any) -> bool:
    """Return whether the value can be encoded at once."""
    return _weigh(value, SLICE_VALUES) < SLICE_VALUES


def _weigh(value: Any, most: int) -> int:
    """Return the number of values and an eighth of the characters, at most `most` or slightly more."""
    if isinstance(value, str):
        return 1 + len(value) // 8
    if isinstance(value, LazyList):
        return most
    if not isinstance(value, dict | list | tuple):
        return 1
    weight = 1
    if not isinstance(value, dict) and len(value) >= most:
        return most
    for item in value.values() if isinstance(value, dict) else value:
        kind = type(item)
        weight += 1 if kind in _SCALARS else 1 + len(item) // 8 if kind is str else _weigh(item, most - weight)
        if weight >= most:
            return weight
    return weight


def _parts(value: Any) -> Iterator[bytes]:
    """Yield parts that are each encoded at once."""
    if isinstance(value, LazyList):
        yield from _written(value.values, FEW)
    elif is_light(value):
        yield _encode(value)
    elif isinstance(value, str):
        yield b'"'
        for i in range(0, len(value), SLICE_VALUES):
            yield _encode(value[i : i + SLICE_VALUES])[1:-1]
        yield b'"'
    elif isinstance(value, dict):
        yield b"{"
        for i, (key, item) in enumerate(value.items()):
            yield (b"," if i else b"") + _encode(str(key)) + b":"
            yield from _parts(item)
        yield b"}"
    else:
        yield from _written(iter(value), 1)


def _written(values: Iterator[Any], few: int) -> Iterator[bytes]:
    """A list. Light values are written several at a time."""
    yield b"["
    first = True
    group: list[Any] = []
    weight = 0

    def flush() -> Iterator[bytes]:
        nonlocal first, weight
        if group:
            yield (b"" if first else b",") + _encode(group)[1:-1]
            first, weight = False, 0
            group.clear()

    for item in values:
        own = _weigh(item, SLICE_VALUES)
        if own >= SLICE_VALUES:
            yield from flush()
            if not first:
                yield b","
            first = False
            yield from _parts(item)
            continue
        group.append(item)
        weight += own
        if weight >= SLICE_VALUES // 8 or (few > 1 and len(group) >= few):
            yield from flush()
    yield from flush()
    yield b"]"
