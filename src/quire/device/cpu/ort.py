"""ONNX graphs run by ONNX Runtime on torch's memory. Large matrices are lent while a program is made, for the runtime repacks
what it multiplies by."""

import importlib
import os
from collections.abc import Sequence
from functools import cache
from importlib.util import find_spec
from typing import Any

import numpy as np
import torch

from quire.device.cpu.graph import ELEMENTS, Graph, Value, give_back

MOST_THREADS = 16  # of one program; they sleep between runs


def available() -> bool:
    return find_spec("onnxruntime") is not None


def runtime() -> Any:
    """The package. Releases since 1.29 report what models run to their makers, unless told not to before they are imported."""
    os.environ.setdefault("ORT_DISABLE_TELEMETRY", "1")
    return importlib.import_module("onnxruntime")


class Program:
    """A compiled graph."""

    def __init__(
        self,
        graph: Graph,
        inputs: Sequence[Value],
        outputs: Sequence[Value],
        hold: bool = True,
        *,
        spin: bool = False,
    ) -> None:
        """`hold`: what was lent may be read again, and is kept. Otherwise the memory of what was given goes back to the system,
        if not its addresses. `spin`: threads wait for each other without sleeping, as long as a run lasts."""
        onnxruntime = runtime()
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = min(torch.get_num_threads(), MOST_THREADS)
        options.inter_op_num_threads = 1
        options.log_severity_level = 3
        # graphs are written as they are to run: to look for better ones would take time, and memory that is kept
        options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
        options.enable_cpu_mem_arena = options.enable_mem_pattern = False
        options.add_session_config_entry("session.intra_op.allow_spinning", "1" if spin else "0")
        options.add_session_config_entry("session.force_spinning_stop", "1")  # with the run
        values = {name: onnxruntime.OrtValue.ortvalue_from_numpy(array) for name, array in graph.lent.items()}
        options.add_external_initializers(list(graph.lent), list(values.values()))
        for name in (*graph.given, *graph.lasting):
            options.add_initializer(name, values[name])  # otherwise the runtime copies some, and keeps the copies
        model = graph.encode(inputs, outputs)
        self.session = onnxruntime.InferenceSession(model, options, providers=["CPUExecutionProvider"])
        # as numbers: to look up numpy's types would be most of the time it takes to bind memory
        self.types = {value.name: ELEMENTS[np.dtype(value.dtype)] for value in (*inputs, *outputs)}
        self._held = values if hold else {name: values[name] for name in (*graph.given, *graph.lasting)}
        if not hold:
            for name in graph.given:
                give_back(graph.lent[name])


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


@cache
def _cpu() -> Any:
    from onnxruntime.capi._pybind_state import OrtDevice

    return OrtDevice(OrtDevice.cpu(), OrtDevice.default_memory(), 0)
