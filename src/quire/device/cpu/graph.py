"""Write small ONNX graphs. Knows operators, not layers.

Small constants are stored in the model; large matrices are borrowed by the runtime while it reads the model.
"""

import ctypes
import itertools
import mmap
import struct
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

import numpy as np
import numpy.typing as npt

CONTRIB = "com.microsoft"
OWN = "quire"  # domain of custom operators
OPSET, CONTRIB_OPSET, IR_VERSION = 21, 1, 10
# ONNX codes of element types
ELEMENTS = {np.dtype(np.float32): 1, np.dtype(np.uint8): 2, np.dtype(np.int32): 6, np.dtype(np.int64): 7}
FLOATS = 8  # the kind of float32 tiles in `native/product.c`
BORROWED = "Borrowed"  # custom operator: a borrowed matrix

Array = npt.NDArray[Any]


class Runtime(StrEnum):
    """What runs a graph."""

    OPENVINO = "OpenVINO"
    OWN = "Quire"  # `program.py`


@dataclass(frozen=True)
class Value:
    """An input or output of a graph. A named dimension has any size."""

    name: str
    shape: tuple[int | str, ...]
    dtype: type[np.generic] = np.float32


@dataclass(frozen=True)
class Node:
    operator: str
    inputs: tuple[str, ...]  # "" = none
    outputs: tuple[str, ...]  # "" = unused
    domain: str = ""
    attributes: Mapping[str, float | int | str] = field(default_factory=dict)


def give_back(array: Array) -> None:
    """Return an array's pages to the system. Reading it then gives zeros."""
    start, end = -(-array.ctypes.data // mmap.PAGESIZE), (array.ctypes.data + array.nbytes) // mmap.PAGESIZE
    if start < end and sys.platform == "linux":
        ctypes.CDLL(None).madvise(
            ctypes.c_void_p(start * mmap.PAGESIZE), ctypes.c_size_t((end - start) * mmap.PAGESIZE), mmap.MADV_DONTNEED
        )


class Graph:
    def __init__(self, runtime: Runtime) -> None:
        """Start a graph. Runtimes have different operators for products."""
        self.runtime = runtime
        self.borrowed: dict[str, Array] = {}
        self.adopted: list[str] = []  # borrowed matrices without other readers
        self.nibbles: dict[str, tuple[int, ...]] = {}  # shapes of borrowed 4-bit matrices
        self.constants: dict[str, Array] = {}
        self.nodes: list[Node] = []
        self._shared: dict[tuple[tuple[int, ...], bytes], str] = {}
        self._names = (f"t{number}" for number in itertools.count())

    def name(self) -> str:
        return next(self._names)

    def constant(self, values: Array) -> str:
        name = self.name()
        self.constants[name] = values
        return name

    def shared(self, values: Array) -> str:
        """Add a constant, or return an equal one."""
        key = values.shape, values.tobytes()
        if key not in self._shared:
            self._shared[key] = self.constant(values)
        return self._shared[key]

    def borrow(self, matrix: Array) -> str:
        name = self.name()
        self.borrowed[name] = matrix
        return name

    def adopt(self, matrix: Array, nibbles: tuple[int, ...] = ()) -> str:
        """Borrow a matrix without other readers. `nibbles`: its shape if it holds 4-bit values, two per byte, the first in
        the low half.
        """
        name = self.borrow(matrix)
        self.adopted.append(name)
        if nibbles:
            self.nibbles[name] = nibbles
        return name

    def add(self, operator: str, inputs: Sequence[str], outputs: int = 1, domain: str = "", **attributes: Any) -> list[str]:
        """Add a node and return the names of its outputs."""
        names = [self.name() for _ in range(outputs)]
        self.place(operator, inputs, names, domain, **attributes)
        return names

    def place(self, operator: str, inputs: Sequence[str], outputs: Sequence[str], domain: str = "", **attributes: Any) -> None:
        """Add a node whose outputs have these names; "" = that output is unused."""
        self.nodes.append(Node(operator, tuple(inputs), tuple(outputs), domain, attributes))

    def encode(self, inputs: Sequence[Value], outputs: Sequence[Value]) -> bytes:
        """Return the graph as an ONNX file. Borrowed matrices are outputs of a custom operator."""
        nodes = [Node(BORROWED, (), (name,), OWN, {"name": name}) for name in self.borrowed] + self.nodes
        parts = [*map(_node, nodes), _text(2, "graph")]
        parts += [_bytes(5, _tensor(*item) + _bytes(9, item[1].tobytes())) for item in self.constants.items()]
        parts += [_bytes(11, _described(value)) for value in inputs] + [_bytes(12, _described(value)) for value in outputs]
        domains = {"": OPSET, CONTRIB: CONTRIB_OPSET, OWN: 1}
        versions = [_bytes(8, _text(1, domain) + _number(2, at)) for domain, at in domains.items()]
        return b"".join([_number(1, IR_VERSION), _bytes(7, b"".join(parts)), *versions])


# ONNX files are protocol buffers: a message is a sequence of fields, each a field number (see onnx.proto) and a value


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


def _node(node: Node) -> bytes:
    body = [_text(1, name) for name in node.inputs] + [_text(2, name) for name in node.outputs]
    body += [
        _text(4, node.operator),
        *(_bytes(5, _attribute(*item)) for item in node.attributes.items()),
        _text(7, node.domain),
    ]
    return _bytes(1, b"".join(body))


def _attribute(name: str, value: float | int | str) -> bytes:
    if isinstance(value, float):
        return _text(1, name) + _varint(2 << 3 | 5) + struct.pack("<f", value) + _number(20, 1)
    if isinstance(value, str):
        return _text(1, name) + _text(4, value) + _number(20, 3)
    return _text(1, name) + _number(3, value) + _number(20, 2)


def _tensor(name: str, array: Array) -> bytes:
    return b"".join(_number(1, size) for size in array.shape) + _number(2, ELEMENTS[array.dtype]) + _text(8, name)


def _described(value: Value) -> bytes:
    """Encode a graph's input or output."""
    shape = [_bytes(1, _text(2, size) if isinstance(size, str) else _number(1, size)) for size in value.shape]
    tensor = _number(1, ELEMENTS[np.dtype(value.dtype)]) + _bytes(2, b"".join(shape))
    return _text(1, value.name) + _bytes(2, _bytes(1, tensor))
