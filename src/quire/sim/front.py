"""The way between a client and an engine: HTTP, text and messages between processes.

    client ──► API process: reads the request ─ ─ ► engine ─ ─ ► API process: writes every token ──► client
               └── `request` seconds of its time                ├── `token` seconds of its time for each
               └── `way` in all, before the engine has it ──┘   └── `finish` after the last

A process does one thing after the other. Whoever comes while it writes the tokens of a step waits, and so does the first token
of one whose step has many rows; requests that come together reach the engine one by one, so that a step may begin without some.
"""

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class FrontTime:
    """Seconds; `request` is part of `way`."""

    way: float = 0.0
    request: float = 0.0
    token: float = 0.0
    finish: float = 0.0


NO_FRONT = FrontTime()
USUAL_FRONT = FrontTime(0.0025, 0.001, 0.000045)  # of cores like an H200's host


class FrontEnds:
    """As many API processes as engines, whose clients are shared out evenly."""

    def __init__(self, count: int, time: FrontTime) -> None:
        self._time, self._rest = time, max(0.0, time.way - time.request)
        self._free = [0.0] * count  # when each has done all there was

    def arrive(self, number: int, now: float) -> float:
        """When the engine has a request that comes now."""
        front = number % len(self._free)
        done = self._free[front] = max(now, self._free[front]) + self._time.request
        return done + self._rest

    def tell(self, numbers: Sequence[int], last: Sequence[bool], now: float) -> tuple[list[float], list[float]]:
        """When the clients have the tokens of a step, one for each of these requests, and those for whom it is the `last`
        know that they have all."""
        free, token, finish = self._free, self._time.token, self._time.finish
        if not token and not finish:
            return [now] * len(numbers), [now] * sum(last)
        times, ends, count = list[float](), list[float](), len(free)
        for number, is_last in zip(numbers, last, strict=True):
            front = number % count
            at = free[front]
            at = free[front] = (at if at > now else now) + token
            times.append(at)
            if is_last:
                at = free[front] = at + finish
                ends.append(at)
        return times, ends
