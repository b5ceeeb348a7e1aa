"""A compiled decoder bound to memory for steps of T rows of one token: nothing is allocated, copied or looked up between calls.

Attention is a call, too, for the layers and the rows that `attn/lines.py` can serve. What it cannot goes to the layer.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from quire.attn.batch import Batch, GroupView
from quire.attn.lines import LineAttention, RowPlaces, find_form
from quire.layers.attention import SelfAttention, attend_heads
from quire.ops.onnx import Binding


@dataclass(frozen=True)
class Apart:
    """The rows of a step whose keys are scattered."""

    index: Tensor  # [R] int64
    batch: Batch  # of them alone


class Group:
    """The layers of one cache group."""

    def __init__(self, attention: SelfAttention, rows: int) -> None:
        core = attention.core
        self._index, self._window, self._page_size = core.group, core.spec.window, core.bound().shape[3]
        self.places = RowPlaces(rows)
        self.layers: list[LineAttention] = []
        self.apart: Apart | None = None

    def look(self, batch: Batch) -> None:
        known = self.places.starts
        scattered = self.places.look(batch, self._index, self._window, self._page_size)
        self.apart = Apart(torch.tensor(scattered), _pick(batch, scattered)) if scattered else None
        if (known != self.places.starts).any():
            for layer in self.layers:
                layer.place()


class BoundAttention:
    """One layer's attention in a track, from `qkv` to `out`."""

    def __init__(self, attention: SelfAttention, qkv: Tensor, out: Tensor, groups: dict[int, Group]) -> None:
        core = attention.core
        self._attention, self._qkv, self._out, self._kv = attention, qkv, out, core.bound()
        rotation = None if attention.rope is None else attention.rope.table
        form = find_form(core.spec, self._kv, rotation, attention.norms, attention.sinks)
        self._lines: LineAttention | None = None
        if form is not None:
            if core.group not in groups:
                groups[core.group] = Group(attention, len(qkv))
            self._group = groups[core.group]
            self._lines = LineAttention(form, self._kv, rotation, attention.norms, qkv, out, self._group.places)
            self._group.layers.append(self._lines)

    @property
    def stale(self) -> bool:
        return self._attention.core.kv is not self._kv

    def run(self, batch: Batch) -> None:
        if self._lines is None:
            self._out.copy_(attend_heads(self._attention, self._qkv, batch))
            return
        self._lines.run()
        apart = self._group.apart
        if apart is not None:
            self._out[apart.index] = attend_heads(self._attention, self._qkv[apart.index], apart.batch)


class Memory:
    """Matrices with T rows, which can be used again when they are given back. It has to outlive the calls bound to it."""

    def __init__(self, rows: int) -> None:
        self._rows = rows
        self._all: list[Tensor] = []
        self._free: dict[int, list[Tensor]] = {}

    def take(self, columns: int) -> Tensor:
        free = self._free.setdefault(columns, [])
        if not free:
            free.append(torch.empty(self._rows, columns))
            self._all += free
        return free.pop()

    def give(self, matrix: Tensor) -> None:
        self._free[matrix.shape[1]].append(matrix)


class Track:
    """Calls in order, each with the attention behind it."""

    def __init__(
        self,
        source: Tensor,
        result: Tensor,
        calls: Sequence[tuple[Binding, BoundAttention | None]],
        groups: Sequence[Group],
        memory: Memory,
    ) -> None:
        self._source, self._result = source, result  # [T, columns]
        self._calls, self._groups, self._memory = tuple(calls), tuple(groups), memory

    def suits(self, rows: int) -> bool:
        return len(self._source) == rows and not any(attending is not None and attending.stale for _, attending in self._calls)

    def run(self, x: Tensor, batch: Batch) -> Tensor:
        self._source.copy_(x)
        for group in self._groups:
            group.look(batch)
        for call, attending in self._calls:
            call.run()
            if attending is not None:
                attending.run(batch)
        return self._result


def _pick(batch: Batch, rows: Sequence[int]) -> Batch:
    """Some of the rows, which have one token each."""
    index = torch.tensor(rows)
    return replace(
        batch,
        ids=batch.ids[index],
        positions=batch.positions[index],
        row_starts=torch.arange(len(rows) + 1, dtype=torch.int32),
        kv_lengths=batch.kv_lengths[index],
        rows=tuple((at, 1, batch.rows[row][2]) for at, row in enumerate(rows)),
        logit_index=torch.arange(len(rows)),
        groups=tuple(GroupView(view.tables[index], view.write[index]) for view in batch.groups),
        plans={},
    )
