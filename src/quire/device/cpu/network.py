"""Compile a quantized decoder into one OpenVINO network, from embedded tokens to the last hidden states, including attention.

It is for steps of few tokens; with many, the decoder itself is faster. The cache must have pages of 32 tokens and separate
keys and values. OpenVINO calls its attention operator experimental, so its results are checked before it is used.
"""

import logging
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from quire.attn.backend import AttentionSpec
from quire.attn.batch import Batch, GroupView
from quire.device.cpu.autotune import dequantize_from
from quire.device.cpu.graph import OWN, Graph, Runtime, Value
from quire.device.cpu.openvino import PAGE, PAGED, Network
from quire.device.cpu.trace import Trace
from quire.layers.attention import SelfAttention, take_final
from quire.ops.arguments import HeadNorms, Rotation
from quire.ops.kv import attend
from quire.ops.qkv import reference_place_heads

logger = logging.getLogger(__name__)

SPLIT_FROM = 1024  # keys of the longest row from which a row may be split among threads
TWO_TOKENS: dict[str, npt.NDArray[np.int32] | npt.NDArray[np.int64]] = {
    "positions": np.zeros(2, np.int64),
    "cached": np.zeros(2, np.int32),
    "row_starts": np.arange(3, dtype=np.int32),
    "pages": np.zeros(2, np.int32),
    "page_starts": np.arange(3, dtype=np.int32),
    "longest": np.array(1, np.int32),
}


@dataclass(frozen=True)
class AttentionShape:
    """What decides the attention graph of a layer."""

    heads: int
    kv_heads: int
    head_dim: int
    scale: float
    turned: int  # rotated components of a head
    eps: float | None  # of head norms; None: no head norms

    @property
    def columns(self) -> tuple[int, int, int]:
        return self.heads * self.head_dim, self.kv_heads * self.head_dim, self.kv_heads * self.head_dim


