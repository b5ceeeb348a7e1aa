"""When to plan the next step: shortly before the one in flight ends, so that new requests join it.

    device   [ step 7 ............ ][ step 8 ............ ][ step 9
    host      plan 8, land 7 ──────► gather ......► plan 9, land 8 ──────►
                                     a request that arrives here is in step 9, not in step 10

A decode step takes about as long as the previous one. Other steps are not predicted; the next one is then planned at once. If
the device had to wait for a plan, later plans are made earlier. There is no clock in this module.
"""

PREDICTED_SHARE = 0.9  # of the last step's time: the next may be shorter
MIN_WAIT_S = 0.0002  # a longer wait of the host means that the device was busy when it got its next step
MIN_LEAD_S, MAX_LEAD_S = 0.0005, 0.01  # reserve before the predicted end
LEAD_DECAY = 0.98  # of the lead, after a plan in time


class PlanDeadline:
    """`due` is the moment to plan the next step."""

    def __init__(self) -> None:
        self.due = 0.0
        self._lead = MIN_LEAD_S
        self._landed: float | None = None  # when the device ended the step before the one in flight; None: unknown
        self._even_rows = 0  # of a decode step in flight, else 0

    def turned(self, began: float, ended: float, waited: float, rows: int, tokens: int) -> None:
        """Note a turn of the loop: a step with `rows` rows is in flight (0: none), and the host waited for the previous one."""
        in_time = waited >= MIN_WAIT_S
        if in_time:
            self._lead = max(MIN_LEAD_S, self._lead * LEAD_DECAY)
        elif self.due > 0.0:
            self._lead = min(MAX_LEAD_S, self._lead * 2)
        even = rows if rows == tokens else 0
        predicted = 0.0
        if in_time and self._landed is not None and 0 < even <= self._even_rows:
            predicted = PREDICTED_SHARE * (ended - self._landed) - self._lead - (ended - began - waited)
        self.due = ended + predicted if predicted > 0.0 else 0.0
        self._landed, self._even_rows = ended if in_time else None, even
