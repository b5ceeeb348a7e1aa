"""From a stage on a GPU to the next one, on the same card or on another that reaches it.

    sender      copies to its place ─► records `laid` ─► a message: how many rows          nobody waits for a GPU
    receiver    side stream: waits for `laid` ─► copies to its landing ─► records `read`   while the step before still runs
                its own stream waits for that copy, and goes on
    sender      before it uses the place again its stream waits for `read`

Places are memory of the sender's card, which both processes have mapped (CUDA's inter-process handles), as are the events. The
message says that `laid` was recorded, not that it has happened. No kernel waits for another process, and whoever dies leaves at
most an event that never comes: who waits for results looks after the others meanwhile.

When they meet, the receiver reads something that the sender wrote. Where it cannot (cards that do not reach each other, systems
without such handles), hidden states go through the host's memory as those of CPUs do; so they do to other nodes.
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
from quire.dist.shared_memory import Watch

logger = logging.getLogger(__name__)

HANDLE = 64  # bytes, of memory or of an event
LANDINGS = 2
PROOF = 64  # bytes that are written and read when both meet
PATIENCE = 10.0  # seconds for them to come
YES, NO = b"\1", b"\0"


class Links(Protocol):
    """CUDA, as far as it is needed here."""

    device: torch.device

    def share(self, size: int) -> tuple[Tensor, bytes]:
        """Fresh memory [size] uint8, and the handle by which another process opens it."""
        ...

    def open(self, handle: bytes, size: int) -> Tensor: ...

    def free(self, memory: Tensor) -> None:
        """What was shared."""
        ...

    def close(self, memory: Tensor) -> None:
        """What was opened."""
        ...

    def event(self, shared: bool = False) -> Any: ...

    def open_event(self, handle: bytes) -> Any: ...

    def stream(self) -> Any: ...

    def current(self) -> Any:
        """The stream of steps."""
        ...

    def on(self, stream: Any) -> AbstractContextManager[Any]: ...


class CardEnds:
    """A rank's ends; there are none before it has met its neighbours."""

    inlet: Source
    outlet: Sink

    def __init__(self, shape: Shape, neighbours: Neighbours, watch: Watch, links: Links) -> None:
        self._shape, self._neighbours, self._watch, self._links = shape, neighbours, watch, links
        self._sending: _Sending | None = None
        self._receiving: _Receiving | None = None
        for peer in (*neighbours.peers.values(), *neighbours.remote.values()):
            peer.setblocking(False)

    def barrier(self) -> None:
        """Both ends of a rank may lead to the same one, over one connection: all say first what they send from, and then answer
        whether they can read what they were told of."""
        peers, before, behind = self._neighbours.peers, self._neighbours.before, self._neighbours.behind
        sending = self._sending = _Sending(self._shape, self._links) if behind in peers else None
        if sending is not None:
            self._say(behind, sending.hello)
        self.inlet = self._receive_from(before, peers[before]) if before in peers else self._by_host_in()
        self.outlet = self._by_host_out() if sending is None else self._send_to(behind, peers[behind], sending)

    def close(self) -> None:
        if self._receiving is not None:
            self._receiving.close()
        if self._sending is not None:
            self._sending.free()

    def _receive_from(self, rank: int, peer: socket.socket) -> Source:
        hello = self._hear(rank, peer, 1 + HANDLE * (1 + self._shape.places))
        receiving = self._receiving = _Receiving(self._shape, self._links, hello)
        self._say(rank, receiving.answer)
        if not receiving.works:
            logger.warning("this GPU cannot read that of rank %d: hidden states come through the host's memory", rank)
            return self._by_host_in()
        return CardInlet(receiving, rank, peer, self._watch)

    def _send_to(self, rank: int, peer: socket.socket, sending: "_Sending") -> Sink:
        answer = self._hear(rank, peer, 1 + HANDLE * self._shape.places)
        if answer[:1] == NO:
            sending.free()
            return self._by_host_out()
        read = [self._links.open_event(handle) for handle in _cut(answer[1:])]
        return CardOutlet(sending, read, rank, peer, self._watch)

    def _by_host_in(self) -> Source:
        return FromHost(open_inlet(self._shape, self._neighbours, self._watch), self._links.device)

    def _by_host_out(self) -> Sink:
        return ToHost(open_outlet(self._shape, self._neighbours, self._watch))

    def _say(self, rank: int, words: bytes) -> None:
        try:
            self._neighbours.peers[rank].send(words)  # few: there is room for them
        except OSError:
            self._watch.lost(rank)

    def _hear(self, rank: int, peer: socket.socket, count: int) -> bytes:
        heard = bytearray(count)
        take(peer, memoryview(heard), rank, self._watch, [rank])
        return bytes(heard)


class _Sending:
    """The places that a rank sends from; none where memory cannot be shared."""

    def __init__(self, shape: Shape, links: Links) -> None:
        self.shape, self.links = shape, links
        self._memory: Tensor | None = None
        self.laid: list[Any] = []
        try:
            self._memory, handle = links.share(shape.size)
            self._memory[:PROOF].copy_(_proof(links.device))
            self.laid = [links.event(shared=True) for _ in range(shape.places)]
            self.laid[0].record(links.current())
            self.hello = YES + b"".join([handle, *(event.ipc_handle() for event in self.laid)])
        except RuntimeError as error:
            logger.warning("memory of this GPU cannot be shared with other processes: %s", error)
            self.hello = bytes(1 + HANDLE * (1 + shape.places))

    @property
    def places(self) -> Tensor:
        assert self._memory is not None
        return _places(self._memory, self.shape)

    def free(self) -> None:
        if self._memory is not None:
            self.links.free(self._memory)
            self._memory = None


