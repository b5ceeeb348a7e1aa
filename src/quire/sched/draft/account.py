"""What it may cost to find out whether drafts are worth it: a small share of all the time that was spent.

Every step with drafts is compared with what its tokens would have taken without: what it lost is booked, and won back by those
that brought more. A trial has to be covered by the share; when twice the share and a step are lost nobody drafts, whatever is
expected. So a run of any length loses next to nothing, however wrong the expectations are.
"""

SHARE = 0.005  # of the time spent
MOST_SHARES = 2.0
OUTLIER = 8.0  # times what is expected: somebody else had the processor


class Account:
    def __init__(self) -> None:
        self._spent = 0.0  # seconds, of all steps
        self._lost = 0.0  # to drafts, of which what they won is taken off; never below 0

    def spend(self, seconds: float) -> None:
        self._spent += seconds

    def book(self, seconds: float, worth: float, expected: float) -> None:
        """A step took so long; its tokens are worth so much without drafts."""
        self._lost = max(0.0, self._lost + min(seconds, OUTLIER * expected) - worth)

    def lose(self, seconds: float) -> None:
        self._lost += seconds

    def covers(self, seconds: float) -> bool:
        """May so much be risked?"""
        return self._lost + seconds <= SHARE * self._spent

    def overdrawn(self, step: float) -> bool:
        """Is more lost than may be, and one step's seconds? Bad luck at first is no reason to give up what pays."""
        return self._lost > MOST_SHARES * SHARE * self._spent + step
