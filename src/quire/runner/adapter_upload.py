"""An adapter's file on its way to a GPU, beside the steps that run: nothing is done with its numbers on the host.

    file ──► pieces of pinned memory, by several threads ──► device, as it is ──► looked at, turned, multiplied: as layers read
                                                                                  it ──► to the host, to stay

All of it goes through a stream of its own. Threads hold Python for moments only: to read, to copy and to wait are done without.
"""

import logging
import os
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from queue import SimpleQueue
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from quire.files.threads import in_threads
from quire.load.adapter import Model
from quire.load.adapter_plan import KINDS, FilePlan, FilePlans, Floats
from quire.ops.adapter_moves import Moves
from quire.ops.adapter_pack import find_largest, pack
from quire.prepare.adapt import Adapters, PackedAdapter
from quire.types.errors import AdapterError, ModelError

PIECE = 4 << 20  # bytes that a thread reads at once
THREADS = 6  # they copy from memory to memory, as a rule; others hash the same file meanwhile

logger = logging.getLogger(__name__)


class Slot(NamedTuple):
    """Host memory that a device copies from."""

    room: Tensor  # [PIECE] uint8
    free: torch.cuda.Event | None  # when it has been copied


class Uploaded(NamedTuple):
    packed: PackedAdapter
    flat: Tensor  # on the device
    rank: int


class AdapterUpload:
    def __init__(self, model: Model, adapters: Adapters) -> None:
        self._adapters, self._plans, self._device = adapters, FilePlans(model, adapters), adapters.device
        cuda = self._device.type == "cuda"
        self._stream = torch.cuda.Stream(self._device) if cuda else None  # type: ignore[no-untyped-call]
        self._slots: SimpleQueue[Slot] = SimpleQueue()
        for _ in range(THREADS):
            event = torch.cuda.Event() if cuda else None  # type: ignore[no-untyped-call]
            self._slots.put(Slot(torch.empty(PIECE, dtype=torch.uint8, pin_memory=cuda), event))

    def read(self, path: str) -> Uploaded | None:
        """None = it has to be looked at on the host: it is of an unusual kind, there is something wrong with it, or the device
        has no room for it beside those that are there."""
        try:
            found = self._plans.find(path)
            if found is None:
                return None
            file, plan, config = found
            return self._read(file, plan, plan.scales(config))
        except (AdapterError, ModelError, OSError, MemoryError, torch.OutOfMemoryError) as error:
            logger.debug("%s is read on the host", path, exc_info=error)
        except Exception as error:  # the host's way does not depend on it
            logger.warning("%s is read on the host, which takes longer", path, exc_info=error)
        return None

    @torch.no_grad()
    def _read(self, file: Path, plan: FilePlan, scales: Floats) -> Uploaded | None:
        dtype, moves = self._adapters.dtype, plan.moves
        with self._aside():
            raw = torch.empty(-(-plan.bytes // PIECE) * PIECE, dtype=torch.uint8, device=self._device)
            self._bring(file, plan, raw)
            numbers = raw[: plan.bytes // plan.kind.itemsize * plan.kind.itemsize].view(plan.kind)
            flat = torch.empty(plan.layout.size, dtype=dtype, device=self._device)
            largest = find_largest(numbers, moves)
            pack(numbers, flat, moves, torch.from_numpy(plan.of_copies(scales)).to(self._device))
            if not plan.is_sound(largest.cpu().double().numpy(), scales, dtype):
                return None
            there = None
            if self._stream is None:
                held = flat
            else:
                held = self._adapters.host_room(plan.layout.size)
                for begin in range(0, len(flat), PIECE):  # steps have copies to make between
                    held[begin : begin + PIECE].copy_(flat[begin : begin + PIECE], non_blocking=True)
                there = self._stream.record_event()
        return Uploaded(PackedAdapter(held, plan.layout.where, row=plan.layout.row, there=there), flat, plan.rank)

    def _bring(self, file: Path, plan: FilePlan, raw: Tensor) -> None:
        with file.open("rb") as source:

            def bring(begin: int) -> None:
                slot = self._slots.get()
                try:
                    wanted = min(PIECE, plan.bytes - begin)
                    if slot.free is not None:
                        slot.free.synchronize()
                    fill(slot.room[:wanted], source.fileno(), plan.first + begin, file.name)
                    with self._aside():
                        raw[begin : begin + wanted].copy_(slot.room[:wanted], non_blocking=True)
                    if slot.free is not None:
                        slot.free.record(self._stream)
                finally:
                    self._slots.put(slot)

            in_threads(bring, range(0, plan.bytes, PIECE), THREADS)

    def _aside(self) -> AbstractContextManager[object]:
        return nullcontext() if self._stream is None else torch.cuda.stream(self._stream)

    def warm_up(self) -> None:
        """The kernels of every kind of file are there when the first is read."""
        moves = Moves(np.array([[0, 64]]), np.array([[0, 8, 8, 0, 1, 8]]), self._device)
        with self._aside(), torch.no_grad():
            ones = torch.ones(1, device=self._device)
            for kind in KINDS:
                raw = torch.zeros(64, dtype=kind, device=self._device)
                pack(raw, torch.empty(64, dtype=self._adapters.dtype, device=self._device), moves, ones)
                find_largest(raw, moves).cpu()


def fill(room: Tensor, source: int, begin: int, name: str) -> None:
    """room [n] uint8 with what the file has from there on."""
    there, done = room.numpy().data, 0
    while done < len(there):
        came = os.preadv(source, [there[done:]], begin + done)
        if not came:
            raise AdapterError(f"{name} was changed while it was read", "lora_path")
        done += came
