"""Run graphs on Quire's own kernels (`native/program.c`): products with matrices in tiles (`repack.py`) and what is between
them.

One call runs a whole graph. Element-wise operators follow each other without a barrier between threads, four tokens at a
time.

Products may add LoRA: a table of addresses per layer, which the kernels read.

inputs, parts, address of the entries ─► per adapter slot: address and rank of A; per part: address of B, rank, first, count
"""

import struct
from collections.abc import Iterable, Mapping, Sequence

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from quire.device.cpu.graph import FLOATS, Graph, Node, Value
from quire.layers.lora import LinearBank, LinearLoRA
from quire.ops.blocks import GROUP
from quire.ops.native import kernels, workers

OP = struct.Struct("2q 2q 2q 3q 2q d")  # as in C: kind columns, inputs, strides, weight out total, prepared matrix, eps
NORM, ADD_NORM, ADD, MULTIPLY, SILU, GELU, GELU_TANH, COPY, ROUND, GATHER, PRODUCT, LOW_RANK, LAYER_NORM = range(13)
TOTAL = 3  # output index of the sum in an add-norm
OPERATORS = {"Add": ADD, "Mul": MULTIPLY, "QuickGelu": SILU}
ROWS_OF_BLOCK = 4  # tokens per block of a product
BLOCK_BYTES = 160  # of 32 quantized activations of ROWS_OF_BLOCK tokens
ALIGNED = 64  # bytes

Location = tuple[int, int]  # address of a matrix, and the stride of its rows in elements
MAX_PARTS = 4


class Scratch:
    """Memory for intermediate results. Programs that never run at the same time may share it."""

    def __init__(self) -> None:
        self._memory = torch.empty(0, dtype=torch.uint8)

    def take(self, nbytes: int) -> Tensor:
        if len(self._memory) < nbytes + ALIGNED:
            self._memory = torch.empty(nbytes + ALIGNED, dtype=torch.uint8)
        return self._memory[-self._memory.data_ptr() % ALIGNED :]


class Program:
    """A compiled graph, with all memory that it borrows."""

    def __init__(self, graph: Graph, inputs: Sequence[Value], scratch: Scratch) -> None:
        self.scratch, self.nodes, self._graph = scratch, graph.nodes, graph
        self.columns = {value.name: int(value.shape[1]) for value in inputs}
        self.matrices: dict[str, np.ndarray[tuple[int], np.dtype[np.int64]]] = {}  # by output, the struct of C
        for node in graph.nodes:
            self._read(node)

    def address(self, constant: str) -> int:
        return int(self._graph.constants[constant].ctypes.data)

    def _read(self, node: Node) -> None:
        width = self.columns[node.inputs[0]]
        if node.operator == "Tiles":
            width = int(node.attributes["columns"])
            memory, kind = self._graph.borrowed[node.inputs[1]], int(node.attributes["kind"])
            bias = self.address(node.inputs[2]) if len(node.inputs) > 2 else 0
            self.matrices[node.outputs[0]] = np.array(
                [memory.ctypes.data, bias, kind, self.columns[node.inputs[0]], width, memory[0].nbytes], np.int64
            )
        elif node.operator == "Split":
            width //= len(node.outputs)
        self.columns.update((name, width) for name in node.outputs if name)


