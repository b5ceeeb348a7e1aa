"""The device half of the host tier: pages are stored in records of host memory, and fetched from them, as plans say. A snapshot
of recurrent states is divided among several records.

    CPU    copies are made before the rows of the step run
    CUDA   stored pages are gathered on the step's stream, so that its rows may overwrite them, and travel to pinned memory on a
           stream of their own; fetched pages travel there, too, beside the rows of this and later steps

Every record has a checksum of its content and its page's key, computed where the page comes from, and again where it arrives.
"""

from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass
from hashlib import shake_256
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from quire.config.host import available_host_bytes
from quire.device.base import GIB, Device
from quire.features.base import Allocation, PageMemory, StepPart
from quire.features.tiers.host import STAGED_PAGES, DiskSetting
from quire.features.tiers.states import StateMemory
from quire.features.tiers.threads import DiskThreads, Group, Pairs
from quire.layers.recurrent import Recurrence
from quire.models.decoder import Decoder
from quire.types.errors import ConfigError
from quire.types.plan import Ints, Longs, StepPlan, StepRows

if TYPE_CHECKING:
    from torch.cuda import Event

WORD_BYTES = 8
SUMS_BYTES = 2 * WORD_BYTES  # of a record


@dataclass
class Moved:
    """Pages, or a snapshot, whose fetch has begun."""

    pages: list[int]  # or [~entry]
    right: Tensor  # [pages] bool, in host memory when `event` has happened
    event: "Event | None"

    @property
    def done(self) -> bool:
        return self.event is None or self.event.query()  # type: ignore[no-untyped-call]


