"""Collectives between ranks in processes: through shared memory on one machine, and over TCP between machines.

    memory       two turns x [ rank 0's part | rank 1's part | ... ]
    one turn     publish our part ─► a byte to every other rank ─► a byte from every other rank ─► read all parts
    NodesGroup   send to and receive from every rank of other nodes at the same time ─► then the turn above

A part may be overwritten two turns later: a rank that has sent the byte of the turn between has read it. A rank that waits for a
byte sleeps; the end of a process closes its sockets, which wakes the others. The memory is anonymous and freed with its last
process. Sums are added in the order of ranks. Every pair of ranks on different nodes has its own connection.
"""

import mmap
import os
import select
import socket
import time
from collections.abc import Mapping, Sequence
from typing import NoReturn, Protocol

import torch
from torch import Tensor

from quire.dist.mesh import Position, evenly

PIECE = 1 << 22  # bytes of a part that are published at a time
LOOK = 0.5  # seconds between looks at those who are waited for
READY = b"\1"
SAID = 1020  # bytes that a rank says at most


class Watch(Protocol):
    """Knows the processes of the other ranks."""

    def lost(self, rank: int) -> NoReturn:
        """A rank closed its connection."""
        ...

    def late(self, ranks: Sequence[int], seconds: float) -> None:
        """Ranks have been waited for this long. Raises if that is too long."""
        ...


def exchange_bytes(ranks: int, piece: int = PIECE) -> int:
    """Bytes of the shared memory of a group; pages that are not used take none."""
    return 2 * ranks * piece


class SharedMemoryGroup:
    piece = PIECE

    def __init__(
        self, position: Position, memory: int, peers: Mapping[int, socket.socket], watch: Watch, offset: int = 0
    ) -> None:
        """memory: a file of any size, of which the part from `offset` on is for them. peers: a connection to every other rank,
        under the names that `watch` knows."""
        self._rank, self._size, self._peers, self._watch = position.rank, position.size, dict(peers), watch
        size = exchange_bytes(position.size, self.piece)
        if os.fstat(memory).st_size < offset + size:
            os.ftruncate(memory, offset + size)  # by the rank that comes first
        mapped = mmap.mmap(memory, size, offset=offset)
        self._turns = torch.frombuffer(mapped, dtype=torch.uint8).view(2, position.size, self.piece)
        self._turn = 0
        for peer in self._peers.values():
            peer.setblocking(False)

    def add(self, part: Tensor) -> Tensor:
        flat = part.reshape(-1)
        total = torch.empty_like(flat)
        step = PIECE // flat.element_size()
        for first in range(0, len(flat), step):
            piece = flat[first : first + step]
            parts = self._exchange(piece, [len(piece)] * self._size)
            out = torch.add(parts[0], parts[1], out=total[first : first + step])
            for other in parts[2:]:
                out += other
        return total.view(part.shape)

    def join(self, part: Tensor, total: int) -> Tensor:
        flat = part.reshape(-1)
        rows, step = part.numel() // part.shape[-1], PIECE // flat.element_size()
        if not rows:
            return part.new_empty(*part.shape[:-1], total)
        lengths = [rows * len(evenly(total)(Position(rank, self._size))) for rank in range(self._size)]
        if max(lengths) <= step:
            whole = self._exchange(flat, lengths)
        else:
            whole = [flat.new_empty(length) for length in lengths]
            for first in range(0, max(lengths), step):
                few = [max(0, min(step, length - first)) for length in lengths]
                for place, there in zip(whole, self._exchange(flat[first : first + step], few), strict=True):
                    place[first : first + len(there)] = there
        return torch.cat([piece.view(*part.shape[:-1], -1) for piece in whole], -1)

    def swap(self, said: bytes) -> list[bytes]:
        """What every rank says, in the order of ranks: a few bytes, of any kind."""
        if len(said) > SAID:
            raise ValueError(f"{len(said)} bytes are more than the {SAID} that ranks say to each other")
        framed = len(said).to_bytes(4, "little") + said
        piece = torch.frombuffer(bytearray(framed.ljust(4 + SAID, b"\0")), dtype=torch.uint8)
        heard = [part.numpy().tobytes() for part in SharedMemoryGroup._exchange(self, piece, [len(piece)] * self._size)]
        return [frame[4 : 4 + int.from_bytes(frame[:4], "little")] for frame in heard]

    def close(self) -> None:
        """The memory is unmapped with this object."""

    def _exchange(self, piece: Tensor, lengths: Sequence[int]) -> list[Tensor]:
        """All ranks' pieces of these lengths, where they lie: good until the next turn but one."""
        slots = self._turns[self._turn]
        self._turn = 1 - self._turn
        size = piece.element_size()
        parts = [slot[: length * size].view(piece.dtype) for slot, length in zip(slots, lengths, strict=True)]
        parts[self._rank].copy_(piece)
        self._meet()
        return parts

    def _meet(self) -> None:
        for rank, peer in self._peers.items():
            try:
                peer.send(READY)
            except OSError:
                self._watch.lost(rank)
        late = [rank for rank in self._peers if not self._heard(rank)]
        began = time.monotonic() if late else 0.0
        while late:
            waiting = select.poll()
            for rank in late:
                waiting.register(self._peers[rank], select.POLLIN)
            if not waiting.poll(1000 * LOOK):
                self._watch.late(late, time.monotonic() - began)
            late = [rank for rank in late if not self._heard(rank)]

    def _heard(self, rank: int) -> bool:
        """Takes the byte of this turn, if it is there."""
        try:
            byte = self._peers[rank].recv(1)
        except BlockingIOError:
            return False
        except OSError:
            byte = b""
        if not byte:
            self._watch.lost(rank)
        return True


