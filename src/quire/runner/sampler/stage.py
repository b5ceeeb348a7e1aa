"""The rows to sample, the interface of a stage, and the two kinds of per-slot state."""

from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from quire.device.updates import DeviceUpdates
from quire.runner.transfer import Longs, upload
from quire.types.errors import EngineError
from quire.types.plan import Admission, Floats
from quire.types.sampling import SamplingParams

MAX_COLUMNS = 16
LEAST = float(np.finfo(np.float32).tiny)  # a device may flush smaller values to 0
MOST = float(np.finfo(np.float32).max)


@dataclass(frozen=True)
class Rows:
    """The samples of one step, on host and device: one per row, more for rows with drafts."""

    slots: Longs  # [N]
    ends: Longs  # [N] tokens before the one to be sampled: its position
    prompts: Longs  # [N] how many of those are the prompt
    slot: Tensor  # [N] int64, on the device
    end: Tensor  # [N] int64
    prompt: Tensor  # [N] int64
    tokens: Tensor  # [S, L] int32, every slot's tokens

    @property
    def outputs(self) -> Longs:
        """Return [N] the tokens generated so far."""
        return self.ends - self.prompts

    def take(self, index: Longs) -> "Rows":
        """Return some of the rows, in their order."""
        if len(index) == len(self.slots):
            return self
        chosen = upload(index, self.slot.device)
        return Rows(
            self.slots[index], self.ends[index], self.prompts[index],
            self.slot[chosen], self.end[chosen], self.prompt[chosen], self.tokens,
        )  # fmt: skip


class PerSlot(Protocol):
    """State per slot."""

    def admit(self, slot: int, admission: Admission) -> None: ...

    def retire(self, slot: int) -> None: ...


class SamplerPart(PerSlot, Protocol):
    """A part of the sampler. fields: the sampling parameters it reads; it does not get requests with defaults for all of
    them. It gets all requests if there are none.
    """

    @property
    def fields(self) -> tuple[str, ...]: ...


class SamplerStage(SamplerPart, Protocol):
    """`apply` may change `logits` [N, V] float32 in place and returns them; it is called only if `active`."""

    def active(self, rows: Rows) -> bool: ...

    def apply(self, logits: Tensor, rows: Rows) -> Tensor: ...


class Extra(SamplerPart, Protocol):
    """A part that is neither a filter nor the sampling itself."""

    def wants(self, admission: Admission) -> bool:
        """Return whether it may ever be active for this request."""
        ...


class Edit(SamplerStage, Extra, Protocol): ...


class Processors(Edit, Protocol):
    """Logits processors: an edit before the penalties, and another after all edits and masks."""

    def finish(self, logits: Tensor, rows: Rows, temperature: Floats) -> tuple[Tensor, dict[int, str]]:
        """Return the logits, and why rows failed. temperature: [N], 0 of greedy rows."""
        ...


class Filter(Edit, Protocol):
    """An edit of rows with a temperature: it sees the scaled logits, sets dropped tokens to -inf, and keeps at least one."""

    def __init__(self, columns: "Columns", vocabulary: int) -> None: ...


NEUTRAL = SamplingParams()


def concerns(part: SamplerPart, params: SamplingParams) -> bool:
    return not part.fields or any(getattr(params, name) != getattr(NEUTRAL, name) for name in part.fields)


class Columns:
    """Parameters of every slot in one buffer: one copy updates the device, at fixed addresses that CUDA graphs read.

    On a CPU both sides are the same memory.
    """

    def __init__(self, slots: int, device: torch.device) -> None:
        self.device = device
        self._words = np.zeros((MAX_COLUMNS, slots), np.int64)  # [columns, S]; a narrower type uses the first part of its row
        self._on_device = (
            torch.from_numpy(self._words) if device.type == "cpu" else torch.zeros(self._words.shape, dtype=torch.int64)
        )
        self._on_device = self._on_device.to(device)
        self._made = 0
        self.stale = False

    def make(self, dtype: npt.DTypeLike, neutral: float) -> "Column":
        if self._made == MAX_COLUMNS:
            raise EngineError(f"a sampler has at most {MAX_COLUMNS} columns")
        host = self._words[self._made].view(dtype)[: self._words.shape[1]]
        on_device = self._on_device[self._made].view(torch.from_numpy(host).dtype)[: len(host)]
        self._made += 1
        return Column(self, host, on_device, neutral)

    def refresh(self, updates: DeviceUpdates) -> None:
        """Queue changed values for the device; deliver them before anything is sampled or replayed."""
        if self.stale and self.device.type != "cpu":
            updates.write(self._on_device, 0, self._words[: self._made].view(np.int32).reshape(-1))
        self.stale = False


class Column:
    """One value per slot, written by the host and read by the device after a refresh."""

    def __init__(self, columns: Columns, host: npt.NDArray[Any], on_device: Tensor, neutral: float) -> None:
        self.host = host  # [S]
        self.on_device = on_device  # [S] on the device
        self._columns = columns
        self._neutral = neutral
        host[:] = neutral
        columns.stale = True

    def __setitem__(self, slot: int, value: float) -> None:
        if self.host[slot] != value:
            self.host[slot] = value
            self._columns.stale = True

    def reset(self, slot: int) -> None:
        self[slot] = self._neutral

    def used(self, slots: Longs) -> npt.NDArray[np.bool_]:
        """Return [N] which of these slots differ from the neutral value."""
        used: npt.NDArray[np.bool_] = self.host[slots] != self._neutral
        return used

    def at(self, slot: Tensor) -> Tensor:
        """Return [N] the values of these slots."""
        return self.on_device[slot]


class ColumnStage:
    """What stages whose parameters are columns have in common. Slots with neutral values do not use the stage."""

    def __init__(self, *columns: Column) -> None:
        self._parameters = columns

    def retire(self, slot: int) -> None:
        for column in self._parameters:
            column.reset(slot)

    def used(self, rows: Rows) -> npt.NDArray[np.bool_]:
        """Return [N] which rows use it."""
        first, *others = self._parameters
        used = first.used(rows.slots)
        for column in others:
            used |= column.used(rows.slots)
        return used

    def active(self, rows: Rows) -> bool:
        return bool(self.used(rows).any())


class Lists:
    """A list of token ids per slot, with a value for each id."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._lists: dict[int, tuple[Tensor, Tensor]] = {}

    def put(self, slot: int, ids: Longs, values: npt.NDArray[np.float32] | None = None) -> None:
        numbers = np.zeros(len(ids), np.float32) if values is None else values
        self._lists[slot] = upload(ids, self._device), upload(numbers, self._device)

    def drop(self, slot: int) -> None:
        self._lists.pop(slot, None)

    def holders(self, slots: Longs) -> Longs:
        """Return the rows that have a list."""
        if not self._lists:
            return np.empty(0, np.int64)
        return np.array([row for row, slot in enumerate(slots.tolist()) if slot in self._lists], np.int64)

    def gather(self, slots: Longs, rows: Longs) -> tuple[Tensor, Tensor, Tensor]:
        """Return row, id and value of every entry of the lists of `rows`."""
        lists = [self._lists[slot] for slot in slots[rows].tolist()]
        row = np.repeat(rows, [len(ids) for ids, _ in lists])
        return upload(row, self._device), torch.cat([ids for ids, _ in lists]), torch.cat([values for _, values in lists])