class Binding:
    """A program and the memory it works on: each [T, columns], float32, contiguous and at a fixed address."""

    def __init__(self, program: Program, bound: Mapping[str, Tensor]) -> None:
        self._program, self._bound = program, bound
        self._rows = len(next(iter(bound.values())))
        self._locations: dict[str, Location] = {name: (tensor.data_ptr(), tensor.shape[1]) for name, tensor in bound.items()}
        self._lay()
        self._ops = b"".join(op for node in program.nodes for op in self._compile(node))
        self._workers = workers()

    def run(self, rows: int | None = None) -> None:
        """Run the first `rows` rows; None: all."""
        kernels().run(self._ops, self._rows if rows is None else rows, self._workers)

    def _lay(self) -> None:
        """Assign locations to intermediate results."""
        columns, rows = self._program.columns, self._rows
        made = [name for node in self._program.nodes if node.operator != "Split" for name in node.outputs if name]
        changed = {node.inputs[0]: node.outputs[0] for node in self._program.nodes if node.operator == "LowRank"}
        inner = [name for name in made if name not in self._locations and name not in changed]
        prepared = [self._prepared_bytes(node) for node in self._program.nodes if node.operator == "Tiles"]
        sizes = [4 * rows * columns[name] for name in inner] + [max(prepared, default=0)]
        starts = np.cumsum([0, *(-(-size // ALIGNED) * ALIGNED for size in sizes)]).tolist()
        self._memory = self._program.scratch.take(starts[-1])
        at = [self._memory.data_ptr() + start for start in starts]
        self._locations |= {name: (address, columns[name]) for name, address in zip(inner, at, strict=False)}
        self._locations |= {name: self._locations[target] for name, target in changed.items()}  # LoRA adds in place
        self._prepared = at[-2]

    def _prepared_bytes(self, node: Node) -> int:
        """Return the size of the prepared input of a product."""
        columns = self._program.columns[node.inputs[0]]
        each = 4 * ROWS_OF_BLOCK * columns if node.attributes["kind"] == FLOATS else BLOCK_BYTES * columns // GROUP
        return -(-self._rows // ROWS_OF_BLOCK) * each

    def _compile(self, node: Node) -> list[bytes]:
        program, source = self._program, node.inputs[0]
        if node.operator == "Tiles":
            matrix = program.matrices[node.outputs[0]]
            prepare = GATHER if node.attributes["kind"] == FLOATS else ROUND
            prepared = self._op(prepare, node, columns=program.columns[source], prepared=self._prepared)
            return [prepared, self._op(PRODUCT, node, prepared=self._prepared, matrix=matrix.ctypes.data)]
        if node.operator == "Split":
            return self._split(node)
        if node.operator == "LowRank":
            (out, _), (a, a_stride), (b, b_stride) = (self._locations[name] for name in node.inputs)
            table = int(node.attributes["table"])
            return [OP.pack(LOW_RANK, program.columns[source], a, b, a_stride, b_stride, table, out, 0, 0, 0, 0.0)]
        if node.operator == "SkipSimplifiedLayerNormalization":
            return [self._op(ADD_NORM, node, weight=node.inputs[2])]
        if node.operator == "SimplifiedLayerNormalization":
            return [self._op(NORM, node, weight=node.inputs[1])]
        if node.operator == "LayerNormalization":
            scale, *shift = (program.address(name) for name in node.inputs[1:])
            (a, stride), (out, _) = self._locations[source], self._locations[node.outputs[0]]
            bias, eps = shift[0] if shift else 0, float(node.attributes["epsilon"])
            return [OP.pack(LAYER_NORM, program.columns[source], a, bias, stride, 0, scale, out, 0, 0, 0, eps)]
        if node.operator == "Gelu":
            return [self._op(GELU_TANH if node.attributes["approximate"] == "tanh" else GELU, node)]
        return [self._op(OPERATORS[node.operator], node)]

    def _split(self, node: Node) -> list[bytes]:
        """Return copies for parts that leave the program; other parts are read in place."""
        (address, stride), width, copies = self._locations[node.inputs[0]], self._program.columns[node.outputs[0]], []
        for number, name in enumerate(node.outputs):
            part = address + 4 * number * width, stride
            if name in self._locations:
                target = self._locations[name][0]
                copies.append(OP.pack(COPY, width, part[0], 0, stride, 0, 0, target, 0, 0, 0, 0.0))
            else:
                self._locations[name] = part
        return copies

    def _op(
        self,
        kind: int,
        node: Node,
        *,
        columns: int | None = None,
        weight: str | None = None,
        prepared: int = 0,
        matrix: int = 0,
    ) -> bytes:
        sources = [self._locations[name] for name in node.inputs[:2] if name in self._locations]  # the rest are constants
        (a, a_stride), (b, b_stride) = [*sources, (0, 0)][:2]
        return OP.pack(
            *(kind, self._program.columns[node.outputs[0]] if columns is None else columns),
            *(a, b, a_stride, b_stride),
            *(0 if weight is None else self._program.address(weight), self._locations[node.outputs[0]][0]),
            self._locations[node.outputs[TOTAL]][0] if kind == ADD_NORM else 0,
            *(prepared, matrix, float(node.attributes.get("epsilon", 0.0))),
        )


class LowRankTable:
    """The table of one LoRA bank. The address of its header is fixed; the entries grow with the number of adapter slots."""

    def __init__(self, inputs: int) -> None:
        self._entries: npt.NDArray[np.int64] = np.zeros((2, 2 + 4 * MAX_PARTS), np.int64)
        self._header = np.array([inputs, MAX_PARTS, self._entries.ctypes.data], np.int64)
        self._tensors: dict[int, list[Tensor]] = {}

    @property
    def address(self) -> int:
        return int(self._header.ctypes.data)

    def grow(self, slot: int) -> None:
        """Make room for an entry of this adapter slot."""
        if slot >= len(self._entries):
            more = np.zeros((2 * slot, self._entries.shape[1]), np.int64)
            more[: len(self._entries)] = self._entries
            self._entries, self._header[2] = more, more.ctypes.data

    def write(self, slot: int, weights: LinearLoRA | None) -> None:
        self.grow(slot)
        self._tensors.pop(slot, None)
        self._entries[slot] = 0
        if weights is None:
            return
        down, ups = weights.narrow, [part.up.float().contiguous() for part in weights.parts]
        self._tensors[slot] = [down, *ups]
        entry = [down.data_ptr(), down.shape[1]]
        for part, up in zip(weights.parts, ups, strict=True):
            entry += [up.data_ptr(), len(up), part.start, up.shape[1]]
        self._entries[slot, : len(entry)] = entry


class LowRankTables:
    """The tables of all layers of a model."""

    def __init__(self) -> None:
        self._tables: dict[LinearBank, LowRankTable] = {}
        self._unusual: dict[int, set[LinearBank]] = {}  # by adapter slot: banks whose values the kernels do not support
        self._largest = 0

    @property
    def banks(self) -> set[LinearBank]:
        return {*self._tables}

    def of(self, bank: LinearBank, inputs: int) -> LowRankTable:
        if bank not in self._tables:
            self._tables[bank] = LowRankTable(inputs)
        return self._tables[bank]

    def subscribe(self) -> None:
        """Write current and future values of all banks to the tables."""
        for bank in self._tables:
            bank.on_change = lambda slot, weights, bank=bank: self._update(bank, slot, weights)
            for slot, weights in bank.slots.items():
                self._update(bank, slot, weights)

    def supported(self, slots: Iterable[int]) -> list[int]:
        """Return the adapter slots that the kernels support completely, and make room for all of them."""
        used = list(slots)
        if max(used, default=0) > self._largest:
            self._largest = max(used)
            for table in self._tables.values():
                table.grow(self._largest)
        return [slot for slot in used if not self._unusual.get(slot)]

    def _update(self, bank: LinearBank, slot: int, weights: LinearLoRA | None) -> None:
        simple = weights is None or (weights.simple and len(weights.parts) <= MAX_PARTS)
        (self._unusual.setdefault(slot, set()).discard if simple else self._unusual.setdefault(slot, set()).add)(bank)
        self._tables[bank].write(slot, weights if simple else None)
