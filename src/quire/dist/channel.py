"""Send hidden states from one pipeline stage to the next, through memory that both processes have mapped.

    memory    slots x [ hidden states of a step ]       used in turn
    a step    write to a slot ─► message: number of rows ─► the receiver reads the slot in place

There are more slots than steps in flight, so a sender never waits for a free one. A receiver sleeps until a message arrives;
a dead peer's closed socket wakes it. The memory is anonymous and freed with its processes.

Between nodes, hidden states follow the message over TCP (`Remote...`). A device may have a channel of its own
(`Device.channel`).
"""

import mmap
import queue
import select
import socket
import struct
import threading
import time
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from quire.dist.shared_memory import POLL_S, PeerWatch

ROWS = struct.Struct("<q")


@dataclass(frozen=True)
class Shape:
    """The shape of a channel's memory."""

    slots: int
    rows: int  # at most, per step
    columns: int
    dtype: torch.dtype

    @property
    def size(self) -> int:
        """Return the bytes of the memory. Unused pages are never allocated."""
        whole = self.slots * self.rows * self.columns * self.dtype.itemsize
        return -(-whole // mmap.ALLOCATIONGRANULARITY) * mmap.ALLOCATIONGRANULARITY


class Source(Protocol):
    """The receiving end of a channel."""

    def receive(self, waited_for: Collection[int]) -> Tensor:
        """Return [rows, columns], valid until the slot is used again. waited_for: the ranks that still work on it."""
        ...


class Sink(Protocol):
    """The sending end of a channel."""

    def send(self, hidden: Tensor) -> None:
        """Send hidden states [rows, columns]."""
        ...


@dataclass(frozen=True)
class Neighbours:
    """The previous and the next rank of the pipeline, and the connections to them."""

    rank: int
    previous_rank: int
    next_rank: int
    peers: Mapping[int, socket.socket]  # by rank: connections to ranks of this node
    remote: Mapping[int, socket.socket]  # by rank: connections to ranks of other nodes
    memory: int  # descriptor of the memory that all ranks of this node share
    offset_of: Callable[[int], int]  # rank -> offset of the hidden states that it sends


class Ends(Protocol):
    @property
    def inlet(self) -> Source: ...

    @property
    def outlet(self) -> Sink: ...

    def barrier(self) -> None:
        """Meet the neighbours before the first step. Every rank calls it."""
        ...

    def close(self) -> None:
        """Unmap memory shared with the neighbours, whose processes must have ended."""
        ...


@dataclass(frozen=True)
class HostEnds:
    inlet: Source
    outlet: Sink

    def barrier(self) -> None:
        pass

    def close(self) -> None:
        pass


def open_ends(shape: Shape, neighbours: Neighbours, watch: PeerWatch) -> HostEnds:
    """Open both ends, through the host's memory or over TCP."""
    return HostEnds(open_inlet(shape, neighbours, watch), open_outlet(shape, neighbours, watch))


def open_inlet(shape: Shape, neighbours: Neighbours, watch: PeerWatch) -> Source:
    previous = neighbours.previous_rank
    if previous in neighbours.remote:
        return RemoteInlet(shape, previous, neighbours.remote[previous], watch)
    return Inlet(shape, neighbours.memory, neighbours.offset_of(previous), previous, neighbours.peers[previous], watch)


def open_outlet(shape: Shape, neighbours: Neighbours, watch: PeerWatch) -> Sink:
    following = neighbours.next_rank
    if following in neighbours.remote:
        return RemoteOutlet(following, neighbours.remote[following], watch)
    return Outlet(
        shape, neighbours.memory, neighbours.offset_of(neighbours.rank), following, neighbours.peers[following], watch
    )


class _End:
    def __init__(self, shape: Shape, memory: int, offset: int, rank: int, peer: socket.socket, watch: PeerWatch) -> None:
        """rank, peer: the rank at the other end, and the connection to it."""
        self._rank, self._peer, self._watch = rank, peer, watch
        mapped = mmap.mmap(memory, shape.size, offset=offset)
        count = shape.slots * shape.rows * shape.columns
        self._slots = torch.frombuffer(mapped, dtype=shape.dtype, count=count).view(shape.slots, shape.rows, shape.columns)
        self._turn = 0
        peer.setblocking(False)

    def _next(self, rows: int) -> Tensor:
        slot = self._slots[self._turn % len(self._slots)]
        self._turn += 1
        return slot[:rows]


class Outlet(_End):
    def send(self, hidden: Tensor) -> None:
        self._next(len(hidden)).copy_(hidden)
        try:
            self._peer.send(ROWS.pack(len(hidden)))
        except OSError:
            self._watch.lost(self._rank)


class Inlet(_End):
    def receive(self, waited_for: Collection[int]) -> Tensor:
        header = bytearray(ROWS.size)
        take(self._peer, memoryview(header), self._rank, self._watch, waited_for)
        return self._next(*ROWS.unpack(header))


class RemoteOutlet:
    """Send over TCP in a thread: if stages waited for each other to read, all stages of the ring could block."""

    def __init__(self, rank: int, peer: socket.socket, watch: PeerWatch) -> None:
        self._rank, self._peer, self._watch = rank, peer, watch
        self._queue: queue.SimpleQueue[memoryview] = queue.SimpleQueue()
        self._lost = threading.Event()
        peer.setblocking(False)
        peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        threading.Thread(target=self._run, name="quire-outlet", daemon=True).start()

    def send(self, hidden: Tensor) -> None:
        if self._lost.is_set():
            self._watch.lost(self._rank)
        self._queue.put(memoryview(ROWS.pack(len(hidden))))
        self._queue.put(_bytes(hidden.detach().clone(memory_format=torch.contiguous_format)))

    def _run(self) -> None:
        while True:
            left = self._queue.get()
            while len(left):
                try:
                    left = left[self._peer.send(left) :]
                except BlockingIOError:
                    waiting = select.poll()
                    waiting.register(self._peer, select.POLLOUT)
                    waiting.poll(1000 * POLL_S)
                except (OSError, ValueError):  # ValueError: this process closed it
                    self._lost.set()
                    return


class RemoteInlet:
    def __init__(self, shape: Shape, rank: int, peer: socket.socket, watch: PeerWatch) -> None:
        self._shape, self._rank, self._peer, self._watch = shape, rank, peer, watch
        peer.setblocking(False)

    def receive(self, waited_for: Collection[int]) -> Tensor:
        header = bytearray(ROWS.size)
        take(self._peer, memoryview(header), self._rank, self._watch, waited_for)
        [rows] = ROWS.unpack(header)
        if not 0 <= rows <= self._shape.rows:  # corrupt message
            self._watch.lost(self._rank)
        hidden = torch.empty(rows, self._shape.columns, dtype=self._shape.dtype)
        take(self._peer, _bytes(hidden), self._rank, self._watch, waited_for)
        return hidden


def take(peer: socket.socket, left: memoryview, rank: int, watch: PeerWatch, waited_for: Collection[int]) -> None:
    """Fill `left` from the connection. Raises through `watch` if the peer is gone or late."""
    began = time.monotonic()
    while len(left):
        try:
            count = peer.recv_into(left)
        except BlockingIOError:
            waiting = select.poll()
            waiting.register(peer, select.POLLIN)
            if not waiting.poll(1000 * POLL_S):
                watch.late(list(waited_for), time.monotonic() - began)
            continue
        except OSError:
            count = 0
        if not count:
            watch.lost(rank)
        left = left[count:]


def _bytes(tensor: Tensor) -> memoryview:
    return memoryview(tensor.reshape(-1).view(torch.uint8).numpy().data)
