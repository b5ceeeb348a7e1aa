"""One-shot collectives (`ops/kernels/one_shot.py`) in GPU memory that all ranks of this node have mapped.

    memory of a rank    [ flags | buffer ]

The memory is allocated and mapped by CUDA's inter-process handles. Kernels wait for the flags of other ranks, so a lost rank
would keep them waiting: `release` sets all flags to a turn that never comes, which ends every kernel of every rank.
"""

import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor

from quire.dist.mesh import Position
from quire.ops.kernels.one_shot import MAX_BYTES, PROGRAMS, one_shot
from quire.types.errors import EngineError, QuireError

FLAG_BYTES = 8
PAGE_BYTES = 1 << 21  # of the driver: memory that shares a page with other allocations would be mapped with them
NEVER = (1 << 63) - 1  # a turn beyond all others
PROBE_BYTES = 64  # written by each rank, checked by the others
PROBE_TIMEOUT_S = 60.0  # for the first all-reduce; other ranks compile the kernel
RELEASE_TIMEOUT_S = 5.0  # for its kernels to end after they are released
READ_TIMEOUT_S = 0.5
SUMMED = (torch.float32, torch.float16, torch.bfloat16)
Everyone = Callable[[bytes], Sequence[bytes]]  # a short message of this rank -> those of all ranks


class Links(Protocol):
    """The part of CUDA that is used here (`shared_bytes.CUDALinks`)."""

    device: torch.device

    def share(self, size: int) -> tuple[Tensor, bytes]: ...

    def open(self, handle: bytes, size: int) -> Tensor: ...

    def free(self, memory: Tensor) -> None: ...

    def close(self, memory: Tensor) -> None: ...

    def event(self, shared: bool = False) -> Any: ...

    def stream(self) -> Any: ...

    def current(self) -> Any: ...

    def on(self, stream: Any) -> AbstractContextManager[Any]: ...


