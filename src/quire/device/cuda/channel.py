"""Send hidden states from one pipeline stage to the next between GPUs: the same GPU, or another that can access it.

    sender      copies to its slot ─► records `written` ─► message: number of rows         the host never waits for a GPU
    receiver    side stream: waits for `written` ─► copies to a buffer ─► records `read`   while the previous step still runs
                main stream: waits for that copy, and continues
    sender      before it reuses a slot, its stream waits for `read`

Slots are memory of the sender's GPU, which both processes have mapped (CUDA's inter-process handles), like the events. The
message means that `written` was recorded, not that it has happened. No kernel waits for another process. A process that dies
leaves at most an event that never happens; the process that waits for results watches for that.

At the start, the receiver reads a probe that the sender wrote. If it cannot (GPUs without peer access, systems without such
handles), hidden states go through the host's memory, as on CPUs. They also do so between nodes.
"""

import logging
import socket
import time
from collections.abc import Collection, Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol

import torch
from torch import Tensor

from quire.dist.channel import ROWS, Neighbours, Shape, Sink, Source, open_inlet, open_outlet, take
from quire.dist.shared_memory import PeerWatch

logger = logging.getLogger(__name__)

HANDLE = 64  # bytes, of memory or of an event
RECEIVE_BUFFERS = 2
PROBE_BYTES = 64  # written by the sender, checked by the receiver
HANDSHAKE_TIMEOUT_S = 10.0  # for the probe
YES, NO = b"\1", b"\0"


class Links(Protocol):
    """The part of CUDA that the channel uses."""

    device: torch.device

    def share(self, size: int) -> tuple[Tensor, bytes]:
        """Return new memory [size] uint8, and the handle by which another process opens it."""
        ...

    def open(self, handle: bytes, size: int) -> Tensor: ...

    def free(self, memory: Tensor) -> None:
        """Free memory of `share`."""
        ...

    def close(self, memory: Tensor) -> None:
        """Unmap memory of `open`."""
        ...

    def event(self, shared: bool = False) -> Any: ...

    def open_event(self, handle: bytes) -> Any: ...

    def stream(self) -> Any: ...

    def current(self) -> Any:
        """Return the stream of steps."""
        ...

    def on(self, stream: Any) -> AbstractContextManager[Any]: ...


class CUDAEnds:
    """The ends of a rank, usable after `barrier`."""

    inlet: Source
    outlet: Sink

    def __init__(self, shape: Shape, neighbours: Neighbours, watch: PeerWatch, links: Links) -> None:
        self._shape, self._neighbours, self._watch, self._links = shape, neighbours, watch, links
        self._sending: _Sending | None = None
        self._receiving: _Receiving | None = None
        for peer in (*neighbours.peers.values(), *neighbours.remote.values()):
            peer.setblocking(False)

    def barrier(self) -> None:
        """Exchange handles with the neighbours.

        Both ends of a rank may lead to the same neighbour, over one connection: every rank first sends the handle of its
        slots, then replies whether it can read those of the previous rank.
        """
        peers, previous, following = self._neighbours.peers, self._neighbours.previous_rank, self._neighbours.next_rank
        sending = self._sending = _Sending(self._shape, self._links) if following in peers else None
        if sending is not None:
            self._send_bytes(following, sending.hello)
        self.inlet = self._receive_from(previous, peers[previous]) if previous in peers else self._from_host()
        self.outlet = self._to_host() if sending is None else self._send_to(following, peers[following], sending)

    def close(self) -> None:
        if self._receiving is not None:
            self._receiving.close()
        if self._sending is not None:
            self._sending.free()

    def _receive_from(self, rank: int, peer: socket.socket) -> Source:
        hello = self._receive_bytes(rank, peer, 1 + HANDLE * (1 + self._shape.slots))
        receiving = self._receiving = _Receiving(self._shape, self._links, hello)
        self._send_bytes(rank, receiving.answer)
        if not receiving.works:
            logger.warning("this GPU cannot access the GPU of rank %d: hidden states go through host memory", rank)
            return self._from_host()
        return CUDAInlet(receiving, rank, peer, self._watch)

    def _send_to(self, rank: int, peer: socket.socket, sending: "_Sending") -> Sink:
        answer = self._receive_bytes(rank, peer, 1 + HANDLE * self._shape.slots)
        if answer[:1] == NO:
            sending.free()
            return self._to_host()
        read = [self._links.open_event(handle) for handle in _cut(answer[1:])]
        return CUDAOutlet(sending, read, rank, peer, self._watch)

    def _from_host(self) -> Source:
        return FromHost(open_inlet(self._shape, self._neighbours, self._watch), self._links.device)

    def _to_host(self) -> Sink:
        return ToHost(open_outlet(self._shape, self._neighbours, self._watch))

    def _send_bytes(self, rank: int, data: bytes) -> None:
        try:
            self._neighbours.peers[rank].send(data)  # short: the socket buffer has room
        except OSError:
            self._watch.lost(rank)

    def _receive_bytes(self, rank: int, peer: socket.socket, count: int) -> bytes:
        data = bytearray(count)
        take(peer, memoryview(data), rank, self._watch, [rank])
        return bytes(data)


class _Sending:
    """The slots that a rank sends from; none if its memory cannot be shared."""

    def __init__(self, shape: Shape, links: Links) -> None:
        self.shape, self.links = shape, links
        self._memory: Tensor | None = None
        self.written: list[Any] = []
        try:
            self._memory, handle = links.share(shape.size)
            self._memory[:PROBE_BYTES].copy_(_probe(links.device))
            self.written = [links.event(shared=True) for _ in range(shape.slots)]
            self.written[0].record(links.current())
            self.hello = YES + b"".join([handle, *(event.ipc_handle() for event in self.written)])
        except RuntimeError as error:
            logger.warning("GPU memory cannot be shared between processes: %s", error)
            self.hello = bytes(1 + HANDLE * (1 + shape.slots))

    @property
    def slots(self) -> Tensor:
        assert self._memory is not None
        return _slots(self._memory, self.shape)

    def free(self) -> None:
        if self._memory is not None:
            self.links.free(self._memory)
            self._memory = None


