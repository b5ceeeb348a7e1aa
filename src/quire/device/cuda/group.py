"""Ranks on GPUs of one machine: those of one card or of several meet in memory of the cards.

    one turn    copy our part to our own memory ─► record an event ─► a byte to every other rank, and one from each
                ─► the stream waits for their events ─► read all parts where they lie, and add them in the order of ranks

No rank waits for its GPU: the bytes say that events were recorded, the events that parts are there. A part may be overwritten
two turns later: our stream has waited by then for what others recorded behind their reading of it. Where every rank has a card
of its own, large sums go through NCCL: all parts are gathered, and then added in the same order.
"""

import socket
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch import distributed as dist

from quire.device.cuda.shared_bytes import open_bytes, share_bytes
from quire.dist.mesh import Position
from quire.dist.shared_memory import PIECE, SharedMemoryGroup, Watch

Event: Any = torch.cuda.Event  # which has no types
ONE_SHOT = 1 << 19  # bytes; beyond that links between cards are used better by NCCL


class CUDAGroup(SharedMemoryGroup):
    def __init__(
        self, position: Position, memory: int, peers: Mapping[int, socket.socket], watch: Watch, device: torch.device
    ) -> None:
        """As of ranks on a CPU, which is how they find each other."""
        super().__init__(position, memory, peers, watch)
        device = torch.device(device.type, torch.cuda.current_device())
        own, handle = share_bytes(2 * PIECE, device)
        events = [Event(interprocess=True) for _ in range(2)]
        for event in events:
            event.record()
        told = self.swap(b"".join([bytes([device.index]), handle, *(event.ipc_handle() for event in events)]))
        self._own_events = events
        self._buffers: list[Tensor] = []  # of every rank [2, PIECE]
        self._their_events: list[list[Any]] = []  # of every other rank, for either turn
        size = len(events[0].ipc_handle())
        for rank, said in enumerate(told):
            if rank == position.rank:
                self._buffers.append(own.view(2, PIECE))
                continue
            self._buffers.append(open_bytes(said[1 : 1 + len(handle)], 2 * PIECE, device).view(2, PIECE))
            begins = [1 + len(handle) + turn * size for turn in range(2)]
            self._their_events.append([Event.from_ipc_handle(device, said[at : at + size]) for at in begins])
        cards = {said[0] for said in told}
        self._gathers = len(cards) == position.size and dist.is_nccl_available()
        if self._gathers:
            self._start_nccl(position)

    def add(self, part: Tensor) -> Tensor:
        if not self._gathers or part.numel() * part.element_size() <= ONE_SHOT:
            return super().add(part)
        parts = [torch.empty_like(part) for _ in range(self._size)]
        dist.all_gather(parts, part.contiguous())
        total = parts[0].add_(parts[1])
        for other in parts[2:]:
            total += other
        return total

    def _exchange(self, piece: Tensor, lengths: Sequence[int]) -> list[Tensor]:
        turn, self._turn = self._turn, 1 - self._turn
        size = piece.element_size()
        parts = [buffer[turn, : length * size].view(piece.dtype) for buffer, length in zip(self._buffers, lengths, strict=True)]
        parts[self._rank].copy_(piece)
        self._own_events[turn].record()
        self._meet()
        for events in self._their_events:
            torch.cuda.current_stream().wait_event(events[turn])
        return parts

    def _start_nccl(self, position: Position) -> None:
        """Rank 0 has the store through which NCCL finds its peers, on this machine alone."""
        if position.rank == 0:
            listener = socket.create_server(("127.0.0.1", 0))
            port = listener.getsockname()[1]
            store = dist.TCPStore(  # type: ignore[attr-defined]
                "127.0.0.1", port, position.size, True, wait_for_workers=False, master_listen_fd=listener.detach()
            )
            self.swap(str(port).encode())
        else:
            port = int(self.swap(b"")[0])
            store = dist.TCPStore("127.0.0.1", port, position.size, False)  # type: ignore[attr-defined]
        dist.init_process_group("nccl", store=store, rank=position.rank, world_size=position.size)
