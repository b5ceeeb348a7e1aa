"""What is to be done with the numbers of an adapter's file, said before any of them is read: from its header and configuration.

It is the reader's own work (`adapter.py`), done with tensors without numbers, whose places in the file are then read off. That
goes for low-rank halves of linear layers in one type of floats, where kernels add them: most adapters are nothing else. Of
others, and of those with something wrong, there is no plan, and the reader says what it is. Adapters that were trained in the
same way have the same header, and so the same plan; how much their matrices are multiplied by may differ.
"""

import json
import math
from collections import OrderedDict
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from threading import Lock
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from quire.files.adapter import ADAPTER_LIMITS, AdapterFiles, find_adapter, read_config
from quire.files.safetensors import TensorInfo, parse_header, read_header_text
from quire.load.adapter import LARGEST, Model, Named, Reader, parse_name
from quire.load.adapter_config import AdapterConfig, interpret
from quire.load.assign import rename
from quire.load.safetensors import DTYPES
from quire.ops.adapter_moves import Moves
from quire.prepare.adapt import Adapters, Layout
from quire.prepare.adapter_numbers import LARGE, Scaled
from quire.prepare.adapter_sites import LinearSite

KINDS = (torch.bfloat16, torch.float16, torch.float32)  # of numbers in files
REMEMBERED = 16  # plans
LARGEST_HEADER = 8 << 20  # bytes of a header that is planned

Floats = npt.NDArray[np.float64]


@dataclass(frozen=True)
class FilePlan:
    first: int  # byte of the file that there are numbers from, and how many bytes
    bytes: int
    kind: torch.dtype
    layout: Layout
    moves: Moves
    modules: tuple[str, ...]  # that have two halves each
    halves: npt.NDArray[np.int64]  # [modules, 2] lora_A and lora_B among the spans of `moves`
    scaled: npt.NDArray[np.int64]  # [copies] by the scale of which module; behind the last: not at all
    rank: int  # the largest

    def scales(self, config: AdapterConfig) -> Floats:
        """[modules]."""
        return np.array([config.scale_of(module) for module in self.modules])

    def of_copies(self, scales: Floats) -> npt.NDArray[np.float32]:
        return np.append(scales, 1.0)[self.scaled].astype(np.float32)

    def is_sound(self, largest: Floats, scales: Floats, dtype: torch.dtype) -> bool:
        """Is it certain that all of it can be run in this type? largest [spans]: how far from 0 numbers get. If it is not, the
        reader looks closer."""
        down, up = self.halves.T
        lengths = largest * np.sqrt(self.moves.spans[:, 1])
        fits = min(LARGEST, torch.finfo(dtype).max)
        return bool(
            (largest <= fits).all()
            and (largest[up] * np.abs(scales) <= min(LARGE, torch.finfo(dtype).max)).all()
            and (lengths[down] * lengths[up] * np.abs(scales) <= LARGEST).all()
        )


class FilePlans:
    def __init__(self, model: Model, adapters: Adapters) -> None:
        self._model, self._adapters, self._lock = model, adapters, Lock()
        self._known: OrderedDict[bytes, FilePlan] = OrderedDict()

    def find(self, path: str) -> tuple[Path, FilePlan, AdapterConfig] | None:
        """The file that has the numbers, and what becomes of them. Raises what is wrong, or has no plan then."""
        files = find_adapter(path)
        if files.weights.suffix != ".safetensors":
            return None
        given = read_config(files)
        config = interpret(given, str(files.config))
        text, size = read_header_text(files.weights, ADAPTER_LIMITS)
        if len(text) > LARGEST_HEADER:
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
                while len(self._known) > REMEMBERED:
                    self._known.popitem(last=False)
        return files.weights, plan, config

    def _make(self, files: AdapterFiles, text: bytes, size: int, config: AdapterConfig) -> FilePlan | None:
        header = parse_header(files.weights, text, size, ADAPTER_LIMITS)
        kind, first = _kind_of(header), min((info.offset for info in header.values()), default=0)
        if kind is None or any((info.offset - first) % kind.itemsize or not info.elements for info in header.values()):
            return None
        count = max(info.offset + info.nbytes for info in header.values()) - first
        base = torch.empty(-(-count // kind.itemsize), dtype=kind, device="meta")
        tensors = {name: _place(base, info, first) for name, info in header.items()}
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
        numbers = {module: number for number, module in enumerate(parts)}
        copies, scaled, storage = [], [], base.untyped_storage()._cdata
        places = [place for each in layout.where.values() for place in each.values()]
        for (name, values), (to, shape) in zip(layout.given, places, strict=True):
            source = values.values if isinstance(values, Scaled) else values
            if source.untyped_storage()._cdata != storage or source.dim() != 2:
                return None  # put together of several
            copies.append((to, *shape, source.storage_offset(), *source.stride()))
            scaled.append(numbers[paths[name.removesuffix(".up")]] if isinstance(values, Scaled) else len(parts))
        if layout.whole or layout.row is None or not copies:
            return None
        spans = [((info.offset - first) // kind.itemsize, info.elements) for info in header.values()]
        return FilePlan(
            first, count, kind, Layout((), layout.where, layout.size, row=layout.row),
            Moves(np.array(spans, np.int64), np.array(copies, np.int64), self._adapters.device), tuple(parts),
            np.array([(each["down"], each["up"]) for each in parts.values()], np.int64), np.array(scaled, np.int64), rank,
        )  # fmt: skip


def _key(text: bytes, size: int, config: dict[str, Any]) -> bytes:
    """All that a plan depends on."""
    rest = {name: value for name, value in config.items() if name != "lora_alpha"}
    found = sha256(text)
    found.update(f"{size} {json.dumps(rest, sort_keys=True)}".encode())
    return found.digest()


def _kind_of(header: dict[str, TensorInfo]) -> torch.dtype | None:
    kinds = {DTYPES.get(info.dtype) for info in header.values()}
    kind = kinds.pop() if len(kinds) == 1 else None
    return kind if kind in KINDS else None


def _place(base: torch.Tensor, info: TensorInfo, first: int) -> torch.Tensor:
    strides = [math.prod(info.shape[axis + 1 :]) for axis in range(len(info.shape))]
    return base.as_strided(info.shape, strides, (info.offset - first) // base.dtype.itemsize)
