"""Measured step times by rows and drafts.

Only steps whose rows all sample count. A number of drafts that was never run is estimated
from those that were, in this or an earlier engine: between two measurements by linear interpolation, elsewhere by what
such a device is expected to do (`Prior`), corrected by its error for the nearest number, or by the mean error if none
was run with that many rows. Rows that never ran without drafts are estimated from the nearest number that did.
"""

from bisect import bisect_left
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache

WEIGHT = 0.2  # of a new measurement
FIRST = 5  # measurements of which the minimum counts: the first steps of a kind may include preparations
DOUBT = 2.0  # times the expected cost: maximum until there are `FIRST` measurements
REFRESH = 8  # measurements after which estimates are renewed
OUTLIER = 3.0  # times the expected value: another process had the processor
NEAR = 4.0  # maximum ratio of rows for an estimate
MAX_CORRECTION = 8.0  # times the expected cost: more is not caused by the device
Ratios = Mapping[int, Mapping[int, float]]  # rows -> drafts -> ratio to a step without drafts


@dataclass(frozen=True)
class Prior:
    """Expected costs of drafts, relative to a step without drafts.

    ridge: tokens up to which a step is memory-bound: 3 on a CPU with 4-bit weights, about 150 on a GPU
    wait: for the tokens that drafts depend on, with async scheduling
    guess: of a draft for all rows by a drafter with weights; each: the part of it that a row without drafts saves
    reading: time of the drafter to process a text, as a share of the model's
    """

    ridge: float = 3.0
    wait: float = 0.0
    guess: float = 0.0
    each: float = 0.0
    reading: float = 0.0

    def more(self, rows: int, drafts: float) -> float:
        return drafts / (self.ridge + rows) + self.wait + self.guess * drafts / rows if drafts else 0.0

    def one(self, rows: int) -> float:
        """Return the cost of one more draft."""
        return 1 / (self.ridge + rows) + self.each / rows


