"""Run compiled graphs of float32 matrices, [tokens, columns], on the runtime that the graph was written for."""

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from quire.device.cpu import openvino, program
from quire.device.cpu.graph import Graph, Runtime, Value
from quire.device.cpu.repack import Repacked, emit, emit_tiles, lay_out_floats

# larger inputs and outputs are not cached for the next run; more is cached for a single product, such as the LM head
MAX_CACHED_ELEMENTS, PRODUCT_CACHED_ELEMENTS = 1 << 16, 1 << 22
PROGRAM_TOKENS = 128  # more are divided: intermediate results take several times as much memory

Columns = tuple[str, int]  # a value's name and its number of columns


class Call(Protocol):
    """A run on memory that is already bound."""

    def run(self) -> None: ...


class SplitCall:
    """Several calls in order."""

    def __init__(self, calls: Sequence[Call]) -> None:
        self._calls = calls

    def run(self) -> None:
        for call in self._calls:
            call.run()


class Session:
    """A compiled graph. The next run with as many tokens overwrites the outputs of a run."""

    def __init__(
        self,
        graph: Graph,
        inputs: Sequence[Columns],
        outputs: Sequence[Columns],
        scratch: program.Scratch | None = None,
        cached_elements: int = MAX_CACHED_ELEMENTS,
    ) -> None:
        """Compile a graph.

        inputs, outputs: name and number of columns of each.
        scratch: memory shared with programs that never run at the same time (`program.Program`).
        cached_elements: inputs and outputs up to this size are cached for the next run.
        """
        self._inputs, self._outputs, self._cached_elements = tuple(inputs), tuple(outputs), cached_elements
        values = [_matrix(*item) for item in inputs], [_matrix(*item) for item in outputs]
        self._compiled: openvino.Network | program.Program
        if graph.runtime is Runtime.OWN:
            self._compiled = program.Program(graph, values[0], scratch or program.Scratch())
            self._max_tokens = PROGRAM_TOKENS
        else:
            self._compiled, self._max_tokens = openvino.Network(graph, *values), openvino.Network.max_tokens
            for name, columns in (*inputs, *outputs):
                self._compiled.bind(name, torch.zeros(2, columns))
            self._compiled.run()
            self._compiled.release_weights()
        self._latest: tuple[int, Call, list[Tensor], list[Tensor]] | None = None

    def run(self, *inputs: Tensor) -> list[Tensor]:
        """Return the outputs for inputs [T, columns], float32 and contiguous."""
        if self._latest is None or self._latest[0] != len(inputs[0]):
            return self._run_anew(*inputs)
        _, call, bound, results = self._latest
        for target, tensor in zip(bound, inputs, strict=True):
            target.copy_(tensor)
        call.run()
        return results

    def _run_anew(self, *inputs: Tensor) -> list[Tensor]:
        """Run with another number of tokens than the latest run."""
        rows = len(inputs[0])
        taken = [tensor.contiguous() for tensor in inputs]
        results = [torch.empty(rows, columns) for _, columns in self._outputs]
        cacheable = sum(tensor.numel() for tensor in (*taken, *results)) <= self._cached_elements
        if cacheable:
            taken = [tensor.clone() for tensor in taken]
        call = self.bind(taken, results)
        self._latest = (rows, call, taken, results) if cacheable else None
        call.run()
        return results

    def bind(self, inputs: Sequence[Tensor], outputs: Sequence[Tensor]) -> Call:
        """Return a call on this memory: each [T, columns], float32 and contiguous."""
        rows = len(inputs[0])
        share = -(-rows // -(-rows // self._max_tokens))
        parts = [slice(start, start + share) for start in range(0, rows, share)]
        calls = [self._bind([m[part] for m in inputs], [m[part] for m in outputs]) for part in parts]
        return calls[0] if len(calls) == 1 else SplitCall(calls)

    def keeps_quantized(self) -> bool:
        """Return whether quantized weights stay quantized."""
        return not isinstance(self._compiled, openvino.Network) or self._compiled.keeps_quantized()

    def _bind(self, inputs: Sequence[Tensor], outputs: Sequence[Tensor]) -> Call:
        names = [name for name, _ in (*self._inputs, *self._outputs)]
        bound = list(zip(names, (*inputs, *outputs), strict=True))
        if isinstance(self._compiled, program.Program):
            return program.Binding(self._compiled, dict(bound))
        return openvino.Binding(self._compiled, bound)


def _matrix(name: str, columns: int) -> Value:
    return Value(name, ("rows", columns))


def emit_floats(graph: Graph, x: str, weight: Tensor, bias: Tensor | None, parts: int = 1) -> list[str]:
    """Add a float32 product to a graph. x is [T, K], weight [N, K], the result [T, N] in `parts` equal parts of its columns."""
    if graph.runtime is Runtime.OWN:
        y = emit_tiles(graph, x, lay_out_floats(weight, bias))
        return [y] if parts == 1 else graph.add("Split", [y], outputs=parts, axis=1, num_outputs=parts)
    added = [None] * parts if bias is None else bias.detach().chunk(parts)
    names = []
    for some, constant in zip(weight.detach().chunk(parts), added, strict=True):  # splitting the result would cost more
        inputs = [x, graph.borrow(some.numpy())]
        if constant is not None:
            inputs.append(graph.constant(constant.numpy()))
        names += graph.add("Gemm", inputs, transB=1)
    return names


class Product:
    """Compute x @ weight.T (+ bias): [T, K] -> [T, N]."""

    def __init__(self, graph: Graph, output: str, inputs: int, outputs: int, cached_elements: int) -> None:
        """Compile a graph from `x` to `output`. `cached_elements`: see `Session`."""
        self._session = Session(graph, [("x", inputs)], [(output, outputs)], cached_elements=cached_elements)

    def __call__(self, x: Tensor) -> Tensor:
        return self._session.run(x)[0]

    def keeps_quantized(self) -> bool:
        """Return whether quantized weights stay quantized."""
        return self._session.keeps_quantized()


def float_product(weight: Tensor, bias: Tensor | None, runtime: Runtime) -> Product:
    """Return the product with a float32 matrix, which is repacked once; weight [N, K], bias [N]."""
    graph = Graph(runtime)
    [output] = emit_floats(graph, "x", weight, bias)
    return Product(graph, output, weight.shape[1], weight.shape[0], PRODUCT_CACHED_ELEMENTS)


def packed_product(matrix: Repacked, runtime: Runtime, cached_elements: int = MAX_CACHED_ELEMENTS) -> Product:
    """Return the product with a repacked GGUF matrix. `cached_elements`: see `Session`."""
    graph = Graph(runtime)
    return Product(graph, emit(graph, "x", matrix), matrix.inputs, matrix.outputs, cached_elements)
