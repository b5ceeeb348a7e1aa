"""The device half of recurrent layers: their states, snapshots for prefix hits, and rollback after rejected drafts."""

from collections.abc import Callable, Hashable, Sequence
from dataclasses import replace
from math import prod

import numpy as np
import torch
from torch import Tensor

from quire.attn.batch import Batch
from quire.device.base import Device
from quire.features.base import Allocation, StepPart
from quire.layers.recurrent import Recurrence
from quire.models.decoder import Decoder
from quire.runner.transfer import upload_together
from quire.types.errors import EngineError
from quire.types.plan import Admission, Ints, Longs, Outputs, RowShapes, StepPlan, StepRows

MAX_REPLAYED_TOKENS = 8  # that a row begins earlier
NOTHING = -1


class RecurrentPart(StepPart):
    name = "recurrent"

    def __init__(self, device: Device, dtype: torch.dtype, drafts: bool) -> None:
        """drafts: rows may have draft tokens that are rejected."""
        self._device, self._dtype, self._drafts = device, dtype, drafts
        self._model: Decoder | None = None
        self._states: StateBuffers | None = None
        self._rollback: Rollback | None = None

    def load(self, model: Decoder, reserved_bytes: Callable[[], int]) -> None:  # noqa: ARG002
        self._model = model

    def allocate(self, allocation: Allocation) -> None:
        assert self._model is not None
        slots = len(allocation.slots.tokens) if allocation.pages else 0
        self._states = StateBuffers(
            self._model.recurrents, slots, allocation.snapshots, self._dtype, self._device.allocate, self._drafts
        )
        self._rollback = Rollback(slots, self._states) if self._drafts and slots else None

    def admit(self, slot: int, admission: Admission) -> None:
        if self._rollback is not None:
            self._rollback.admit(slot, admission.start)

    def prepare(self, plan: StepPlan) -> None:
        assert self._states is not None
        self._states.copy(plan.load_entry, plan.load_slot)

    def arrange(self, plan: StepPlan, run: Callable[[StepRows], None]) -> tuple[StepRows, None] | None:
        if self._rollback is None:
            return None
        first, rows = self._rollback.prepare(plan)
        if first is not None:
            run(first)
        self._rollback.keep()
        return rows, None

    def extend(self, batch: Batch, rows: StepRows, slot: Tensor) -> Batch:
        assert self._states is not None
        entries = self._states.entries(rows.slot)
        there = slot if entries is rows.slot else torch.zeros_like(slot)
        return replace(batch, entries=there, entry_list=tuple(entries.tolist()))

    def graph_key(self, rows: StepRows) -> Hashable:  # noqa: ARG002
        """Graphs read the state of a row by its slot, which is among their inputs anyway."""
        return False

    def after_layers(self, plan: StepPlan) -> None:
        assert self._states is not None
        self._states.copy(plan.save_slot, plan.save_entry)

    def describe(self) -> dict[str, int]:
        return {"state_bytes": 0 if self._states is None else self._states.bytes_per_entry}

    def close(self) -> None:
        self._model = self._states = self._rollback = None


class StateBuffers:
    """The states of all recurrent layers.

    entries   [ slot 0 | slot 1 | ... | snapshot | ... | saved for slot 0 | ... | unused ]      in every layer's two arrays
    """

    def __init__(
        self,
        layers: Sequence[Recurrence],
        slots: int,
        snapshots: int,
        dtype: torch.dtype,
        allocate: Callable[[int, int], Tensor],
        twice: bool = False,
    ) -> None:
        """slots: 0: all share one entry, in profile and warm-up runs.
        allocate: entries, and bytes of each -> raw memory [entries, bytes] uint8, all zero.
        twice: a second state is saved for each slot.
        """
        self._shared = not slots
        self._saved = slots + snapshots
        self._entries = slots + snapshots + (slots if twice else 0) + 1
        self._arrays: list[Tensor] = []  # each [entries, ...]
        for layer in layers:
            conv, state = (
                _array(shape, kind, self._entries, allocate)
                for shape, kind in ((layer.cache.conv, dtype), (layer.cache.state, torch.float32))
            )
            layer.bind(conv, state)
            self._arrays += [array for array in (conv, state) if array.numel()]

    @property
    def bytes_per_entry(self) -> int:
        return sum(array[0].nbytes for array in self._arrays)

    def entries(self, slots: Ints) -> Ints:
        return np.zeros_like(slots) if self._shared else slots

    def saved(self, slots: Ints) -> Ints:
        return slots + self._saved

    def copy(self, source: Ints, target: Ints) -> None:
        """Copy state[source] to state[target]; no target is a source."""
        if not len(source) or self._shared or not self._arrays:
            return
        read, write = upload_together([source, target], self._arrays[0].device)
        for array in self._arrays:
            array[write] = array[read]


