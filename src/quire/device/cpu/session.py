"""Compiled graphs of float32 matrices with a row per token, by whichever runtime the graph was written for."""

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from quire.device.cpu import openvino, program
from quire.device.cpu.graph import Graph, Runtime, Value

# inputs and outputs of at most as many numbers are kept for the next run; more of a single product, such as a model's last
KEPT_ELEMENTS, KEPT_OF_PRODUCT = 1 << 16, 1 << 22
# what takes more is cut by rows: there is several times as much between operators, and a network of OpenVINO keeps that
ROWS_OF_NETWORK, ROWS_OF_PROGRAM = 64, 128

Columns = tuple[str, int]  # a value's name, and how many it has


class Call(Protocol):
    """Works on memory that it was bound to."""

    def run(self) -> None: ...


class Calls:
    """One after the other."""

    def __init__(self, calls: Sequence[Call]) -> None:
        self._calls = calls

    def run(self) -> None:
        for call in self._calls:
            call.run()


class Session:
    """A run's outputs are overwritten by the next run with as many rows."""

    def __init__(
        self,
        graph: Graph,
        inputs: Sequence[Columns],
        outputs: Sequence[Columns],
        scratch: program.Scratch | None = None,
        kept: int = KEPT_ELEMENTS,
    ) -> None:
        """`scratch`: see `program.Program`; `kept`: see above."""
        self._inputs, self._outputs, self._kept = tuple(inputs), tuple(outputs), kept
        values = [_matrix(*item) for item in inputs], [_matrix(*item) for item in outputs]
        self._compiled: openvino.Network | program.Program
        if graph.runtime is Runtime.OWN:
            self._compiled = program.Program(graph, values[0], scratch or program.Scratch())
            self._rows_at_once = ROWS_OF_PROGRAM
        else:
            self._compiled, self._rows_at_once = openvino.Network(graph, *values), ROWS_OF_NETWORK
            for name, columns in (*inputs, *outputs):
                self._compiled.bind(name, torch.zeros(2, columns))
            self._compiled.run()
            self._compiled.settle()
        self._latest: tuple[int, Call, list[Tensor], list[Tensor]] | None = None

    def run(self, *inputs: Tensor) -> list[Tensor]:
        """Each [T, columns] float32 and contiguous."""
        if self._latest is None or self._latest[0] != len(inputs[0]):
            return self._run_anew(*inputs)
        _, call, bound, results = self._latest
        for target, tensor in zip(bound, inputs, strict=True):
            target.copy_(tensor)
        call.run()
        return results

    def _run_anew(self, *inputs: Tensor) -> list[Tensor]:
        """Of another number of rows than the latest."""
        rows = len(inputs[0])
        taken = [tensor.contiguous() for tensor in inputs]
        results = [torch.empty(rows, columns) for _, columns in self._outputs]
        kept = sum(tensor.numel() for tensor in (*taken, *results)) <= self._kept
        if kept:
            taken = [tensor.clone() for tensor in taken]
        call = self.bind(taken, results)
        self._latest = (rows, call, taken, results) if kept else None
        call.run()
        return results

    def bind(self, inputs: Sequence[Tensor], outputs: Sequence[Tensor]) -> Call:
        """Each [T, columns] float32 and contiguous."""
        rows = len(inputs[0])
        share = -(-rows // -(-rows // self._rows_at_once))
        parts = [slice(start, start + share) for start in range(0, rows, share)]
        calls = [self._bind([m[part] for m in inputs], [m[part] for m in outputs]) for part in parts]
        return calls[0] if len(calls) == 1 else Calls(calls)

    def keeps_numbers(self) -> bool:
        """Are numbers of few bits multiplied by as they are?"""
        return not isinstance(self._compiled, openvino.Network) or self._compiled.keeps_numbers()

    def _bind(self, inputs: Sequence[Tensor], outputs: Sequence[Tensor]) -> Call:
        names = [name for name, _ in (*self._inputs, *self._outputs)]
        bound = list(zip(names, (*inputs, *outputs), strict=True))
        if isinstance(self._compiled, program.Program):
            return program.Binding(self._compiled, dict(bound))
        return openvino.Binding(self._compiled, bound)


def _matrix(name: str, columns: int) -> Value:
    return Value(name, ("rows", columns))
