"""From one stage of a pipeline to the next: hidden states, in memory that both processes have mapped.

    memory    places x [ hidden states of a step ]       used in turn
    a step    lay them down ─► a message: how many rows ─► read them where they lie

There are more places than steps in flight, so that nobody waits for one to be free. Whoever waits for a message sleeps, and the
end of a process closes its socket. The memory has no name: nothing is left of it.

To a stage on another node the hidden states follow the message, over TCP (`Remote...`). Devices may hand on in ways of their
own (`Device.channel`).
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

from quire.dist.shared_memory import LOOK, Watch

ROWS = struct.Struct("<q")


@dataclass(frozen=True)
class Shape:
    """Of what goes through a channel."""

    places: int
    rows: int  # at most
    columns: int
    dtype: torch.dtype

    @property
    def size(self) -> int:
        """Bytes of the memory, of which only what is used becomes real."""
        whole = self.places * self.rows * self.columns * self.dtype.itemsize
        return -(-whole // mmap.ALLOCATIONGRANULARITY) * mmap.ALLOCATIONGRANULARITY


class Source(Protocol):
    """Where hidden states come from."""

    def receive(self, waited_for: Collection[int]) -> Tensor:
        """[rows, columns], good until as many more have come as there are places. waited_for: the ranks that work on it."""
        ...


class Sink(Protocol):
    """Where they go."""

    def send(self, hidden: Tensor) -> None:
        """hidden [rows, columns]."""
        ...


@dataclass(frozen=True)
class Neighbours:
    """The ranks from which and to which a rank hands on, and what joins it to them."""

    rank: int  # who has them
    before: int
    behind: int
    peers: Mapping[int, socket.socket]  # by rank, where they are on this node
    remote: Mapping[int, socket.socket]  # and where they are not
    memory: int  # a file that all of this node have
    place: Callable[[int], int]  # rank -> where in it the hidden states are that come from there


class Ends(Protocol):
    @property
    def inlet(self) -> Source: ...

    @property
    def outlet(self) -> Sink: ...

    def barrier(self) -> None:
        """Before the first step. Every rank does, and waits for its neighbours."""
        ...

    def close(self) -> None:
        """Give back memory shared with the neighbours, which must have ended."""
        ...


@dataclass(frozen=True)
class HostEnds:
    inlet: Source
    outlet: Sink

    def barrier(self) -> None:
        pass

    def close(self) -> None:
        pass


def open_ends(shape: Shape, neighbours: Neighbours, watch: Watch) -> HostEnds:
    """Through memory of the host, or over TCP."""
    return HostEnds(open_inlet(shape, neighbours, watch), open_outlet(shape, neighbours, watch))


def open_inlet(shape: Shape, neighbours: Neighbours, watch: Watch) -> Source:
    before = neighbours.before
    if before in neighbours.remote:
        return RemoteInlet(shape, before, neighbours.remote[before], watch)
    return Inlet(shape, neighbours.memory, neighbours.place(before), before, neighbours.peers[before], watch)


def open_outlet(shape: Shape, neighbours: Neighbours, watch: Watch) -> Sink:
    behind = neighbours.behind
    if behind in neighbours.remote:
        return RemoteOutlet(behind, neighbours.remote[behind], watch)
    return Outlet(shape, neighbours.memory, neighbours.place(neighbours.rank), behind, neighbours.peers[behind], watch)


class _End:
    def __init__(self, shape: Shape, memory: int, offset: int, rank: int, peer: socket.socket, watch: Watch) -> None:
        """rank: who is at the other end, and `peer` the connection to it."""
        self._rank, self._peer, self._watch = rank, peer, watch
        mapped = mmap.mmap(memory, shape.size, offset=offset)
        count = shape.places * shape.rows * shape.columns
        self._places = torch.frombuffer(mapped, dtype=shape.dtype, count=count).view(shape.places, shape.rows, shape.columns)
        self._turn = 0
        peer.setblocking(False)

    def _next(self, rows: int) -> Tensor:
        place = self._places[self._turn % len(self._places)]
        self._turn += 1
        return place[:rows]


class Outlet(_End):
    def send(self, hidden: Tensor) -> None:
        self._next(len(hidden)).copy_(hidden)
        try:
            self._peer.send(ROWS.pack(len(hidden)))
        except OSError:
            self._watch.lost(self._rank)


class Inlet(_End):
    def receive(self, waited_for: Collection[int]) -> Tensor:
        heard = bytearray(ROWS.size)
        take(self._peer, memoryview(heard), self._rank, self._watch, waited_for)
        return self._next(*ROWS.unpack(heard))


class RemoteOutlet:
    """A thread sends, so that no stage waits for the next one to read: all of them could, in a ring."""

    def __init__(self, rank: int, peer: socket.socket, watch: Watch) -> None:
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
                    waiting.poll(1000 * LOOK)
                except (OSError, ValueError):  # ValueError: it was closed here
                    self._lost.set()
                    return


class RemoteInlet:
    def __init__(self, shape: Shape, rank: int, peer: socket.socket, watch: Watch) -> None:
        self._shape, self._rank, self._peer, self._watch = shape, rank, peer, watch
        peer.setblocking(False)

    def receive(self, waited_for: Collection[int]) -> Tensor:
        heard = bytearray(ROWS.size)
        take(self._peer, memoryview(heard), self._rank, self._watch, waited_for)
        [rows] = ROWS.unpack(heard)
        if not 0 <= rows <= self._shape.rows:  # no stage says that
            self._watch.lost(self._rank)
        hidden = torch.empty(rows, self._shape.columns, dtype=self._shape.dtype)
        take(self._peer, _bytes(hidden), self._rank, self._watch, waited_for)
        return hidden


def take(peer: socket.socket, left: memoryview, rank: int, watch: Watch, waited_for: Collection[int]) -> None:
    """All of these bytes."""
    began = time.monotonic()
    while len(left):
        try:
            count = peer.recv_into(left)
        except BlockingIOError:
            waiting = select.poll()
            waiting.register(peer, select.POLLIN)
            if not waiting.poll(1000 * LOOK):
                watch.late(list(waited_for), time.monotonic() - began)
            continue
        except OSError:
            count = 0
        if not count:
            watch.lost(rank)
        left = left[count:]


def _bytes(tensor: Tensor) -> memoryview:
    return memoryview(tensor.reshape(-1).view(torch.uint8).numpy().data)