@dataclass
class Emitter:
    """Add attention to a graph, and collect the inputs of the graph other than hidden states."""

    graph: Graph
    inputs: list[Value] = field(
        default_factory=lambda: [
            Value("positions", ("tokens",), np.int64),
            Value("cached", ("rows",), np.int32),
            Value("row_starts", ("edges",), np.int32),
            Value("pages", ("entries",), np.int32),
            Value("page_starts", ("edges",), np.int32),
            Value("longest", (), np.int32),
        ]
    )
    tables: dict[str, Tensor] = field(default_factory=dict)  # constant inputs
    _angles: dict[int, list[str]] = field(default_factory=dict)

    def attend(self, shape: AttentionShape, rotation: Rotation | None, norms: HeadNorms | None, qkv: str, layer: int) -> str:
        """Add the attention of a layer: qkv [T, columns] -> [T, heads * head_dim]. Its cache is in inputs keys<layer> and
        values<layer>.
        """
        graph, (queries, keys, values) = self.graph, shape.columns
        if norms is not None:
            query, key, value = self._split(qkv, queries, keys, values)
            query, key = self._norm(shape, query, norms.query, norms), self._norm(shape, key, norms.key, norms)
            [both] = graph.add("Concat", [query, key], axis=1)
        else:
            both, value = self._split(qkv, queries + keys, values)
        if rotation is not None:
            both = self._turn(shape, both, rotation)
        query, key = self._split(both, queries, keys)
        pages = [f"keys{layer}", f"values{layer}"]
        self.inputs += [Value(name, ("pages", shape.kv_heads, PAGE, shape.head_dim)) for name in pages]
        where = ["cached", "row_starts", "pages", "page_starts", "longest"]
        attributes: dict[str, Any] = {"kv_heads": shape.kv_heads, "head_dim": shape.head_dim, "scale": shape.scale}
        return graph.add(PAGED, [query, key, value, *pages, *where], domain=OWN, **attributes)[0]

    def _split(self, x: str, *columns: int) -> list[str]:
        sizes = self.graph.constant(np.array(columns, np.int64))
        return self.graph.add("Split", [x, sizes], outputs=len(columns), axis=1)

    def _norm(self, shape: AttentionShape, x: str, weight: Tensor, norms: HeadNorms) -> str:
        """Add a norm of each head of x [T, heads * head_dim]."""
        by_head = self._by_head(shape, x)
        weights = self.graph.constant((weight.float() + norms.offset).numpy())
        [normed] = self.graph.add("SimplifiedLayerNormalization", [by_head, weights], axis=-1, epsilon=norms.eps)
        return self._flat(normed)

    def _turn(self, shape: AttentionShape, x: str, rotation: Rotation) -> str:
        """Add the rotation of the first components of each head of x [T, heads * head_dim], in pairs, half a head between.

        OpenVINO fuses this pattern into one operator if all components are rotated.
        """
        graph, half, rest = self.graph, shape.turned // 2, shape.head_dim - shape.turned
        cos, sin = self._find_angles(rotation)
        [heads] = graph.add(
            "Reshape", [x, graph.constant(np.array([-1, shape.heads + shape.kv_heads, 1, shape.head_dim], np.int64))]
        )
        parts = graph.constant(np.array([half, half, *([rest] if rest else [])], np.int64))
        first, second, *others = graph.add("Split", [heads, parts], outputs=3 if rest else 2, axis=-1)
        [left] = graph.add("Sub", [*graph.add("Mul", [first, cos]), *graph.add("Mul", [second, sin])])
        [right] = graph.add("Add", [*graph.add("Mul", [second, cos]), *graph.add("Mul", [first, sin])])
        return self._flat(graph.add("Concat", [left, right, *others], axis=-1)[0])

    def _find_angles(self, rotation: Rotation) -> list[str]:
        """Return the names of cosines and sines [T, 1, 1, turned / 2]."""
        key, graph = id(rotation), self.graph
        if key not in self._angles:
            self._angles[key] = []
            inner = graph.constant(np.array([1, 2], np.int64))
            for kind, table in (("cos", rotation.cos), ("sin", rotation.sin)):
                name = f"{kind}{len(self._angles)}"
                self.inputs.append(Value(name, ("table", table.shape[1])))
                self.tables[name] = table
                [rows] = graph.add("Gather", [name, "positions"], axis=0)
                self._angles[key] += graph.add("Unsqueeze", [rows, inner])
        return self._angles[key]

    def _by_head(self, shape: AttentionShape, x: str) -> str:
        return self.graph.add("Reshape", [x, self.graph.constant(np.array([0, -1, shape.head_dim], np.int64))])[0]

    def _flat(self, x: str) -> str:
        return self.graph.add("Reshape", [x, self.graph.constant(np.array([0, -1], np.int64))])[0]


def find_attention_shape(
    spec: AttentionSpec, rotation: Rotation | None, norms: HeadNorms | None, sinks: Tensor | None
) -> AttentionShape | None:
    """Return the shape, or None if OpenVINO cannot run this attention."""
    if spec.soft_cap is not None or spec.window is not None or sinks is not None or spec.slopes is not None:
        return None
    if rotation is not None and rotation.interleaved:
        return None
    turned = 0 if rotation is None else 2 * rotation.cos.shape[1]
    shape = AttentionShape(spec.heads, spec.kv_heads, spec.head_dim, spec.scale, turned, None if norms is None else norms.eps)
    return shape if agrees(shape) else None