def _array(shape: tuple[int, ...], dtype: torch.dtype, entries: int, allocate: Callable[[int, int], Tensor]) -> Tensor:
    size = prod(shape)
    if not size:
        return torch.empty(entries, *shape, dtype=dtype)
    return allocate(entries, size * dtype.itemsize).view(dtype).view(entries, *shape)


class Rollback:
    """Returns recurrent states to before rejected drafts. A state has no positions, so a saved one is restored.

        row         [ newest  draft 1  draft 2  draft 3 ]        the slot's state is saved before it runs
        next row    [ newest  draft 1 | t2 ... ]                 draft 2 was rejected: run from the saved state again

    Tokens that run again write the same keys and values to their pages. A row may begin up to MAX_REPLAYED_TOKENS earlier. If
    the saved state is farther back, its tokens are run before the step, and the state is saved anew.
    """

    def __init__(self, slots: int, states: StateBuffers) -> None:
        self._states = states
        self._at: Longs = np.zeros(slots, np.int64)  # [slots] tokens that the state has seen
        self._saved_at: Longs = np.full(slots, NOTHING, np.int64)  # [slots] tokens that the saved state has seen
        self._keep: Ints = np.empty(0, np.int32)  # slots whose states are saved before the prepared step runs

    def admit(self, slot: int, start: int) -> None:
        self._at[slot], self._saved_at[slot] = start, NOTHING

    def prepare(self, plan: StepPlan) -> tuple[StepRows | None, StepRows]:
        """Return rows to run before the step, without outputs, and the rows to run in its place. Then call `keep`."""
        slot, begin = plan.slot, plan.end.astype(np.int64) - plan.count
        ahead = self._at[slot] - begin
        back = np.flatnonzero(ahead)
        saved = self._saved_at[slot[back]]
        if (ahead < 0).any() or (saved == NOTHING).any() or (saved > begin[back]).any():
            raise EngineError("a recurrent state cannot go back to where a row begins")
        self._states.copy(self._states.saved(slot[back]), slot[back])
        far = back[begin[back] - saved > MAX_REPLAYED_TOKENS]
        near = np.setdiff1d(back, far)
        keeps = plan.drafts > 0
        keeps[near] = False
        self._keep = slot[keeps]
        self._saved_at[self._keep] = begin[keeps]
        self._at[slot] = plan.end
        by = np.zeros_like(plan.count)
        by[near] = begin[near] - self._saved_at[slot[near]]
        first = None
        if len(far):
            distance = (begin[far] - saved[np.searchsorted(back, far)]).astype(np.int32)
            first = _alone(plan, far, distance, begin[far].astype(np.int32))
        return first, _longer(plan, by) if len(near) else plan

    def keep(self) -> None:
        self._states.copy(self._keep, self._states.saved(self._keep))


def _alone(plan: StepPlan, rows: Longs, count: Ints, end: Ints) -> StepRows:
    return StepRows(plan.slot[rows], end, RowShapes(count, np.zeros_like(count), Outputs(count[:0])))


def _longer(plan: StepPlan, by: Ints) -> StepRows:
    """Return rows that begin by[r] tokens earlier."""
    shift, outputs = np.cumsum(by), plan.outputs
    moved = (
        tokens + shift[plan.shapes.rows_of(tokens)] for tokens in (outputs.sample_after, outputs.prompt_logprobs, outputs.pool)
    )
    outputs = Outputs(*(tokens.astype(np.int32) for tokens in moved))
    return StepRows(plan.slot, plan.end, RowShapes(plan.count + by, plan.drafts, outputs))
