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

CHUNK_BYTES = 1 << 22  # of a part, published at a time
POLL_S = 0.5  # interval of reports about late ranks
READY = b"\1"
MAX_MESSAGE_BYTES = 1020  # of a rank in `all_gather_bytes`


class PeerWatch(Protocol):
    """Knows the processes of the other ranks."""

    def lost(self, rank: int) -> NoReturn:
        """A rank closed its connection."""
        ...

    def late(self, ranks: Sequence[int], seconds: float) -> None:
        """Ranks have been waited for this long. Raises if that is too long."""
        ...


def group_bytes(ranks: int, chunk_bytes: int = CHUNK_BYTES) -> int:
    """Return the bytes of a group's shared memory. Unused pages are never allocated."""
    return 2 * ranks * chunk_bytes


class SharedMemoryGroup:
    """Collectives of ranks on one machine."""

    chunk_bytes = CHUNK_BYTES
    records = False

    def __init__(
        self, position: Position, memory: int, peers: Mapping[int, socket.socket], watch: PeerWatch, offset: int = 0
    ) -> None:
        """Join a group.

        memory: descriptor of a file of any size; the group uses it from `offset` on.
        peers: a connection to every other rank, by the rank numbers that `watch` knows.
        """
        self._rank, self._size, self._peers, self._watch = position.rank, position.size, dict(peers), watch
        size = group_bytes(position.size, self.chunk_bytes)
        if os.fstat(memory).st_size < offset + size:
            os.ftruncate(memory, offset + size)  # by the first rank
        mapped = mmap.mmap(memory, size, offset=offset)
        self._turns = torch.frombuffer(mapped, dtype=torch.uint8).view(2, position.size, self.chunk_bytes)
        self._turn = 0
        self._connections = dict(self._peers)  # to all other ranks
        for peer in self._peers.values():
            peer.setblocking(False)

    def add(self, part: Tensor) -> Tensor:
        flat = part.reshape(-1)
        total = torch.empty_like(flat)
        step = CHUNK_BYTES // flat.element_size()
        for first in range(0, len(flat), step):
            chunk = flat[first : first + step]
            parts = self._exchange(chunk, [len(chunk)] * self._size)
            out = torch.add(parts[0], parts[1], out=total[first : first + step])
            for other in parts[2:]:
                out += other
        return total.view(part.shape)

    def join(self, part: Tensor, total: int) -> Tensor:
        flat = part.reshape(-1)
        rows, step = part.numel() // part.shape[-1], CHUNK_BYTES // flat.element_size()
        if not rows:
            return part.new_empty(*part.shape[:-1], total)
        lengths = [rows * len(evenly(total)(Position(rank, self._size))) for rank in range(self._size)]
        if max(lengths) <= step:
            whole = self._exchange(flat, lengths)
        else:
            whole = [flat.new_empty(length) for length in lengths]
            for first in range(0, max(lengths), step):
                few = [max(0, min(step, length - first)) for length in lengths]
                for target, source in zip(whole, self._exchange(flat[first : first + step], few), strict=True):
                    target[first : first + len(source)] = source
        return torch.cat([chunk.view(*part.shape[:-1], -1) for chunk in whole], -1)

    def all_gather_bytes(self, message: bytes) -> list[bytes]:
        """Return the short messages of all ranks, in the order of ranks."""
        if len(message) > MAX_MESSAGE_BYTES:
            raise ValueError(f"{len(message)} bytes exceed the limit of {MAX_MESSAGE_BYTES} bytes for a message between ranks")
        framed = len(message).to_bytes(4, "little") + message
        chunk = torch.frombuffer(bytearray(framed.ljust(4 + MAX_MESSAGE_BYTES, b"\0")), dtype=torch.uint8)
        frames = [part.numpy().tobytes() for part in self._publish(chunk, [len(chunk)] * self._size)]
        return [frame[4 : 4 + int.from_bytes(frame[:4], "little")] for frame in frames]

    @property
    def others(self) -> list[int]:
        return list(self._connections)

    def absent(self) -> list[int]:
        """Return the ranks that have not begun the next exchange. Report a rank that closed its connection as lost."""
        absent = []
        for rank, connection in self._connections.items():
            try:
                closed = not connection.recv(1, socket.MSG_PEEK)
            except BlockingIOError:
                absent.append(rank)
                continue
            except OSError:
                closed = True
            if closed:
                self._watch.lost(rank)
        return absent

    def largest(self, value: int) -> int:
        """Return the largest of all ranks' values."""
        return max(int.from_bytes(each, "little") for each in self.all_gather_bytes(value.to_bytes(8, "little")))

    def late(self) -> list[int]:
        """Return no rank: the host waits for late ranks, and `watch` knows them."""
        return []

    def abandon(self) -> bool:
        """Return True: no launched work waits for a rank."""
        return True

    def close(self) -> None:
        """Do nothing: the memory is unmapped with this object."""

    def _exchange(self, chunk: Tensor, lengths: Sequence[int]) -> list[Tensor]:
        """Return all ranks' chunks of these lengths, valid until the next turn but one."""
        return self._publish(chunk, lengths)

    def _publish(self, chunk: Tensor, lengths: Sequence[int]) -> list[Tensor]:
        """Return all ranks' chunks of these lengths, in host memory and in place."""
        slots = self._turns[self._turn]
        self._turn = 1 - self._turn
        size = chunk.element_size()
        parts = [slot[: length * size].view(chunk.dtype) for slot, length in zip(slots, lengths, strict=True)]
        parts[self._rank].copy_(chunk)
        self._barrier()
        return parts

    def _barrier(self) -> None:
        for rank, peer in self._peers.items():
            try:
                peer.send(READY)
            except OSError:
                self._watch.lost(rank)
        late = [rank for rank in self._peers if not self._take_ready(rank)]
        began = time.monotonic() if late else 0.0
        while late:
            waiting = select.poll()
            for rank in late:
                waiting.register(self._peers[rank], select.POLLIN)
            if not waiting.poll(1000 * POLL_S):
                self._watch.late(late, time.monotonic() - began)
            late = [rank for rank in late if not self._take_ready(rank)]

    def _take_ready(self, rank: int) -> bool:
        """Take a rank's byte of this turn, if it has arrived."""
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
    """Collectives of ranks on several nodes."""

    def __init__(
        self,
        position: Position,
        memory: int,
        peers: Mapping[int, socket.socket],
        watch: PeerWatch,
        remote: Mapping[int, socket.socket],
        offset: int = 0,
        first: int = 0,
    ) -> None:
        """Join a group.

        peers: connections to ranks of this node.
        remote: TCP connections to ranks of other nodes.
        first: the number that `watch` knows for position 0.
        """
        super().__init__(position, memory, peers, watch, offset)
        self._remote, self._first = dict(remote), first
        self._connections |= remote
        for other in self._remote.values():
            other.setblocking(False)
            other.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def _publish(self, chunk: Tensor, lengths: Sequence[int]) -> list[Tensor]:
        received = {rank: chunk.new_empty(lengths[rank - self._first]) for rank in self._remote}
        self._send_and_receive(chunk.contiguous(), received)
        parts = super()._publish(chunk, lengths)
        for rank, part in received.items():
            parts[rank - self._first] = part
        return parts

    def _send_and_receive(self, chunk: Tensor, received: Mapping[int, Tensor]) -> None:
        """Send and receive as the sockets allow: two ranks that only sent would block each other."""
        out = _bytes(chunk)
        sending = dict.fromkeys(received, out) if len(out) else {}
        receiving = {rank: _bytes(part) for rank, part in received.items() if len(part)}
        ranks = {self._remote[rank].fileno(): rank for rank in received}
        began = time.monotonic()
        while sending or receiving:
            waiting = select.poll()
            for descriptor, rank in ranks.items():
                events_of = (select.POLLIN if rank in receiving else 0) | (select.POLLOUT if rank in sending else 0)
                if events_of:
                    waiting.register(descriptor, events_of)
            events = waiting.poll(1000 * POLL_S)
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


def open_group(
    position: Position,
    memory: int,
    peers: Mapping[int, socket.socket],
    watch: PeerWatch,
    offset: int = 0,
    remote: Mapping[int, socket.socket] | None = None,
    first: int = 0,
) -> SharedMemoryGroup:
    """Return the group of ranks on one node, or on several. The arguments are those of `NodesGroup`."""
    if remote:
        return NodesGroup(position, memory, peers, watch, remote, offset, first)
    return SharedMemoryGroup(position, memory, peers, watch, offset)


def _bytes(tensor: Tensor) -> memoryview:
    return memoryview(tensor.view(torch.uint8).numpy().data)
