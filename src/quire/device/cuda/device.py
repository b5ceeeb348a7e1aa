"""A CUDA GPU."""

import importlib.util
import os
from collections.abc import Callable, Sequence
from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING

from quire.config.devices import KEEPS, SHARE
from quire.config.facts import DeviceFacts
from quire.config.memory import CUDA_CONTEXT_BYTES
from quire.device.base import Device, LinkRemark, PlannedBudget, Recorder
from quire.device.registry import VISIBLE, named_gpus
from quire.types.errors import ConfigError
from quire.types.stats import DeviceCounts

if TYPE_CHECKING:
    import socket
    from collections.abc import Mapping

    from quire.device.updates import DeviceUpdates
    from quire.dist.channel import Ends, Neighbours, Shape
    from quire.dist.collectives import RankGroup
    from quire.dist.mesh import Position
    from quire.dist.shared_memory import PeerWatch
    from quire.ops.kernels.launcher import Variants

BATCH, LARGE_BATCH = (8192, 256), (16384, 1024)  # tokens and requests per step
LARGE_BYTES = 70 * 2**30
SERVED_TOKENS = 8192


class CUDADevice(Device):
    name = "cuda"
    records = compiles = samples_alike = True

    def __init__(self) -> None:
        self._kernels: Variants | None = None

    def facts(self, memory: int | None = None) -> DeviceFacts:
        name, free, total, count, kernels = self.name, memory or 0, memory or 0, 0, ""
        if memory is None:
            import torch

            named_gpus()
            if not torch.cuda.is_available():
                raise ConfigError(
                    f"device={self.name} requires a CUDA device; torch {torch.__version__} sees none. Use device=cpu."
                )
            (free, total), name = torch.cuda.mem_get_info(self.name), torch.cuda.get_device_name(self.name)
            count = torch.cuda.device_count()
            kernels = f"{torch.cuda.get_device_capability(self.name)}, CUDA {torch.version.cuda}, {_triton_version()}"
        return DeviceFacts(
            self.name,
            name,
            total_bytes=total,
            free_bytes=free,
            batch=LARGE_BATCH if total >= LARGE_BYTES else BATCH,
            served_tokens=SERVED_TOKENS,
            times_steps=False,
            dtype=None,
            overlaps=True,
            reads_in_place=True,  # measured with contiguous pages
            keeps=KEEPS["cuda"],
            always_keeps=True,
            count=count,
            batch_dependence="",
            kernels=kernels,
        )

    def take_part(self, engine: int, engines: int, sharing: bool = False, ranks: int = 1) -> None:
        """Show this process only the GPUs of its engine, one per rank."""
        visible = _visible()
        if not visible or (len(visible) < engines * ranks and not sharing):
            each = "a GPU" if ranks == 1 else f"{ranks} GPUs"
            raise ConfigError(
                f"data_parallel_size={engines} requires {each} for each engine; {len(visible)} are visible. Use at most "
                f"{max(1, len(visible) // ranks)}, or set kv_cache_memory_bytes, so that engines can share GPUs."
            )
        own = [visible[(engine * ranks + rank) % len(visible)] for rank in range(ranks)]
        os.environ[VISIBLE] = ",".join(dict.fromkeys(own))

    def take_rank(self, rank: int) -> None:
        """Put the rank's own GPU first, so that `cuda` is that GPU in all threads. The others stay visible: ranks read their
        memory.
        """
        visible = _visible()
        if visible and rank:
            first = rank % len(visible)
            os.environ[VISIBLE] = ",".join([*visible[first:], *visible[:first]])

    def sharers(self, ranks: int) -> int:
        import torch

        return -(-ranks // torch.cuda.device_count()) if os.environ.get(SHARE) == "1" else 1

    def check_links(self, ranks: int) -> Sequence[LinkRemark]:
        from quire.device.cuda.links import check_links

        return check_links(ranks)

    def group(
        self,
        position: "Position",
        memory: int,
        peers: "Mapping[int, socket.socket]",
        watch: "PeerWatch",
        offset: int = 0,
        remote: "Mapping[int, socket.socket] | None" = None,
        first: int = 0,
    ) -> "RankGroup":
        from quire.device.cuda.group import open_cuda_group

        if remote and os.environ.get(SHARE) == "1":  # NCCL refuses two ranks on one GPU
            from quire.device.cuda.nodes_group import HostNodesGroup

            return HostNodesGroup(position, memory, peers, watch, remote, offset, first)
        return open_cuda_group(position, memory, peers, watch, self.torch_device, offset, remote, first)

    def channel(self, shape: "Shape", neighbours: "Neighbours", watch: "PeerWatch") -> "Ends":
        from quire.device.cuda.channel import CUDAEnds
        from quire.device.cuda.shared_bytes import CUDALinks

        return CUDAEnds(shape, neighbours, watch, CUDALinks(self.torch_device))

    def start(self) -> None:
        import torch

        torch.cuda.empty_cache()  # kernels and graphs are allocated outside torch, and cannot use its reserved memory
        self._kernels = watch_kernels()

    def budget(self, utilization: float, profile_run: Callable[[], None], reserve: int) -> int:
        from quire.device.cuda.capture import device_budget

        return device_budget(self.torch_device, utilization, profile_run, reserve)

    def held(self, utilization: float) -> tuple[int, int]:
        from quire.device.cuda.capture import memory_held

        return memory_held(self.torch_device, utilization)

    def plan_budget(self, total: int, utilization: float, used: int) -> PlannedBudget:
        usable = int(total * utilization)
        return PlannedBudget(usable, CUDA_CONTEXT_BYTES, usable - CUDA_CONTEXT_BYTES - used)

    def collective_bytes(self, ranks: int, nodes: int, link: str | None) -> int:
        from quire.device.cuda.collective_memory import collective_bytes

        return collective_bytes(ranks, nodes, link)

    def updates(self) -> "DeviceUpdates":
        from quire.device.cuda.updates import CUDAUpdates

        return CUDAUpdates(self.torch_device)

    def recorder(self) -> Recorder:
        from quire.device.cuda.capture import CUDAGraphs

        return CUDAGraphs(self.torch_device)

    def counts(self) -> DeviceCounts:
        kernels = self._kernels
        return DeviceCounts() if kernels is None else DeviceCounts(compilations=kernels.compilations, loads=kernels.loads)

    def synchronize(self) -> None:
        import torch

        torch.cuda.synchronize(self.torch_device)

    def close(self) -> None:
        import torch

        torch.cuda.empty_cache()


def _triton_version() -> str:
    try:
        return f"triton {version('triton')}"
    except PackageNotFoundError:
        return "no triton"


def _visible() -> list[str]:
    import torch

    return named_gpus() or [str(number) for number in range(torch.cuda.device_count())]


def watch_kernels() -> "Variants | None":
    """Return the counter of compiled kernels, or None without a compiler."""
    if importlib.util.find_spec("triton") is None:
        return None
    from quire.ops.kernels.launcher import VARIANTS

    return VARIANTS