A_CPU = Prior()


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
    def __init__(self, prior: Prior = A_CPU, known: Ratios | None = None) -> None:
        """`known`: what an earlier engine has `measured`."""
        self._prior = prior
        self._known: Ratios = known or {}
        self._by_rows: dict[int, dict[int, Measured]] = {}  # rows -> drafts -> seconds, both as `_bucket` has them
        self._correction: float | None = None  # ratio to the expected cost of drafts
        self._estimates: dict[tuple[int, int], float] = {}  # of `seconds`
        self.taken = 0  # measurements
        self.most = max((drafts for found in self._known.values() for drafts in found), default=0)  # drafts that were measured

    def took(self, rows: int, drafts: int, seconds: float) -> None:
        self.taken += 1
        self.most = max(self.most, drafts)
        found = self._by_rows.setdefault(_bucket(rows), {})
        place = _bucket(drafts)
        if place in found:
            found[place].add(seconds)
        else:
            found[place] = Measured(seconds)
        if place and (plain := self.plain(rows)) is not None:
            wrong = (found[place].seconds / plain - 1) / self._prior.more(rows, drafts)
            wrong = min(max(wrong, 0.0), MAX_CORRECTION)
            before = wrong if self._correction is None else self._correction
            self._correction = before + WEIGHT * (wrong - before)
        if found[place].count <= FIRST or self.taken % REFRESH == 0:
            self._estimates.clear()

    def plain(self, rows: int) -> float | None:
        """Return the seconds of a step without drafts, if it was measured with a similar number of rows."""
        if (own := self._by_rows.get(_bucket(rows))) is not None and 0 in own:
            return own[0].seconds
        near = min((many for many, found in self._by_rows.items() if 0 in found), key=lambda many: abs(many - rows), default=0)
        if not near or not rows / NEAR <= near <= rows * NEAR:
            return None
        return self._by_rows[near][0].seconds * (self._prior.ridge + rows) / (self._prior.ridge + near)

    def seconds(self, rows: int, drafts: int) -> float:
        """Return the seconds of a step; requires `plain`. Cached, since the device may be waiting."""
        if (found := self._estimates.get((rows, drafts))) is None:
            found = self._estimates[rows, drafts] = self._estimate(rows, drafts)
        return found

    def _estimate(self, rows: int, drafts: int) -> float:
        base, place = self.plain(rows), _bucket(drafts)
        assert base is not None
        if not place:
            return base
        found = {many: each for many, each in self._by_rows.get(_bucket(rows), {}).items() if many}
        if place in found:  # more drafts never cost less
            least = max((each.seconds for many, each in found.items() if many < place and each.count >= FIRST), default=base)
            return max(least, min(self._believed(rows, many, each, base) for many, each in found.items() if many >= place))
        points = {many: ratio * base for many, ratio in self._known.get(_bucket(rows), {}).items()}
        points |= {many: self._believed(rows, many, measured, base) for many, measured in found.items()}
        places = sorted(points)
        i = bisect_left(places, place)
        if 0 < i < len(places) or place in points:
            low, high = places[i if place in points else i - 1], places[i]
            below, above = points[low], points[high]
            return max(base, below + (above - below) * (place - low) / max(1, high - low))
        if not places:
            corrected = 1.0 if self._correction is None else self._correction
            return base * (1 + corrected * self._prior.more(rows, drafts))
        near = places[min(i, len(places) - 1)]
        return base + max(0.0, points[near] - base) * self._prior.more(rows, place) / self._prior.more(rows, near)

    def _believed(self, rows: int, drafts: int, measured: Measured, base: float) -> float:
        if measured.count >= FIRST:
            return measured.seconds
        return min(measured.seconds, base * (1 + DOUBT * self._prior.more(rows, drafts)))

    def one(self, rows: int) -> float:
        """Return the seconds of one more draft; requires `plain`."""
        corrected = 1.0 if self._correction is None else self._correction
        return self.seconds(rows, 0) * corrected * self._prior.one(rows)

    def measured(self) -> dict[int, dict[int, float]]:
        """Return the measurements for later engines."""
        found_ratios = {rows: dict(drafts) for rows, drafts in self._known.items()}
        for rows, found in self._by_rows.items():
            sure = [drafts for drafts, each in found.items() if drafts and each.count >= FIRST]
            if 0 in found and sure:
                found_ratios.setdefault(rows, {}).update(
                    {drafts: self.seconds(rows, drafts) / found[0].seconds for drafts in sure}
                )
        return found_ratios


@lru_cache(64)
def bucket_ends(count_limit: int) -> tuple[int, ...]:
    """Return the largest count of each bucket up to `count_limit`: counts of a bucket cost the same."""
    return tuple(count for count in range(1, count_limit + 1) if count == count_limit or _bucket(count) != _bucket(count + 1))


def _bucket(count: int) -> int:
    """Return the bucket of a count: exact up to 16, then in steps of about a quarter."""
    if count <= 16:
        return count
    step = 1 << (count.bit_length() - 3)
    return count // step * step


TRIAL_SHARE = 0.004  # of the time spent that trials may lose
MAX_GAIN = 1.0  # step times of earlier gains that count
MAX_EXCESS = 1.0  # step times: maximum loss beyond the allowed one
ACCOUNT_OUTLIER = 8.0  # times the expected value: another process had the processor


class Account:
    def __init__(self, credit: float) -> None:
        """`credit`: step times that may be lost initially."""
        self._credit = credit
        self._spent = 0.0  # seconds, of all steps
        self.lost = 0.0  # by drafts, minus gains

    def spend(self, seconds: float) -> None:
        self._spent += seconds

    def book(self, seconds: float, worth: float, expected: float, step: float) -> None:
        """Record a step. worth: seconds for its tokens without drafts; step: seconds of a step without drafts."""
        lost = self.lost + min(seconds, ACCOUNT_OUTLIER * expected) - worth
        self.lost = min(max(lost, -MAX_GAIN * step), self._allowed(step) + MAX_EXCESS * step)

    def lose(self, seconds: float) -> None:
        self.lost += seconds

    def covers(self, seconds: float, step: float) -> bool:
        """Return whether a loss of `seconds` is allowed; step: seconds of a step without drafts."""
        return self.lost + seconds <= self._allowed(step)

    def _allowed(self, step: float) -> float:
        return self._credit * step + TRIAL_SHARE * self._spent