class _Receiving:
    def __init__(self, shape: Shape, links: Links, hello: bytes) -> None:
        self.shape, self.links, self.works = shape, links, False
        self.read: list[Any] = []
        self._memory: Tensor | None = None
        self.answer = bytes(1 + HANDLE * shape.places)
        if hello[:1] == NO:
            return
        try:
            memory = self._memory = links.open(hello[1 : 1 + HANDLE], shape.size)
            self.laid = [links.open_event(handle) for handle in _cut(hello[1 + HANDLE :])]
            self.side = links.stream()
            if not self._reads(memory):
                return
            self.read = [links.event(shared=True) for _ in range(shape.places)]
            self.answer = YES + b"".join(event.ipc_handle() for event in self.read)
        except RuntimeError as error:
            logger.warning("memory of another GPU cannot be opened: %s", error)
            return
        self.places = _places(memory, shape)
        self.landings = torch.zeros(LANDINGS, shape.rows, shape.columns, dtype=shape.dtype, device=links.device)
        self.side.wait_stream(links.current())
        self.works = True

    def close(self) -> None:
        if self._memory is not None:
            self.links.close(self._memory)
            self._memory = None

    def _reads(self, memory: Tensor) -> bool:
        links, seen = self.links, torch.zeros(PROOF, dtype=torch.uint8, device=self.links.device)
        self.side.wait_stream(links.current())
        self.side.wait_event(self.laid[0])
        done = links.event()
        with links.on(self.side):
            seen.copy_(memory[:PROOF])
        done.record(self.side)
        deadline = time.monotonic() + PATIENCE
        while not done.query():
            if time.monotonic() > deadline:
                return False
            time.sleep(0.001)
        return bool(torch.equal(seen, _proof(links.device)))


class CardOutlet:
    def __init__(self, sending: _Sending, read: Sequence[Any], rank: int, peer: socket.socket, watch: Watch) -> None:
        self._places, self._laid, self._read, self._links = sending.places, sending.laid, read, sending.links
        self._rank, self._peer, self._watch = rank, peer, watch
        self._turn = 0

    def send(self, hidden: Tensor) -> None:
        turn, stream = self._turn, self._links.current()
        place = turn % len(self._places)
        self._turn += 1
        if turn >= len(self._places):
            stream.wait_event(self._read[place])
        self._places[place, : len(hidden)].copy_(hidden)
        self._laid[place].record(stream)
        try:
            self._peer.send(ROWS.pack(len(hidden)))
        except OSError:
            self._watch.lost(self._rank)


class CardInlet:
    """What it gives is good until the next but one has come."""

    def __init__(self, receiving: _Receiving, rank: int, peer: socket.socket, watch: Watch) -> None:
        self._places, self._laid, self._read = receiving.places, receiving.laid, receiving.read
        self._landings, self._side, self._links = receiving.landings, receiving.side, receiving.links
        self._used = [self._links.event() for _ in range(LANDINGS)]
        self._arrived = self._links.event()
        self._rank, self._peer, self._watch = rank, peer, watch
        self._turn = 0

    def receive(self, waited_for: Collection[int]) -> Tensor:
        heard = bytearray(ROWS.size)
        take(self._peer, memoryview(heard), self._rank, self._watch, waited_for)
        [rows] = ROWS.unpack(heard)
        turn, stream, side = self._turn, self._links.current(), self._side
        place, landing = turn % len(self._places), self._landings[turn % LANDINGS][:rows]
        self._turn += 1
        if turn:
            self._used[(turn - 1) % LANDINGS].record(stream)  # all that reads the last one was launched
        if turn >= LANDINGS:
            side.wait_event(self._used[turn % LANDINGS])
        side.wait_event(self._laid[place])
        with self._links.on(side):
            landing.copy_(self._places[place, :rows])
        self._read[place].record(side)
        self._arrived.record(side)
        stream.wait_event(self._arrived)
        return landing


class FromHost:
    def __init__(self, source: Source, device: torch.device) -> None:
        self._source, self._device = source, device

    def receive(self, waited_for: Collection[int]) -> Tensor:
        return self._source.receive(waited_for).to(self._device)


class ToHost:
    """Waits for the GPU."""

    def __init__(self, sink: Sink) -> None:
        self._sink = sink

    def send(self, hidden: Tensor) -> None:
        self._sink.send(hidden.cpu())


def _places(memory: Tensor, shape: Shape) -> Tensor:
    count = shape.places * shape.rows * shape.columns
    return memory[: count * shape.dtype.itemsize].view(shape.dtype).view(shape.places, shape.rows, shape.columns)


def _cut(handles: bytes) -> list[bytes]:
    return [handles[first : first + HANDLE] for first in range(0, len(handles), HANDLE)]


def _proof(device: torch.device) -> Tensor:
    return torch.arange(1, PROOF + 1, dtype=torch.uint8, device=device)
