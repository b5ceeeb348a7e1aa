"""ONNX graphs run by OpenVINO on torch's memory. It keeps matrices of 4-bit numbers as they are where the CPU has the
instructions for them, and attends over pages.

What a product is multiplied by is written as dequantized numbers, which it never makes; activations are rounded to 8 bits
by groups of 32. Large matrices are lent by an operator of our own name (`LENT`). Attention is another (`PAGED`), for ONNX has
none.
"""

import importlib
import sys
from collections.abc import Mapping, Sequence
from functools import cache
from threading import Lock
from typing import Any

import numpy as np
import torch
from torch import Tensor

from quire.device.cpu.graph import LENT, OWN, Array, Graph, Value, give_back
from quire.ops.blocks import GROUP

MOST_THREADS = 16
KEPT_SHAPES = 128  # what a network keeps for operators in shapes it has met: some ten for each number of rows
PAGED = "PagedAttention"
PAGE = 32  # tokens; the plugin knows no other


class Network:
    """A compiled graph."""

    def __init__(self, graph: Graph, inputs: Sequence[Value], outputs: Sequence[Value]) -> None:
        core = _core()
        settings = {
            "INFERENCE_NUM_THREADS": min(torch.get_num_threads(), MOST_THREADS),
            "NUM_STREAMS": 1,
            "ENABLE_CPU_PINNING": False,
            "INFERENCE_PRECISION_HINT": "f32",
            "KV_CACHE_PRECISION": "f32",
            "DYNAMIC_QUANTIZATION_GROUP_SIZE": GROUP,
            "CPU_RUNTIME_CACHE_CAPACITY": KEPT_SHAPES,
        }
        with _reading:
            _lending[:] = [graph]
            model = core.read_model(graph.encode(inputs, outputs))
        self._compiled = core.compile_model(model, "CPU", settings)
        self._graph = graph  # with what is lent
        self._request = self._compiled.create_infer_request()
        self._names = {name for port in self._compiled.inputs for name in port.get_names()}
        self._told: dict[str, Array] = {}
        self._bound: dict[str, Tensor] = {}  # it works on their memory, which has to stay
        self.latest: object = None  # who has bound its memory last

    def bind(self, name: str, tensor: Tensor) -> None:
        """An input or output. Contiguous."""
        self._bound[name] = tensor
        self._request.set_tensor(name, _openvino().Tensor(tensor.numpy(), shared_memory=True))

    def tell(self, numbers: Mapping[str, Array]) -> None:
        """Small inputs, contiguous, which it copies. Those that nothing in the graph reads are left out."""
        for name, array in numbers.items():
            there = self._told.get(name)
            if there is not None and there.shape == array.shape:
                there[...] = array
            elif name in self._names:
                tensor = _openvino().Tensor(array, shared_memory=False)
                self._request.set_tensor(name, tensor)
                self._told[name] = tensor.data

    def run(self) -> None:
        self._request.infer(share_outputs=True)  # else it copies them

    def settle(self) -> None:
        """After a first run: it has copies of what it was given, in an order of its own, and reads no others. (Float matrices
        that it was lent, it may read again for a number of rows that it has not met.)"""
        for name in self._graph.given:
            give_back(self._graph.lent[name])

    def keeps_numbers(self) -> bool:
        """Does it multiply by 4-bit numbers as they are? It tells what it made of the graph."""
        nodes = [node.get_rt_info() for node in self._compiled.get_runtime_model().get_ops()]
        kinds = {node["runtimePrecision"].value for node in nodes if node["layerType"].value == "FullyConnected"}
        return "u4" in kinds  # beside floats, by which sums are made


class Binding:
    """One of the memories a network works on by turns."""

    def __init__(self, network: Network, tensors: Sequence[tuple[str, Tensor]]) -> None:
        self._network, self._tensors = network, tuple(tensors)

    def run(self) -> None:
        if self._network.latest is not self:
            for name, tensor in self._tensors:
                self._network.bind(name, tensor)
            self._network.latest = self
        self._network.run()


@cache
def _openvino() -> Any:
    """The package. Imported, it reports to its makers, through another package that it can do without."""
    reporter = "openvino_telemetry"
    missing = reporter not in sys.modules
    if missing:
        sys.modules[reporter] = None  # type: ignore[assignment]  # not to be found
    try:
        return importlib.import_module("openvino")
    finally:
        if missing:
            del sys.modules[reporter]


@cache
def _core() -> Any:
    core = _openvino().Core()
    extension = importlib.import_module("openvino.frontend.onnx").ConversionExtension
    core.add_extension([extension(PAGED, OWN, _convert_paged), extension(LENT, OWN, _convert_lent)])
    return core


_reading, _lending = Lock(), list[Graph]()  # one graph is read at a time, and lends


def _convert_lent(node: Any) -> list[Any]:
    openvino, graph, name = _openvino(), _lending[0], node.get_attribute("name")
    array, shape = graph.lent[name], graph.nibbles.get(name)
    tensor = openvino.Tensor(array, shared_memory=True)
    if shape is not None:
        tensor = openvino.Tensor(array.reshape(-1), openvino.Shape(shape), openvino.Type.u4)
    constant = importlib.import_module("openvino.opset13").constant
    return [constant(tensor, shared_memory=True).output(0)]


def _convert_paged(node: Any) -> list[Any]:
    """Inputs: query, key, value [T, columns]; keys and values in their pages [P, kv_heads, PAGE, head_dim]; cached tokens [R],
    where each row's tokens start [R + 1], pages of all rows, where each row's start [R + 1]; the longest row []."""
    operators = importlib.import_module("openvino.op")
    constant = importlib.import_module("openvino.opset13").constant

    def number(value: float, kind: type[np.generic] = np.int32) -> Any:
        return constant(np.array(value, kind)).output(0)

    def nothing(kind: type[np.generic] = np.int32, dimensions: int = 1) -> Any:
        return constant(np.zeros((0,) * dimensions, kind)).output(0)

    *first, longest = (node.get_input(index) for index in range(node.get_input_size()))
    others = [
        number(node.get_attribute("scale"), np.float32),
        number(0),  # sliding window
        nothing(np.float32),  # slopes of linear biases
        longest,
        nothing(),  # scores that are wanted
        *(nothing(), nothing(dimensions=2), nothing(np.float32, 2)),  # pages to be turned again
        *(nothing(np.float32), number(0), number(0)),  # sparse attention
        nothing(np.float32, 4),  # sinks
        *(number(0), nothing(), nothing(), nothing()),  # pages to be dropped
        nothing(),  # types of tokens
        *(nothing(np.uint8), nothing()),  # tokens that do not see each other
    ]
    paged = operators._PagedAttentionExtension([*first, *others])
    notes = paged.get_rt_info()
    for which in ("k", "v"):
        notes[f"num_{which}_heads"], notes[f"{which}_head_size"] = (
            node.get_attribute("kv_heads"),
            node.get_attribute("head_dim"),
        )
    return [paged.output(0)]