class NodesGroup(SharedMemoryGroup):
    def __init__(
        self,
        position: Position,
        memory: int,
        peers: Mapping[int, socket.socket],
        watch: Watch,
        remote: Mapping[int, socket.socket],
        offset: int = 0,
        first: int = 0,
    ) -> None:
        """peers: of this node. remote: a TCP connection to every rank of other nodes. first: what `watch` calls the rank at
        position 0."""
        super().__init__(position, memory, peers, watch, offset)
        self._remote, self._first = dict(remote), first
        for other in self._remote.values():
            other.setblocking(False)
            other.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def _exchange(self, piece: Tensor, lengths: Sequence[int]) -> list[Tensor]:
        elsewhere = {rank: piece.new_empty(lengths[rank - self._first]) for rank in self._remote}
        self._trade(piece.contiguous(), elsewhere)
        parts = super()._exchange(piece, lengths)
        for rank, part in elsewhere.items():
            parts[rank - self._first] = part
        return parts

    def _trade(self, piece: Tensor, elsewhere: Mapping[int, Tensor]) -> None:
        """Sends and receives as either is possible: two that only sent would wait for each other."""
        out = _bytes(piece)
        sending = dict.fromkeys(elsewhere, out) if len(out) else {}
        receiving = {rank: _bytes(part) for rank, part in elsewhere.items() if len(part)}
        ranks = {self._remote[rank].fileno(): rank for rank in elsewhere}
        began = time.monotonic()
        while sending or receiving:
            waiting = select.poll()
            for descriptor, rank in ranks.items():
                wanted = (select.POLLIN if rank in receiving else 0) | (select.POLLOUT if rank in sending else 0)
                if wanted:
                    waiting.register(descriptor, wanted)
            events = waiting.poll(1000 * LOOK)
            if not events:
                self._watch.late(list({*receiving, *sending}), time.monotonic() - began)
            for descriptor, event in events:
                rank = ranks[descriptor]
                if rank in receiving and event & ~select.POLLOUT:
                    self._step(rank, receiving, self._remote[rank].recv_into)
                if rank in sending and event & select.POLLOUT:
                    self._step(rank, sending, self._remote[rank].send)

    def _step(self, rank: int, left: dict[int, memoryview], move: "object") -> None:
        try:
            count = move(left[rank])  # type: ignore[operator]
        except BlockingIOError:
            return
        except OSError:
            count = 0
        if not count:
            self._watch.lost(rank)
        left[rank] = left[rank][count:]
        if not len(left[rank]):
            del left[rank]


def _bytes(tensor: Tensor) -> memoryview:
    return memoryview(tensor.view(torch.uint8).numpy().data)
