"""Two processes on one card hand hidden states on to each other, many times: `python cuda_handover.py [host] [times]`. What
comes is what was sent, with work before and behind it on both sides. `host`: through the host's memory. `times`: how long it
takes."""

import os
import socket
import subprocess
import sys
import time

import torch
from cuda_sums import Watch

from quire.device.cuda.channel import CUDAEnds, CUDAInlet, FromHost
from quire.device.cuda.shared_bytes import CUDALinks
from quire.dist.channel import Neighbours, Shape
from quire.proc.spawn import anonymous_memory

DEVICE = torch.device(os.environ.get("HANDOVER_DEVICE", "cuda"))
COLUMNS, ROWS, PLACES = 512, 96, 4
TURNS = 60


def states_of(turn: int) -> torch.Tensor:
    rows = 1 + turn * 37 % ROWS
    return torch.randn(rows, COLUMNS, generator=torch.Generator().manual_seed(turn)).bfloat16().to(DEVICE)


def busy(weight: torch.Tensor) -> None:
    """Some milliseconds of a GPU: whoever does not wait for it reads what is not there yet."""
    for _ in range(4):
        weight @ weight


def check(rank: int, ends: CUDAEnds) -> None:
    """The first keeps as many on their way as a pipeline does; the second gives back twice what it gets."""
    weight = torch.ones(4096 if DEVICE.type == "cuda" else 64, 4096 if DEVICE.type == "cuda" else 64, device=DEVICE)
    sent = [states_of(turn) for turn in range(TURNS)]
    wrong = torch.zeros((), dtype=torch.int64, device=DEVICE)
    for turn in range(TURNS + PLACES - 2 if rank == 0 else TURNS):
        if rank == 1:
            x = ends.inlet.receive([0])
            if turn % 3 == 0:
                busy(weight)
            ends.outlet.send(x * 2)
            continue
        if turn < TURNS:
            if turn % 5 == 0:
                busy(weight)
            ends.outlet.send(sent[turn].clone())
        if (back := turn - (PLACES - 2)) >= 0:
            got = ends.inlet.receive([1])
            assert got.shape == sent[back].shape, (back, got.shape)
            wrong += (got != sent[back] * 2).sum()
    assert int(wrong) == 0, f"{int(wrong)} numbers are not those that were sent"


def measure(rank: int, ends: CUDAEnds) -> None:
    for rows in (1, 64, 2048):
        x, times = torch.ones(rows, COLUMNS * 8, dtype=torch.bfloat16, device=DEVICE), 300
        for turn in range(times + 50):
            if turn == 50:
                torch.cuda.synchronize()
                began = time.perf_counter()
            if rank == 0:
                ends.outlet.send(x)
                ends.inlet.receive([1])
            else:
                ends.outlet.send(ends.inlet.receive([0]))
        hosts = time.perf_counter() - began
        torch.cuda.synchronize()
        took = time.perf_counter() - began
        if rank == 0:
            print(
                f"{rows} rows of {COLUMNS * 8} ({rows * COLUMNS * 16 / 1e6:.2f} MB): a hand-over takes "
                f"{took / times / 2 * 1e6:.1f} us, its host {hosts / times / 2 * 1e6:.1f}"
            )


def run(rank: int, memory: int, end: socket.socket) -> None:
    timed = "times" in sys.argv
    shape = Shape(PLACES, 2048 if timed else ROWS, COLUMNS * (8 if timed else 1), torch.bfloat16)
    os.ftruncate(memory, 2 * shape.size)
    neighbours = Neighbours(rank, 1 - rank, 1 - rank, {1 - rank: end}, {}, memory, lambda sender: sender * shape.size)
    links = CUDALinks(DEVICE)
    if "host" in sys.argv:
        links.open = _refuse
    ends = CUDAEnds(shape, neighbours, Watch(), links)
    ends.barrier()
    assert type(ends.inlet) is (FromHost if "host" in sys.argv else CUDAInlet)
    with torch.inference_mode():
        (measure if timed else check)(rank, ends)


def _refuse(*_):
    raise RuntimeError("told to")


def main() -> None:
    if "rank1" in sys.argv:
        run(1, int(sys.argv[2]), socket.socket(fileno=int(sys.argv[3])))
        return
    memory, (ours, theirs) = anonymous_memory("handover"), socket.socketpair()
    command = [sys.executable, __file__, "rank1", str(memory), str(theirs.fileno()), *sys.argv[1:]]
    other = subprocess.Popen(command, pass_fds=[memory, theirs.fileno()], env=os.environ)
    theirs.close()
    run(0, memory, ours)
    assert other.wait(60) == 0
    print("what was sent came")


if __name__ == "__main__":
    main()
