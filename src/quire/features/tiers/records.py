"""Records of pages and snapshots in host memory, and the copies between them and the device.

    record    [ content | checksum ]      one copy moves both

    store     gathered into a buffer on the step's stream, before the step overwrites the pages; from there the side stream
              computes the checksums and copies to host memory
    fetch     all on the side stream: copied into a buffer, checked, and written to pages that no step reads yet

The side stream runs next to this step and later ones; the host waits for neither. On a CPU the same work is done at once.
Buffers have a fixed size, so that many pages take no more device memory than a few.
"""

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from hashlib import shake_256
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from quire.features.base import PageMemory
from quire.features.tiers.host import STAGED_BYTES
from quire.features.tiers.states import StateMemory
from quire.features.tiers.threads import Group
from quire.runner.transfer import upload_together
from quire.types.errors import ConfigError
from quire.types.plan import Ints, Longs

if TYPE_CHECKING:
    from torch.cuda import Event

WORD_BYTES = 8
SUMS_BYTES = 2 * WORD_BYTES  # of a record


class StreamMark:
    """A point in a stream. Without a stream it has been reached."""

    def __init__(self, event: "Event | None" = None) -> None:
        self._event = event

    @property
    def reached(self) -> bool:
        return self._event is None or self._event.query()  # type: ignore[no-untyped-call]

    def wait(self) -> None:
        """Let the host wait."""
        if self._event is not None:
            self._event.synchronize()

    def hold(self) -> None:
        """Let what is launched from now on wait, and not the host."""
        if self._event is not None:
            torch.cuda.current_stream().wait_event(self._event)


class SideStream:
    """A stream next to that of the steps. On a CPU there is none: work is done in order."""

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None  # type: ignore[no-untyped-call]

    @contextlib.contextmanager
    def after_launched(self) -> Iterator[None]:
        """Launch work here, which begins when all that has been launched on the step's stream is done."""
        if self._stream is None:
            yield
            return
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            yield

    def mark(self) -> StreamMark:
        """Mark the end of what has been launched here."""
        return StreamMark() if self._stream is None else StreamMark(self._stream.record_event())


@dataclass
class Moved:
    """Pages, or a snapshot, whose fetch has begun."""

    pages: list[int]  # or [~entry]
    right: Tensor  # [pages] bool, in host memory when `end` is reached
    end: StreamMark


