"""The host's copy of the page tables, to find requests that begin with the same pages.

Requests share pages from their admission on, so a result stays valid until the next admission, and equal rows are not searched
again.
"""

from functools import partial

import numpy as np

from quire.attn.work_split import FindSharedPrefix, SharedPrefix, find_alike, nothing_shared
from quire.types.plan import Ints


class Prefixes:
    def __init__(self, groups: int, slots: int, width: int, page_size: int) -> None:
        self.pages = np.zeros((groups, slots, width), np.int32)  # [G, S, P]
        self._page_size = page_size
        self.changes = 0  # while it is the same, equal rows share the same prefix
        self._found: dict[
            tuple[int, int], tuple[bytes, SharedPrefix]
        ] = {}  # (group, keys per split) -> rows, their shared prefix

    def clear(self, slots: list[int]) -> None:
        """Clear the tables of slots that get new requests."""
        self.pages[:, slots] = 0
        self._forget()

    def write(self, group: Ints, slot: Ints, index: Ints, page: Ints) -> None:
        if self.pages[group, slot, index].any():  # a page that may be shared is replaced
            self._forget()
        self.pages[group, slot, index] = page

    def _forget(self) -> None:
        self._found.clear()
        self.changes += 1

    def finder(self, group: int, slot: Ints, count: Ints, end: Ints) -> FindSharedPrefix:
        """Return the search for the rows of a step. Decode rows may share what lies before their last page."""
        return partial(self._find, group, slot, count, end)

    def _find(self, group: int, slot: Ints, count: Ints, end: Ints, keys: int) -> SharedPrefix:
        rows = slot.tobytes() + (count == 1).tobytes()
        known = self._found.get((group, keys))
        if known is None or known[0] != rows:
            full = np.where(count == 1, (end - 1) // self._page_size, 0)
            known = rows, find_alike(self.pages[group], slot, full, self._page_size, keys)
            self._found[group, keys] = known
        return known[1]


class NothingShared(Prefixes):
    """For rows whose shared prefixes are not used."""

    def __init__(self) -> None:
        super().__init__(0, 0, 0, 1)

    def finder(self, group: int, slot: Ints, count: Ints, end: Ints) -> FindSharedPrefix:  # noqa: ARG002
        return nothing_shared
