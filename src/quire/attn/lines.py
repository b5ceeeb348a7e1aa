"""Rows of one token by ONNX Runtime: head norms, rotation, the way into the cache and attention of up to 16 rows are one call,
and calls run side by side.

The cache must lie line by line and a row's pages behind each other. Then the place of its first key says where all of its keys
are, and a call's memory stays the same as long as the rows do: only lengths change. When rows come and go, the others keep
their seats, for to lead a row to its keys costs as much as some of its steps.

    a head's line   [ null page | ... | start: key 0, 1, ... | ... ]

A row is a node of its own in the call's graph, so its numbers do not depend on the rows beside it. The runtime is quick where
nothing is left to be scaled, so queries are scaled before.
"""

import logging
from dataclasses import dataclass
from functools import cache

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from quire.attn.backend import AttentionSpec
from quire.attn.batch import Batch
from quire.ops.attention import attend
from quire.ops.crew import Job, crew_size, run_together
from quire.ops.kv import kv_lines
from quire.ops.onnx import CONTRIB, Graph, Value
from quire.ops.ort import MOST_THREADS, Binding, Program
from quire.ops.qkv import HeadNorms, Rotation, reference_place_heads

logger = logging.getLogger(__name__)

ROWS_PER_CALL = 16
SPREAD_FROM = 4  # rows that threads divide among themselves: for fewer, waking one costs as much as it saves
SHARED_FROM = 1024  # keys of the longest row, from which threads share a row's heads where there are more threads than rows
# where a row's keys start that lie in several places, or of which it sees only the last
SCATTERED, TOO_MANY = -1, -2

Starts = npt.NDArray[np.int64]
Lengths = npt.NDArray[np.int32]


@dataclass(frozen=True)
class Form:
    """What makes the graphs of two layers the same."""

    heads: int
    kv_heads: int
    head_dim: int
    scale: float
    turned: int  # components of a head that turn
    eps: float | None  # of head norms; None = there are none

    @property
    def columns(self) -> tuple[int, int, int]:
        return self.heads * self.head_dim, self.kv_heads * self.head_dim, self.kv_heads * self.head_dim


class Seats:
    """Where rows have their keys, in one cache group. `count` seats, of which the first are taken, in memory that stays: calls
    read it."""

    def __init__(self, count: int) -> None:
        self.before = torch.zeros(count, dtype=torch.int32)  # keys before each row's token; 0 where they are elsewhere
        self.longest = torch.zeros((), dtype=torch.int32)
        self.starts = np.zeros(0, np.int64)  # of the keys in the lines, for each seat that is taken
        self.shared = False  # do threads share a row

    def take(self, starts: Starts, lengths: Lengths) -> bool:
        """-> whether rows have to be led to their keys again."""
        known, shared, self.starts = self.starts, self.shared, starts
        self.before.numpy()[: len(starts)] = np.where(starts < 0, 0, lengths - 1)
        longest = max(int(lengths.max()), 2)  # the runtime takes 1 for the beginning of a prompt
        self.longest.fill_(longest)
        self.shared = longest >= SHARED_FROM and len(starts) < max(SPREAD_FROM, crew_size())
        return shared != self.shared or not np.array_equal(known, starts)


def find_starts(batch: Batch, group: int, window: int | None, page_size: int) -> Starts:
    """[R] where the first key of each row is in the lines, or SCATTERED or TOO_MANY. The rows have one token each."""
    tables = batch.groups[group].tables.numpy()  # [R, pages]
    lengths = count_keys(batch)
    at = np.arange(tables.shape[1], dtype=np.int32)
    following = (tables == tables[:, :1] + at) | (at * page_size >= lengths[:, None])
    starts = np.where(following.all(axis=1), tables[:, 0].astype(np.int64) * page_size, SCATTERED)
    return starts if window is None else np.where(lengths > window, TOO_MANY, starts)


def count_keys(batch: Batch) -> Lengths:
    """[R] of each row, its own tokens' included."""
    return np.array([length for _, _, length in batch.rows], np.int32)


def find_seats(starts: Starts, seated: Starts) -> list[int]:
    """The row that takes each seat: rows that were there keep theirs, as far as there are seats; `seated` is who was there."""
    coming = {start: row for row, start in enumerate(starts.tolist()) if start >= 0}
    kept = [coming.pop(start, None) for start in seated[: len(starts)].tolist()]
    kept += [None] * (len(starts) - len(kept))
    staying = {row for row in kept if row is not None}
    others = iter([row for row in range(len(starts)) if row not in staying])
    return [next(others) if row is None else row for row in kept]


