"""How many tokens a drafter with weights guesses behind the rows of a step: as many as bring the most tokens per second.

    tokens expected   1 of every row, and of its drafts   first, first · later, first · later², ...    as often as right
    seconds           of a step with so many drafts of every row and as many guesses behind it, measured, by rows

Most rows have the same number. Those have fewer whose next draft is not worth what one costs more.

Its guesses cost time whether they are run or not, so where they do not pay it is not asked, and nothing is learnt. As long as
little is known of how often it is right it guesses behind a few rows only, then behind more; to begin with that, and to try
again later, has to be covered (`account`). Where guesses pay, a step without them is measured once in a while. Texts that it
has not read, it reads first: that has to be won back by the tokens that are to come.
"""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from quire.sched.draft.costs import DOUBT, WEIGHT, Account, Prior, StepCosts
from quire.sched.draft.speculation import ENOUGH, STILL_WORTH, WORTH, own
from quire.types.request import Drafting

TRIED_EVERY, RARELY = 200, 1600  # steps, at least, and twice as many after each time in vain
WORTH_TRYING = 32  # tokens that are to come
TRIAL = 4  # steps of one: behind the first there are guesses, the second waits for them, the others are measured
PLAIN_EVERY = 256  # steps with drafts: then two without
HELD = 4  # steps for which a number is kept
SOME = 4  # rows that have drafts at first; then as many more as were seen with some
SEEN = 16  # of these: what drafts bring is known
EVERY = 1 << 30
WON_BACK = 0.05  # of what was read at first, by each step
Counts = Sequence[int]
Ints = npt.NDArray[np.int64]
Chances = npt.NDArray[np.float64]


