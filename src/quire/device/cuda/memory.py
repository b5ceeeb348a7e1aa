"""How many bytes the cache may take on a GPU: measured."""

import gc
from collections.abc import Callable

import torch

from quire.device.base import GIB, no_memory


def device_budget(device: torch.device, utilization: float, profile_run: Callable[[], None], reserve: int) -> int:
    """Bytes for a cache on a GPU: its share, less what others hold, the weights, the peak of the largest step, and a reserve
    for CUDA graphs, which are recorded later (`runner/graphs.py` says how much they may take)."""
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
            f"{utilization * total / GIB:.2f} GiB, but {outside / GIB:.2f} GiB are in use outside this engine, the weights "
            f"take {weights / GIB:.2f} GiB, the largest step {(peak - weights) / GIB:.2f} GiB and CUDA graphs "
            f"{reserve / GIB:.2f} GiB; raise gpu_memory_utilization, or lower max_num_batched_tokens or max_num_seqs"
        )
    return budget


def memory_held(device: torch.device, utilization: float) -> tuple[int, int]:
    """The share of a GPU, and what is in use on it, whoever has it."""
    gc.collect()
    torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info(device)
    return int(utilization * total), total - free
