"""Ranks on GPUs of one machine: those of one card or of several meet in memory of the cards.

    one turn    copy our part to our own memory ─► record an event ─► a byte to every other rank, and one from each
                ─► the stream waits for their events ─► read all parts where they lie, and add them in the order of ranks

No rank waits for its GPU: the bytes say that events were recorded, the events that parts are there. A part may be overwritten
two turns later: our stream has waited by then for what others recorded behind their reading of it. Where every rank has a card
of its own, large sums go through NCCL: all parts are gathered, and then added in the same order. So do all, where cards cannot
read each other's memory.

The NCCL process group belongs to this object. The process's default group is never used: a program may hold two engines, or use
torch.distributed itself.
"""

import hashlib
import socket
from collections.abc import Mapping, Sequence
from typing import Any, cast

import torch
from torch import Tensor
from torch import distributed as dist

from quire.device.cuda.shared_bytes import HANDLE, close_bytes, free_bytes, open_bytes, share_bytes
from quire.dist.mesh import Position
from quire.dist.shared_memory import PIECE, SAID, SharedMemoryGroup, Watch
from quire.types.errors import EngineError

Event: Any = torch.cuda.Event  # which has no types
CARD = 16  # bytes of a card's name
PROOF = 64  # bytes that all write and read when they meet
ONE_SHOT = 1 << 19  # bytes; beyond that links between cards are used better by NCCL


class CUDAGroup(SharedMemoryGroup):
    def __init__(
        self,
        position: Position,
        memory: int,
        peers: Mapping[int, socket.socket],
        watch: Watch,
        device: torch.device,
        offset: int = 0,
    ) -> None:
        """As of ranks on a CPU, which is how they find each other."""
        super().__init__(position, memory, peers, watch, offset)
        device = torch.device(device.type, torch.cuda.current_device())
        self._nccl: Any = None  # ProcessGroupNCCL, which has no types
        own, handle = share_bytes(2 * PIECE, device)
        self._own: Tensor | None = own
        self._opened: list[Tensor] = []  # memory of other ranks
        own[:PROOF].fill_(1 + position.rank)
        events = [Event(interprocess=True) for _ in range(2)]
        for event in events:
            event.record()
        told = self.swap(b"".join([_card(device), handle, *(event.ipc_handle() for event in events)]))
        self._own_events = events
        self._buffers: list[Tensor] = []  # of every rank [2, PIECE]
        self._their_events: list[list[Any]] = []  # of every other rank, for either turn
        apart = len({said[:CARD] for said in told}) == position.size
        self._gathers = apart and dist.is_nccl_available()
        failure = ""
        try:
            for rank, said in enumerate(told):
                self._open(rank, said[CARD:], own, device)
        except RuntimeError as error:
            failure = str(error)
        wrong = [words.decode(errors="replace") for words in self.swap(failure.encode()[:SAID]) if words]
        self._reads = not wrong
        if wrong and not self._gathers:
            raise EngineError(f"ranks cannot read the memory of each other's GPUs, and there is no NCCL to use: {wrong[0]}")
        if self._gathers:
            self._start_nccl(position)

    def _open(self, rank: int, said: bytes, own: Tensor, device: torch.device) -> None:
        """RuntimeError = what is there cannot be read."""
        if rank == self._rank:
            self._buffers.append(own.view(2, PIECE))
            return
        handle, *events = (said[at : at + HANDLE] for at in range(0, 3 * HANDLE, HANDLE))
        buffer, theirs = open_bytes(handle, 2 * PIECE, device), [Event.from_ipc_handle(device, each) for each in events]
        self._opened.append(buffer)
        torch.cuda.current_stream().wait_event(theirs[0])
        if buffer[:PROOF].tolist() != [1 + rank] * PROOF:
            raise RuntimeError(f"rank {rank} wrote something else than what is found there")
        self._buffers.append(buffer.view(2, PIECE))
        self._their_events.append(theirs)

    def add(self, part: Tensor) -> Tensor:
        if not self._gathers or part.numel() * part.element_size() <= ONE_SHOT:
            return super().add(part)
        parts = self._all_gather(part.contiguous())
        total = parts[0].add_(parts[1])
        for other in parts[2:]:
            total += other
        return total

    def _exchange(self, piece: Tensor, lengths: Sequence[int]) -> list[Tensor]:
        if not self._reads:
            return self._gather(piece, lengths)
        turn, self._turn = self._turn, 1 - self._turn
        size = piece.element_size()
        parts = [buffer[turn, : length * size].view(piece.dtype) for buffer, length in zip(self._buffers, lengths, strict=True)]
        parts[self._rank].copy_(piece)
        self._own_events[turn].record()
        self._meet()
        for events in self._their_events:
            torch.cuda.current_stream().wait_event(events[turn])
        return parts

    def _gather(self, piece: Tensor, lengths: Sequence[int]) -> list[Tensor]:
        """All ranks' pieces, of which NCCL wants the same length."""
        padded = piece.new_zeros(max(lengths))
        padded[: len(piece)] = piece
        return [part[:length] for part, length in zip(self._all_gather(padded), lengths, strict=True)]

    def _all_gather(self, part: Tensor) -> list[Tensor]:
        """All ranks' parts, which have one shape."""
        parts = [torch.empty_like(part) for _ in range(self._size)]
        self._nccl.allgather([parts], [part]).wait()
        return parts

    def close(self) -> None:
        if self._nccl is not None:
            self._nccl.abort()
            self._nccl = None
        self._buffers.clear()
        while self._opened:
            close_bytes(self._opened.pop())
        if self._own is not None:
            free_bytes(self._own)
            self._own = None

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
        self._nccl = make_nccl(store, position)


def make_nccl(store: Any, position: Position) -> Any:
    return cast(Any, dist).ProcessGroupNCCL(store, position.rank, position.size)


def _card(device: torch.device) -> bytes:
    """Its name, whatever number it has for this process."""
    return hashlib.sha256(str(torch.cuda.get_device_properties(device).uuid).encode()).digest()[:CARD]
