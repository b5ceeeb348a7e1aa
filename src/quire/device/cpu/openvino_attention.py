"""Attention over pages inside a graph for OpenVINO: head norms, rotation, the way into the cache and attention, of rows with
any number of tokens.

The cache must lie in pages of 32 tokens, keys apart from values. The plugin calls its operator experimental, so it is tried
before it is used.
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
from quire.device.cpu.graph import OWN, Graph, Runtime, Value
from quire.device.cpu.openvino import PAGE, PAGED, Network
from quire.ops.arguments import HeadNorms, Rotation
from quire.ops.kv import attend
from quire.ops.qkv import reference_place_heads

logger = logging.getLogger(__name__)

DIVIDED_FROM = 1024  # keys of the longest row, from which threads may share a row's


@dataclass(frozen=True)
class Form:
    """What makes the graphs of two layers' attentions the same."""

    heads: int
    kv_heads: int
    head_dim: int
    scale: float
    turned: int  # components of a head that turn
    eps: float | None  # of head norms; None = there are none

    @property
    def columns(self) -> tuple[int, int, int]:
        return self.heads * self.head_dim, self.kv_heads * self.head_dim, self.kv_heads * self.head_dim


@dataclass
class Emitter:
    """Attentions of one graph. It collects the graph's inputs beside the hidden states."""

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
    tables: dict[str, Tensor] = field(default_factory=dict)  # inputs that stay the same
    _angles: dict[int, list[str]] = field(default_factory=dict)

    def attend(self, form: Form, rotation: Rotation | None, norms: HeadNorms | None, qkv: str, layer: int) -> str:
        """qkv [T, columns] -> [T, heads * head_dim]. The inputs keys<layer> and values<layer> are its cache."""
        graph, (queries, keys, values) = self.graph, form.columns
        if norms is not None:
            query, key, value = self._split(qkv, queries, keys, values)
            query, key = self._norm(form, query, norms.query, norms), self._norm(form, key, norms.key, norms)
            [both] = graph.add("Concat", [query, key], axis=1)
        else:
            both, value = self._split(qkv, queries + keys, values)
        if rotation is not None:
            both = self._turn(form, both, rotation)
        query, key = self._split(both, queries, keys)
        pages = [f"keys{layer}", f"values{layer}"]
        self.inputs += [Value(name, ("pages", form.kv_heads, PAGE, form.head_dim)) for name in pages]
        where = ["cached", "row_starts", "pages", "page_starts", "longest"]
        attributes: dict[str, Any] = {"kv_heads": form.kv_heads, "head_dim": form.head_dim, "scale": form.scale}
        return graph.add(PAGED, [query, key, value, *pages, *where], domain=OWN, **attributes)[0]

    def _split(self, x: str, *columns: int) -> list[str]:
        sizes = self.graph.constant(np.array(columns, np.int64))
        return self.graph.add("Split", [x, sizes], outputs=len(columns), axis=1)

    def _norm(self, form: Form, x: str, weight: Tensor, norms: HeadNorms) -> str:
        """x [T, heads * head_dim], head by head."""
        by_head = self._by_head(form, x)
        weights = self.graph.constant((weight.float() + norms.offset).numpy())
        [normed] = self.graph.add("SimplifiedLayerNormalization", [by_head, weights], axis=-1, epsilon=norms.eps)
        return self._flat(normed)

    def _turn(self, form: Form, x: str, rotation: Rotation) -> str:
        """x [T, heads * head_dim]: the first components of each head turn, in pairs a half apart. In this form the plugin takes
        it for one operator, if all components turn."""
        graph, half, rest = self.graph, form.turned // 2, form.head_dim - form.turned
        cos, sin = self._find_angles(rotation)
        [heads] = graph.add(
            "Reshape", [x, graph.constant(np.array([-1, form.heads + form.kv_heads, 1, form.head_dim], np.int64))]
        )
        parts = graph.constant(np.array([half, half, *([rest] if rest else [])], np.int64))
        first, second, *others = graph.add("Split", [heads, parts], outputs=3 if rest else 2, axis=-1)
        [left] = graph.add("Sub", [*graph.add("Mul", [first, cos]), *graph.add("Mul", [second, sin])])
        [right] = graph.add("Add", [*graph.add("Mul", [second, cos]), *graph.add("Mul", [first, sin])])
        return self._flat(graph.add("Concat", [left, right, *others], axis=-1)[0])

    def _find_angles(self, rotation: Rotation) -> list[str]:
        """Cosines and sines [T, 1, 1, turned / 2]."""
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

    def _by_head(self, form: Form, x: str) -> str:
        return self.graph.add("Reshape", [x, self.graph.constant(np.array([0, -1, form.head_dim], np.int64))])[0]

    def _flat(self, x: str) -> str:
        return self.graph.add("Reshape", [x, self.graph.constant(np.array([0, -1], np.int64))])[0]


