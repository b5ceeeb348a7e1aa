"""What steps cost, measured: seconds by how many rows a step has and how many drafts.

Only steps of rows that all draw count; a step of a prompt is long for other reasons. A number of drafts that was never run is
judged by those that were: between two measurements on the line between them, beyond the last on the line that leads there.
"""

from bisect import bisect_left
from functools import lru_cache

WEIGHT = 0.2  # of a new measurement
FIRST = 3  # measurements of which the least counts: the first step of a kind may have to prepare something
OUTLIER = 3.0  # times what is expected: somebody else had the processor
UNMEASURED = 0.5  # of a row's share of a step: what a draft costs before one was measured


class Measured:
    __slots__ = ("count", "seconds")

    def __init__(self, seconds: float) -> None:
        self.seconds, self.count = seconds, 1

    def add(self, seconds: float) -> None:
        self.count += 1
        if self.count <= FIRST:
            self.seconds = min(self.seconds, seconds)
        else:
            self.seconds += WEIGHT * (min(seconds, OUTLIER * self.seconds) - self.seconds)


class StepCosts:
    def __init__(self, unmeasured: float = UNMEASURED) -> None:
        """`unmeasured`: what a draft costs before one was measured, of a row's share of a step."""
        self._unmeasured = unmeasured
        self._by_rows: dict[int, dict[int, Measured]] = {}  # rows -> drafts -> seconds, both as `_bucket` has them

    def took(self, rows: int, drafts: int, seconds: float) -> None:
        found = self._by_rows.setdefault(_bucket(rows), {})
        place = _bucket(drafts)
        if place in found:
            found[place].add(seconds)
        else:
            found[place] = Measured(seconds)

    def plain(self, rows: int) -> float | None:
        """Seconds of a step without drafts, if that was measured."""
        found = self._by_rows.get(_bucket(rows), {}).get(0)
        return None if found is None else found.seconds

    def measured(self, rows: int, drafts: int) -> bool:
        return _bucket(drafts) in self._by_rows.get(_bucket(rows), ())

    def most(self, rows: int) -> int:
        """Drafts that were ever measured."""
        return max(self._by_rows.get(_bucket(rows), ()), default=0)

    def seconds(self, rows: int, drafts: int) -> float:
        """To be asked where `plain` is known."""
        found = self._by_rows[_bucket(rows)]
        base, place = found[0].seconds, _bucket(drafts)
        if place in found:
            return found[place].seconds
        known = sorted(found)
        i = bisect_left(known, place)
        if len(known) == 1:
            return base * (1 + self._unmeasured * drafts / rows)
        low, high = (known[i - 1], known[i]) if i < len(known) else (0, known[-1])
        below, above = found[low].seconds, found[high].seconds
        return max(base, below + (above - below) * (place - low) / (high - low))


@lru_cache(64)
def bucket_ends(most: int) -> tuple[int, ...]:
    """Up to `most`, the largest numbers that cost the same: of these one is best."""
    return tuple(count for count in range(1, most + 1) if count == most or _bucket(count) != _bucket(count + 1))


def _bucket(count: int) -> int:
    """Itself up to 16, then in steps of about a quarter."""
    if count <= 16:
        return count
    step = 1 << (count.bit_length() - 3)
    return count // step * step
