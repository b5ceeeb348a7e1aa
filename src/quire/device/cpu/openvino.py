"""Run ONNX graphs with OpenVINO on torch's memory. It keeps 4-bit matrices packed where the CPU has the instructions, and has
attention over pages.

A product's matrix is written as dequantized values, which OpenVINO never materializes. It quantizes activations to 8 bits per
group of 32. Large matrices are borrowed through a custom operator (`BORROWED`); attention is another (`PAGED`), which ONNX
lacks.
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

from quire.device.cpu.graph import BORROWED, OWN, Array, Graph, Value, give_back
from quire.ops.blocks import GROUP

MAX_THREADS = 16
MAX_TOKENS = 64
SHAPE_CACHE_CAPACITY = 128  # cached operator shapes of a network: about ten for each number of tokens
PAGED = "PagedAttention"
PAGE = 32  # tokens; the CPU plugin supports no other


class Network:
    """A compiled graph and its infer request."""

    # per run; more are divided, since intermediate results take several times as much memory, which OpenVINO does not free
    max_tokens = MAX_TOKENS  # `autotune.choose` sets fewer on CPUs where more give wrong products

    def __init__(self, graph: Graph, inputs: Sequence[Value], outputs: Sequence[Value]) -> None:
        core = _core()
        settings = {
            "INFERENCE_NUM_THREADS": min(torch.get_num_threads(), MAX_THREADS),
            "NUM_STREAMS": 1,
            "ENABLE_CPU_PINNING": False,
            "INFERENCE_PRECISION_HINT": "f32",
            "KV_CACHE_PRECISION": "f32",
            "DYNAMIC_QUANTIZATION_GROUP_SIZE": GROUP,
            "CPU_RUNTIME_CACHE_CAPACITY": SHAPE_CACHE_CAPACITY,
        }
        with _reading:
            _encoding[:] = [graph]
            model = core.read_model(graph.encode(inputs, outputs))
        self._compiled = core.compile_model(model, "CPU", settings)
        self._graph = graph  # holds the borrowed matrices
        self._request = self._compiled.create_infer_request()
        self._names = {name for port in self._compiled.inputs for name in port.get_names()}
        self._copied_inputs: dict[str, Array] = {}
        self._bound: dict[str, Tensor] = {}  # keeps the memory alive
        self.latest: object = None  # the last binding

    def bind(self, name: str, tensor: Tensor) -> None:
        """Use the memory of a contiguous tensor for an input or output."""
        self._bound[name] = tensor
        self._request.set_tensor(name, _openvino().Tensor(tensor.numpy(), shared_memory=True))

    def set_inputs(self, inputs: Mapping[str, Array]) -> None:
        """Copy small contiguous inputs. Those that the graph does not read are ignored."""
        for name, array in inputs.items():
            copied = self._copied_inputs.get(name)
            if copied is not None and copied.shape == array.shape:
                copied[...] = array
            elif name in self._names:
                tensor = _openvino().Tensor(array, shared_memory=False)
                self._request.set_tensor(name, tensor)
                self._copied_inputs[name] = tensor.data

    def run(self) -> None:
        self._request.infer(share_outputs=True)  # otherwise it copies them

    def release_weights(self) -> None:
        """Free repacked matrices after the first run, which copied them.

        Borrowed float matrices stay: they may be read again for a new number of tokens.
        """
        for name in self._graph.adopted:
            give_back(self._graph.borrowed[name])

    def keeps_quantized(self) -> bool:
        """Return whether 4-bit matrices stay packed, according to the compiled graph."""
        nodes = [node.get_rt_info() for node in self._compiled.get_runtime_model().get_ops()]
        kinds = {node["runtimePrecision"].value for node in nodes if node["layerType"].value == "FullyConnected"}
        return "u4" in kinds  # there are also float products, for sums


class Binding:
    """One of several sets of memory that a network works on in turn."""

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
    """Import the package without its telemetry."""
    reporter = "openvino_telemetry"
    missing = reporter not in sys.modules
    if missing:
        sys.modules[reporter] = None  # type: ignore[assignment]  # makes the import fail
    try:
        return importlib.import_module("openvino")
    finally:
        if missing:
            del sys.modules[reporter]


@cache
def _core() -> Any:
    core = _openvino().Core()
    extension = importlib.import_module("openvino.frontend.onnx").ConversionExtension
    core.add_extension([extension(PAGED, OWN, _convert_paged), extension(BORROWED, OWN, _convert_borrowed)])
    return core


_reading, _encoding = Lock(), list[Graph]()  # one graph is read at a time


def _convert_borrowed(node: Any) -> list[Any]:
    openvino, graph, name = _openvino(), _encoding[0], node.get_attribute("name")
    array, shape = graph.borrowed[name], graph.nibbles.get(name)
    tensor = openvino.Tensor(array, shared_memory=True)
    if shape is not None:
        tensor = openvino.Tensor(array.reshape(-1), openvino.Shape(shape), openvino.Type.u4)
    constant = importlib.import_module("openvino.opset13").constant
    return [constant(tensor, shared_memory=True).output(0)]


def _convert_paged(node: Any) -> list[Any]:
    """Convert the attention operator.

    Inputs: query, key, value [T, columns]; keys and values in pages [P, kv_heads, PAGE, head_dim]; cached tokens [R]; first
    token of each row [R + 1]; pages of all rows; first page of each row [R + 1]; length of the longest row [].
    """
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
        nothing(np.float32),  # ALiBi slopes
        longest,
        nothing(),  # score outputs
        *(nothing(), nothing(dimensions=2), nothing(np.float32, 2)),  # cache rotation
        *(nothing(np.float32), number(0), number(0)),  # sparse attention
        nothing(np.float32, 4),  # sinks
        *(number(0), nothing(), nothing(), nothing()),  # adaptive eviction
        nothing(),  # token types
        *(nothing(np.uint8), nothing()),  # attention masks
    ]
    paged = operators._PagedAttentionExtension([*first, *others])
    notes = paged.get_rt_info()
    for which in ("k", "v"):
        notes[f"num_{which}_heads"], notes[f"{which}_head_size"] = (
            node.get_attribute("kv_heads"),
            node.get_attribute("head_dim"),
        )
    return [paged.output(0)]
