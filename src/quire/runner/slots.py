"""The state of each request on the device: arrays indexed by slot.

    tokens[slot]    [ prompt ........ | sampled ...... | stale ]     a sampled token is written here by the step that sampled it
    cursor[slot]    [ run so far ............. )
    known[slot]     [ known .................. )                   = cursor + 1 after sampling
                                             [ drafts ..... )      draft tokens follow it

Token values live on the device only: the host knows how many there are, never which. After a row with drafts `cursor` and
`known` are upper bounds (`inexact`), until the next row of the slot shows how many drafts were accepted.
"""

import copy
from functools import partial

import numpy as np
import torch

from quire.attn.work_split import FindSharedPrefix, SharedPrefix, find_alike, nothing_shared
from quire.device.updates import DeviceUpdates
from quire.types.errors import EngineError
from quire.types.plan import MAX_LIST_ROWS, Admission, Ints, StepPlan


class Prefixes:
    """The host's copy of the page tables, to find requests that begin with the same pages.

    Requests share pages from their admission on. So a result is valid until the next admission, and equal rows are not
    searched again.
    """

    def __init__(self, groups: int, slots: int, width: int, page_size: int) -> None:
        self.pages = np.zeros((groups, slots, width), np.int32)  # [G, S, P]
        self._page_size = page_size
        self.changes = 0  # counts changes; between two changes equal rows share the same prefix
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
        """Return the search for the rows of a step. Decode rows may share the pages before their last one."""
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
    """The prefixes of rows that never share any."""

    def __init__(self) -> None:
        super().__init__(0, 0, 0, 1)

    def finder(self, group: int, slot: Ints, count: Ints, end: Ints) -> FindSharedPrefix:  # noqa: ARG002
        return nothing_shared


