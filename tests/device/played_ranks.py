"""Ranks with GPUs, played by processes on CPUs: `python played_ranks.py RANKS WHAT`.

GPU memory is shared host memory, kernels run in Triton's interpreter, and gloo is NCCL.

WHAT    shared     ranks share a GPU and use one-shot collectives alone
        peers      a GPU each
        no-peers   GPUs cannot read each other's memory
        unheard    the same, and a rank of NCCL never connects: the first rank names it
        dies       the same, and that rank ends
        silent     GPUs can, but flags do not arrive
        nodes      every rank is on a node of its own
"""

import hashlib
import itertools
import logging
import mmap
import os
import signal
import socket
import sys
import threading
import time
import traceback
from contextlib import nullcontext
from types import SimpleNamespace

os.environ["TRITON_INTERPRET"] = "1"  # before kernels are defined

import torch
from torch import distributed as dist

from quire.device.cuda import group, nccl, one_shot
from quire.dist.mesh import Position, evenly
from quire.proc.spawn import anonymous_memory
from quire.types.errors import EngineDead

SIZE, WHAT = int(sys.argv[1]), sys.argv[2]
REGION = 4 << 20  # of a rank's GPU memory
MEMORY = mmap.mmap(-1, SIZE * REGION)
MAPPED = mmap.mmap(-1, SIZE * SIZE)  # [owner, rank]: whether a rank has another one's memory mapped
PEERLESS = ("no-peers", "unheard", "dies")
CONNECT_TIMEOUT_S = 1.0
DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.int64)
calls = []  # of NCCL


class Watch:
    def lost(self, rank):
        raise SystemExit(f"rank {rank} is gone")

    def late(self, ranks, seconds):
        if seconds > (CONNECT_TIMEOUT_S if WHAT == "unheard" else 60):
            raise EngineDead(f"{ranks} are late")


class Links:
    device = torch.device("cpu")

    def __init__(self, rank):
        self._rank, self.mapped = rank, 0

    def share(self, size):
        self.mapped += 1
        return self._view(self._rank, size), bytes([self._rank]) * 64

    def open(self, handle, size):
        if WHAT in PEERLESS and self._rank:
            raise RuntimeError("cuIpcOpenMemHandle_v2 failed with CUDA error 217")
        self.mapped += 1
        MAPPED[handle[0] * SIZE + self._rank] = 1
        view = self._view(handle[0], size)
        return view.clone() if WHAT == "silent" else view  # reads arrive, writes do not

    def _view(self, rank, size):
        assert size <= REGION
        return torch.frombuffer(MEMORY, dtype=torch.uint8, count=size, offset=rank * REGION)

    def free(self, memory):
        own = slice(self._rank * SIZE, (1 + self._rank) * SIZE)
        assert WHAT not in (*PEERLESS, "silent") or not any(MAPPED[own]), "another rank has it mapped"
        self.mapped -= 1

    def close(self, memory):
        time.sleep(0.05 * self._rank)
        others = [owner for owner in range(SIZE) if MAPPED[owner * SIZE + self._rank]]
        MAPPED[others[0] * SIZE + self._rank] = 0
        self.mapped -= 1

    def event(self, shared=False):
        return SimpleNamespace(record=lambda stream: None, query=lambda: True)

    def stream(self):
        return None

    def current(self):
        return SimpleNamespace(synchronize=lambda: None)

    def on(self, stream):
        return nullcontext()


class Gloo:
    """NCCL requires parts of equal size, and all ranks to make the same calls."""

    def __init__(self, store, position):
        if WHAT in ("unheard", "dies") and position.rank == SIZE - 1:
            time.sleep(CONNECT_TIMEOUT_S)
            os._exit(0) if WHAT == "dies" else threading.Event().wait()
        self._ranks = dist.ProcessGroupGloo(store, position.rank, position.size)

    def alltoall_base(self, out, part, out_splits, splits):
        assert out_splits == splits == [] and out.is_contiguous() and part.is_contiguous()
        calls.append(("all-to-all", part.dtype, len(part)))
        return self._ranks.alltoall_base(out, part, [], [])

    def _allgather_base(self, out, part):
        assert out.is_contiguous() and part.is_contiguous() and len(out) == SIZE * len(part)
        calls.append(("all-gather", part.dtype, len(part)))
        return self._ranks._allgather_base(out, part)

    def abort(self):
        calls.append("abort")


