"""How many bytes the cache may take: measured on a GPU, a cautious share of what is free on a CPU."""

import gc
import os
from collections.abc import Callable, Iterator
from pathlib import Path

import torch

from quire.types.errors import ConfigError

GIB = 2**30
MOST_HOST_BYTES = 4 * GIB
HOST_SHARE = 0.4


def host_budget() -> int:
    """Bytes for a cache in host memory, after the model is loaded: a share of what is free, and never more than 4 GiB."""
    available = available_host_bytes()
    budget = min(MOST_HOST_BYTES, int(HOST_SHARE * available))
    if budget <= 0:
        raise ConfigError(
            f"no memory is left for the KV cache: {available / GIB:.2f} GiB are free after loading the model; "
            "use a smaller model or dtype, free some memory, or set kv_cache_memory_bytes"
        )
    return budget


def device_budget(device: torch.device, utilization: float, rehearse: Callable[[], None]) -> int:
    """Bytes for a cache on a GPU: its share, less what others hold, the weights, and the peak of the largest step."""
    gc.collect()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats(device)
    weights = torch.cuda.memory_allocated(device)
    rehearse()
    torch.cuda.synchronize(device)
    peak = torch.cuda.max_memory_allocated(device)
    gc.collect()
    torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info(device)
    outside = total - free - torch.cuda.memory_reserved(device)
    budget = int(utilization * total) - outside - peak
    if budget <= 0:
        raise ConfigError(
            f"no memory is left for the KV cache: gpu_memory_utilization {utilization:g} of {total / GIB:.2f} GiB is "
            f"{utilization * total / GIB:.2f} GiB, but {outside / GIB:.2f} GiB are in use outside this engine, the weights "
            f"take {weights / GIB:.2f} GiB and the largest step {(peak - weights) / GIB:.2f} GiB; raise "
            "gpu_memory_utilization, or lower max_num_batched_tokens or max_num_seqs"
        )
    return budget


def available_host_bytes(root: Path = Path("/")) -> int:
    """What this process may still take: free memory of the machine, or what its control groups leave of their limits."""
    return min([_machine_bytes(root), *_group_bytes(root)])


def _machine_bytes(root: Path) -> int:
    try:
        lines = (root / "proc/meminfo").read_text().splitlines()
    except OSError:  # not Linux: half of the memory is a fair guess
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 2
    fields = {name: int(rest.split()[0]) * 1024 for name, _, rest in (line.partition(":") for line in lines) if rest.split()}
    return fields.get("MemAvailable", fields["MemFree"])


def _group_bytes(root: Path) -> Iterator[int]:
    """limit - use of every control group around this process. File pages in `use` can be dropped, so they do not count."""
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        return
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            base, limit, use, dropped = root / "sys/fs/cgroup", "memory.max", "memory.current", "inactive_file"
        elif "memory" in controllers.split(","):
            base, limit, use = root / "sys/fs/cgroup/memory", "memory.limit_in_bytes", "memory.usage_in_bytes"
            dropped = "total_inactive_file"
        else:
            continue
        group = base / path.lstrip("/")
        for place in (group, *group.parents):
            if (most := _read_number(place / limit)) is not None and (used := _read_number(place / use)) is not None:
                yield max(0, most - used + _read_field(place / "memory.stat", dropped))
            if place == base:
                break


def _read_number(path: Path) -> int | None:
    try:
        return int(path.read_text())
    except (OSError, ValueError):  # no such group here, or "max"
        return None


def _read_field(path: Path, name: str) -> int:
    try:
        lines = path.read_text().splitlines()
    except OSError:
        return 0
    return next((int(value) for key, _, value in (line.partition(" ") for line in lines) if key == name), 0)
