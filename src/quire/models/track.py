"""A compiled decoder bound to memory that stays, for steps of rows of one token: nothing is allocated or looked up between
calls, and nothing is copied but the pages of scattered rows.

Attention is a call, too, for the layers and the rows that `attn/lines.py` can serve, on copies where keys are scattered. What
it cannot goes to the layer. Rows run in the order of their seats:

    rows of the batch   a  c  d  e         (b has left)
    seats               a  e  c  d         x goes in, and hidden states come out, through this order
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from quire.attn.batch import Batch, take_rows
from quire.attn.copies import Copies
from quire.attn.lines import (
    SCATTERED,
    TOO_MANY,
    Form,
    LineAttention,
    Seats,
    Starts,
    count_keys,
    find_form,
    find_seats,
    find_starts,
)
from quire.layers.attention import SelfAttention, attend_heads
from quire.ops.session import Call

ROOM = 16  # rows by which tracks grow

Bind = Callable[[int], Call]  # a number of rows -> a call that works on so many
Kind = tuple[int, Form]  # of layers: their cache group and form


@dataclass(frozen=True)
class Apart:
    """The rows of a step that no call is for."""

    seats: Tensor  # [R] int64
    batch: Batch  # of them alone


class Group:
    """The layers of one cache group and form that attend by calls."""

    def __init__(self, attention: SelfAttention, form: Form, capacity: int) -> None:
        core = attention.core
        self._index, self._window, self._page_size = core.group, core.spec.window, core.bound().shape[3]
        self._form, self._capacity = form, capacity
        self.seats = Seats(capacity)
        self.layers: list[LineAttention] = []
        self.in_line = True  # are there rows whose keys are
        self._copies: Copies | None = None
        self.copied: Copies | None = None  # if there are rows on copies
        self.apart: Apart | None = None

    def find_starts(self, batch: Batch) -> Starts:
        return find_starts(batch, self._index, self._window, self._page_size)

    def take_seats(self, batch: Batch, starts: Starts, order: list[int]) -> None:
        """`starts` [R] of the batch's rows, of which order[i] takes seat i."""
        seated, lengths = starts[order], count_keys(batch)[order]
        self.in_line = bool((seated >= 0).any())
        if self.seats.take(seated, lengths):
            for layer in self.layers:
                layer.place()
        others = np.flatnonzero(seated == TOO_MANY)
        scattered = np.flatnonzero(seated == SCATTERED)
        self.copied = None
        if len(scattered):
            self._copies = self._copies or Copies(self._form, self._page_size, self._capacity)
            tables = batch.groups[self._index].tables.numpy()[[order[seat] for seat in scattered.tolist()]]
            left = self._copies.take(scattered, tables, lengths[scattered])
            others = np.concatenate((others, left))
            self.copied = self._copies if len(left) < len(scattered) else None
        rows = [order[seat] for seat in others.tolist()]
        self.apart = Apart(torch.from_numpy(others), take_rows(batch, rows).batch) if rows else None


class BoundAttention:
    """One layer's attention in a track, from `qkv` to `out`, each [C, columns]."""

    def __init__(self, attention: SelfAttention, qkv: Tensor, out: Tensor, groups: dict[Kind, Group]) -> None:
        core = attention.core
        self._attention, self._qkv, self._out, self._kv, self._norms = attention, qkv, out, core.bound(), attention.norms
        self._rotation = None if attention.rope is None else attention.rope.table
        form = find_form(core.spec, self._kv, self._rotation, self._norms, attention.sinks)
        self._lines: LineAttention | None = None
        if form is not None:
            self._group = groups.setdefault((core.group, form), Group(attention, form, len(qkv)))
            self._lines = LineAttention(form, self._kv, self._rotation, self._norms, qkv, out, self._group.seats)
            self._group.layers.append(self._lines)

    @property
    def by_calls(self) -> bool:
        return self._lines is not None

    @property
    def stale(self) -> bool:
        return self._attention.core.kv is not self._kv

    def run(self, batch: Batch) -> None:
        """The rows of `batch` are in the order of the seats, unless it goes by calls."""
        if self._lines is None:
            rows = len(batch.rows)
            self._out[:rows] = attend_heads(self._attention, self._qkv[:rows], batch)
            return
        copied, apart = self._group.copied, self._group.apart
        if self._group.in_line:
            self._lines.run()
        if copied is not None:
            copied.attend(self._kv, self._rotation, self._norms, self._qkv, self._out)
        if apart is not None:
            self._out[apart.seats] = attend_heads(self._attention, self._qkv[apart.seats], apart.batch)