def part_of(rank, shape, dtype):
    """Integers where the interpreter rounds otherwise than a GPU."""
    numbers = torch.Generator().manual_seed(100 * rank + shape[-1])
    return (
        torch.randn(shape, generator=numbers, dtype=dtype)
        if dtype in (torch.float32, torch.float64)
        else torch.randint(-20, 20, shape, generator=numbers).to(dtype)
    )


def check_sums(ranks, rank):
    for shape in ((1, 1), (3, 7), (2, 4096), (1, 150_000)):  # the last is more than one shot of NCCL's neighbours
        for dtype in DTYPES if shape[1] < 5000 else DTYPES[:1]:
            first, *others = (part_of(each, shape, dtype) for each in range(SIZE))
            for other in others:
                first = first + other
            own = part_of(rank, shape, dtype)
            assert torch.equal(ranks.add(own), first), (shape, dtype)
            assert torch.equal(own, part_of(rank, shape, dtype))  # it is not written to
    assert ranks.add(torch.empty(0, 4)).shape == (0, 4)


def check_rows(ranks, rank):
    """A row has the same bits next to any others, on both sides of the limit for one shot."""
    rows = part_of(rank, (300, 1024), torch.float32)
    whole = ranks.add(rows)
    for few in (slice(0, 1), slice(5, 9), slice(0, 100)):
        assert torch.equal(ranks.add(rows[few]), whole[few])


def check_gathering(ranks, rank):
    for total, rows in ((100, 2), (SIZE, 1), (5000, 40)):
        whole = torch.arange(float(rows * total)).view(rows, total)
        cut = evenly(total)(Position(rank, SIZE))
        assert torch.equal(ranks.join(whole[:, cut.start : cut.stop].contiguous(), total), whole)


def check_loss(ranks, rank):
    """The last rank does not come: the first finds out, and ends the kernels of all."""
    if rank < SIZE - 1:
        waiting = threading.Thread(target=ranks.add, args=(torch.ones(5000),))
        waiting.start()
        while rank == 0 and ranks.late() != [SIZE - 1]:
            waiting.join(0.05)
        if rank == 0:
            ranks._one_shot.release()
        waiting.join(60)
        assert not waiting.is_alive()
    ranks.largest(0)


def run(rank, memory, peers):
    links = Links(rank)
    torch.cuda.current_device = lambda: 0
    torch.cuda.get_device_properties = lambda _: SimpleNamespace(uuid="GPU" if WHAT == "shared" else f"GPU-{rank}")
    dist.is_nccl_available = lambda: True
    group.CUDALinks, nccl.make_nccl = lambda device: links, Gloo
    if WHAT == "shared":
        os.environ[group.COLLECTIVES] = "symmetric"
    if WHAT == "silent":
        one_shot.OneShot._probe = refuse_flags
    ends = ({}, peers) if WHAT == "nodes" else (peers, None)
    position, warnings = Position(rank, SIZE), Warnings()
    group.logger.addHandler(warnings)
    if WHAT in ("unheard", "dies"):
        check_connecting(position, memory, ends[0])
        return
    ranks = group.open_cuda_group(position, memory, ends[0], Watch(), torch.device("cpu"), 1 << 12, ends[1])
    check_warnings(warnings.found)
    assert ranks.records == (WHAT in ("shared", "peers", "nodes"))
    connecting = len(calls)
    gathers = [SIZE * size * dtype.itemsize for kind, dtype, size in calls if kind == "all-gather"]
    for size in range(10, 27) if calls else ():  # a CUDA graph has no first message that is much larger or smaller
        assert any(abs((1 << size).bit_length() - each.bit_length()) <= 1 for each in gathers), (size, gathers)
    for check in (check_sums, check_rows, check_gathering):
        check(ranks, rank)
    used = calls[connecting:]
    if WHAT == "peers":  # large ones only
        sizes = [size * dtype.itemsize for kind, dtype, size in used if kind == "all-to-all"]
        assert sizes and min(sizes) > group.one_shot_limit(SIZE)
    else:
        assert bool(used) == (WHAT != "shared")
    assert ranks.largest(10 + rank) == 9 + SIZE
    if WHAT == "shared":
        check_loss(ranks, rank)
    assert not dist.is_initialized()  # the default group is the program's
    assert len(set(ranks._control.all_gather_bytes(hashlib.sha256(str(calls).encode()).digest()))) == 1
    ranks.close()
    assert links.mapped == 0 and calls[-1:] == (["abort"] if WHAT != "shared" else [])