class RecordContent:
    """What records hold: a page each, or the parts of a snapshot. A page is named by its number, a snapshot by ~entry."""

    def __init__(self, pages: Sequence[PageMemory], states: StateMemory, snapshot_records: int) -> None:
        """pages: memories with the same page numbers. snapshot_records: that a snapshot takes"""
        self._pages, self._states, self.count = pages, states, snapshot_records
        self.page_bytes = sum(memory.page_bytes for memory in pages)
        self.bytes = max(self.page_bytes, -(-states.bytes // snapshot_records), WORD_BYTES)
        self.staged = max(snapshot_records, STAGED_BYTES // self.bytes, 1)  # records that are moved together, at most

    def batches(self, targets: Ints) -> Iterator[Longs]:
        """Yield indices of `targets` that are moved together: some pages, or all records of one snapshot."""
        pages, snapshots = np.flatnonzero(targets > 0), np.flatnonzero(targets < 0)
        for first in range(0, len(pages), self.staged):
            yield pages[first : first + self.staged]
        for first in range(0, len(snapshots), self.count):
            yield snapshots[first : first + self.count]

    def gather(self, targets: Ints, out: Tensor) -> None:
        """Copy what a batch names to out [records, width] uint8. What it does not fill is zero."""
        if targets[0] > 0:
            for memory, part in self._parts(out):
                memory.gather(targets, part)
            out[:, self.page_bytes :].zero_()
            return
        content = out.new_zeros(out.numel())
        if size := self._states.bytes:
            content[:size] = self._states.gather(~targets[:1])[0]
        out.copy_(content.view_as(out))

    def scatter(self, targets: Ints, content: Tensor) -> None:
        """Overwrite what a batch names. content: [records, width] uint8"""
        if targets[0] > 0:
            for memory, part in self._parts(content):
                memory.scatter(targets, part)
        elif size := self._states.bytes:
            self._states.scatter(~targets[:1], content.reshape(1, -1)[:, :size])

    def _parts(self, content: Tensor) -> Iterator[tuple[PageMemory, Tensor]]:
        """Yield each memory with its columns. A pipeline stage may have none."""
        sizes = [memory.page_bytes for memory in self._pages]
        for memory, part in zip(self._pages, torch.split(content[:, : self.page_bytes], sizes, 1), strict=True):
            if memory.page_bytes:
                yield memory, part

    def together(self, targets: Ints, right: Tensor) -> tuple[list[int], Tensor]:
        """Return the pages or the snapshot of a batch, and whether each is right. right: [records] bool"""
        return (targets.tolist(), right) if targets[0] > 0 else (targets[:1].tolist(), right.all(0, keepdim=True))


class Buffer:
    """Records on the device: content [records, width], sums [records, 2]."""

    def __init__(self, rows: Tensor) -> None:
        """rows: [records, width + SUMS_BYTES] uint8"""
        self.rows, self.content = rows, rows[:, :-SUMS_BYTES]
        self.sums = rows[:, -SUMS_BYTES:].view(torch.int64)
        self.copied = StreamMark()  # the end of the latest copy to host memory


class Arena:
    """Records in host memory: memory [records, width], sums [records, 2]."""

    def __init__(self, content: RecordContent, records: int, buffers: int, device: torch.device) -> None:
        """buffers: for pages that are stored. While there is a free one, a store does not wait for earlier ones."""
        self._content, self._device = content, device
        self._width = -(-content.bytes // WORD_BYTES) * WORD_BYTES
        self._rows = torch.empty(records, self._width + SUMS_BYTES, dtype=torch.uint8)
        self._pinned = device.type == "cuda" and _pin(self._rows)
        host = Buffer(self._rows)
        self.memory, self.sums = host.content, host.sums
        self._weights = checksum_weights(self._width).to(device)
        self._side = SideStream(device)
        self._incoming, *self._outgoing = (self._buffer(min(content.staged, records)) for _ in range(1 + buffers))
        self._stored = StreamMark()  # the end of the latest store

    def _buffer(self, records: int) -> Buffer:
        return Buffer(torch.empty(records, self._width + SUMS_BYTES, dtype=torch.uint8, device=self._device))

    def close(self) -> None:
        """Wait for all copies, and unpin the memory."""
        self._side.mark().wait()
        if self._pinned:
            torch.cuda.cudart().cudaHostUnregister(self._rows.data_ptr())  # type: ignore[no-untyped-call]
            self._pinned = False

    @property
    def disk_bytes(self) -> int:
        """Return the bytes on disk of the largest page or snapshot, without its header."""
        return self._content.count * (self._width + SUMS_BYTES) - SUMS_BYTES

    def read(self, records: Group) -> tuple[bytes, memoryview]:
        """Return the first record's checksum, and the content of all, which the checksums of the others follow.

        What plans stored has arrived when `wait` returns.
        """
        tag = self.sums[records[0]].numpy().tobytes()
        if len(records) == 1:
            return tag, self.memory[records[0]].numpy().data
        index = torch.tensor(records)
        return tag, memoryview(self.memory[index].numpy().tobytes() + self.sums[index[1:]].numpy().tobytes())

    def room(self, records: Group) -> memoryview:
        if len(records) == 1:
            return self.memory[records[0]].numpy().data
        return memoryview(bytearray(len(records) * (self._width + SUMS_BYTES) - SUMS_BYTES))

    def write(self, records: Group, tag: bytes, content: memoryview) -> None:
        size = len(records) * self._width
        if len(records) > 1:
            self.memory[torch.tensor(records)] = torch.frombuffer(content[:size], dtype=torch.uint8).view(-1, self._width)
        sums = bytearray(tag) + content[size:]
        self.sums[torch.tensor(records)] = torch.frombuffer(sums, dtype=torch.int64).view(-1, 2)

    def wait(self) -> None:
        """Let the host wait until what has been stored so far is in host memory, and nothing writes to its records."""
        self._stored.wait()

    def store(self, pages: Ints, records: Ints, tags: Longs) -> None:
        """Copy pages to records. tags: of their keys"""
        for part in self._content.batches(pages):
            count, buffer = len(part), self._outgoing.pop(0)
            self._outgoing.append(buffer)
            buffer.copied.hold()
            self._content.gather(pages[part], buffer.content[:count])
            with self._side.after_launched():
                buffer.sums[:count] = self._sums(buffer.content[:count], tags[part])
                for at, record, length in runs(records[part]):
                    self._rows[record : record + length].copy_(buffer.rows[at : at + length], non_blocking=True)
            buffer.copied = self._stored = self._side.mark()

    def fetch(self, records: Ints, pages: Ints, tags: Longs) -> list[Moved]:
        """Copy records to pages. tags: of the keys that the records must have"""
        with self._side.after_launched():  # launched steps may still read what the pages had
            return [self._fetch(records[part], pages[part], tags[part]) for part in self._content.batches(pages)]

    def _fetch(self, records: Ints, pages: Ints, tags: Longs) -> Moved:
        count, buffer = len(records), self._incoming
        for at, record, length in runs(records):
            buffer.rows[at : at + length].copy_(self._rows[record : record + length], non_blocking=True)
        content = buffer.content[:count]
        right = (self._sums(content, tags) == buffer.sums[:count]).all(1)
        self._content.scatter(pages, content)
        moved, right = self._content.together(pages, right)
        return Moved(moved, right.to("cpu", non_blocking=True), self._side.mark())

    def _sums(self, content: Tensor, tags: Longs) -> Tensor:
        (uploaded,) = upload_together([tags], self._device)
        return checksums(content, self._weights, uploaded)


def _pin(memory: Tensor) -> bool:
    """Pin memory in place: memory that torch allocates pinned is rounded up to a power of two."""
    error = torch.cuda.cudart().cudaHostRegister(memory.data_ptr(), memory.numel(), 0)  # type: ignore[no-untyped-call]
    if int(error):
        size = memory.numel() / 2**30
        raise ConfigError(
            f"kv_offloading_size: CUDA error {int(error)} while {size:.2f} GiB of host memory were pinned. Lower it"
        )
    return True


def runs(records: Ints) -> list[tuple[int, int, int]]:
    """Return (index, record, length) of the runs of consecutive records."""
    starts = np.flatnonzero(np.diff(records, prepend=records[0] - 2) != 1)
    lengths = np.diff(starts, append=len(records))
    return list(zip(starts.tolist(), records[starts].tolist(), lengths.tolist(), strict=True))


def checksum_weights(width: int) -> Tensor:
    """Return [width / 4] odd weights, the same in every process: checksums are kept on disk."""
    weights = np.frombuffer(shake_256(b"checksums of KV cache pages").digest(2 * width), np.int64) | 1
    return torch.from_numpy(weights)


def checksums(content: Tensor, weights: Tensor, tags: Tensor) -> Tensor:
    """Return [pages, 2] int64, modulo 2**64: of each page the sum of its 64-bit words, and a weighted sum of 32-bit words.

    An error changes the second sum, unless the random weights cancel it: with a probability of at most 2**-33. Tags enter both.

    content: [pages, bytes] uint8, each page contiguous. weights: [bytes / 4] int64. tags: [pages] int64
    """
    halves = content.view(torch.int32)
    return torch.stack((content.view(torch.int64).sum(1) + tags, (halves * weights).sum(1) ^ tags), 1)