class OneShot:
    """One-shot collectives of one rank, usable if `open` returns no problem."""

    def __init__(self, position: Position, links: Links) -> None:
        self._rank, self._size, self._links = position.rank, position.size, links
        self._flag_bytes = PROGRAMS * position.size * FLAG_BYTES
        self._bytes = -(-(self._flag_bytes + 2 * MAX_BYTES) // PAGE_BYTES) * PAGE_BYTES
        self._own: Tensor | None = None
        self._opened: list[Tensor] = []  # memory of other ranks
        self._flags: list[Tensor] = []  # of every rank, [PROGRAMS, ranks]

    def open(self, everyone: Everyone) -> str:
        """Connect all ranks, which call this at the same time. Return what does not work, the same on all ranks; "": all
        does. After a problem, all memory is unmapped and freed.
        """
        handle, problem = b"", ""
        try:
            handle = self._share()
        except RuntimeError as error:
            problem = str(error)
        handles = everyone(handle)
        steps: tuple[Callable[[], None], ...] = (partial(self._map, handles), self._probe)
        for step in steps:
            try:
                if not problem:
                    step()
            except QuireError:  # it cannot be unmapped either
                raise
            except RuntimeError as error:
                problem = str(error)
            problems = everyone(problem.encode()[:500])
            found = [f"rank {rank}: {each.decode(errors='replace')}" for rank, each in enumerate(problems) if each]
            problem = found[0] if found else ""
            if problem:
                self._unmap()  # no rank runs a kernel any more
                everyone(b"")
                self._free()  # no rank has it mapped any more
                return problem
        return ""

    def add(self, part: Tensor) -> Tensor:
        """Return the sum of all ranks' parts, which is a new tensor."""
        flat = part.reshape(-1)
        if part.dtype not in SUMMED:
            parts = self.gather(flat)
            total = parts[0]
            for other in parts[1:]:
                total += other
            return total.view(part.shape)
        total, step = torch.empty_like(flat), MAX_BYTES // flat.element_size()
        for first in range(0, len(flat), step):
            self._run(flat[first : first + step], total[first : first + step])
        return total.view(part.shape)

    def gather(self, part: Tensor) -> Tensor:
        """Return all ranks' parts [ranks, length]; part: contiguous, [length]."""
        gathered = part.new_empty(self._size, len(part))
        source, target = part.view(torch.uint8), gathered.view(torch.uint8)
        if len(source) <= MAX_BYTES:
            self._run(source, target)
            return gathered
        for first in range(0, len(source), MAX_BYTES):
            piece = source[first : first + MAX_BYTES]
            pieces = source.new_empty(self._size, len(piece))
            self._run(piece, pieces)
            target[:, first : first + len(piece)] = pieces
        return gathered

    def late(self) -> list[int]:
        """Return the ranks whose part of the collective that is running has not arrived; none if the GPU does not answer."""
        links = self._links
        copies = [self._flags[self._rank][0], self._turns[:1]]
        done = links.event()
        with links.on(self._side):
            for target, source in zip(self._seen, copies, strict=True):
                target.copy_(source, non_blocking=True)
        done.record(self._side)
        if not _happens(done, READ_TIMEOUT_S):
            return []
        flags, [turn] = self._seen[0].tolist(), self._seen[1].tolist()
        return [rank for rank, arrived in enumerate(flags) if rank != self._rank and arrived <= turn]

    def release(self) -> None:
        """End all collectives, running and launched, of all ranks. Their results are of no use."""
        with self._links.on(self._side):
            for flags in self._flags:
                flags.fill_(NEVER)

    def close(self) -> None:
        """Unmap and free the memory. The other ranks must have ended."""
        self._unmap()
        self._free()

    def _unmap(self) -> None:
        self._flags.clear()
        while self._opened:
            self._links.close(self._opened.pop())

    def _free(self) -> None:
        if self._own is not None:
            self._links.free(self._own)
            self._own = None

    def _share(self) -> bytes:
        self._own, handle = self._links.share(self._bytes)
        self._own.zero_()
        self._buffer_of(self._own)[:PROBE_BYTES].fill_(1 + self._rank)
        self._links.current().synchronize()  # before another rank opens it
        return handle

    def _map(self, handles: Sequence[bytes]) -> None:
        assert self._own is not None
        memories = []
        for rank, handle in enumerate(handles):
            memory = self._own if rank == self._rank else self._links.open(handle, self._bytes)
            if rank != self._rank:
                self._opened.append(memory)
            if self._buffer_of(memory)[:PROBE_BYTES].tolist() != [1 + rank] * PROBE_BYTES:
                raise RuntimeError(f"the memory of rank {rank} does not have the values that it wrote")
            memories.append(memory)
        self._flags = [memory[: self._flag_bytes].view(torch.int64).view(PROGRAMS, self._size) for memory in memories]
        device, starts = self._links.device, [memory.data_ptr() for memory in memories]
        self._turns = torch.zeros(PROGRAMS, dtype=torch.int64, device=device)
        self._addresses = torch.tensor([starts, [start + self._flag_bytes for start in starts]], device=device)
        pinned = device.type == "cuda"
        self._seen = [torch.zeros(count, dtype=torch.int64, pin_memory=pinned) for count in (self._size, 1)]
        self._side = self._links.stream()

    def _probe(self) -> None:
        """Compile all variants of the kernel, and check that its flags arrive: accesses to another GPU may be lost."""
        device, done = self._links.device, self._links.event()
        expected = sum(range(1, 1 + self._size))
        wrong = torch.zeros((), dtype=torch.int64, device=device)
        for dtype in SUMMED:
            for count in (8, 3):  # with and without vector loads
                part = torch.full((count,), 1 + self._rank, dtype=dtype, device=device)
                wrong += (self.add(part) != expected).sum() + (self.gather(part).sum(0) != expected).sum()
        done.record(self._links.current())
        if not _happens(done, PROBE_TIMEOUT_S):
            self.release()
            released = self._links.event()
            released.record(self._side)
            if not (_happens(released, RELEASE_TIMEOUT_S) and _happens(done, RELEASE_TIMEOUT_S)):
                raise EngineError("a first all-reduce cannot be ended: the GPU does not answer. Restart the process")
            raise RuntimeError(f"a first all-reduce did not end within {PROBE_TIMEOUT_S:.0f} s")
        if int(wrong):
            raise RuntimeError("a first all-reduce has wrong values")

    def _run(self, source: Tensor, target: Tensor) -> None:
        if len(source):
            one_shot(source, target, self._turns, self._addresses, self._rank, self._size)

    def _buffer_of(self, memory: Tensor) -> Tensor:
        return memory[self._flag_bytes :]


def _happens(event: Any, seconds: float) -> bool:
    """Return whether the event happens within this time."""
    deadline = time.monotonic() + seconds
    while not event.query():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.001)
    return True
