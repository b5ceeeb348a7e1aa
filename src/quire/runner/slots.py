"""What the device keeps of each tenant: arrays indexed by slot.

    tokens[slot]    [ prompt ........ | drawn ...... | stale ]     a drawn token is written here by the step that drew it
    cursor[slot]    [ run so far ............. )
    known[slot]     [ there to be run ......... )                  = cursor + 1 after a draw

Token values live on the device only: the host knows how many there are, never which.
"""

import numpy as np
import torch

from quire.runner.prefixes import Prefixes
from quire.runner.transfer import Longs, upload_together
from quire.types.errors import EngineError
from quire.types.plan import Admission, Ints, StepPlan


class Slots:
    def __init__(self, slots: int, length: int, groups: int, page_size: int, device: torch.device) -> None:
        """`length` is the most tokens a tenant may run; the one drawn last has a place after them."""
        self.device = device
        self.length = length
        self.page_size = page_size
        self.tokens = torch.zeros(slots, length + 1, dtype=torch.int32, device=device)  # [S, L]
        width = -(-length // page_size)
        self.tables = torch.zeros(groups, slots, width, dtype=torch.int32, device=device)  # [G, S, P]
        self.prefixes = Prefixes(groups, slots, width, page_size)
        self.cursor = np.zeros(slots, np.int64)  # [S]
        self.known = np.zeros(slots, np.int64)  # [S]
        self.prompt_length = np.zeros(slots, np.int64)  # [S]

    def retire(self, slots: Ints) -> None:
        self.cursor[slots] = self.known[slots] = self.prompt_length[slots] = 0

    def admit(self, admissions: tuple[Admission, ...]) -> None:
        """New tenants: their tokens, and page tables that lead nowhere yet."""
        if not admissions:
            return
        lengths = np.array([len(admission.tokens) for admission in admissions], np.int64)
        if lengths.max() > self.length:
            raise EngineError(f"a request of {lengths.max()} tokens was admitted to slots of {self.length}")
        slots = np.array([admission.slot for admission in admissions], np.int64)
        self.cursor[slots] = [admission.start for admission in admissions]
        self.known[slots] = lengths
        self.prompt_length[slots] = [admission.prompt_length for admission in admissions]
        slot, row, column, token = upload_together(
            [
                slots,
                np.repeat(slots, lengths),
                ragged_arange(lengths),
                np.concatenate([admission.tokens for admission in admissions]),
            ],
            self.device,
        )
        self.prefixes.clear(slots)
        self.tables[:, slot] = 0
        self.tokens[row, column] = token.int()

    def give(self, plan: StepPlan) -> None:
        """Tokens that follow a tenant's last without having been drawn."""
        if not len(plan.given_slot):
            return
        self.known += np.bincount(plan.given_slot, minlength=len(self.known))
        slot, position, token = upload_together([plan.given_slot, plan.given_position, plan.given_token], self.device)
        self.tokens[slot, position] = token.int()

    def write_tables(self, plan: StepPlan) -> None:
        if not len(plan.entry_page):
            return
        entries = [plan.entry_group, plan.entry_slot, plan.entry_index, plan.entry_page]
        self.prefixes.write(*entries)
        group, slot, index, page = upload_together(entries, self.device)
        self.tables[group, slot, index] = page.int()

    def check(self, plan: StepPlan) -> None:
        """A row goes on exactly where its slot stands, and draws exactly when it reaches the last token: anything else would
        read or write the wrong cache entries in silence."""
        start, end = plan.end - plan.count, plan.end
        wrong = (start != self.cursor[plan.slot]) | (plan.count < 1) | (end > self.known[plan.slot])
        wrong |= plan.sample != (end == self.known[plan.slot])
        if wrong.any():
            row = int(np.flatnonzero(wrong)[0])
            slot = int(plan.slot[row])
            raise EngineError(
                f"step {plan.step} asks slot {slot} for positions {start[row]} to {end[row]} with sample={plan.sample[row]}, "
                f"but {self.cursor[slot]} of its {self.known[slot]} tokens have been run"
            )

    def advance(self, plan: StepPlan) -> None:
        """The rows have been launched; those that draw have one more token to run."""
        self.cursor[plan.slot] = plan.end
        self.known[plan.slot] += plan.sample


def ragged_arange(lengths: Longs) -> Longs:
    """[3, 2] -> [0, 1, 2, 0, 1]."""
    starts = np.cumsum(lengths) - lengths
    return np.arange(int(lengths.sum()), dtype=np.int64) - np.repeat(starts, lengths)
