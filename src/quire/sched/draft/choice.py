"""Choose how many tokens a drafter with weights drafts after the rows of a step: those with the most tokens per second.

    tokens expected   1 of every row, and of its drafts   first, first · later, first · later², ...    (acceptance rates)
    seconds           measured, of a step whose rows have that many drafts and get as many new ones, by rows

Most rows have the same number. Rows whose next draft does not pay have fewer.

Drafting costs time whether drafts are run or not, so without benefit the drafter does not run, and acceptance rates are not
measured. While they are uncertain, it drafts for a few rows only, then for more; the first and later trials must be covered
(`Account`). If drafts pay, a step without them is measured from time to time. Texts that the drafter has not processed are
processed first, which must be won back by later tokens.
"""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from quire.sched.draft.costs import DOUBT, WEIGHT, Account, Prior, StepCosts
from quire.sched.draft.speculation import MIN_SPEEDUP, MIN_SPEEDUP_ASYNC, NEAR_BEST, own
from quire.types.request import Drafting

TRIAL_INTERVAL, MAX_TRIAL_INTERVAL = 200, 1600  # steps; doubled after each trial without benefit
MIN_TRIAL_TOKENS = 32  # expected further tokens of a row
TRIAL_STEPS = 4  # drafts are made after the first, the second waits for them, the others are measured
PLAIN_EVERY = 256  # steps with drafts: then two without
HELD_STEPS = 4  # for which a number of drafts stays
TRIAL_ROWS = 4  # rows with drafts at first; then as many more as had outcomes
KNOWN_OUTCOMES = 16  # from which on acceptance rates are known
ALL_ROWS = 1 << 30
AMORTIZATION = 0.05  # of the time for unread texts, per step
Counts = Sequence[int]
Ints = npt.NDArray[np.int64]
Chances = npt.NDArray[np.float64]


