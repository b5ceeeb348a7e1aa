"""What every stage is made of: the rows to sample, the seam itself, and the two forms of per-slot state."""

from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from quire.runner.transfer import Longs, upload
from quire.types.plan import Admission


@dataclass(frozen=True)
class Rows:
    """The rows of one step that draw a token, as the host and as the device see them."""

    slots: Longs  # [N]
    ends: Longs  # [N] tokens before the one to be drawn: its position
    prompts: Longs  # [N] how many of those are the prompt
    slot: Tensor  # [N] int64, on the device
    end: Tensor  # [N] int64
    prompt: Tensor  # [N] int64
    tokens: Tensor  # [S, L] int32, every slot's tokens

    @property
    def outputs(self) -> Longs:
        """[N] tokens drawn so far."""
        return self.ends - self.prompts

    def take(self, index: Longs) -> "Rows":
        chosen = upload(index, self.slot.device)
        return Rows(
            self.slots[index], self.ends[index], self.prompts[index],
            self.slot[chosen], self.end[chosen], self.prompt[chosen], self.tokens,
        )  # fmt: skip


class Tenancy(Protocol):
    """Anything that keeps state per slot."""

    def admit(self, slot: int, admission: Admission) -> None: ...

    def retire(self, slot: int) -> None: ...


class Stage(Tenancy, Protocol):
    """`apply` may change `logits` [N, V] float32 in place and returns them; it is called only when `active` says so."""

    def active(self, rows: Rows) -> bool: ...

    def apply(self, logits: Tensor, rows: Rows) -> Tensor: ...


class Column:
    """One number per slot, written by the host and read by the device; on a CPU both are the same memory."""

    def __init__(self, slots: int, dtype: npt.DTypeLike, neutral: float, device: torch.device) -> None:
        self.host = np.full(slots, neutral, dtype)  # [S]
        self._neutral = neutral
        self._device = device
        self._copy: Tensor | None = None

    def __setitem__(self, slot: int, value: float) -> None:
        self.host[slot] = value
        if self._device.type != "cpu":
            self._copy = None

    def reset(self, slot: int) -> None:
        self[slot] = self._neutral

    def used(self, slots: Longs) -> npt.NDArray[np.bool_]:
        """[N] which of these slots differ from the neutral value."""
        used: npt.NDArray[np.bool_] = self.host[slots] != self._neutral
        return used

    def at(self, slot: Tensor) -> Tensor:
        """[N] the values of these slots."""
        if self._copy is None:
            self._copy = upload(self.host if self._device.type == "cpu" else self.host.copy(), self._device)
        return self._copy[slot]


class Lists:
    """A list of token ids per slot, and a number with each id."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._lists: dict[int, tuple[Tensor, Tensor]] = {}

    def put(self, slot: int, ids: Longs, values: npt.NDArray[np.float32] | None = None) -> None:
        numbers = np.zeros(len(ids), np.float32) if values is None else values
        self._lists[slot] = upload(ids, self._device), upload(numbers, self._device)

    def drop(self, slot: int) -> None:
        self._lists.pop(slot, None)

    def holders(self, slots: Longs) -> Longs:
        """Which of these rows have a list."""
        if not self._lists:
            return np.empty(0, np.int64)
        return np.array([row for row, slot in enumerate(slots.tolist()) if slot in self._lists], np.int64)

    def gather(self, slots: Longs, rows: Longs) -> tuple[Tensor, Tensor, Tensor]:
        """The lists of `rows` end to end: row, id and number of every entry."""
        lists = [self._lists[slot] for slot in slots[rows].tolist()]
        row = np.repeat(rows, [len(ids) for ids, _ in lists])
        return upload(row, self._device), torch.cat([ids for ids, _ in lists]), torch.cat([values for _, values in lists])