class _Receiving:
    def __init__(self, shape: Shape, links: Links, hello: bytes) -> None:
        self.shape, self.links, self.works = shape, links, False
        self.read: list[Any] = []
        self._memory: Tensor | None = None
        self.answer = bytes(1 + HANDLE * shape.slots)
        if hello[:1] == NO:
            return
        try:
            memory = self._memory = links.open(hello[1 : 1 + HANDLE], shape.size)
            self.written = [links.open_event(handle) for handle in _cut(hello[1 + HANDLE :])]
            self.side = links.stream()
            if not self._reads(memory):
                return
            self.read = [links.event(shared=True) for _ in range(shape.slots)]
            self.answer = YES + b"".join(event.ipc_handle() for event in self.read)
        except RuntimeError as error:
            logger.warning("memory of another GPU cannot be mapped: %s", error)
            return
        self.slots = _slots(memory, shape)
        self.buffers = torch.zeros(RECEIVE_BUFFERS, shape.rows, shape.columns, dtype=shape.dtype, device=links.device)
        self.side.wait_stream(links.current())
        self.works = True

    def close(self) -> None:
        if self._memory is not None:
            self.links.close(self._memory)
            self._memory = None

    def _reads(self, memory: Tensor) -> bool:
        links, seen = self.links, torch.zeros(PROBE_BYTES, dtype=torch.uint8, device=self.links.device)
        self.side.wait_stream(links.current())
        self.side.wait_event(self.written[0])
        done = links.event()
        with links.on(self.side):
            seen.copy_(memory[:PROBE_BYTES])
        done.record(self.side)
        deadline = time.monotonic() + HANDSHAKE_TIMEOUT_S
        while not done.query():
            if time.monotonic() > deadline:
                return False
            time.sleep(0.001)
        return bool(torch.equal(seen, _probe(links.device)))


class CUDAOutlet:
    def __init__(self, sending: _Sending, read: Sequence[Any], rank: int, peer: socket.socket, watch: PeerWatch) -> None:
        self._slots, self._written, self._read, self._links = sending.slots, sending.written, read, sending.links
        self._rank, self._peer, self._watch = rank, peer, watch
        self._turn = 0

    def send(self, hidden: Tensor) -> None:
        turn, stream = self._turn, self._links.current()
        slot = turn % len(self._slots)
        self._turn += 1
        if turn >= len(self._slots):
            stream.wait_event(self._read[slot])
        self._slots[slot, : len(hidden)].copy_(hidden)
        self._written[slot].record(stream)
        try:
            self._peer.send(ROWS.pack(len(hidden)))
        except OSError:
            self._watch.lost(self._rank)


class CUDAInlet:
    """The receiving end. A result is valid until the next but one arrives."""

    def __init__(self, receiving: _Receiving, rank: int, peer: socket.socket, watch: PeerWatch) -> None:
        self._slots, self._written, self._read = receiving.slots, receiving.written, receiving.read
        self._buffers, self._side, self._links = receiving.buffers, receiving.side, receiving.links
        self._used = [self._links.event() for _ in range(RECEIVE_BUFFERS)]
        self._arrived = self._links.event()
        self._rank, self._peer, self._watch = rank, peer, watch
        self._turn = 0

    def receive(self, waited_for: Collection[int]) -> Tensor:
        header = bytearray(ROWS.size)
        take(self._peer, memoryview(header), self._rank, self._watch, waited_for)
        [rows] = ROWS.unpack(header)
        turn, stream, side = self._turn, self._links.current(), self._side
        slot, buffer = turn % len(self._slots), self._buffers[turn % RECEIVE_BUFFERS][:rows]
        self._turn += 1
        if turn:
            self._used[(turn - 1) % RECEIVE_BUFFERS].record(stream)  # all readers of the previous buffer were launched
        if turn >= RECEIVE_BUFFERS:
            side.wait_event(self._used[turn % RECEIVE_BUFFERS])
        side.wait_event(self._written[slot])
        with self._links.on(side):
            buffer.copy_(self._slots[slot, :rows])
        self._read[slot].record(side)
        self._arrived.record(side)
        stream.wait_event(self._arrived)
        return buffer


class FromHost:
    """Receive into host memory and copy to the GPU."""

    def __init__(self, source: Source, device: torch.device) -> None:
        self._source, self._device = source, device

    def receive(self, waited_for: Collection[int]) -> Tensor:
        return self._source.receive(waited_for).to(self._device)


class ToHost:
    """Send from host memory. Waits for the GPU."""

    def __init__(self, sink: Sink) -> None:
        self._sink = sink

    def send(self, hidden: Tensor) -> None:
        self._sink.send(hidden.cpu())


def _slots(memory: Tensor, shape: Shape) -> Tensor:
    count = shape.slots * shape.rows * shape.columns
    return memory[: count * shape.dtype.itemsize].view(shape.dtype).view(shape.slots, shape.rows, shape.columns)


def _cut(handles: bytes) -> list[bytes]:
    return [handles[first : first + HANDLE] for first in range(0, len(handles), HANDLE)]


def _probe(device: torch.device) -> Tensor:
    return torch.arange(1, PROBE_BYTES + 1, dtype=torch.uint8, device=device)