class Choice:
    """Of a number of drafts for each row."""

    def __init__(self, costs: StepCosts, account: Account, prior: Prior) -> None:
        self._costs, self._account, self._prior = costs, account, prior
        self._depth = 0  # the most of a row
        self._held = 0  # steps for which it stays, as long as drafts are worth it
        self._fixed = 0  # steps for which it stays, whatever is expected
        self._asked = EVERY  # rows at most, in a trial
        self._idle = self._patience = TRIED_EVERY  # steps since drafts were tried, and until they are again
        self._busy = 0  # steps since one without drafts
        self._invested = 0.0  # seconds of reading, since drafts are run
        self._reading, self._tokens_read = 0.0, 0.0  # seconds of late, for so many tokens
        self._prompt = 0.0  # seconds of a prompt's token, of late: of the model that is drafted for

    def choose(
        self, drafting: Sequence[Drafting], common: Drafting, seen: int, limit: int, unread: Sequence[int], further: int
    ) -> tuple[Counts, int]:
        """For rows of requests of which these are the ones that draw, at most `limit`; and for others, that draw for the first
        time. `common`: what is expected of those of whom nothing is known, of so many rows that were `seen`. `unread`: tokens
        of each; `further`: that each may have."""
        self._idle, self._busy, rows = self._idle + 1, self._busy + 1, len(drafting)
        plain = self._costs.plain(rows) if rows and limit else None
        self._invested *= 1 - WON_BACK
        if plain is None or not self._account.covers(-self._invested, plain):
            self._stop()
            return [0] * rows, 0
        right = self._chances(drafting, common, limit)
        if self._fixed:
            self._fixed -= 1
        else:
            self._settle(right, np.sort(unread), further, seen, plain)
        self._depth = min(self._depth, limit)
        asked = _least(unread, min(self._asked, max(SOME, seen)))
        if self._depth:
            self._invested += self.reading(int(np.asarray(unread)[asked].sum()))
        return self._spread(right, asked), self._depth

    @property
    def tries(self) -> bool:
        """Drafts are run whatever is expected."""
        return self._asked == SOME

    def _stop(self, fixed: int = 0) -> None:
        self._depth = self._held = self._busy = 0
        self._invested, self._fixed, self._asked = 0.0, fixed, EVERY

    def took(self, rows: int, depth: int, guesses: int, fresh: int, seconds: float) -> None:
        """A step whose rows had so many drafts, and as many were guessed behind it: all together so many. Before it, so many
        tokens of texts were read."""
        missing = rows * depth - guesses
        known = self._costs.plain(rows) is not None
        seconds += missing * self._costs.one(rows) if missing and known else 0.0
        if fresh <= rows:
            self._costs.took(rows, rows * depth, seconds)
        elif known and self._costs.most:
            self._reading = (1 - WEIGHT) * self._reading + max(0.0, seconds - self._costs.seconds(rows, rows * depth))
            self._tokens_read = (1 - WEIGHT) * self._tokens_read + fresh

    def prompt(self, tokens: int, seconds: float) -> None:
        """A step without drafts, of so many tokens, most of them prompts'."""
        each = seconds / (self._prior.ridge + tokens)
        self._prompt = each if not self._prompt else self._prompt + WEIGHT * (each - self._prompt)

    def reading(self, unread: int) -> float:
        """Seconds."""
        return unread * (self._reading / self._tokens_read if self._tokens_read else self._prompt * self._prior.reading)

    def _chances(self, drafting: Sequence[Drafting], common: Drafting, limit: int) -> Chances:
        """[rows, limit] that a draft is right, and all before it."""
        first = np.array([own(each.first, common.first) for each in drafting]) / 2 + common.first / 2
        later = np.array([own(each.later, common.later) for each in drafting]) / 2 + common.later / 2
        chances: Chances = first[:, None] * later[:, None] ** np.arange(limit)
        return chances

    def _spread(self, right: Chances, asked: npt.NDArray[np.bool_]) -> Counts:
        """Rows that are asked for have so many each, or less where that brings more tokens per second: but one that much."""
        rows, depth = len(right), self._depth
        if not depth or not asked.all() or rows == 1:
            return [depth if each else 0 for each in asked.tolist()]
        one, right = self._costs.one(rows), right[:, :depth]
        seconds, tokens = self._costs.seconds(rows, rows * depth), rows + right.sum()
        kept = right >= one * tokens / seconds
        kept[right[:, 0].argmax()] = True
        fewer = seconds - one * int((~kept).sum())
        if fewer <= 0 or (rows + right[kept].sum()) / fewer <= tokens / seconds:
            return [depth] * rows
        counts: list[int] = kept.sum(1).tolist()
        return counts

    def _settle(self, right: Chances, unread: Ints, further: int, seen: int, plain: float) -> None:
        """How many the rows have from now on. `unread`: rising."""
        (rows, limit), costs = right.shape, self._costs
        known = min(rows, max(SOME, seen))
        seconds = np.array([costs.seconds(rows, rows * count) for count in range(1, limit + 1)])
        paces, reading = (rows + right.sum(0).cumsum()) / seconds, self.reading(int(unread[:known].sum()))
        best = int((paces >= ENOUGH * paces.max()).argmax())
        most = best + 1 if costs.most else 1  # as long as nobody has measured any
        worth = WORTH if seen >= SEEN and not self._depth else STILL_WORTH
        pays = worth * (further * rows / paces[best] + DOUBT * reading) < further * plain

        def covered(reading: float, steps: int, most: int, asked: int) -> int:
            """How many drafts may be tried for so many steps."""
            more = [seconds[i] - plain - (i + 1) * (rows - asked) * costs.one(rows) for i in range(most)]
            return next((i + 1 for i in range(most)[::-1] if self._account.covers(reading + steps * more[i], plain)), 0)

        due = self._idle >= self._patience and further > WORTH_TRYING
        if pays and self._busy >= PLAIN_EVERY:
            self._stop(1)
        elif pays and (self._depth or seen >= SEEN):
            self._patience = TRIED_EVERY if seen >= SEEN else self._patience
            self._go_on(most)
        elif pays and due and (depth := covered(reading, 2, most, known)):
            self._try(depth)
        else:
            self._stop()
            if due and covered(self.reading(int(unread[:SOME].sum())), TRIAL, 1, min(rows, SOME)):
                self._try(1)
                self._fixed, self._asked = TRIAL - 1, SOME

    def _try(self, depth: int) -> None:
        self._idle, self._patience, self._depth = 0, min(2 * self._patience, RARELY), depth

    def _go_on(self, depth: int) -> None:
        self._idle, self._asked = 0, EVERY
        if self._held and self._depth:
            self._held -= 1
        else:
            self._depth, self._held = depth, HELD - 1


def _least(unread: Sequence[int], count: int) -> npt.NDArray[np.bool_]:
    """So many rows, those that are read most."""
    chosen = np.zeros(len(unread), np.bool_)
    chosen[np.argsort(np.asarray(unread), kind="stable")[:count]] = True
    return chosen
