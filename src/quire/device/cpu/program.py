"""Graphs run by Quire's own kernels (`native/program.c`): products with matrices in tiles (`tiles.py`), and what is between
them. One call runs a whole graph; operators on rows follow each other without anybody waiting, four rows at a time.
"""

import struct
from collections.abc import Mapping, Sequence

import numpy as np
import torch
from torch import Tensor

from quire.device.cpu.graph import Graph, Node, Value
from quire.device.cpu.tiles import FLOATS
from quire.ops.blocks import GROUP
from quire.ops.native import kernels, workers

OP = struct.Struct("2q 2q 2q 3q 2q d")  # as in C: kind columns, inputs, strides, weight out total, taken matrix, eps
NORM, ADD_NORM, ADD, MULTIPLY, SILU, GELU, GELU_TANH, COPY, ROUND, GATHER, PRODUCT, LOW_RANK = range(12)
TOTAL = 3  # of the outputs of a norm that adds first: the sum
OPERATORS = {"Add": ADD, "Mul": MULTIPLY, "QuickGelu": SILU}
ROWS_OF_BLOCK = 4  # that a product takes together
BLOCK_BYTES = 160  # of 32 numbers of as many rows, rounded
ALIGNED = 64  # bytes

Place = tuple[int, int]  # where a matrix begins, and by how many numbers its rows are apart


class Scratch:
    """Memory between operators. Programs that are never run at the same time may have it together."""

    def __init__(self) -> None:
        self._memory = torch.empty(0, dtype=torch.uint8)

    def take(self, nbytes: int) -> Tensor:
        if len(self._memory) < nbytes + ALIGNED:
            self._memory = torch.empty(nbytes + ALIGNED, dtype=torch.uint8)
        return self._memory[-self._memory.data_ptr() % ALIGNED :]


class Program:
    """A compiled graph, which is kept with all that it was lent."""

    def __init__(self, graph: Graph, inputs: Sequence[Value], scratch: Scratch) -> None:
        self.scratch, self.nodes, self._graph = scratch, graph.nodes, graph
        self.columns = {value.name: int(value.shape[1]) for value in inputs}
        self.matrices: dict[str, np.ndarray[tuple[int], np.dtype[np.int64]]] = {}  # by output, as C has them
        for node in graph.nodes:
            self._read(node)

    def address(self, constant: str) -> int:
        return int(self._graph.constants[constant].ctypes.data)

    def _read(self, node: Node) -> None:
        width = self.columns[node.inputs[0]]
        if node.operator == "Tiles":
            width = int(node.attributes["columns"])
            memory, kind = self._graph.lent[node.inputs[1]], int(node.attributes["kind"])
            bias = self.address(node.inputs[2]) if len(node.inputs) > 2 else 0
            self.matrices[node.outputs[0]] = np.array(
                [memory.ctypes.data, bias, kind, self.columns[node.inputs[0]], width, memory[0].nbytes], np.int64
            )
        elif node.operator == "Split":
            width //= len(node.outputs)
        self.columns.update((name, width) for name in node.outputs if name)


class Binding:
    """A program and the memory it works on, each [T, columns] float32 and contiguous, which has to stay where it is."""

    def __init__(self, program: Program, bound: Mapping[str, Tensor]) -> None:
        self._program, self._bound = program, bound
        self._rows = len(next(iter(bound.values())))
        self._places: dict[str, Place] = {name: (tensor.data_ptr(), tensor.shape[1]) for name, tensor in bound.items()}
        self._lay()
        self._ops = b"".join(op for node in program.nodes for op in self._compile(node))
        self._workers = workers()

    def run(self) -> None:
        kernels().run(self._ops, self._rows, self._workers)

    def _lay(self) -> None:
        """Places for what nobody gave one."""
        columns, rows = self._program.columns, self._rows
        made = [name for node in self._program.nodes if node.operator != "Split" for name in node.outputs if name]
        changed = {node.inputs[0]: node.outputs[0] for node in self._program.nodes if node.operator == "LowRank"}
        inner = [name for name in made if name not in self._places and name not in changed]
        taken = [self._taken_bytes(node) for node in self._program.nodes if node.operator == "Tiles"]
        sizes = [4 * rows * columns[name] for name in inner] + [max(taken, default=0)]
        starts = np.cumsum([0, *(-(-size // ALIGNED) * ALIGNED for size in sizes)]).tolist()
        self._memory = self._program.scratch.take(starts[-1])
        at = [self._memory.data_ptr() + start for start in starts]
        self._places |= {name: (address, columns[name]) for name, address in zip(inner, at, strict=False)}
        self._places |= {name: self._places[target] for name, target in changed.items()}  # they are added to where they are
        self._taken = at[-2]

    def _taken_bytes(self, node: Node) -> int:
        """Of the rows that a product takes, as it wants them."""
        columns = self._program.columns[node.inputs[0]]
        each = 4 * ROWS_OF_BLOCK * columns if node.attributes["kind"] == FLOATS else BLOCK_BYTES * columns // GROUP
        return -(-self._rows // ROWS_OF_BLOCK) * each

    def _compile(self, node: Node) -> list[bytes]:
        program, source = self._program, node.inputs[0]
        if node.operator == "Tiles":
            matrix = program.matrices[node.outputs[0]]
            prepare = GATHER if node.attributes["kind"] == FLOATS else ROUND
            prepared = self._op(prepare, node, columns=program.columns[source], taken=self._taken)
            return [prepared, self._op(PRODUCT, node, taken=self._taken, matrix=matrix.ctypes.data)]
        if node.operator == "Split":
            return self._split(node)
        if node.operator == "LowRank":
            (out, _), (a, a_stride), (b, b_stride) = (self._places[name] for name in node.inputs)
            table = int(node.attributes["table"])
            return [OP.pack(LOW_RANK, program.columns[source], a, b, a_stride, b_stride, table, out, 0, 0, 0, 0.0)]
        if node.operator == "SkipSimplifiedLayerNormalization":
            return [self._op(ADD_NORM, node, weight=node.inputs[2])]
        if node.operator == "SimplifiedLayerNormalization":
            return [self._op(NORM, node, weight=node.inputs[1])]
        if node.operator == "Gelu":
            return [self._op(GELU_TANH if node.attributes["approximate"] == "tanh" else GELU, node)]
        return [self._op(OPERATORS[node.operator], node)]

    def _split(self, node: Node) -> list[bytes]:
        """Parts are read where they are; only what leaves the program is copied."""
        (address, stride), width, copies = self._places[node.inputs[0]], self._program.columns[node.outputs[0]], []
        for number, name in enumerate(node.outputs):
            part = address + 4 * number * width, stride
            if name in self._places:
                target = self._places[name][0]
                copies.append(OP.pack(COPY, width, part[0], 0, stride, 0, 0, target, 0, 0, 0, 0.0))
            else:
                self._places[name] = part
        return copies

    def _op(
        self, kind: int, node: Node, *, columns: int | None = None, weight: str | None = None, taken: int = 0, matrix: int = 0
    ) -> bytes:
        sources = [self._places[name] for name in node.inputs[:2] if name in self._places]  # others are constants
        (a, a_stride), (b, b_stride) = [*sources, (0, 0)][:2]
        return OP.pack(
            *(kind, self._program.columns[node.outputs[0]] if columns is None else columns),
            *(a, b, a_stride, b_stride),
            *(0 if weight is None else self._program.address(weight), self._places[node.outputs[0]][0]),
            self._places[node.outputs[TOTAL]][0] if kind == ADD_NORM else 0,
            *(taken, matrix, float(node.attributes.get("epsilon", 0.0))),
        )