class Call:
    """Some rows of a layer in one call."""

    def __init__(self, binding: Binding, part: slice) -> None:
        self.binding, self.part = binding, part
        self.starts = np.full(part.stop - part.start, TOO_MANY - 1, np.int64)  # nobody was led anywhere yet


class LineAttention:
    """One layer's attention, from the first rows of `qkv` [C, columns] to those of `out` [C, heads * head_dim]: memory that
    stays."""

    def __init__(
        self, form: Form, kv: Tensor, rotation: Rotation | None, norms: HeadNorms | None, qkv: Tensor, out: Tensor, seats: Seats
    ) -> None:
        lines = kv_lines(kv)
        assert lines is not None
        self._form, self._qkv, self._out, self._seats = form, qkv, out, seats
        self._shape = (1, *lines.shape[1:])  # [1, kv_heads, tokens, head_dim]
        self._key, self._value = (line.data_ptr() for line in lines)
        self._step = form.head_dim * lines.element_size()
        self._fixed = {"longest": seats.longest}
        if rotation is not None:
            self._fixed |= {"cos": rotation.cos, "sin": rotation.sin}
        if norms is not None:
            self._fixed["query_norm"] = (norms.query.float() + norms.offset) * form.scale
            self._fixed["key_norm"] = norms.key.float() + norms.offset
        self._known: dict[tuple[int, int, bool], Call] = {}
        self._jobs: list[Job] = []
        self._together = False  # whether threads divide the jobs

    def place(self) -> None:
        """Leads the row of each seat that is taken to its keys; others to the null page, where they do no harm."""
        rows = len(self._seats.starts)
        spread = 1 if self._seats.shared or rows < SPREAD_FROM else crew_size()
        self._together = spread > 1
        calls = [self._call(part) for part in cut_rows(rows, spread)]
        self._jobs = [call.binding.run for call in calls]
        for call in calls:
            wanted = self._seats.starts[call.part]
            for node in np.flatnonzero(wanted != call.starts).tolist():
                offset = max(int(wanted[node]), 0) * self._step
                for name, address in (("key", self._key + offset), ("value", self._value + offset)):
                    call.binding.read(f"{name}{node}", self._shape, address)
                    call.binding.write(f"new_{name}{node}", self._shape, address)
            call.starts = wanted

    def run(self) -> None:
        if self._together:
            run_together(self._jobs)
        else:
            for job in self._jobs:
                job()

    def _call(self, part: slice) -> Call:
        key = part.start, part.stop, self._seats.shared
        if key not in self._known:
            self._known[key] = Call(self._bind(self._qkv[part], self._out[part], self._seats.before[part]), part)
        return self._known[key]

    def _bind(self, qkv: Tensor, out: Tensor, before: Tensor) -> Binding:
        binding = Binding(_program(self._form, len(qkv), self._seats.shared))
        for name, tensor in self._fixed.items():
            binding.read(name, tensor.shape, tensor.data_ptr())
        binding.read("before", before.shape, before.data_ptr())
        binding.read("qkv", (len(qkv), 1, qkv.shape[1]), qkv.data_ptr())
        binding.write("out", (len(out), 1, out.shape[1]), out.data_ptr())
        return binding


