"""From one stage of a pipeline to the next: hidden states, in memory that both processes have mapped.

    memory    places x [ hidden states of a step ]       used in turn
    a step    lay them down ─► a message: how many rows ─► read them where they lie

There are more places than steps in flight, so that nobody waits for one to be free. Whoever waits for a message sleeps, and the
end of a process closes its socket. The memory has no name: nothing is left of it.
"""

import mmap
import select
import socket
import struct
import time
from collections.abc import Collection
from dataclasses import dataclass

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
        """hidden [rows, columns]."""
        self._next(len(hidden)).copy_(hidden)
        try:
            self._peer.send(ROWS.pack(len(hidden)))
        except OSError:
            self._watch.lost(self._rank)


class Inlet(_End):
    def receive(self, waited_for: Collection[int]) -> Tensor:
        """[rows, columns], good until as many more have come as there are places. waited_for: the ranks that work on it."""
        began, heard = time.monotonic(), b""
        while len(heard) < ROWS.size:
            try:
                piece = self._peer.recv(ROWS.size - len(heard))
            except BlockingIOError:
                waiting = select.poll()
                waiting.register(self._peer, select.POLLIN)
                if not waiting.poll(1000 * LOOK):
                    self._watch.late(list(waited_for), time.monotonic() - began)
                continue
            except OSError:
                piece = b""
            if not piece:
                self._watch.lost(self._rank)
            heard += piece
        return self._next(*ROWS.unpack(heard))