class Slots:
    """The arrays of all slots, on device and host."""

    def __init__(
        self,
        slots: int,
        length: int,
        groups: int,
        page_size: int,
        device: torch.device,
        drafts: int = 0,
        updates: DeviceUpdates | None = None,
    ) -> None:
        """length: tokens that a request may run; the last sampled token and `drafts` drafts come on top."""
        self.device = device
        self.updates = updates or DeviceUpdates()
        self.length = length
        self.page_size = page_size
        self.drafts = drafts
        self.tokens = torch.zeros(slots, length + 1 + drafts, dtype=torch.int32, device=device)  # [S, L]
        width = -(-length // page_size)
        self.tables = torch.zeros(groups, slots, width, dtype=torch.int32, device=device)  # [G, S, P]
        self.prefixes = Prefixes(groups, slots, width, page_size)
        self.cursor = np.zeros(slots, np.int64)  # [S]
        self.known = np.zeros(slots, np.int64)  # [S]
        self.inexact = np.zeros(slots, np.bool_)  # [S] drafts were run: cursor and known are upper bounds
        self.samples = np.ones(slots, np.bool_)  # [S] tokens are sampled after the last known one
        self.prompt_length = np.zeros(slots, np.int64)  # [S]

    def only(self, group: int) -> "Slots":
        """Return a view of the slots with the tables of one group, for rows that need not begin at the cursor."""
        view = copy.copy(self)
        view.tables, view.prefixes = self.tables[group : group + 1], NothingShared()
        view.inexact = np.zeros_like(self.inexact)
        return view

    def take_in(self, plan: StepPlan) -> None:
        """Apply retirements, admissions, given tokens and pages. They are on the device once the updates are delivered."""
        self.retire(plan.retired)
        self._admit(plan.admitted)
        if len(plan.given_slot):
            self._give(plan)
        if len(plan.draft_token):
            self._write_drafts(plan)
        if plan.admitted or len(plan.entry_page):
            self._write_tables(plan)

    def retire(self, slots: Ints) -> None:
        if len(slots):
            self.cursor[slots] = self.known[slots] = self.prompt_length[slots] = 0
            self.inexact[slots] = False

    def _admit(self, admissions: tuple[Admission, ...]) -> None:
        for admission in admissions:
            slot, length = admission.slot, len(admission.tokens)
            if length > self.length:
                raise EngineError(f"a request of {length} tokens was admitted to slots of {self.length}")
            self.cursor[slot], self.known[slot], self.prompt_length[slot] = admission.start, length, admission.prompt_length
            self.inexact[slot], self.samples[slot] = False, admission.extras.pooling is None
            self.updates.write(self.tokens, slot * self.tokens.shape[1], admission.tokens)

    def _give(self, plan: StepPlan) -> None:
        """Append tokens that were not sampled, such as the end of a thinking budget."""
        self.known[plan.given_slot] = plan.given_position + 1  # if a slot has several, the last
        index = plan.given_slot.astype(np.int64) * self.tokens.shape[1] + plan.given_position
        self.updates.scatter(self.tokens, index, plan.given_token)

    def _write_drafts(self, plan: StepPlan) -> None:
        width, at = self.tokens.shape[1], 0
        if len(plan.slot) <= MAX_LIST_ROWS:
            for slot, end, (_, drafts) in zip(plan.slot.tolist(), plan.end.tolist(), plan.shapes.each, strict=True):
                if drafts:
                    self.updates.write(self.tokens, slot * width + end - drafts, plan.draft_token[at : at + drafts])
                    at += drafts
            return
        row, after = plan.shapes.draft_positions
        self.updates.scatter(self.tokens, plan.slot[row].astype(np.int64) * width + plan.end[row] + after, plan.draft_token)

    def _write_tables(self, plan: StepPlan) -> None:
        """Write page-table entries. A new request's row is written whole: entries without a page are null."""
        new_slots = [admission.slot for admission in plan.admitted]
        if new_slots:
            self.prefixes.clear(new_slots)
        group, slot, index, page = plan.entry_group, plan.entry_slot, plan.entry_index, plan.entry_page
        if len(page):
            self.prefixes.write(group, slot, index, page)
        groups, slots, width = self.tables.shape
        if new_slots:
            used = int(index.max()) + 1 if len(index) else 0
            for each in range(groups):
                for new_slot in new_slots:
                    row = self.prefixes.pages[each, new_slot, :used]
                    self.updates.write(self.tables, (each * slots + new_slot) * width, row, width)
            old = np.ones(slots, np.bool_)
            old[new_slots] = False
            others = old[slot]
            group, slot, index, page = group[others], slot[others], index[others], page[others]
        if len(page):
            self.updates.scatter(self.tables, (group.astype(np.int64) * slots + slot) * width + index, page)

    def check(self, plan: StepPlan) -> None:
        """Raise EngineError unless each row begins at its slot's cursor, and samples if and only if it ends at the last known
        token.

        Any other row would silently read or write the wrong cache entries. For an inexact slot only bounds are checked
        (`inexact`: cursor and known are upper bounds).
        """
        if len(plan.slot) <= MAX_LIST_ROWS and self._check_few(plan):
            return
        slot = plan.slot.astype(np.int64)
        start, reach, known, cursor = plan.end - plan.count, plan.end - plan.drafts, self.known[slot], self.cursor[slot]
        wrong = (start != cursor) | (plan.sample != ((reach == known) & self.samples[slot]))
        if self.drafts:
            wrong &= ~self.inexact[slot]
            wrong |= start > cursor
        wrong |= (plan.count <= plan.drafts) | (reach > known) | (slot < 0) | (plan.drafts > self.drafts)
        if np.count_nonzero(wrong):
            raise self._position_error(plan, int(np.flatnonzero(wrong)[0]))

    def _check_few(self, plan: StepPlan) -> bool:
        """Check a few rows without numpy. Return False if `check` must look again."""
        rows = zip(plan.slot.tolist(), plan.end.tolist(), plan.count.tolist(), plan.shapes.each, strict=True)
        for slot, end, count, (sample, drafts) in rows:
            after, left = self.cursor.item(slot) - (end - count), self.known.item(slot) - (end - drafts)
            exact = not after and sample == (not left and self.samples.item(slot))
            if min(slot, after, left) < 0 or drafts >= count or drafts > self.drafts or not (exact or self.inexact.item(slot)):
                return False
        return True

    def _position_error(self, plan: StepPlan, row: int) -> EngineError:
        slot, end = int(plan.slot[row]), int(plan.end[row])
        return EngineError(
            f"step {plan.step} asks slot {slot} for positions {end - plan.count[row]} to {end} with sample={plan.sample[row]} "
            f"and {plan.drafts[row]} drafts, but {self.cursor[slot]} of its {self.known[slot]} tokens have been run"
        )

    def advance(self, plan: StepPlan) -> None:
        """Note that the rows were launched. Those that sample have one more token to run; some drafts may be accepted."""
        self.cursor[plan.slot] = plan.end
        if not self.drafts:
            self.known[plan.slot] += plan.sample
            return
        self.known[plan.slot] = np.where(plan.sample, plan.end + 1, self.known[plan.slot])
        self.inexact[plan.slot] = plan.drafts > 0
