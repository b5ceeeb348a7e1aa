"""Collectives of ranks on GPUs of one machine, through GPU memory.

    one turn    copy our part to our own memory ─► record an event ─► a byte to every other rank, and one from each
                ─► the stream waits for their events ─► read all parts in place, and add them in the order of ranks

The host never waits for its GPU: a byte means that an event was recorded, an event that a part was written. A part may be
overwritten two turns later: by then our stream has waited for events that the others recorded after they read it. If every
rank has its own GPU, large sums go through NCCL: all parts are gathered and then added in the same order. All sums do so if
GPUs cannot access each other's memory.

The NCCL process group belongs to this object. torch.distributed's default group is never used: a program may hold two
engines, or use it itself.
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
from quire.dist.shared_memory import CHUNK_BYTES, MAX_MESSAGE_BYTES, PeerWatch, SharedMemoryGroup
from quire.types.errors import EngineError

Event: Any = torch.cuda.Event  # torch has no types for it
GPU_ID_BYTES = 16  # of a GPU's id
PROBE_BYTES = 64  # written by each rank, checked by the others
ONE_SHOT_BYTES = 1 << 19  # beyond that, NCCL uses links between GPUs better


class CUDAGroup(SharedMemoryGroup):
    """Collectives of ranks on GPUs. Ranks find each other as on a CPU."""

    def __init__(
        self,
        position: Position,
        memory: int,
        peers: Mapping[int, socket.socket],
        watch: PeerWatch,
        device: torch.device,
        offset: int = 0,
    ) -> None:
        super().__init__(position, memory, peers, watch, offset)
        device = torch.device(device.type, torch.cuda.current_device())
        self._nccl: Any = None  # ProcessGroupNCCL, which has no types
        own, handle = share_bytes(2 * CHUNK_BYTES, device)
        self._own: Tensor | None = own
        self._opened: list[Tensor] = []  # memory of other ranks
        own[:PROBE_BYTES].fill_(1 + position.rank)
        events = [Event(interprocess=True) for _ in range(2)]
        for event in events:
            event.record()
        messages = self.all_gather_bytes(b"".join([_gpu_id(device), handle, *(event.ipc_handle() for event in events)]))
        self._own_events = events
        self._buffers: list[Tensor] = []  # of every rank, [2, CHUNK_BYTES]
        self._their_events: list[list[Any]] = []  # of every other rank, for both turns
        separate_gpus = len({message[:GPU_ID_BYTES] for message in messages}) == position.size
        self._gathers = separate_gpus and dist.is_nccl_available()
        failure = ""
        try:
            for rank, message in enumerate(messages):
                self._open(rank, message[GPU_ID_BYTES:], own, device)
        except RuntimeError as error:
            failure = str(error)
        wrong = [
            words.decode(errors="replace") for words in self.all_gather_bytes(failure.encode()[:MAX_MESSAGE_BYTES]) if words
        ]
        self._reads = not wrong
        if wrong and not self._gathers:
            raise EngineError(f"ranks cannot read the memory of each other's GPUs, and there is no NCCL to use: {wrong[0]}")
        if self._gathers:
            self._start_nccl(position)

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

    def add(self, part: Tensor) -> Tensor:
        if not self._gathers or part.numel() * part.element_size() <= ONE_SHOT_BYTES:
            return super().add(part)
        parts = self._all_gather(part.contiguous())
        total = parts[0].add_(parts[1])
        for other in parts[2:]:
            total += other
        return total

    def _exchange(self, chunk: Tensor, lengths: Sequence[int]) -> list[Tensor]:
        if not self._reads:
            return self._gather(chunk, lengths)
        turn, self._turn = self._turn, 1 - self._turn
        size = chunk.element_size()
        parts = [buffer[turn, : length * size].view(chunk.dtype) for buffer, length in zip(self._buffers, lengths, strict=True)]
        parts[self._rank].copy_(chunk)
        self._own_events[turn].record()
        self._barrier()
        for events in self._their_events:
            torch.cuda.current_stream().wait_event(events[turn])
        return parts

    def _gather(self, chunk: Tensor, lengths: Sequence[int]) -> list[Tensor]:
        """Return all ranks' chunks. NCCL requires equal lengths."""
        padded = chunk.new_zeros(max(lengths))
        padded[: len(chunk)] = chunk
        return [part[:length] for part, length in zip(self._all_gather(padded), lengths, strict=True)]

    def _all_gather(self, part: Tensor) -> list[Tensor]:
        """Return all ranks' parts, which have one shape."""
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
        """Start NCCL. Rank 0 has the store through which its peers connect, on loopback only."""
        if position.rank == 0:
            listener = socket.create_server(("127.0.0.1", 0))
            port = listener.getsockname()[1]
            store = dist.TCPStore(  # type: ignore[attr-defined]
                "127.0.0.1", port, position.size, True, wait_for_workers=False, master_listen_fd=listener.detach()
            )
            self.all_gather_bytes(str(port).encode())
        else:
            port = int(self.all_gather_bytes(b"")[0])
            store = dist.TCPStore("127.0.0.1", port, position.size, False)  # type: ignore[attr-defined]
        self._nccl = make_nccl(store, position)


def make_nccl(store: Any, position: Position) -> Any:
    return cast(Any, dist).ProcessGroupNCCL(store, position.rank, position.size)


def _gpu_id(device: torch.device) -> bytes:
    """Return an id of the GPU that does not depend on its index in this process."""
    return hashlib.sha256(str(torch.cuda.get_device_properties(device).uuid).encode()).digest()[:GPU_ID_BYTES]