def describe(batch: Batch) -> dict[str, npt.NDArray[np.int32] | npt.NDArray[np.int64]]:
    """Return the network inputs that describe the rows of a batch.

    If there are fewer decode rows than threads, OpenVINO splits keys among threads, and sums differ in their last bits from
    those of larger batches. An empty row prevents it: OpenVINO splits only if every row has one token. With many keys the
    split is worth it.
    """
    [view] = batch.groups
    table, tokens, longest = view.tables.numpy(), len(batch.ids), max(length for _, _, length in batch.rows)
    padding = [(tokens, 0, 0)] if len(batch.rows) == tokens and longest < SPLIT_FROM else []
    starts, counts, lengths = np.array([*batch.rows, *padding], np.int32).T
    needed = -(-lengths // PAGE)
    page_starts = np.zeros(len(needed) + 1, np.int32)
    needed.cumsum(out=page_starts[1:])
    return {
        "positions": batch.positions.numpy(),
        "cached": lengths - counts,
        "row_starts": np.concatenate((starts, [tokens]), dtype=np.int32),
        "pages": table[np.arange(table.shape[1]) < needed[: len(table), None]],
        "page_starts": page_starts,
        "longest": np.array(longest, np.int32),
    }


@cache
def agrees(shape: AttentionShape) -> bool:
    """Return whether OpenVINO computes what torch computes, for two short rows."""
    dice = torch.Generator().manual_seed(0)
    kv = torch.randn(2, 4, shape.kv_heads, PAGE, shape.head_dim, generator=dice).transpose(0, 1)
    rotation = Rotation(*torch.rand(2, 64, shape.turned // 2, generator=dice)) if shape.turned else None
    weights = torch.rand(2, shape.head_dim, generator=dice)
    norms = None if shape.eps is None else HeadNorms(weights[0], weights[1], shape.eps, 1.0)
    qkv = torch.randn(3, sum(shape.columns), generator=dice)
    tables = torch.tensor([[3, 1], [2, 0]], dtype=torch.int32)
    batch = Batch(
        ids=torch.zeros(3, dtype=torch.int64),
        positions=torch.tensor([38, 4, 5]),
        row_starts=torch.tensor([0, 1, 3], dtype=torch.int32),
        kv_lengths=torch.tensor([39, 6], dtype=torch.int32),
        rows=((0, 1, 39), (1, 2, 6)),
        logit_index=torch.arange(3),
        groups=(GroupView(tables, torch.tensor([PAGE + 6, 2 * PAGE + 4, 2 * PAGE + 5])),),
    )
    query = reference_place_heads(qkv.clone(), kv, batch.groups[0].write, batch.positions, rotation, norms)
    expected = []
    for one, pages, end in zip(query, ([3, 1], [2], [2]), (39, 5, 6), strict=True):
        keys, values = kv[pages].permute(1, 2, 0, 3, 4).flatten(2, 3)[:, None, :, :end]
        expected.append(attend(one[None, None], keys, values, None, scale=shape.scale).flatten())
    try:
        out = _try(shape, qkv, kv, batch, rotation, norms)
    except Exception as reason:  # OpenVINO's errors have no common base class
        logger.info("attention without OpenVINO: %s", reason)
        return False
    return torch.allclose(out, torch.stack(expected), atol=1e-4, rtol=1e-4)


def _try(
    shape: AttentionShape, qkv: Tensor, kv: Tensor, batch: Batch, rotation: Rotation | None, norms: HeadNorms | None
) -> Tensor:
    graph = Graph(Runtime.OPENVINO)
    emitter = Emitter(graph)
    out = emitter.attend(shape, rotation, norms, "qkv", layer=0)
    values = [Value("qkv", ("tokens", qkv.shape[1])), *emitter.inputs]
    network = Network(graph, values, [Value(out, ("tokens", shape.columns[0]))])
    result = torch.empty(len(qkv), shape.columns[0])
    memory = {"qkv": qkv, out: result, "keys0": kv[:, 0], "values0": kv[:, 1], **emitter.tables}
    for name, tensor in memory.items():
        network.bind(name, tensor)
    network.set_inputs(describe(batch))
    network.run()
    return result


Attending = tuple[SelfAttention, AttentionShape]


def find_attention_shapes(trace: Trace) -> list[Attending] | None:
    """Return the attention layers in order, or None if OpenVINO cannot run all of them."""
    found = []
    for segment in trace.segments:
        for boundary in segment.boundaries:
            attention = boundary.attention
            if attention is None:
                continue
            rotation = None if attention.rope is None else attention.rope.table
            shape = find_attention_shape(attention.core.spec, rotation, attention.norms, attention.sinks)
            if shape is None:
                return None
            found.append((attention, shape))
    return found


class DecoderNetwork:
    """A decoder as one network. Its cache is one group of pages of PAGE tokens with separate keys and values."""

    def __init__(self, trace: Trace, attending: list[Attending]) -> None:
        self._attending = attending
        self.too_many = dequantize_from(trace.quickly)  # tokens from which the decoder itself is faster
        graph = Graph(Runtime.OPENVINO)
        emitter = Emitter(graph)
        self._first = graph.name()
        names = {trace.first: self._first}
        layer = 0
        for segment in trace.segments:
            for step in segment.steps:
                names.update(zip(step.outputs, step.emit(graph, [names[symbol] for symbol in step.inputs]), strict=True))
            for boundary in segment.boundaries:
                names[boundary.target] = names[boundary.source]  # unneeded tokens are dropped at the end
                if boundary.attention is not None:
                    attention, shape = attending[layer]
                    rotation = None if attention.rope is None else attention.rope.table
                    source = names[boundary.source]
                    names[boundary.target] = emitter.attend(shape, rotation, attention.norms, source, layer)
                    layer += 1
        self._last, self._columns = names[trace.last], trace.first.columns
        x = Value(self._first, ("tokens", self._columns))
        self._network = Network(graph, [x, *emitter.inputs], [Value(self._last, ("tokens", self._columns))])
        for name, table in emitter.tables.items():
            self._network.bind(name, table)
        self._first_cache: Tensor | None = None
        self._memory = torch.empty(2, 0, self._columns)  # input and output of the latest step's size
        self._run_once()

    def suit(self, batch: Batch) -> bool:
        """Return whether it is faster than the decoder. With many decode rows, faster products outweigh slower attention."""
        return len(batch.ids) < self.too_many or len(batch.ids) == len(batch.rows)

    def find_rows(self, batch: Batch) -> list[int]:
        """Return the decode rows of a batch that does not suit.

        Their results then equal those of a step without prompts, and their keys are not copied.
        """
        return [row for row, (_, count, _) in enumerate(batch.rows) if count == 1]

    def __call__(self, x: Tensor, batch: Batch) -> Tensor:
        """Return hidden states of x [T, columns]. The next call overwrites them."""
        self._bind_caches()
        self._make_room(len(x))
        source, result = self._memory
        source.copy_(x)
        self._network.set_inputs(describe(batch))
        self._network.run()
        return take_final(result, batch)

    def _bind_caches(self) -> None:
        """Bind the caches of all layers, which are allocated together."""
        if self._first_cache is self._attending[0][0].core.kv:
            return
        for layer, (attention, _) in enumerate(self._attending):
            kv = attention.core.bound()
            assert kv.shape[3] == PAGE
            self._network.bind(f"keys{layer}", kv[:, 0])
            self._network.bind(f"values{layer}", kv[:, 1])
        self._first_cache = self._attending[0][0].core.kv

    def _run_once(self) -> None:
        """Run two tokens on a cache of the null page."""
        for layer, (_, shape) in enumerate(self._attending):
            for name in (f"keys{layer}", f"values{layer}"):
                self._network.bind(name, torch.zeros(1, shape.kv_heads, PAGE, shape.head_dim))
        self._make_room(2)
        self._network.set_inputs(TWO_TOKENS)
        self._network.run()
        self._network.release_weights()

    def _make_room(self, tokens: int) -> None:
        if self._memory.shape[1] != tokens:
            self._memory = torch.zeros(2, tokens, self._columns)
            self._network.bind(self._first, self._memory[0])
            self._network.bind(self._last, self._memory[1])