class Choice:
    """The number of drafts for each row."""

    def __init__(self, costs: StepCosts, account: Account, prior: Prior) -> None:
        self._costs, self._account, self._prior = costs, account, prior
        self._depth = 0  # maximum of a row
        self._held = 0  # steps for which it stays, as long as drafts pay
        self._fixed = 0  # steps for which it stays in any case
        self._row_limit = ALL_ROWS  # of a trial
        self._idle = self._patience = TRIAL_INTERVAL  # steps since the last trial, and until the next
        self._busy = 0  # steps since the last without drafts
        self._invested = 0.0  # seconds for unread texts, since drafts run
        self._reading, self._tokens_read = 0.0, 0.0  # recent seconds for unread texts, and their tokens
        self._prompt = 0.0  # recent seconds of the target model for a prompt token

    def choose(
        self, drafting: Sequence[Drafting], common: Drafting, seen: int, limit: int, unread: Sequence[int], further: int
    ) -> tuple[Counts, int]:
        """Return the drafts of each row, and the number for rows that sample for the first time.

        common: rates of all requests, from `seen` outcomes; limit: of drafts
        unread: tokens of each row; further: expected tokens per row
        """
        self._idle, self._busy, rows = self._idle + 1, self._busy + 1, len(drafting)
        plain = self._costs.plain(rows) if rows and limit else None
        self._invested *= 1 - AMORTIZATION
        if plain is None or not self._account.covers(-self._invested, plain):
            self._stop()
            return [0] * rows, 0
        right = self._chances(drafting, common, limit)
        if self._fixed:
            self._fixed -= 1
        else:
            self._settle(right, np.sort(unread), further, seen, plain)
        self._depth = min(self._depth, limit)
        chosen = _least(unread, min(self._row_limit, max(TRIAL_ROWS, seen)))
        if self._depth:
            self._invested += self.reading(int(np.asarray(unread)[chosen].sum()))
        return self._spread(right, chosen), self._depth

    @property
    def tries(self) -> bool:
        """Return whether a trial runs."""
        return self._row_limit == TRIAL_ROWS

    def _stop(self, fixed: int = 0) -> None:
        self._depth = self._held = self._busy = 0
        self._invested, self._fixed, self._row_limit = 0.0, fixed, ALL_ROWS

    def took(self, rows: int, depth: int, guesses: int, fresh: int, seconds: float) -> None:
        """Record a step whose rows had `depth` drafts, and after which `guesses` were made in total.

        fresh: tokens of texts that were processed before it
        """
        missing = rows * depth - guesses
        known = self._costs.plain(rows) is not None
        seconds += missing * self._costs.one(rows) if missing and known else 0.0
        if fresh <= rows:
            self._costs.took(rows, rows * depth, seconds)
        elif known and self._costs.most:
            self._reading = (1 - WEIGHT) * self._reading + max(0.0, seconds - self._costs.seconds(rows, rows * depth))
            self._tokens_read = (1 - WEIGHT) * self._tokens_read + fresh

    def prompt(self, tokens: int, seconds: float) -> None:
        """Record a step without drafts with mostly prompt tokens."""
        each = seconds / (self._prior.ridge + tokens)
        self._prompt = each if not self._prompt else self._prompt + WEIGHT * (each - self._prompt)

    def reading(self, unread: int) -> float:
        """Return the seconds for processing unread tokens."""
        return unread * (self._reading / self._tokens_read if self._tokens_read else self._prompt * self._prior.reading)

    def _chances(self, drafting: Sequence[Drafting], common: Drafting, limit: int) -> Chances:
        """Return the probability that a draft and all before it are accepted, [rows, limit]."""
        first = np.array([own(each.first, common.first) for each in drafting]) / 2 + common.first / 2
        later = np.array([own(each.later, common.later) for each in drafting]) / 2 + common.later / 2
        chances: Chances = first[:, None] * later[:, None] ** np.arange(limit)
        return chances

    def _spread(self, right: Chances, chosen: npt.NDArray[np.bool_]) -> Counts:
        """Return the drafts of each chosen row: `depth`, or fewer where that gives more tokens per second."""
        rows, depth = len(right), self._depth
        if not depth or not chosen.all() or rows == 1:
            return [depth if each else 0 for each in chosen.tolist()]
        one, right = self._costs.one(rows), right[:, :depth]
        seconds, tokens = self._costs.seconds(rows, rows * depth), rows + right.sum()
        run = right >= one * tokens / seconds
        run[right[:, 0].argmax()] = True
        fewer = seconds - one * int((~run).sum())
        if fewer <= 0 or (rows + right[run].sum()) / fewer <= tokens / seconds:
            return [depth] * rows
        counts: list[int] = run.sum(1).tolist()
        return counts

    def _settle(self, right: Chances, unread: Ints, further: int, seen: int, plain: float) -> None:
        """Choose the number for the next steps. `unread`: rising."""
        (rows, limit), costs = right.shape, self._costs
        known = min(rows, max(TRIAL_ROWS, seen))
        seconds = np.array([costs.seconds(rows, rows * count) for count in range(1, limit + 1)])
        paces, reading = (rows + right.sum(0).cumsum()) / seconds, self.reading(int(unread[:known].sum()))
        best = int((paces >= NEAR_BEST * paces.max()).argmax())
        most = best + 1 if costs.most else 1  # nothing is measured yet
        speedup = MIN_SPEEDUP_ASYNC if seen >= KNOWN_OUTCOMES and not self._depth else MIN_SPEEDUP
        pays = speedup * (further * rows / paces[best] + DOUBT * reading) < further * plain

        def covered(reading: float, steps: int, most: int, chosen: int) -> int:
            """Return how many drafts a trial of `steps` steps may have."""
            more = [seconds[i] - plain - (i + 1) * (rows - chosen) * costs.one(rows) for i in range(most)]
            return next((i + 1 for i in range(most)[::-1] if self._account.covers(reading + steps * more[i], plain)), 0)

        due = self._idle >= self._patience and further > MIN_TRIAL_TOKENS
        if pays and self._busy >= PLAIN_EVERY:
            self._stop(1)
        elif pays and (self._depth or seen >= KNOWN_OUTCOMES):
            self._patience = TRIAL_INTERVAL if seen >= KNOWN_OUTCOMES else self._patience
            self._go_on(most)
        elif pays and due and (depth := covered(reading, 2, most, known)):
            self._try(depth)
        else:
            self._stop()
            if due and covered(self.reading(int(unread[:TRIAL_ROWS].sum())), TRIAL_STEPS, 1, min(rows, TRIAL_ROWS)):
                self._try(1)
                self._fixed, self._row_limit = TRIAL_STEPS - 1, TRIAL_ROWS

    def _try(self, depth: int) -> None:
        self._idle, self._patience, self._depth = 0, min(2 * self._patience, MAX_TRIAL_INTERVAL), depth

    def _go_on(self, depth: int) -> None:
        self._idle, self._row_limit = 0, ALL_ROWS
        if self._held and self._depth:
            self._held -= 1
        else:
            self._depth, self._held = depth, HELD_STEPS - 1


def _least(unread: Sequence[int], count: int) -> npt.NDArray[np.bool_]:
    """Return a mask of `count` rows with the fewest unread tokens."""
    chosen = np.zeros(len(unread), np.bool_)
    chosen[np.argsort(np.asarray(unread), kind="stable")[:count]] = True
    return chosen
