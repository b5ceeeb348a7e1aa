"""A quantized decoder on a CPU as one network of OpenVINO, from embedded tokens to the last hidden states, attention included.
For steps of few tokens in any rows; with many the decoder itself is faster."""

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from quire.attn.batch import Batch
from quire.device.cpu.autotune import dequantize_from
from quire.device.cpu.graph import Graph, Runtime, Value
from quire.device.cpu.openvino import PAGE, Network
from quire.device.cpu.openvino_attention import Emitter, Form, describe, find_form
from quire.device.cpu.trace import Trace
from quire.layers.attention import SelfAttention, keep

TWO_TOKENS: dict[str, npt.NDArray[np.int32] | npt.NDArray[np.int64]] = {
    "positions": np.zeros(2, np.int64),
    "cached": np.zeros(2, np.int32),
    "row_starts": np.arange(3, dtype=np.int32),
    "pages": np.zeros(2, np.int32),
    "page_starts": np.arange(3, dtype=np.int32),
    "longest": np.array(1, np.int32),
}

Attending = tuple[SelfAttention, Form]


def find_forms(trace: Trace) -> list[Attending] | None:
    """Its attentions in order; None = not all are for the plugin."""
    found = []
    for piece in trace.pieces:
        for between in piece.behind:
            attention = between.attention
            if attention is None:
                continue
            rotation = None if attention.rope is None else attention.rope.table
            form = find_form(attention.core.spec, rotation, attention.norms, attention.sinks)
            if form is None:
                return None
            found.append((attention, form))
    return found


class DecoderNetwork:
    """Its cache is one group of pages of PAGE tokens, with keys apart from values."""

    def __init__(self, trace: Trace, attending: list[Attending]) -> None:
        self._attending = attending
        self.too_many = dequantize_from(trace.quickly)  # tokens: from there on the decoder itself is faster
        graph = Graph(Runtime.OPENVINO)
        emitter = Emitter(graph)
        self._first = graph.name()
        names = {trace.first: self._first}
        layer = 0
        for piece in trace.pieces:
            for step in piece.steps:
                names.update(zip(step.outputs, step.emit(graph, [names[symbol] for symbol in step.inputs]), strict=True))
            for between in piece.behind:
                names[between.target] = names[between.source]  # tokens are left out in the end
                if between.attention is not None:
                    attention, form = attending[layer]
                    rotation = None if attention.rope is None else attention.rope.table
                    source = names[between.source]
                    names[between.target] = emitter.attend(form, rotation, attention.norms, source, layer)
                    layer += 1
        self._last, self._columns = names[trace.last], trace.first.columns
        x = Value(self._first, ("tokens", self._columns))
        self._network = Network(graph, [x, *emitter.inputs], [Value(self._last, ("tokens", self._columns))])
        for name, table in emitter.tables.items():
            self._network.bind(name, table)
        self._first_cache: Tensor | None = None
        self._memory = torch.empty(2, 0, self._columns)  # in and out, of as many tokens as there were in the latest step
        self._rehearse()

    def suit(self, batch: Batch) -> bool:
        """Is it faster than the decoder? With many rows of one token that loses in attention what it gains in products."""
        return len(batch.ids) < self.too_many or len(batch.ids) == len(batch.rows)

    def find_rows(self, batch: Batch) -> list[int]:
        """Of a batch that does not suit, those that do. In a step with prompts a row of one token then gets the numbers of a
        step without, and its keys are not copied."""
        return [row for row, (_, count, _) in enumerate(batch.rows) if count == 1]

    def __call__(self, x: Tensor, batch: Batch) -> Tensor:
        """x [T, columns] -> hidden states; they are overwritten by the next call."""
        self._lead_to_caches()
        self._make_room(len(x))
        source, result = self._memory
        source.copy_(x)
        self._network.tell(describe(batch))
        self._network.run()
        return keep(result, batch)

    def _lead_to_caches(self) -> None:
        """All layers get theirs at the same time."""
        if self._first_cache is self._attending[0][0].core.kv:
            return
        for layer, (attention, _) in enumerate(self._attending):
            kv = attention.core.bound()
            assert kv.shape[3] == PAGE
            self._network.bind(f"keys{layer}", kv[:, 0])
            self._network.bind(f"values{layer}", kv[:, 1])
        self._first_cache = self._attending[0][0].core.kv

    def _rehearse(self) -> None:
        """A first run, of two tokens on a cache of the null page."""
        for layer, (_, form) in enumerate(self._attending):
            for name in (f"keys{layer}", f"values{layer}"):
                self._network.bind(name, torch.zeros(1, form.kv_heads, PAGE, form.head_dim))
        self._make_room(2)
        self._network.tell(TWO_TOKENS)
        self._network.run()
        self._network.settle()

    def _make_room(self, tokens: int) -> None:
        if self._memory.shape[1] != tokens:
            self._memory = torch.zeros(2, tokens, self._columns)
            self._network.bind(self._first, self._memory[0])
            self._network.bind(self._last, self._memory[1])
