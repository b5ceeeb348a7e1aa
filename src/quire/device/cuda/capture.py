"""CUDA graphs: what a function launches, recorded once and replayed over memory that stays."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

LARGEST_GRAPH = 16 << 20  # bytes, without the memory of its tensors


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
        self._taken = 0  # bytes

    def capture(self, run: Callable[[], Tensor]) -> CUDAGraph:
        graph, before = torch.cuda.CUDAGraph(), self._memory()
        with torch.cuda.stream(self._stream):
            graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
            try:
                place = Place(run())
            finally:
                graph.capture_end()
        self._taken += taken_between(before, self._memory())
        return CUDAGraph(graph, torch.as_tensor(place, device=self._device))

    def taken_bytes(self) -> int:
        return self._taken

    def _memory(self) -> tuple[int, int]:
        return torch.cuda.memory_reserved(self._device), torch.cuda.mem_get_info(self._device)[0]


def taken_between(before: tuple[int, int], after: tuple[int, int]) -> int:
    """Of two times the bytes that torch has, and those that are free on the device. What the driver takes for a graph is seen
    in the latter only, where other processes come and go as well: they count for no more than a graph can be."""
    grown = max(0, after[0] - before[0])
    return min(max(before[1] - after[1], grown), grown + LARGEST_GRAPH)


class Place:
    """Where a recorded step leaves a tensor. It belongs to the pool that all graphs share, and is not held: the next graph may
    be recorded over the same memory, because what one step leaves there is used before the next step runs."""

    def __init__(self, tensor: Tensor) -> None:
        assert tensor.dtype == torch.float32 and tensor.is_contiguous()
        shape, data = tuple(tensor.shape), (tensor.data_ptr(), False)
        self.__cuda_array_interface__ = {"shape": shape, "typestr": "<f4", "data": data, "version": 2}
