"""Ranks that are processes of one machine meet in memory that all of them have mapped.

    memory       two turns x [ rank 0's part | rank 1's part | ... ]
    one turn     lay down our part ─► a byte to every other rank ─► a byte from every other rank ─► read all parts

A part may be overwritten two turns later: whoever has sent the byte of the turn between has read it. Whoever waits for a byte
sleeps, and the end of a process closes its sockets, so that the others wake up. The memory has no name: nothing is left of it.
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

PIECE = 1 << 22  # bytes of a part that are laid down at a time
LOOK = 0.5  # seconds between looks at those who are waited for
READY = b"\1"
SAID = 1020  # bytes that a rank says at most


class Watch(Protocol):
    """Who knows what the other ranks are."""

    def lost(self, rank: int) -> NoReturn:
        """It is gone, and said nothing."""
        ...

    def late(self, ranks: Sequence[int], seconds: float) -> None:
        """They have kept us waiting so long. Raises if that is too long."""
        ...


def meeting_size(ranks: int, piece: int = PIECE) -> int:
    """Bytes, of which only what is used becomes real."""
    return 2 * ranks * piece


class SharedMemoryGroup:
    piece = PIECE

    def __init__(
        self, position: Position, memory: int, peers: Mapping[int, socket.socket], watch: Watch, offset: int = 0
    ) -> None:
        """memory: a file of any size, of which the part from `offset` on is for them. peers: a connection to every other rank,
        under the names that `watch` knows."""
        self._rank, self._size, self._peers, self._watch = position.rank, position.size, dict(peers), watch
        size = meeting_size(position.size, self.piece)
        if os.fstat(memory).st_size < offset + size:
            os.ftruncate(memory, offset + size)  # whoever comes first
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
