"""How many tokens a drafter with weights guesses behind the rows of a step: as many as bring the most tokens per second.

    tokens expected   1 of every row, and of its drafts   first, first · later, first · later², ...    as often as right
    seconds           of a step with so many drafts of every row and as many guesses behind it, measured, by rows

Most rows have the same number. Those have fewer whose next draft is not worth what one costs more.

Its guesses cost time whether they are run or not, so where they do not pay it is not asked, and nothing is learnt. A trial has
to be covered by a small share of the time spent (`account`), and so has whatever nobody has measured yet. Where guesses pay, a
step without them is measured once in a while. Texts that it has not read, it reads first: that has to be won back by the tokens
that are to come.
"""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from quire.sched.draft.account import Account
from quire.sched.draft.costs import WEIGHT, Prior, StepCosts
from quire.types.request import Drafting

WORTH = 1.03  # times the pace without drafts: what they have to bring to be run
TRIED_EVERY = 200  # steps, at least
TRIAL = 4  # steps of one: behind the first there are guesses, the second waits for them, the others are measured
PLAIN_EVERY = 256  # steps with drafts: then two without
HELD = 4  # steps for which a number is kept
SEEN = 16  # rows with drafts, before what they bring is known
BELIEVED = 0.5  # of what the first of them promise
Counts = Sequence[int]


class Choice:
    """Of a number of drafts for each row."""

    def __init__(self, costs: StepCosts, account: Account, prior: Prior) -> None:
        self._costs, self._account, self._prior = costs, account, prior
        self._depth = 0  # the most of a row
        self._fixed = 0  # steps for which it stays, whatever is expected
        self._limit = 0  # that it was chosen under
        self._idle = TRIED_EVERY  # steps since drafts were tried
        self._busy = 0  # steps since one without drafts
        self._reading, self._tokens_read = 0.0, 0.0  # seconds of late, for so many tokens
        self._prompt = 0.0  # seconds of a prompt's token, of late: of the model that is drafted for

    def choose(
        self, drafting: Sequence[Drafting], common: Drafting, seen: int, limit: int, unread: int, further: int
    ) -> tuple[Counts, int]:
        """For rows of requests of which these are the ones that draw, at most `limit`; and for others, that draw for the first
        time. `common`: what is expected of those of whom nothing is known, of so many rows that were `seen`. `unread`: tokens
        of all of them; `further`: that each may have."""
        self._idle, self._busy = self._idle + 1, self._busy + 1
        rows = len(drafting)
        if not limit or not rows or self._account.overdrawn(self._costs.plain(rows) or 0.0):
            self._depth = self._fixed = 0
            return [0] * rows, 0
        right = self._chances(drafting, common, limit)
        if self._fixed and limit == self._limit:
            self._fixed -= 1
        else:
            self._limit = limit
            self._depth, self._fixed = self._best(right, seen, unread, further)
        depth = min(self._depth, limit)
        return self._spread(right, depth), depth

    def took(self, rows: int, depth: int, guesses: int, seconds: float) -> None:
        """A step whose rows had so many drafts, and as many were guessed behind it: all together so many."""
        missing = rows * depth - guesses
        more = missing * self._costs.one(rows) if missing and self._costs.plain(rows) is not None else 0.0
        self._costs.took(rows, rows * depth, seconds + more)

    def read(self, rows: int, depth: int, unread: int, seconds: float) -> None:
        """Two steps, of which the first had no drafts, and behind it so many tokens were read and so many guessed."""
        if (plain := self._costs.plain(rows)) is not None and unread > rows:
            more = max(0.0, seconds - plain - self._costs.seconds(rows, rows * depth))
            self._reading = (1 - WEIGHT) * self._reading + more
            self._tokens_read = (1 - WEIGHT) * self._tokens_read + unread

    def prompt(self, tokens: int, seconds: float) -> None:
        """A step without drafts, of so many tokens, most of them prompts'."""
        each = seconds / (self._prior.ridge + tokens)
        self._prompt = each if not self._prompt else self._prompt + WEIGHT * (each - self._prompt)

    def reading(self, unread: int) -> float:
        """Seconds."""
        return unread * (self._reading / self._tokens_read if self._tokens_read else self._prompt * min(1.0, self._prior.guess))

    def _chances(self, drafting: Sequence[Drafting], common: Drafting, limit: int) -> npt.NDArray[np.float64]:
        """[rows, limit] that a draft is right, and all before it."""
        first = np.array([each.first if each.first >= 0 else common.first for each in drafting])
        later = np.array([each.later if each.later >= 0 else common.later for each in drafting])
        chances: npt.NDArray[np.float64] = first[:, None] * later[:, None] ** np.arange(limit)
        return chances

    def _spread(self, right: npt.NDArray[np.float64], depth: int) -> Counts:
        """Rows have so many each, or less where that brings more tokens per second: but one row that much."""
        rows = len(right)
        if not depth or rows == 1 or self._costs.plain(rows) is None:
            return [depth] * rows
        one, right = self._costs.one(rows), right[:, :depth]
        seconds, tokens = self._costs.seconds(rows, rows * depth), rows + right.sum()
        kept = right >= one * tokens / seconds
        kept[right[:, 0].argmax()] = True
        fewer = seconds - one * int((~kept).sum())
        if fewer <= 0 or (rows + right[kept].sum()) / fewer <= tokens / seconds:
            return [depth] * rows
        counts: list[int] = kept.sum(1).tolist()
        return counts

    def _best(self, right: npt.NDArray[np.float64], seen: int, unread: int, further: int) -> tuple[int, int]:
        """How many, and for how many more steps that is kept."""
        (rows, limit), costs = right.shape, self._costs
        plain = costs.plain(rows)
        if plain is None:
            return 0, 0
        seconds = np.array([costs.seconds(rows, rows * count) for count in range(1, limit + 1)])
        brings, reading = right.sum(0).cumsum(), self.reading(unread)
        sure = np.array([seen >= SEEN and costs.measured(rows, rows * count) for count in range(1, limit + 1)])
        counted_on = BELIEVED * brings * plain / rows if seen else 0.0 * brings
        risks = reading + (TRIAL - 1) * (seconds - plain - counted_on)
        paces = np.where(sure | [self._account.covers(risk) for risk in risks], (rows + brings) / seconds, 0.0)
        best = int(paces.argmax())
        if paces[best] and WORTH * (further * rows / paces[best] + reading) < further * plain:
            self._idle = 0
            if self._busy >= PLAIN_EVERY:
                self._busy = 0
                return 0, 1
            return best + 1, HELD - 1 if sure[best] else TRIAL - 1
        self._busy = 0
        if self._idle >= TRIED_EVERY and self._account.covers(reading + (TRIAL - 1) * (seconds[0] - plain)):
            self._idle = 0
            return 1, TRIAL - 1
        return 0, HELD - 1