def find_form(spec: AttentionSpec, rotation: Rotation | None, norms: HeadNorms | None, sinks: Tensor | None) -> Form | None:
    """None = such a layer is not for the plugin."""
    if spec.soft_cap is not None or spec.window is not None or sinks is not None or spec.slopes is not None:
        return None
    if rotation is not None and rotation.interleaved:
        return None
    turned = 0 if rotation is None else 2 * rotation.cos.shape[1]
    form = Form(spec.heads, spec.kv_heads, spec.head_dim, spec.scale, turned, None if norms is None else norms.eps)
    return form if agrees(form) else None


def describe(batch: Batch) -> dict[str, npt.NDArray[np.int32] | npt.NDArray[np.int64]]:
    """What a network is told of a batch's rows, by the names of its inputs.

    Rows of one token get company, a row without tokens: otherwise, if they are fewer than threads, their keys are divided among
    threads, and their numbers are others, if by a rounding, than among more rows. Where there are many keys that is worth it.
    (The plugin takes its undivided way, the only one that knows rows without tokens, if any row has not one token.)
    """
    [view] = batch.groups
    table, tokens, longest = view.tables.numpy(), len(batch.ids), max(length for _, _, length in batch.rows)
    company = [(tokens, 0, 0)] if len(batch.rows) == tokens and longest < DIVIDED_FROM else []
    starts, counts, lengths = np.array([*batch.rows, *company], np.int32).T
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
def agrees(form: Form) -> bool:
    """Does the plugin at hand compute what torch computes? Tried on two short rows."""
    dice = torch.Generator().manual_seed(0)
    kv = torch.randn(2, 4, form.kv_heads, PAGE, form.head_dim, generator=dice).transpose(0, 1)
    rotation = Rotation(*torch.rand(2, 64, form.turned // 2, generator=dice)) if form.turned else None
    weights = torch.rand(2, form.head_dim, generator=dice)
    norms = None if form.eps is None else HeadNorms(weights[0], weights[1], form.eps, 1.0)
    qkv = torch.randn(3, sum(form.columns), generator=dice)
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
        expected.append(attend(one[None, None], keys, values, None, scale=form.scale).flatten())
    try:
        out = _try(form, qkv, kv, batch, rotation, norms)
    except Exception as reason:  # the plugin's errors have no common ancestor
        logger.info("attention does not go to OpenVINO: %s", reason)
        return False
    return torch.allclose(out, torch.stack(expected), atol=1e-4, rtol=1e-4)


def _try(form: Form, qkv: Tensor, kv: Tensor, batch: Batch, rotation: Rotation | None, norms: HeadNorms | None) -> Tensor:
    graph = Graph(Runtime.OPENVINO)
    emitter = Emitter(graph)
    out = emitter.attend(form, rotation, norms, "qkv", layer=0)
    values = [Value("qkv", ("tokens", qkv.shape[1])), *emitter.inputs]
    network = Network(graph, values, [Value(out, ("tokens", form.columns[0]))])
    result = torch.empty(len(qkv), form.columns[0])
    memory = {"qkv": qkv, out: result, "keys0": kv[:, 0], "values0": kv[:, 1], **emitter.tables}
    for name, tensor in memory.items():
        network.bind(name, tensor)
    network.tell(describe(batch))
    network.run()
    return result
