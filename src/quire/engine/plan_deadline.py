"""When the next step has to be planned: shortly before the one in flight ends, so that whoever comes by then is in it.

    device   [ step 7 ............ ][ step 8 ............ ][ step 9
    host      plan 8, land 7 ──────► gather ......► plan 9, land 8 ──────►
                                     who comes here is in step 9, not in step 10

A step whose rows run one token each takes about as long as the one before it. Other steps are not foreseen, and behind them the
next is planned at once. Where the device had to wait for a plan, plans are made earlier from then on. It has no clock.
"""

FORESEEN = 0.9  # of the last step's time: the next may be shorter
IN_TIME = 0.0002  # seconds for which the host waited: the device was busy when it got its next step
LEAST_LEAD, MOST_LEAD = 0.0005, 0.01  # seconds that are kept in hand
EASING = 0.98  # of the lead, whenever it was enough


class PlanDeadline:
    """`due` is the moment to plan the next step."""

    def __init__(self) -> None:
        self.due = 0.0
        self._lead = LEAST_LEAD
        self._landed: float | None = None  # when the device ended the step before the one in flight; None = not known
        self._even_rows = 0  # of the step in flight; 0 = it has rows of several tokens, or there is none

    def turned(self, began: float, ended: float, waited: float, rows: int, tokens: int) -> None:
        """A turn of the loop: a step of so many rows is in flight (0 = none is), and the one before it was waited for."""
        in_time = waited >= IN_TIME
        if in_time:
            self._lead = max(LEAST_LEAD, self._lead * EASING)
        elif self.due > 0.0:
            self._lead = min(MOST_LEAD, self._lead * 2)
        even = rows if rows == tokens else 0
        foreseen = 0.0
        if in_time and self._landed is not None and 0 < even <= self._even_rows:
            foreseen = FORESEEN * (ended - self._landed) - self._lead - (ended - began - waited)
        self.due = ended + foreseen if foreseen > 0.0 else 0.0
        self._landed, self._even_rows = ended if in_time else None, even
