"""Collectives of ranks that share a GPU, through its memory. Hosts exchange a byte for each: no CUDA graph can record them.

    one turn    copy our part to our own memory ─► record an event ─► a byte to every other rank, and one from each
                ─► the stream waits for their events ─► read all parts in place, and add them in the order of ranks

The host never waits for its GPU: a byte means that an event was recorded, an event that a part was written. A part may be
overwritten two turns later: by then our stream has waited for events that the others recorded after they read it.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from quire.device.cuda.shared_bytes import HANDLE, close_bytes, free_bytes, open_bytes, share_bytes
from quire.dist.shared_memory import CHUNK_BYTES, MAX_MESSAGE_BYTES, SharedMemoryGroup
from quire.types.errors import EngineError

Event: Any = torch.cuda.Event  # torch has no types for it
PROBE_BYTES = 64  # written by each rank, checked by the others


class HostGroup(SharedMemoryGroup):
    """Collectives through the host, once `open` has been called. Ranks find each other as on a CPU."""

    _own: Tensor | None = None

    def open(self, device: torch.device) -> None:
        """Share memory of the GPU with the other ranks, which call this at the same time."""
        own, handle = share_bytes(2 * CHUNK_BYTES, device)
        self._own = own
        self._opened: list[Tensor] = []  # memory of other ranks
        own[:PROBE_BYTES].fill_(1 + self._rank)
        events = [Event(interprocess=True) for _ in range(2)]
        for event in events:
            event.record()
        messages = self.all_gather_bytes(b"".join([handle, *(event.ipc_handle() for event in events)]))
        self._own_events = events
        self._buffers: list[Tensor] = []  # of every rank, [2, CHUNK_BYTES]
        self._their_events: list[list[Any]] = []  # of every other rank, for both turns
        failure = ""
        try:
            for rank, message in enumerate(messages):
                self._open(rank, message, own, device)
        except RuntimeError as error:
            failure = str(error)
        wrong = [
            words.decode(errors="replace") for words in self.all_gather_bytes(failure.encode()[:MAX_MESSAGE_BYTES]) if words
        ]
        if wrong:
            raise EngineError(f"ranks cannot read each other's GPU memory: {wrong[0]}")

    def _open(self, rank: int, message: bytes, own: Tensor, device: torch.device) -> None:
        """Map a rank's memory. Raises RuntimeError if it cannot be read."""
        if rank == self._rank:
            self._buffers.append(own.view(2, CHUNK_BYTES))
            return
        handle, *events = (message[at : at + HANDLE] for at in range(0, 3 * HANDLE, HANDLE))
        buffer, theirs = open_bytes(handle, 2 * CHUNK_BYTES, device), [Event.from_ipc_handle(device, each) for each in events]
        self._opened.append(buffer)
        torch.cuda.current_stream().wait_event(theirs[0])
        if buffer[:PROBE_BYTES].tolist() != [1 + rank] * PROBE_BYTES:
            raise RuntimeError(f"the memory of rank {rank} does not have the values that it wrote")
        self._buffers.append(buffer.view(2, CHUNK_BYTES))
        self._their_events.append(theirs)

    def _exchange(self, chunk: Tensor, lengths: Sequence[int]) -> list[Tensor]:
        turn, self._turn = self._turn, 1 - self._turn
        size = chunk.element_size()
        parts = [buffer[turn, : length * size].view(chunk.dtype) for buffer, length in zip(self._buffers, lengths, strict=True)]
        parts[self._rank].copy_(chunk)
        self._own_events[turn].record()
        self._barrier()
        for events in self._their_events:
            torch.cuda.current_stream().wait_event(events[turn])
        return parts

    def abandon(self) -> bool:
        return False  # the stream may wait for an event of a lost rank

    def close(self) -> None:
        if self._own is None:
            return
        self._buffers.clear()
        while self._opened:
            close_bytes(self._opened.pop())
        free_bytes(self._own)
        self._own = None
