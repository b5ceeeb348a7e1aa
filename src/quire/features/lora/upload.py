"""Reads an adapter's file into GPU memory while steps run, without touching its values on the host.

    file ──► pinned pieces, by several threads ──► device, as in the file ──► checked, transposed, scaled: as layers read it
                                                                              ──► host memory, for later loads

Everything runs on its own CUDA stream. A `FilePlan` maps elements of the file to elements of the buffer. It is made from the
file's header and configuration by running the host's reader (`peft.py`) on meta tensors and reading their storage offsets.
There is a plan for low-rank pairs of linear layers in one float type; every other file, and every file with an error, is read
on the host. Adapters trained in the same way have the same header and share a plan.
"""

import json
import logging
import math
import os
from collections import OrderedDict
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from queue import SimpleQueue
from threading import Lock
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from quire.features.lora.packing import Adapters, Layout, PackedAdapter
from quire.features.lora.peft import LARGEST, AdapterModel, Named, Reader, parse_name
from quire.features.lora.peft_config import AdapterConfig, interpret
from quire.features.lora.sites import LinearSite
from quire.features.lora.values import LARGE, Scaled
from quire.files.adapter import ADAPTER_LIMITS, AdapterFiles, find_adapter, read_config
from quire.files.safetensors import TensorInfo, parse_header, read_header_text
from quire.files.threads import in_threads
from quire.load.assign import rename
from quire.load.safetensors import DTYPES
from quire.ops.adapters import find_largest, pack
from quire.ops.arguments import Moves
from quire.types.errors import AdapterError, ModelError

KINDS = (torch.bfloat16, torch.float16, torch.float32)  # dtypes of weights in files
MAX_PLANS = 16
MAX_HEADER_BYTES = 8 << 20  # of a file that is planned

Floats = npt.NDArray[np.float64]


@dataclass(frozen=True)
class FilePlan:
    first: int  # byte of the file at which weights begin; `bytes`: their size
    bytes: int
    kind: torch.dtype
    layout: Layout
    moves: Moves
    modules: tuple[str, ...]  # each has lora_A and lora_B
    halves: npt.NDArray[np.int64]  # [modules, 2] lora_A and lora_B among the spans of `moves`
    scaled: npt.NDArray[np.int64]  # [copies] index of the module whose scale applies; after the last: no scale
    rank: int  # the largest

    def scales(self, config: AdapterConfig) -> Floats:
        """Return the scale of each module [modules]."""
        return np.array([config.scale_of(module) for module in self.modules])

    def of_copies(self, scales: Floats) -> npt.NDArray[np.float32]:
        return np.append(scales, 1.0)[self.scaled].astype(np.float32)

    def is_sound(self, largest: Floats, scales: Floats, dtype: torch.dtype) -> bool:
        """Return whether all weights and products surely fit into the dtype. If not, the reader checks more closely.

        largest: [spans] largest absolute weight
        """
        down, up = self.halves.T
        lengths = largest * np.sqrt(self.moves.spans[:, 1])
        fits = min(LARGEST, torch.finfo(dtype).max)
        return bool(
            (largest <= fits).all()
            and (largest[up] * np.abs(scales) <= min(LARGE, torch.finfo(dtype).max)).all()
            and (lengths[down] * lengths[up] * np.abs(scales) <= LARGEST).all()
        )


