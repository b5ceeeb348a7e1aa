"""Three ranks whose cards cannot read each other's memory, played by CPUs, with gloo for NCCL: `python gathering_ranks.py`."""

import itertools
import os
import socket
import sys
from types import SimpleNamespace

import torch
from torch import distributed as dist

from quire.device.cuda import group
from quire.dist.mesh import Position, evenly
from quire.proc.spawn import anonymous_memory

SIZE = 3


class Event:
    def __init__(self, interprocess):
        assert interprocess

    def record(self):
        pass

    def ipc_handle(self):
        return bytes(group.HANDLE)


class Watch:
    def lost(self, rank):
        raise SystemExit(f"rank {rank} is gone")

    def late(self, ranks, seconds):
        if seconds > 60:
            raise SystemExit(f"{ranks} are late")


def refuse(*_):
    raise RuntimeError("cuIpcOpenMemHandle_v2 failed with CUDA error 217")


def make_gloo(store, position):
    return dist.ProcessGroupGloo(store, position.rank, position.size)


def part_of(rank: int, size: int) -> torch.Tensor:
    return torch.randn(2, size, generator=torch.Generator().manual_seed(100 * rank + size))


def run(rank: int, memory: int, peers: dict[int, socket.socket]) -> None:
    torch.cuda.current_device = lambda: 0
    torch.cuda.get_device_properties = lambda _: SimpleNamespace(uuid=f"GPU-{rank}")
    dist.is_nccl_available = lambda: True
    group.Event, group.make_nccl, group.open_bytes = Event, make_gloo, refuse
    group.share_bytes = lambda size, device: (torch.zeros(size, dtype=torch.uint8), bytes(group.HANDLE))
    group.free_bytes = lambda memory: None
    ranks = group.CUDAGroup(Position(rank, SIZE), memory, peers, Watch(), torch.device("cpu"), 1 << 12)
    for size in (1, 7, 300_000):  # the last is more than one shot
        first, second, third = (part_of(each, size) for each in range(SIZE))
        assert torch.equal(ranks.add(part_of(rank, size)), first + second + third)
    whole = torch.arange(200.0).view(2, 100)
    cut = evenly(100)(Position(rank, SIZE))
    assert torch.equal(ranks.join(whole[:, cut.start : cut.stop].contiguous(), 100), whole)
    assert not dist.is_initialized()  # the default group is the program's
    ranks.close()


def main() -> int:
    memory, ends = anonymous_memory("gathering"), [{} for _ in range(SIZE)]
    for first, second in itertools.combinations(range(SIZE), 2):
        ends[first][second], ends[second][first] = socket.socketpair()
    children = []
    for rank in range(SIZE):
        if not (child := os.fork()):
            for other in range(SIZE):
                for end in ends[other].values() if other != rank else ():
                    end.close()
            run(rank, memory, ends[rank])
            os._exit(0)
        children.append(child)
    return int(any(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children))


if __name__ == "__main__":
    sys.exit(main())