class Memory:
    """Matrices with C rows, which can be used again when they are given back. It has to outlive the calls bound to it."""

    def __init__(self, rows: int) -> None:
        self.rows = rows
        self._all: list[Tensor] = []
        self._free: dict[int, list[Tensor]] = {}

    def take(self, columns: int) -> Tensor:
        free = self._free.setdefault(columns, [])
        if not free:
            free.append(torch.empty(self.rows, columns))
            self._all += free
        return free.pop()

    def give(self, matrix: Tensor) -> None:
        self._free[matrix.shape[1]].append(matrix)


class Track:
    """Stages in order, each with the attention behind it, for up to C rows."""

    def __init__(
        self,
        source: Tensor,
        result: Tensor,
        stages: Sequence[tuple[Bind, BoundAttention | None]],
        groups: Sequence[Group],
        memory: Memory,
    ) -> None:
        self._source, self._result = source, result  # [C, columns]
        self._binds = [bind for bind, _ in stages]
        self._attending = [attending for _, attending in stages]
        self._groups, self._memory = tuple(groups), memory
        self._by_calls = all(attending is None or attending.by_calls for attending in self._attending)
        self._calls: list[Call] = []  # for as many rows as there are starts
        self._starts = np.zeros(0, np.int64)  # in the first group, of the latest rows
        self._order: list[int] = []  # the row of each seat
        self._turned: tuple[Tensor, Tensor] | None = None  # the row of each seat and the seat of each row, unless they agree

    def suits(self, rows: int) -> bool:
        first = self._attending[0]
        return rows <= self._memory.rows and (first is None or not first.stale)

    def run(self, x: Tensor, batch: Batch) -> Tensor:
        """x [T, columns] -> hidden states of the same rows; they are overwritten by the next run."""
        rows = len(x)
        seated = self._seat(batch, rows)
        if self._turned is None:
            self._source[:rows] = x
        else:
            torch.index_select(x, 0, self._turned[0], out=self._source[:rows])
        for call, attending in zip(self._calls, self._attending, strict=True):
            call.run()
            if attending is not None:
                attending.run(seated)
        return self._result[:rows] if self._turned is None else self._result.index_select(0, self._turned[1])

    def _seat(self, batch: Batch, rows: int) -> Batch:
        """-> the batch in the order of the seats, if somebody asks for its rows."""
        if len(self._calls) == 0 or len(self._order) != rows:
            self._calls = [bind(rows) for bind in self._binds]
        starts = [group.find_starts(batch) for group in self._groups]
        first = starts[0] if starts else np.zeros(rows, np.int64)
        if len(self._order) != rows or not np.array_equal(first, self._starts):
            order = find_seats(first, self._groups[0].seats.starts) if starts else list(range(rows))
            turned = order != list(range(rows))
            self._turned = (torch.tensor(order), torch.tensor(order).argsort()) if turned else None
            self._starts, self._order = first, order
        for group, found in zip(self._groups, starts, strict=True):
            group.take_seats(batch, found, self._order)
        return batch if self._turned is None or self._by_calls else take_rows(batch, self._order).batch


def room_for(rows: int) -> int:
    """How many rows a track is made for that has to take so many."""
    return -(-rows // ROOM) * ROOM