def cut_rows(count: int, spread: int) -> list[slice]:
    """Rows by calls, for `spread` threads to run side by side: powers of two, so that there are few programs."""
    parts, at, share = [], 0, min(ROWS_PER_CALL, -(-count // spread))
    while at < count:
        size = 1 << min(share, count - at).bit_length() - 1
        parts.append(slice(at, at + size))
        at += size
    return parts


def find_form(
    spec: AttentionSpec, kv: Tensor, rotation: Rotation | None, norms: HeadNorms | None, sinks: Tensor | None
) -> Form | None:
    """None = such a layer, or its cache, is not for the runtime."""
    if spec.soft_cap is not None or sinks is not None or kv.dtype != torch.float32 or kv_lines(kv) is None:
        return None
    turned = 0 if rotation is None else 2 * rotation.cos.shape[1]
    form = Form(spec.heads, spec.kv_heads, spec.head_dim, spec.scale, turned, None if norms is None else norms.eps)
    return form if agrees(form) else None


@cache
def agrees(form: Form) -> bool:
    """Does the runtime at hand compute what torch computes? Tried on two short rows."""
    dice = torch.Generator().manual_seed(0)
    lines = torch.randn(2, form.kv_heads, 16, form.head_dim, generator=dice)
    kv = lines.view(2, form.kv_heads, 4, 4, form.head_dim).permute(2, 0, 1, 3, 4)
    rotation = Rotation(*torch.rand(2, 16, form.turned // 2, generator=dice)) if form.turned else None
    weights = torch.rand(2, form.head_dim, generator=dice)
    norms = None if form.eps is None else HeadNorms(weights[0], weights[1], form.eps, 1.0)
    qkv, out = torch.randn(2, sum(form.columns), generator=dice), torch.empty(2, form.columns[0])
    seats = Seats(2)
    seats.take(np.array([4, 8]), np.array([3, 6], np.int32))
    try:
        attention = LineAttention(form, kv, rotation, norms, qkv, out, seats)
        attention.place()
        attention.run()
    except Exception as reason:  # the runtime has no common ancestor for its errors
        logger.info("attention stays with torch: %s", reason)
        return False
    query = reference_place_heads(qkv.clone(), kv, torch.tensor([6, 13]), torch.tensor([2, 5]), rotation, norms)
    expected = []
    for one, start, end in zip(query, (4, 8), (7, 14), strict=True):
        keys, values = lines[:, None, :, start:end]
        expected.append(attend(one[None, None], keys, values, None, scale=form.scale).flatten())
    return torch.allclose(out, torch.stack(expected), atol=1e-4, rtol=1e-4)


@cache
def _program(form: Form, rows: int, shared: bool) -> Program:
    graph = Graph()
    columns, cache_shape = sum(form.columns), (1, form.kv_heads, "tokens", form.head_dim)
    heads = _split_rows(graph, _scaled(graph, form, rows), rows)
    before = _split_rows(graph, ["before"], rows)
    outs = ["out"] if rows == 1 else [graph.name() for _ in range(rows)]
    angles = ["cos", "sin"] if form.turned else []
    for i, (taken, count, out) in enumerate(zip(heads, before, outs, strict=True)):
        inputs = [*taken, *[""] * (3 - len(taken)), f"key{i}", f"value{i}", *count, "longest", *angles]
        graph.place(
            "GroupQueryAttention", inputs, [out, f"new_key{i}", f"new_value{i}"], CONTRIB,
            num_heads=form.heads, kv_num_heads=form.kv_heads, scale=1.0, do_rotary=int(form.turned > 0),
        )  # fmt: skip
    if rows > 1:
        graph.place("Concat", outs, ["out"], axis=0)
    inputs_ = [Value("qkv", (rows, 1, columns)), Value("before", (rows,), np.int32), Value("longest", (), np.int32)]
    inputs_ += [Value(name, ("positions", form.turned // 2)) for name in angles]
    if form.eps is not None:
        inputs_ += [Value(name, (form.head_dim,)) for name in ("query_norm", "key_norm")]
    inputs_ += [Value(f"{name}{i}", cache_shape) for i in range(rows) for name in ("key", "value")]
    outputs = [Value(f"new_{name}{i}", cache_shape) for i in range(rows) for name in ("key", "value")]
    outputs = [Value("out", (rows, 1, form.columns[0])), *outputs]
    return Program(graph, inputs_, outputs, most_threads=MOST_THREADS if shared else 1)


def _scaled(graph: Graph, form: Form, rows: int) -> list[str]:
    """Names of [rows, 1, columns]: queries, keys and values in one, or each of them where heads are normed."""
    if form.eps is None:
        queries, *others = form.columns
        factors = np.concatenate([np.full(queries, form.scale, np.float32), np.ones(sum(others), np.float32)])
        return graph.add("Mul", ["qkv", graph.constant(factors)])
    query, key, value = graph.add("Split", ["qkv", graph.constant(np.array(form.columns, np.int64))], outputs=3, axis=2)
    normed = []
    for name, weight in ((query, "query_norm"), (key, "key_norm")):
        [by_head] = graph.add("Reshape", [name, graph.constant(np.array([rows, 1, -1, form.head_dim], np.int64))])
        [done] = graph.add("SimplifiedLayerNormalization", [by_head, weight], axis=-1, epsilon=form.eps)
        normed += graph.add("Reshape", [done, graph.constant(np.array([rows, 1, -1], np.int64))])
    return [*normed, value]


def _split_rows(graph: Graph, names: list[str], rows: int) -> list[list[str]]:
    """For each row, the names of its part of every value."""
    if rows == 1:
        return [names]
    parts = [graph.add("Split", [name], outputs=rows, axis=0, num_outputs=rows) for name in names]
    return [list(taken) for taken in zip(*parts, strict=True)]
