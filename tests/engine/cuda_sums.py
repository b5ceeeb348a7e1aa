"""Two processes on one card add random parts, many times, and compare with the sum of both: `python cuda_sums.py`. Run with
`times` it also tells how long a sum takes."""

import os
import socket
import subprocess
import sys
import time

import torch

from quire.device.cuda.group import open_cuda_group
from quire.dist.mesh import Position
from quire.proc.spawn import anonymous_memory

SIZES = (1, 7, 4096, 65536, 3 << 20)


class Watch:
    def lost(self, rank):
        raise SystemExit(f"rank {rank} is gone")

    def late(self, ranks, seconds):
        if seconds > 60:
            raise SystemExit(f"{ranks} are late")


def part_of(rank: int, turn: int, size: int, dtype: torch.dtype) -> torch.Tensor:
    numbers = torch.Generator().manual_seed(1000 * turn + rank)
    return torch.randn(size, generator=numbers).to(dtype).cuda()


def run(rank: int, memory: int, end: socket.socket, timed: bool) -> None:
    group = open_cuda_group(Position(rank, 2), memory, {1 - rank: end}, Watch(), torch.device("cuda"))
    for turn in range(40):
        for size in SIZES:
            for dtype in (torch.float32, torch.bfloat16):
                parts = [part_of(each, turn, size, dtype) for each in range(2)]
                assert torch.equal(group.add(parts[rank].view(1, -1)), (parts[0] + parts[1]).view(1, -1)), (turn, size, dtype)
    whole = torch.arange(640.0, device="cuda").view(4, 160)
    assert torch.equal(group.join(whole[:, 80 * rank : 80 * rank + 80].contiguous(), 160), whole)
    if timed:
        for size in (4096, 65536, 1 << 20):
            part = torch.ones(size, dtype=torch.bfloat16, device="cuda")
            for _ in range(50):
                group.add(part)
            torch.cuda.synchronize()
            began = time.perf_counter()
            for _ in range(500):
                group.add(part)
            torch.cuda.synchronize()
            if rank == 0:
                print(f"a sum of {2 * size} bytes, two ranks: {(time.perf_counter() - began) * 2000:.1f} us")


def main() -> None:
    timed = "times" in sys.argv
    if "rank1" in sys.argv:
        run(1, int(sys.argv[2]), socket.socket(fileno=int(sys.argv[3])), timed)
        return
    memory, (ours, theirs) = anonymous_memory("sums"), socket.socketpair()
    command = [sys.executable, __file__, "rank1", str(memory), str(theirs.fileno()), *(["times"] if timed else [])]
    other = subprocess.Popen(command, pass_fds=[memory, theirs.fileno()], env=os.environ)
    theirs.close()
    run(0, memory, ours, timed)
    assert other.wait(60) == 0
    print("the same bits")


if __name__ == "__main__":
    main()
