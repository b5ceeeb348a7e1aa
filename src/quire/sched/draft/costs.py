"""What steps cost: seconds by how many rows a step has and how many drafts, measured.

Only steps of rows that all draw count; a step of a prompt is long for other reasons. A number of drafts that was never run is
judged by those that were, here or by an earlier engine: between two measurements on the line between them, elsewhere by what
such a device is expected to do (`Prior`), corrected by how wrong that was for the nearest number, or on the whole where none
was run with so many rows. A number of rows that never ran without drafts is judged by the nearest that did, if that is near.
"""

from bisect import bisect_left
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache

WEIGHT = 0.2  # of a new measurement
FIRST = 5  # measurements of which the least counts: the first steps of a kind may have to prepare something
DOUBT = 2.0  # times what is expected: more than that of drafts is not believed before so many measurements
FRESH = 8  # measurements, until they are asked again
OUTLIER = 3.0  # times what is expected: somebody else had the processor
NEAR = 4.0  # times as many rows, or as few: what they take says something
FARTHEST = 8.0  # times what was expected: more is no matter of the device, and says nothing of other steps
Ratios = Mapping[int, Mapping[int, float]]  # rows -> drafts -> times a step without drafts


@dataclass(frozen=True)
class Prior:
    """What drafts are expected to cost, in steps without any. Up to `ridge` tokens a step takes longer to read the weights than
    to compute: 3 is a CPU's with weights of 4 bits, a GPU has some 150. `wait`: for the tokens that drafts are made from, where
    other steps are planned ahead. `guess`: one by a drafter with weights, behind each row; `each`: as much of that is saved by
    every row that has none. `reading`: of what the model takes to read a text, so much does that drafter."""

    ridge: float = 3.0
    wait: float = 0.0
    guess: float = 0.0
    each: float = 0.0
    reading: float = 0.0

    def more(self, rows: int, drafts: float) -> float:
        return drafts / (self.ridge + rows) + self.wait + self.guess * drafts / rows if drafts else 0.0

    def one(self, rows: int) -> float:
        """A draft more, where there are others."""
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
        """`known`: what an earlier engine has `learnt`."""
        self._prior = prior
        self._known: Ratios = known or {}
        self._by_rows: dict[int, dict[int, Measured]] = {}  # rows -> drafts -> seconds, both as `_bucket` has them
        self._correction: float | None = None  # times what is expected of drafts
        self._told: dict[tuple[int, int], float] = {}  # what `seconds` has said of late
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
            wrong = min(max(wrong, 0.0), FARTHEST)
            before = wrong if self._correction is None else self._correction
            self._correction = before + WEIGHT * (wrong - before)
        if found[place].count <= FIRST or self.taken % FRESH == 0:
            self._told.clear()

    def plain(self, rows: int) -> float | None:
        """Seconds of a step without drafts, if that was measured with about so many rows."""
        if (own := self._by_rows.get(_bucket(rows))) is not None and 0 in own:
            return own[0].seconds
        near = min((many for many, found in self._by_rows.items() if 0 in found), key=lambda many: abs(many - rows), default=0)
        if not near or not rows / NEAR <= near <= rows * NEAR:
            return None
        return self._by_rows[near][0].seconds * (self._prior.ridge + rows) / (self._prior.ridge + near)

    def seconds(self, rows: int, drafts: int) -> float:
        """To be asked where `plain` is known. Of late: the device may be waiting for the answer."""
        if (found := self._told.get((rows, drafts))) is None:
            found = self._told[rows, drafts] = self._judge(rows, drafts)
        return found

    def _judge(self, rows: int, drafts: int) -> float:
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
        """Seconds of a draft more, where there are others; to be asked where `plain` is known."""
        corrected = 1.0 if self._correction is None else self._correction
        return self.seconds(rows, 0) * corrected * self._prior.one(rows)

    def learnt(self) -> dict[int, dict[int, float]]:
        """For engines to come."""
        told = {rows: dict(drafts) for rows, drafts in self._known.items()}
        for rows, found in self._by_rows.items():
            sure = [drafts for drafts, each in found.items() if drafts and each.count >= FIRST]
            if 0 in found and sure:
                told.setdefault(rows, {}).update({drafts: self.seconds(rows, drafts) / found[0].seconds for drafts in sure})
        return told


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


SHARE = 0.004  # of the time spent
KEPT = 1.0  # steps of what was won
FORGIVEN = 1.0  # steps: what was lost beyond that and what may be
ACCOUNT_OUTLIER = 8.0  # times what is expected: somebody else had the processor


class Account:
    def __init__(self, credit: float) -> None:
        """`credit`: steps that may be lost to begin with."""
        self._credit = credit
        self._spent = 0.0  # seconds, of all steps
        self.lost = 0.0  # to drafts, of which what they won is taken off

    def spend(self, seconds: float) -> None:
        self._spent += seconds

    def book(self, seconds: float, worth: float, expected: float, step: float) -> None:
        """A step took so long; its tokens are worth so much without drafts, when a step takes `step`."""
        lost = self.lost + min(seconds, ACCOUNT_OUTLIER * expected) - worth
        self.lost = min(max(lost, -KEPT * step), self._allowed(step) + FORGIVEN * step)

    def lose(self, seconds: float) -> None:
        self.lost += seconds

    def covers(self, seconds: float, step: float) -> bool:
        """May so much be risked, where a step takes `step` seconds?"""
        return self.lost + seconds <= self._allowed(step)

    def _allowed(self, step: float) -> float:
        return self._credit * step + SHARE * self._spent
