"""The device half of the host tier: pages are stored in records of host memory, and fetched from them, as plans say. A snapshot
of recurrent states is divided among several records.

Every record has a checksum of its content and its page's key, computed where the page comes from, and again where it arrives.
"""

from collections.abc import Callable, Hashable, Sequence

import torch

from quire.config.host import available_host_bytes
from quire.device.base import GIB, Device
from quire.features.base import Allocation, StepPart
from quire.features.tiers.host import OTHER_BUFFERS, DiskSetting
from quire.features.tiers.records import Arena, Moved, RecordContent
from quire.features.tiers.states import StateMemory
from quire.features.tiers.threads import DiskThreads, Pairs
from quire.layers.recurrent import Recurrence
from quire.models.decoder import Decoder
from quire.types.errors import ConfigError
from quire.types.plan import StepPlan, StepRows


class TiersPart(StepPart):
    name = "tiers"
    moves_pages = True

    def __init__(
        self,
        device: Device,
        dtype: torch.dtype,
        host_bytes: int,
        machine_bytes: int,
        reserved: int,
        buffers: int,
        disk: DiskSetting | None = None,
    ) -> None:
        """host_bytes: of this rank's records. machine_bytes: the same, of all ranks on this machine. reserved: bytes of device
        memory for pages. buffers: on the device, for pages that are stored. disk: None: nothing is kept on disk.
        """
        self._device, self._dtype, self._bytes = device, dtype, host_bytes
        self._machine_bytes, self._reserved = machine_bytes, reserved
        self._buffers, self._disk_setting = buffers, disk
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
        return max(self._reserved, (self._buffers + OTHER_BUFFERS) * states)

    def allocate(self, allocation: Allocation) -> None:
        self._close_arena()
        if allocation.pages and allocation.memory is not None:
            states = StateMemory(self._recurrents)
            content = RecordContent([allocation.memory, *allocation.others], states, allocation.snapshot_records)
            self._arena = Arena(content, self._bytes // content.bytes, self._buffers, self._device.torch_device)
            if self._disk_setting is not None:
                share = f"{allocation.share}, pages of {content.page_bytes} bytes, states of {states.bytes}"
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
        done = [moved for moved in self._moved if moved.end.reached]
        self._moved = [moved for moved in self._moved if moved not in done]
        return [pair for moved in done for pair in zip(moved.pages, moved.right.tolist(), strict=True)]

    def abandon(self, pages: Sequence[int]) -> None:
        """Wait until nothing writes to these pages any more, and do not report them."""
        gone = set(pages)
        for moved in [moved for moved in self._moved if gone.intersection(moved.pages)]:
            moved.end.wait()
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

    def _close_arena(self) -> None:
        if self._arena is not None:
            self._close_disk()
            self._arena.close()
        self._arena, self._moved = None, []

    def _close_disk(self) -> None:
        if self._disk is not None:
            self._disk.close()
        self._disk = None

    def describe(self) -> dict[str, int]:
        return {} if self._arena is None else {"host_tier_bytes": self._arena.memory.numel()}

    def close(self) -> None:
        self._close_arena()
        self._recurrents = ()

    @property
    def _own_arena(self) -> Arena:
        assert self._arena is not None
        return self._arena
