"""What it may cost to find out whether drafts are worth it: a step or two at first, and a small share of all the time spent.

Every step with drafts is compared with what its tokens would have taken without: what it lost is booked, and won back by those
that brought more, of which a little is kept for later trials. A trial has to be covered; when more is lost than may be nobody
drafts, whatever is expected. So a run of any length loses next to nothing, however wrong the expectations are.
"""

SHARE = 0.004  # of the time spent
KEPT = 1.0  # steps of what was won
FORGIVEN = 1.0  # steps: what was lost beyond that and what may be
OUTLIER = 8.0  # times what is expected: somebody else had the processor


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
        lost = self.lost + min(seconds, OUTLIER * expected) - worth
        self.lost = min(max(lost, -KEPT * step), self._allowed(step) + FORGIVEN * step)

    def lose(self, seconds: float) -> None:
        self.lost += seconds

    def covers(self, seconds: float, step: float) -> bool:
        """May so much be risked, where a step takes `step` seconds?"""
        return self.lost + seconds <= self._allowed(step)

    def _allowed(self, step: float) -> float:
        return self._credit * step + SHARE * self._spent
