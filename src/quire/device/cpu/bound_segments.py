"""A compiled decoder bound to memory that stays, for steps of few tokens: nothing is allocated, looked up or copied between
calls. Attention is a call, too, where `ops/paged_attention.py` can serve a layer, or two where a row has several tokens (with
drafts); otherwise it goes to the layer.
"""

from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor

from quire.attn.batch import Batch
from quire.attn.cpu import batch_rows
from quire.device.cpu.session import Call
from quire.layers.attention import SelfAttention, attend_heads
from quire.ops import paged_attention

ROOM = 16  # tokens by which tracks grow
KEPT = 16  # numbers of tokens whose calls are kept

Bind = Callable[[int], Call]  # a number of tokens -> a call that works on so many


class BoundAttention:
    """One layer's attention in a track, from `qkv` to `out`, each [C, columns]."""

    def __init__(self, attention: SelfAttention, qkv: Tensor, out: Tensor) -> None:
        core = attention.core
        self._attention, self._qkv, self._out, self._kv, self._group = attention, qkv, out, core.bound(), core.group
        self._calls: tuple[paged_attention.PagedAttention, ...] = ()  # for rows of one token; to write keys, and to attend
        rotation = None if attention.rope is None else attention.rope.table
        by_halves = rotation is None or not rotation.interleaved
        plain = attention.sinks is None and core.spec.slopes is None
        if plain and by_halves and paged_attention.suits(self._kv):
            bind = partial(
                paged_attention.PagedAttention, self._kv, scale=core.spec.scale, window=core.spec.window,
                soft_cap=core.spec.soft_cap, rotation=rotation, norms=attention.norms,
            )  # fmt: skip
            queries = qkv[:, : core.spec.heads * core.spec.head_dim]
            self._calls = bind(qkv, out), bind(qkv, None), bind(queries, out, placed=True)

    @property
    def stale(self) -> bool:
        return self._attention.core.kv is not self._kv

    def run(self, batch: Batch) -> None:
        tokens = len(batch.ids)
        for call in self._calls[:1] if tokens == len(batch.rows) else self._calls[1:]:
            call.run(batch_rows(batch, self._group))
        if not self._calls:
            self._out[:tokens] = attend_heads(self._attention, self._qkv[:tokens], batch)


class BoundSum:
    """A sum over ranks (`Between.add`) in a track, from `part` to `total`, each [C, columns]."""

    stale = False

    def __init__(self, add: Callable[[Tensor], Tensor], part: Tensor, total: Tensor) -> None:
        self._add, self._part, self._total = add, part, total

    def run(self, batch: Batch) -> None:
        tokens = len(batch.ids)
        self._total[:tokens] = self._add(self._part[:tokens])


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


class BoundSegments:
    """Stages in order, each with the attention and the sums behind it, for up to C tokens."""

    def __init__(
        self,
        source: Tensor,
        result: Tensor,
        stages: Sequence[tuple[Bind, Sequence[BoundAttention | BoundSum]]],
        memory: Memory,
        places: Tensor | None = None,
    ) -> None:
        """`places` [C, 1]: of the tokens' adapters, zeros by now."""
        self._places, self._adapted = places, False  # True = they are not all zeros
        self._source, self._result, self._memory = source, result, memory  # [C, columns]
        self._binds = [bind for bind, _ in stages]
        self._behind = [behind for _, behind in stages]
        self._calls: dict[int, list[Call]] = {}  # by how many tokens they are for

    def suits(self, tokens: int) -> bool:
        return tokens <= self._memory.rows and not any(each.stale for each in self._behind[0])

    def run(self, x: Tensor, batch: Batch) -> Tensor:
        """x [T, columns] -> hidden states of the same tokens; they are overwritten by the next run."""
        tokens = len(x)
        calls = self._calls.get(tokens) or self._bind(tokens)
        self._source[:tokens] = x
        if self._adapted or batch.tokens.lora is not None:
            self._place(batch)
        for call, behind in zip(calls, self._behind, strict=True):
            call.run()
            for each in behind:
                each.run(batch)
        return self._result[:tokens]

    def _place(self, batch: Batch) -> None:
        """Whose adapter each token has; what was there for the last step is wiped out once."""
        if self._places is None:
            return
        lora = batch.tokens.lora
        self._adapted = lora is not None
        self._places.zero_()
        if lora is not None:
            self._places[: len(batch.ids), 0] = torch.from_numpy(lora.places)

    def _bind(self, tokens: int) -> list[Call]:
        if len(self._calls) >= KEPT:
            self._calls.clear()
        self._calls[tokens] = [bind(tokens) for bind in self._binds]
        return self._calls[tokens]


def room_for(tokens: int) -> int:
    """How many tokens a track is made for that has to take so many."""
    return -(-tokens // ROOM) * ROOM
