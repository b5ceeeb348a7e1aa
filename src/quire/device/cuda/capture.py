"""CUDA graphs, and the GPU memory that is left for the KV cache."""

import gc
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from quire.device.base import GIB, no_memory

MAX_GRAPH_BYTES = 16 << 20  # of the driver, without tensors


@dataclass(frozen=True)
class CUDAGraph:
    """A recorded step and its result."""

    graph: torch.cuda.CUDAGraph
    result: Tensor

    def replay(self) -> Tensor:
        self.graph.replay()
        return self.result


class CUDAGraphs:
    """Record CUDA graphs on one stream. All graphs share one memory pool."""

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
                view = ResultView(run())
            finally:
                graph.capture_end()
        self._taken += taken_between(before, self._memory())
        return CUDAGraph(graph, torch.as_tensor(view, device=self._device))

    def taken_bytes(self) -> int:
        return self._taken

    def _memory(self) -> tuple[int, int]:
        return torch.cuda.memory_reserved(self._device), torch.cuda.mem_get_info(self._device)[0]


def taken_between(before: tuple[int, int], after: tuple[int, int]) -> int:
    """Of two times the bytes that torch has, and those that are free on the device. What the driver takes for a graph is seen
    in the latter only, where other processes come and go as well: they count for no more than a graph can be."""
    grown = max(0, after[0] - before[0])
    return min(max(before[1] - after[1], grown), grown + MAX_GRAPH_BYTES)


class ResultView:
    """Address of a recorded step's result.

    The memory belongs to the pool of all graphs and is not held: the next graph may be recorded over it, because a step's
    result is used before the next step runs.
    """

    def __init__(self, tensor: Tensor) -> None:
        assert tensor.dtype == torch.float32 and tensor.is_contiguous()
        shape, data = tuple(tensor.shape), (tensor.data_ptr(), False)
        self.__cuda_array_interface__ = {"shape": shape, "typestr": "<f4", "data": data, "version": 2}


def device_budget(device: torch.device, utilization: float, profile_run: Callable[[], None], reserve: int) -> int:
    """Return the bytes for a cache on a GPU, measured with the largest step.

    It is the engine's share of the GPU without memory outside torch (of other processes, CUDA, NCCL and one-shot collectives),
    weights, the peak of the largest step and a reserve for CUDA graphs, which are recorded later (`runner/graphs.py` limits
    them). Ranks have connected before, for messages of all sizes.
    """
    gc.collect()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats(device)
    weights = torch.cuda.memory_allocated(device)
    profile_run()
    torch.cuda.synchronize(device)
    peak = torch.cuda.max_memory_allocated(device)
    gc.collect()
    torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info(device)
    outside = total - free - torch.cuda.memory_reserved(device)
    budget = int(utilization * total) - outside - peak - reserve
    if budget <= 0:
        raise no_memory(
            f"gpu_memory_utilization {utilization:g} of {total / GIB:.2f} GiB is "
            f"{utilization * total / GIB:.2f} GiB, but {outside / GIB:.2f} GiB are in use outside torch (other programs, "
            f"CUDA, NCCL), the weights take {weights / GIB:.2f} GiB, the largest step {(peak - weights) / GIB:.2f} GiB and "
            f"CUDA graphs {reserve / GIB:.2f} GiB; end other programs on this GPU (nvidia-smi lists them), raise "
            "gpu_memory_utilization, or lower max_num_batched_tokens or max_num_seqs"
        )
    return budget


def memory_held(device: torch.device, utilization: float) -> tuple[int, int]:
    """Return the engine's share of a GPU, and the bytes in use by all processes."""
    gc.collect()
    torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info(device)
    return int(utilization * total), total - free
