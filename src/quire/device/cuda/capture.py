"""CUDA graphs: what a function launches, recorded once and replayed over memory that stays."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class CUDAGraph:
    graph: torch.cuda.CUDAGraph
    result: Tensor

    def replay(self) -> Tensor:
        self.graph.replay()
        return self.result


class CUDAGraphs:
    """The stream that graphs are recorded on, and the memory that they share."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._pool = torch.cuda.graph_pool_handle()

    def capture(self, run: Callable[[], Tensor]) -> CUDAGraph:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.stream(self._stream):
            graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
            try:
                place = Place(run())
            finally:
                graph.capture_end()
        return CUDAGraph(graph, torch.as_tensor(place, device=self._device))

    def free_bytes(self) -> int:
        return torch.cuda.mem_get_info(self._device)[0]


class Place:
    """Where a recorded step leaves a tensor. It belongs to the pool that all graphs share, and is not held: the next graph may
    be recorded over the same memory, because what one step leaves there is used before the next step runs."""

    def __init__(self, tensor: Tensor) -> None:
        assert tensor.dtype == torch.float32 and tensor.is_contiguous()
        shape, data = tuple(tensor.shape), (tensor.data_ptr(), False)
        self.__cuda_array_interface__ = {"shape": shape, "typestr": "<f4", "data": data, "version": 2}