class Warnings(logging.Handler):
    def __init__(self):
        super().__init__(logging.WARNING)
        self.found = []

    def emit(self, record):
        self.found.append(record.getMessage())


def check_warnings(found):
    if WHAT not in ("no-peers", "silent"):
        assert not found
        return
    cause = "rank 1: cuIpcOpenMemHandle_v2 failed with CUDA error 217"
    cause = cause if WHAT == "no-peers" else "rank 0: a first all-reduce did not end within 60 s"
    [warning] = found
    assert warning.startswith(
        f"GPUs cannot use each other's memory ({cause}): one-shot collectives and CUDA graphs are disabled"
    )


def check_connecting(position, memory, peers):
    """The last rank is lost, or late, while NCCL connects: the others do not wait for it without end."""
    os.environ["NCCL_SOCKET_IFNAME"] = "nothing0"
    try:
        group.open_cuda_group(position, memory, peers, Watch(), torch.device("cpu"), 1 << 12)
    except SystemExit as lost:
        assert position.rank or str(lost) == f"rank {SIZE - 1} is gone"
        assert WHAT == "dies" or position.rank  # the others end with the first rank
    except EngineDead as late:
        assert WHAT == "unheard"
        assert str(late).startswith(
            f"NCCL has not connected the ranks: {[*peers]} are late. NCCL_SOCKET_IFNAME=nothing0 names no"
        )
        assert "NCCL_DEBUG=INFO" in str(late)
    else:
        raise AssertionError("it connected")


def refuse_flags(self):
    raise RuntimeError("a first all-reduce did not end within 60 s")


def main() -> int:
    memory, ends = anonymous_memory("played"), [{} for _ in range(SIZE)]
    for first, second in itertools.combinations(range(SIZE), 2):
        ends[first][second], ends[second][first] = pair() if WHAT == "nodes" else socket.socketpair()
    memories = [anonymous_memory("node") if WHAT == "nodes" else memory for _ in range(SIZE)]
    children = []
    for rank in range(SIZE):
        if not (child := os.fork()):
            for other in range(SIZE):
                for end in ends[other].values() if other != rank else ():
                    end.close()
            code = 1
            try:
                run(rank, memories[rank], ends[rank])
                code = 0
            except BaseException:
                traceback.print_exc()
            os._exit(code)
        children.append(child)
    for end in (end for each in ends for end in each.values()):
        end.close()  # or no rank would see that another one has ended
    while children:
        ended, status = os.wait()
        children.remove(ended)
        if status:  # the others would wait for it
            for child in children:
                os.kill(child, signal.SIGKILL)
            return 1
    return 0


def pair():
    """Return both ends of a TCP connection."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        first = socket.create_connection(server.getsockname())
        return first, server.accept()[0]


if __name__ == "__main__":
    sys.exit(main())