class FilePlans:
    def __init__(self, model: AdapterModel, adapters: Adapters) -> None:
        self._model, self._adapters, self._lock = model, adapters, Lock()
        self._known: OrderedDict[bytes, FilePlan] = OrderedDict()

    def find(self, path: str) -> tuple[Path, FilePlan, AdapterConfig] | None:
        """Return the file of weights, its plan and its config; None: there is no plan. Raise what is wrong with the files."""
        files = find_adapter(path)
        if files.weights.suffix != ".safetensors":
            return None
        given = read_config(files)
        config = interpret(given, str(files.config))
        text, size = read_header_text(files.weights, ADAPTER_LIMITS)
        if len(text) > MAX_HEADER_BYTES:
            return None
        key = _key(text, size, given)
        with self._lock:
            plan = self._known.get(key)
            if plan is not None:
                self._known.move_to_end(key)
        if plan is None:
            plan = self._make(files, text, size, config)
            if plan is None:
                return None
            with self._lock:
                self._known[key] = plan
                while len(self._known) > MAX_PLANS:
                    self._known.popitem(last=False)
        return files.weights, plan, config

    def _make(self, files: AdapterFiles, text: bytes, size: int, config: AdapterConfig) -> FilePlan | None:
        header = parse_header(files.weights, text, size, ADAPTER_LIMITS)
        kind, first = _kind_of(header), min((info.offset for info in header.values()), default=0)
        if kind is None or any((info.offset - first) % kind.itemsize or not info.elements for info in header.values()):
            return None
        count = max(info.offset + info.nbytes for info in header.values()) - first
        base = torch.empty(-(-count // kind.itemsize), dtype=kind, device="meta")
        tensors = {name: _view_of(base, info, first) for name, info in header.items()}
        order: dict[str, int] = {name: number for number, name in enumerate(header)}
        found = [Named(name, values, 0.0) for name, values in tensors.items()]
        parts: dict[str, dict[str, int]] = {}
        for named in found:
            module, half = parse_name(named)
            parts.setdefault(module, {})[half] = order[named.name]
        if config.dora or config.tokens or any(sorted(each) != ["down", "up"] for each in parts.values()):
            return None
        paths = {(rename(f"{module}.weight", self._model.renames) or "").removesuffix(".weight"): module for module in parts}
        if len(paths) < len(parts) or not all(isinstance(self._model.sites.get(path), LinearSite) for path in paths):
            return None
        additions, rank = Reader(config, self._model).read(found)
        layout = self._adapters.lay_out(additions)
        index_of = {module: number for number, module in enumerate(parts)}
        copies, scaled, storage = [], [], base.untyped_storage()._cdata
        spans = [span for each in layout.where.values() for span in each.values()]
        for (name, values), (to, shape) in zip(layout.given, spans, strict=True):
            source = values.values if isinstance(values, Scaled) else values
            if source.untyped_storage()._cdata != storage or source.dim() != 2:
                return None  # several tensors in one
            copies.append((to, *shape, source.storage_offset(), *source.stride()))
            scaled.append(index_of[paths[name.removesuffix(".up")]] if isinstance(values, Scaled) else len(parts))
        if layout.whole or layout.row is None or not copies:
            return None
        sources = [((info.offset - first) // kind.itemsize, info.elements) for info in header.values()]
        return FilePlan(
            first, count, kind, Layout((), layout.where, layout.size, row=layout.row),
            Moves(np.array(sources, np.int64), np.array(copies, np.int64), self._adapters.device), tuple(parts),
            np.array([(each["down"], each["up"]) for each in parts.values()], np.int64), np.array(scaled, np.int64), rank,
        )  # fmt: skip


def _key(text: bytes, size: int, config: dict[str, Any]) -> bytes:
    """Return a digest of everything that a plan depends on."""
    rest = {name: value for name, value in config.items() if name != "lora_alpha"}
    found = sha256(text)
    found.update(f"{size} {json.dumps(rest, sort_keys=True)}".encode())
    return found.digest()


def _kind_of(header: dict[str, TensorInfo]) -> torch.dtype | None:
    kinds = {DTYPES.get(info.dtype) for info in header.values()}
    kind = kinds.pop() if len(kinds) == 1 else None
    return kind if kind in KINDS else None


def _view_of(base: torch.Tensor, info: TensorInfo, first: int) -> torch.Tensor:
    strides = [math.prod(info.shape[axis + 1 :]) for axis in range(len(info.shape))]
    return base.as_strided(info.shape, strides, (info.offset - first) // base.dtype.itemsize)


PIECE_BYTES = 4 << 20  # that a thread reads at once
THREADS = 6  # usually they copy from the page cache; other threads hash the same file at the same time

logger = logging.getLogger(__name__)


class Slot(NamedTuple):
    """Host memory that a device copies from."""

    room: Tensor  # [PIECE_BYTES] uint8
    free: torch.cuda.Event | None  # recorded when it has been copied


class Uploaded(NamedTuple):
    packed: PackedAdapter
    flat: Tensor  # on the device
    rank: int


class AdapterUpload:
    def __init__(self, model: AdapterModel, adapters: Adapters) -> None:
        self._adapters, self._plans, self._device = adapters, FilePlans(model, adapters), adapters.device
        cuda = self._device.type == "cuda"
        self._stream = torch.cuda.Stream(self._device) if cuda else None  # type: ignore[no-untyped-call]
        self._slots: SimpleQueue[Slot] = SimpleQueue()
        for _ in range(THREADS):
            event = torch.cuda.Event() if cuda else None  # type: ignore[no-untyped-call]
            self._slots.put(Slot(torch.empty(PIECE_BYTES, dtype=torch.uint8, pin_memory=cuda), event))

    def read(self, path: str) -> Uploaded | None:
        """Return the uploaded adapter. None: the host must read it, because the kind or the files are unusual, or the device
        has no memory left."""
        try:
            found = self._plans.find(path)
            if found is None:
                return None
            file, plan, config = found
            return self._read(file, plan, plan.scales(config))
        except (AdapterError, ModelError, OSError, MemoryError, torch.OutOfMemoryError) as error:
            logger.debug("%s is read on the host", path, exc_info=error)
        except Exception as error:  # the host can still read it
            logger.warning("%s is read on the host, which takes longer", path, exc_info=error)
        return None

    @torch.no_grad()
    def _read(self, file: Path, plan: FilePlan, scales: Floats) -> Uploaded | None:
        dtype, moves = self._adapters.dtype, plan.moves
        with self._on_stream():
            raw = torch.empty(-(-plan.bytes // PIECE_BYTES) * PIECE_BYTES, dtype=torch.uint8, device=self._device)
            self._bring(file, plan, raw)
            weights = raw[: plan.bytes // plan.kind.itemsize * plan.kind.itemsize].view(plan.kind)
            flat = torch.empty(plan.layout.size, dtype=dtype, device=self._device)
            largest = find_largest(weights, moves)
            pack(weights, flat, moves, torch.from_numpy(plan.of_copies(scales)).to(self._device))
            if not plan.is_sound(largest.cpu().double().numpy(), scales, dtype):
                return None
            uploaded = None
            if self._stream is None:
                held = flat
            else:
                held = self._adapters.host_room(plan.layout.size)
                for begin in range(0, len(flat), PIECE_BYTES):  # in pieces, so that copies of steps come between them
                    held[begin : begin + PIECE_BYTES].copy_(flat[begin : begin + PIECE_BYTES], non_blocking=True)
                uploaded = self._stream.record_event()
        return Uploaded(PackedAdapter(held, plan.layout.where, row=plan.layout.row, uploaded=uploaded), flat, plan.rank)

    def _bring(self, file: Path, plan: FilePlan, raw: Tensor) -> None:
        with file.open("rb") as source:

            def bring(begin: int) -> None:
                slot = self._slots.get()
                try:
                    wanted = min(PIECE_BYTES, plan.bytes - begin)
                    if slot.free is not None:
                        slot.free.synchronize()
                    fill(slot.room[:wanted], source.fileno(), plan.first + begin, file.name)
                    with self._on_stream():
                        raw[begin : begin + wanted].copy_(slot.room[:wanted], non_blocking=True)
                    if slot.free is not None:
                        slot.free.record(self._stream)
                finally:
                    self._slots.put(slot)

            in_threads(bring, range(0, plan.bytes, PIECE_BYTES), THREADS)

    def _on_stream(self) -> AbstractContextManager[object]:
        return nullcontext() if self._stream is None else torch.cuda.stream(self._stream)

    def warm_up(self) -> None:
        """Compile the kernels of every kind of file before the first is read."""
        moves = Moves(np.array([[0, 64]]), np.array([[0, 8, 8, 0, 1, 8]]), self._device)
        with self._on_stream(), torch.no_grad():
            ones = torch.ones(1, device=self._device)
            for kind in KINDS:
                raw = torch.zeros(64, dtype=kind, device=self._device)
                pack(raw, torch.empty(64, dtype=self._adapters.dtype, device=self._device), moves, ones)
                find_largest(raw, moves).cpu()


def fill(room: Tensor, source: int, begin: int, name: str) -> None:
    """Fill room [n] uint8 with the file's bytes from `begin` on."""
    memory, done = room.numpy().data, 0
    while done < len(memory):
        came = os.preadv(source, [memory[done:]], begin + done)
        if not came:
            raise AdapterError(f"{name} was changed while it was read", "lora_path")
        done += came
