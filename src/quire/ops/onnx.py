"""Small ONNX graphs, written by hand and run by ONNX Runtime on torch's memory. Knows operators, not layers.

Small constants travel inside the model; large matrices are lent while the program is made, for the runtime repacks what it
multiplies by.
"""

import ctypes
import importlib
import itertools
import mmap
import os
import struct
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

CONTRIB = "com.microsoft"
OPSET, CONTRIB_OPSET, IR_VERSION = 21, 1, 10
# numbers of the element types in ONNX's tensors
_ELEMENTS = {np.dtype(np.float32): 1, np.dtype(np.uint8): 2, np.dtype(np.int32): 6, np.dtype(np.int64): 7}
MOST_THREADS = 16  # of one program; they sleep between runs
ROWS_AT_ONCE = 256  # of matrices with more: what is between operators then stays in the caches
KEPT_ELEMENTS = 1 << 16  # inputs and outputs of at most as many numbers are kept for the next run
# attention over one query at a time takes twice as long by the runtime's way for many
SETTINGS = {"ORT_GQA_DISABLE_FLASH_ATTENTION": "1"}

Array = npt.NDArray[Any]


@cache
def available() -> bool:
    try:
        runtime()
    except ImportError:
        return False
    return True


def runtime() -> Any:
    """The package. Releases since 1.29 report what models run to their makers, unless told not to before they are imported."""
    os.environ.setdefault("ORT_DISABLE_TELEMETRY", "1")
    return importlib.import_module("onnxruntime")


@dataclass(frozen=True)
class Value:
    """An input or output of a graph. A dimension with a name has any size."""

    name: str
    shape: tuple[int | str, ...]
    dtype: type[np.generic] = np.float32


class Program:
    """A compiled graph."""

    def __init__(
        self,
        graph: "Graph",
        inputs: Sequence[Value],
        outputs: Sequence[Value],
        hold: bool = True,
        most_threads: int = MOST_THREADS,
    ) -> None:
        """`hold`: what was lent may be read again, and is kept. Otherwise the memory of what was given goes back to the system,
        if not its addresses."""
        onnxruntime = runtime()
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = min(torch.get_num_threads(), most_threads)
        options.inter_op_num_threads = 1
        options.log_severity_level = 3
        # graphs are written as they are to run: to look for better ones would take time, and memory that is kept
        options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
        options.enable_cpu_mem_arena = options.enable_mem_pattern = False
        options.add_session_config_entry("session.intra_op.allow_spinning", "0")
        values = {name: onnxruntime.OrtValue.ortvalue_from_numpy(array) for name, array in graph.lent.items()}
        options.add_external_initializers(list(graph.lent), list(values.values()))
        for name in graph.given:
            options.add_initializer(name, values[name])  # otherwise the runtime copies some, and keeps the copies
        model = graph.encode(inputs, outputs)
        with _environment(SETTINGS):
            self.session = onnxruntime.InferenceSession(model, options, providers=["CPUExecutionProvider"])
        # as numbers: to look up numpy's types would be most of the time it takes to bind memory
        self.types = {value.name: _ELEMENTS[np.dtype(value.dtype)] for value in (*inputs, *outputs)}
        self._held = values if hold else {name: values[name] for name in graph.given}
        if not hold:
            for name in graph.given:
                _empty(graph.lent[name])


class Binding:
    """A program and the memory it works on, which has to stay where it is."""

    def __init__(self, program: Program) -> None:
        self._program = program
        self._memory = program.session.io_binding()._iobinding
        self._run = program.session._sess.run_with_iobinding

    def read(self, name: str, shape: Sequence[int], address: int) -> None:
        self._memory.bind_input(name, _cpu(), self._program.types[name], shape, address)

    def write(self, name: str, shape: Sequence[int], address: int) -> None:
        self._memory.bind_output(name, _cpu(), self._program.types[name], shape, address)

    def run(self) -> None:
        self._run(self._memory, None)