class TiersPart(StepPart):
    name = "tiers"

    def __init__(
        self,
        device: Device,
        dtype: torch.dtype,
        host_bytes: int,
        machine_bytes: int,
        reserved: int,
        disk: DiskSetting | None = None,
    ) -> None:
        """host_bytes: of this rank's records. machine_bytes: the same, of all ranks on this machine. reserved: bytes of device
        memory for pages. disk: None: nothing is kept on disk.
        """
        self._device, self._dtype, self._bytes = device, dtype, host_bytes
        self._machine_bytes, self._reserved = machine_bytes, reserved
        self._disk_setting = disk
        self._disk: DiskThreads | None = None
        self._recurrents: Sequence[Recurrence] = ()
        self._arena: Arena | None = None
        self._moved: list[Moved] = []

    def load(self, model: Decoder, reserved_bytes: Callable[[], int]) -> None:  # noqa: ARG002
        self._recurrents = model.recurrents
        available = available_host_bytes()
        if self._machine_bytes > available:
            raise ConfigError(
                f"kv_offloading_size needs {self._machine_bytes / GIB:.2f} GiB of host memory on this machine, but "
                f"{available / GIB:.2f} GiB are available. Lower it"
            )

    def reserved_bytes(self, max_seqs: int, recording: bool) -> int:  # noqa: ARG002
        states = sum(layer.cache.bytes(self._dtype.itemsize) for layer in self._recurrents)
        return max(self._reserved, 2 * states)

    def allocate(self, allocation: Allocation) -> None:
        self._arena = None
        if allocation.pages and allocation.memory is not None:
            states = StateMemory(self._recurrents)
            content = RecordContent(allocation.memory, states, allocation.snapshot_records, self._device.torch_device)
            self._arena = Arena(content, self._bytes // content.bytes, self._device.torch_device)
            if self._disk_setting is not None:
                self._close_disk()
                share = f"{allocation.share}, pages of {allocation.memory.page_bytes} bytes, states of {states.bytes}"
                self._disk = DiskThreads(self._disk_setting, share, self._arena)

    def prepare(self, plan: StepPlan) -> None:
        if len(plan.store_page):
            self._own_arena.store(plan.store_page, plan.store_record, plan.store_tag)
        if len(plan.fetch_page):
            self._moved += self._own_arena.fetch(plan.fetch_record, plan.fetch_page, plan.fetch_tag)

    def graph_key(self, rows: StepRows) -> Hashable:  # noqa: ARG002
        """Pages move before the rows run."""
        return False

    def take_fetched(self) -> list[tuple[int, bool]]:
        """Return the pages whose fetch has ended since the last call, and whether their content is right."""
        done = [moved for moved in self._moved if moved.done]
        self._moved = [moved for moved in self._moved if moved not in done]
        return [pair for moved in done for pair in zip(moved.pages, moved.right.tolist(), strict=True)]

    def abandon(self, pages: Sequence[int]) -> None:
        """Wait until nothing writes to these pages any more, and do not report them."""
        gone = set(pages)
        for moved in [moved for moved in self._moved if gone.intersection(moved.pages)]:
            if moved.event is not None:
                moved.event.synchronize()
            self._moved.remove(moved)

    def disk_contents(self) -> tuple[bytes, list[bytes]] | None:
        """Return the secret and the names of the records on disk; None: nothing is kept on disk."""
        return None if self._disk is None else (self._disk.store.secret, self._disk.store.names)

    def read_and_write(self, reads: Pairs, writes: Pairs, removals: Sequence[bytes]) -> None:
        """Begin to read records from disk, to write others, and then to remove names."""
        assert self._disk is not None
        self._disk.begin(reads, writes, removals)

    def take_read_and_written(self) -> tuple[list[tuple[int, bool]], list[tuple[int, bool]], list[bytes]]:
        """Return what was read and written since the last call, whether it worked, and names that were removed."""
        assert self._disk is not None
        return self._disk.take()

    def clear_disk(self) -> None:
        if self._disk is not None:
            self._disk.clear()

    def _close_disk(self) -> None:
        if self._disk is not None:
            self._disk.close()
        self._disk = None

    def describe(self) -> dict[str, int]:
        return {} if self._arena is None else {"host_tier_bytes": self._arena.memory.numel()}

    def close(self) -> None:
        self._close_disk()
        self._arena, self._recurrents = None, ()
        self._moved = []

    @property
    def _own_arena(self) -> "Arena":
        assert self._arena is not None
        return self._arena


class RecordContent:
    """What records hold: a page each, or the parts of a snapshot. A page is named by its number, a snapshot by ~entry."""

    def __init__(self, pages: PageMemory, states: StateMemory, snapshot_records: int, device: torch.device) -> None:
        """snapshot_records: that a snapshot takes"""
        self._pages, self._states, self._count, self._device = pages, states, snapshot_records, device
        self.bytes = max(pages.page_bytes, -(-states.bytes // snapshot_records), WORD_BYTES)

    def batches(self, targets: Ints) -> Iterator[Longs]:
        """Yield indices of `targets` that are moved together: some pages, or all records of one snapshot."""
        pages, snapshots = np.flatnonzero(targets > 0), np.flatnonzero(targets < 0)
        for first in range(0, len(pages), STAGED_PAGES):
            yield pages[first : first + STAGED_PAGES]
        for first in range(0, len(snapshots), self._count):
            yield snapshots[first : first + self._count]

    def gather(self, targets: Ints, width: int) -> Tensor:
        """Return copies of what a batch names, [records, width] uint8."""
        on_pages = targets[0] > 0
        if not (self._pages.page_bytes if on_pages else self._states.bytes):  # a pipeline stage without such layers
            return torch.zeros(len(targets), width, dtype=torch.uint8, device=self._device)
        if on_pages:
            return _padded(self._pages.gather(targets), width)
        return _padded(self._states.gather(~targets[:1]), width * len(targets)).view(len(targets), width)

    def scatter(self, targets: Ints, content: Tensor) -> None:
        """Overwrite what a batch names. content: [records, width] uint8"""
        if targets[0] > 0:
            if self._pages.page_bytes:
                self._pages.scatter(targets, content[:, : self._pages.page_bytes])
        elif self._states.bytes:
            self._states.scatter(~targets[:1], content.view(1, -1)[:, : self._states.bytes])

    def together(self, targets: Ints, right: Tensor) -> tuple[list[int], Tensor]:
        """Return the pages or the snapshot of a batch, and whether each is right. right: [records] bool"""
        return (targets.tolist(), right) if targets[0] > 0 else (targets[:1].tolist(), right.all(0, keepdim=True))


class Arena:
    """Records in host memory: memory [records, record_bytes], sums [records, 2]."""

    def __init__(self, content: RecordContent, records: int, device: torch.device) -> None:
        self._content, self._on_gpu = content, device.type == "cuda"
        self._width = -(-content.bytes // WORD_BYTES) * WORD_BYTES
        self.memory = torch.empty(records, self._width, dtype=torch.uint8, pin_memory=self._on_gpu)
        self.sums = torch.zeros(records, 2, dtype=torch.int64, pin_memory=self._on_gpu)
        self._weights = checksum_weights(self._width).to(device)
        self.stored: Any = None  # the event of the latest store
        self._stream: Any = torch.cuda.Stream(device) if self._on_gpu else None  # type: ignore[no-untyped-call]

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
        """Wait until what has been stored so far is in host memory."""
        event = self.stored
        if event is not None:
            event.synchronize()

    def store(self, pages: Ints, records: Ints, tags: Longs) -> None:
        """Copy pages to records. tags: of their keys"""
        before: Any = None
        for part in self._content.batches(pages):
            content = self._content.gather(pages[part], self._width)
            sums = checksums(content, self._weights, self._on_device(tags[part]))
            if not self._on_gpu:
                index = torch.from_numpy(records[part].astype(np.int64))
                self.memory[index], self.sums[index] = content, sums
                continue
            self._stream.wait_stream(torch.cuda.current_stream())
            if before is not None:  # at most two parts take memory
                torch.cuda.current_stream().wait_event(before)
            with torch.cuda.stream(self._stream):
                for i, record in enumerate(records[part].tolist()):
                    self.memory[record].copy_(content[i], non_blocking=True)
                    self.sums[record].copy_(sums[i], non_blocking=True)
                before = self.stored = self._stream.record_event()
            content.record_stream(self._stream)
            sums.record_stream(self._stream)

    def fetch(self, records: Ints, pages: Ints, tags: Longs) -> list[Moved]:
        """Copy records to pages. tags: of the keys that the records must have"""
        batches = self._content.batches(pages)
        if not self._on_gpu:
            return [self._copy_back(records[part], pages[part], tags[part]) for part in batches]
        self._stream.wait_stream(torch.cuda.current_stream())  # launched steps may still read what the pages had
        with torch.cuda.stream(self._stream):
            return [self._bring(records[part].tolist(), pages[part], tags[part]) for part in batches]

    def _copy_back(self, records: Ints, pages: Ints, tags: Longs) -> Moved:
        index = torch.from_numpy(records.astype(np.int64))
        content = self.memory[index]
        right = (checksums(content, self._weights, self._on_device(tags)) == self.sums[index]).all(1)
        self._content.scatter(pages, content)
        return Moved(*self._content.together(pages, right), None)

    def _bring(self, records: list[int], pages: Ints, tags: Longs) -> Moved:
        """Copy records to pages, on the current stream."""
        device = self._weights.device
        content = torch.empty(len(records), self._width, dtype=torch.uint8, device=device)
        sums = torch.empty(len(records), 2, dtype=torch.int64, device=device)
        for i, record in enumerate(records):
            content[i].copy_(self.memory[record], non_blocking=True)
            sums[i].copy_(self.sums[record], non_blocking=True)
        right = (checksums(content, self._weights, self._on_device(tags)) == sums).all(1)
        self._content.scatter(pages, content)
        moved, right = self._content.together(pages, right)
        host = torch.empty(len(moved), dtype=torch.bool, pin_memory=True)
        host.copy_(right, non_blocking=True)
        return Moved(moved, host, self._stream.record_event())

    def _on_device(self, tags: Longs) -> Tensor:
        return torch.from_numpy(tags.copy()).to(self._weights.device)


def _padded(content: Tensor, size: int) -> Tensor:
    missing = size - content.shape[1]
    return functional.pad(content, (0, missing)) if missing else content


def checksum_weights(width: int) -> Tensor:
    """Return [width / 4] odd weights, the same in every process: checksums are kept on disk."""
    weights = np.frombuffer(shake_256(b"checksums of KV cache pages").digest(2 * width), np.int64) | 1
    return torch.from_numpy(weights)


def checksums(content: Tensor, weights: Tensor, tags: Tensor) -> Tensor:
    """Return [pages, 2] int64, modulo 2**64: of each page the sum of its 64-bit words, and a weighted sum of 32-bit words.

    An error changes the second sum, unless the random weights cancel it: with a probability of at most 2**-33. Tags enter both.

    content: [pages, bytes] uint8, contiguous. weights: [bytes / 4] int64. tags: [pages] int64
    """
    halves = content.view(torch.int32)
    return torch.stack((content.view(torch.int64).sum(1) + tags, (halves * weights).sum(1) ^ tags), 1)
