"""How much of every page a model that drafts has run. While nobody asks for guesses it runs nothing, so a prefix that was found
for the large model need not be one for it: it begins where its own part of the pages ends."""

import numpy as np

from quire.runner.prefixes import Prefixes
from quire.types.plan import Ints, StepPlan


class FilledPages:
    def __init__(self, pages: int, page_size: int, tables: Prefixes, group: int, slots: int) -> None:
        """`tables`: of the slots, as the host knows them; those of one `group` matter."""
        self._filled = np.zeros(pages + 1, np.int32)  # [pages, and the null page] tokens
        self._page_size, self._tables, self._group = page_size, tables, group
        self._noted = np.zeros(slots, np.int32)  # [S] tokens

    def take_in(self, plan: StepPlan) -> None:
        """Pages that are new to their slots are empty, but for those that were found or copied."""
        start = np.zeros_like(self._noted)
        for admission in plan.admitted:
            start[admission.slot] = admission.start
        own = plan.entry_group == self._group
        fresh = own & (plan.entry_index * self._page_size >= start[plan.entry_slot])
        self._filled[plan.entry_page[fresh]] = 0
        np.minimum.at(self._noted, plan.entry_slot[fresh], plan.entry_index[fresh] * self._page_size)
        self._filled[plan.copy_to] = self._filled[plan.copy_from]
        for admission in plan.admitted:
            self._noted[admission.slot] = self._find(admission.slot, admission.start)

    def read(self, slot: int) -> int:
        """The tokens of a new tenant that have been run."""
        return int(self._noted[slot])

    def note(self, slot: Ints, seen: Ints) -> None:
        """So many tokens of these slots are in their pages now."""
        size, tables = self._page_size, self._tables.pages[self._group]
        for each, begin, end in zip(slot.tolist(), self._noted[slot].tolist(), seen.tolist(), strict=True):
            if end > begin:
                index = np.arange(begin // size, -(-end // size))
                self._filled[tables[each, index]] = np.minimum(end - index * size, size)
        self._noted[slot] = seen

    def _find(self, slot: int, start: int) -> int:
        size = self._page_size
        filled = self._filled[self._tables.pages[self._group, slot, : -(-start // size)]]
        short = np.flatnonzero(filled < size)
        return start if not len(short) else min(start, int(short[0]) * size + int(filled[short[0]]))