class Session(Program):
    """Of float32 matrices with a row per token. A run's outputs are overwritten by the next run with as many rows."""

    def __init__(
        self, graph: "Graph", inputs: Sequence[tuple[str, int]], outputs: Sequence[tuple[str, int]], hold: bool = True
    ) -> None:
        """inputs and outputs: names, and columns."""
        super().__init__(graph, [_matrix(*item) for item in inputs], [_matrix(*item) for item in outputs], hold)
        self._inputs, self._outputs = tuple(inputs), tuple(outputs)
        self._latest: tuple[int, Binding, list[Tensor], list[Tensor]] | None = None

    def run(self, *inputs: Tensor) -> list[Tensor]:
        """Each [T, columns] float32 and contiguous."""
        rows = len(inputs[0])
        if self._latest is not None and self._latest[0] == rows:
            _, binding, bound, results = self._latest
            for target, tensor in zip(bound, inputs, strict=True):
                target.copy_(tensor)
            binding.run()
            return results
        taken = [tensor.contiguous() for tensor in inputs]
        results = [torch.empty(rows, columns) for _, columns in self._outputs]
        if sum(tensor.numel() for tensor in (*taken, *results)) <= KEPT_ELEMENTS:
            taken = [tensor.clone() for tensor in taken]
            binding = self.bind(taken, results)
            self._latest = rows, binding, taken, results
            binding.run()
            return results
        self._latest = None
        share = -(-rows // -(-rows // ROWS_AT_ONCE))
        for start in range(0, rows, share):
            part = slice(start, start + share)
            self.bind([tensor[part] for tensor in taken], [tensor[part] for tensor in results]).run()
        return results

    def bind(self, inputs: Sequence[Tensor], outputs: Sequence[Tensor]) -> Binding:
        """Each [T, columns] float32 and contiguous."""
        binding = Binding(self)
        for (name, _), tensor in zip(self._inputs, inputs, strict=True):
            binding.read(name, tensor.shape, tensor.data_ptr())
        for (name, _), tensor in zip(self._outputs, outputs, strict=True):
            binding.write(name, tensor.shape, tensor.data_ptr())
        return binding


@cache
def _cpu() -> Any:
    from onnxruntime.capi._pybind_state import OrtDevice

    return OrtDevice(OrtDevice.cpu(), OrtDevice.default_memory(), 0)


@contextmanager
def _environment(settings: Mapping[str, str]) -> Iterator[None]:
    """The process's environment with `settings` for a moment; what the user has set stays."""
    added = {name: value for name, value in settings.items() if name not in os.environ}
    os.environ.update(added)
    try:
        yield
    finally:
        for name in added:
            del os.environ[name]


def _empty(array: Array) -> None:
    """Its pages go back to the system; whoever reads it finds zeros."""
    start, end = -(-array.ctypes.data // mmap.PAGESIZE), (array.ctypes.data + array.nbytes) // mmap.PAGESIZE
    if start < end and sys.platform == "linux":
        ctypes.CDLL(None).madvise(
            ctypes.c_void_p(start * mmap.PAGESIZE), ctypes.c_size_t((end - start) * mmap.PAGESIZE), mmap.MADV_DONTNEED
        )


def _matrix(name: str, columns: int) -> Value:
    return Value(name, ("rows", columns))


class Graph:
    def __init__(self) -> None:
        self.lent: dict[str, Array] = {}
        self.given: list[str] = []  # of what is lent, that nobody else reads
        self._constants: list[bytes] = []
        self._nodes: list[bytes] = []
        self._names = (f"t{number}" for number in itertools.count())

    def name(self) -> str:
        return next(self._names)

    def constant(self, values: Array) -> str:
        name = self.name()
        self._constants.append(_bytes(5, _tensor(name, values) + _bytes(9, values.tobytes())))
        return name

    def lend(self, matrix: Array) -> str:
        name = self.name()
        self.lent[name] = matrix
        return name

    def give(self, matrix: Array) -> str:
        """Lends what nobody else reads."""
        name = self.lend(matrix)
        self.given.append(name)
        return name

    def add(self, operator: str, inputs: Sequence[str], outputs: int = 1, domain: str = "", **attributes: Any) -> list[str]:
        """One node; the names of its outputs."""
        names = [self.name() for _ in range(outputs)]
        self.place(operator, inputs, names, domain, **attributes)
        return names

    def place(self, operator: str, inputs: Sequence[str], outputs: Sequence[str], domain: str = "", **attributes: Any) -> None:
        """One node whose outputs have the names given; "" = that output is not wanted."""
        body = [_text(1, name) for name in inputs] + [_text(2, name) for name in outputs]
        body += [_text(4, operator), *(_bytes(5, _attribute(*item)) for item in attributes.items()), _text(7, domain)]
        self._nodes.append(_bytes(1, b"".join(body)))

    def encode(self, inputs: Sequence[Value], outputs: Sequence[Value]) -> bytes:
        """The graph as an ONNX file's bytes; what is lent stands elsewhere."""
        parts = [*self._nodes, _text(2, "graph"), *self._constants]
        parts += [_bytes(5, _tensor(name, array) + _elsewhere(array)) for name, array in self.lent.items()]
        parts += [_bytes(11, _described(value)) for value in inputs] + [_bytes(12, _described(value)) for value in outputs]
        versions = [_bytes(8, _text(1, domain) + _number(2, at)) for domain, at in (("", OPSET), (CONTRIB, CONTRIB_OPSET))]
        return b"".join([_number(1, IR_VERSION), _bytes(7, b"".join(parts)), *versions])


# ONNX files are protocol buffers: a message is a row of fields, each a number and a value. The numbers are those of onnx.proto.


def _varint(value: int) -> bytes:
    out = bytearray()
    value &= (1 << 64) - 1
    while value > 127:
        out.append(value & 127 | 128)
        value >>= 7
    return bytes([*out, value])


def _number(field: int, value: int) -> bytes:
    return _varint(field << 3) + _varint(value)


def _bytes(field: int, value: bytes) -> bytes:
    return _varint(field << 3 | 2) + _varint(len(value)) + value


def _text(field: int, value: str) -> bytes:
    return _bytes(field, value.encode())


def _attribute(name: str, value: float | int | str) -> bytes:
    if isinstance(value, float):
        return _text(1, name) + _varint(2 << 3 | 5) + struct.pack("<f", value) + _number(20, 1)
    if isinstance(value, str):
        return _text(1, name) + _text(4, value) + _number(20, 3)
    return _text(1, name) + _number(3, value) + _number(20, 2)


def _tensor(name: str, array: Array) -> bytes:
    return b"".join(_number(1, size) for size in array.shape) + _number(2, _ELEMENTS[array.dtype]) + _text(8, name)


def _elsewhere(array: Array) -> bytes:
    """Where a tensor's values are, in the form of a file; the session is given them by name."""
    place = {"location": "lent", "offset": "0", "length": str(array.nbytes)}
    return b"".join(_bytes(13, _text(1, key) + _text(2, value)) for key, value in place.items()) + _number(14, 1)


def _described(value: Value) -> bytes:
    """A graph's input or output."""
    shape = [_bytes(1, _text(2, size) if isinstance(size, str) else _number(1, size)) for size in value.shape]
    tensor = _number(1, _ELEMENTS[np.dtype(value.dtype)]) + _bytes(2, b"".join(shape))
    return _text(1, value.name) + _bytes(2, _bytes(1, tensor))
