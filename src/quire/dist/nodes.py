"""Ranks on several nodes: those of one meet in its memory, and what they have for ranks of other nodes goes over TCP.

    one turn    to and from every rank of other nodes, at the same time ─► then as ranks of one machine do (`shared_memory`)

Every rank has a connection of its own to every rank elsewhere; sums are added in the order of ranks, as everywhere.
"""

import select
import socket
import time
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from quire.dist.mesh import Position
from quire.dist.shared_memory import LOOK, SharedMemoryGroup, Watch


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
