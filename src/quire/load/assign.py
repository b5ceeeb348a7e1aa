"""Tensors on their way to their places in the model.

On a CPU, and on the device a tensor is on already, that is a copy. To a GPU there is a road: pieces of a few megabytes are
copied by several threads to memory the GPU can fetch from, and fetched from there behind their backs; types are changed on
the GPU. Which tensor belongs where is not known here.

    file, mapped ──► pinned buffer A ──► place             thread 1: fills A while B is being fetched
                 ╲─► pinned buffer B ──► place             thread 2: ...
"""

import os
import re
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from threading import local
from types import TracebackType
from typing import Protocol, runtime_checkable

import numpy as np
import torch
from torch import Tensor, nn

from quire.layers.embedding import Embedding, Head
from quire.layers.parameter import CheckpointTensor, WeightSlices, whole
from quire.load.source import Source, TensorSlice
from quire.progress import WorkInProgress, doing
from quire.types.errors import ModelError

PIECE = 16 << 20  # bytes
WORKERS = min(6, os.cpu_count() or 1)
WAITING = 4 * WORKERS  # pieces that may be on their way


class Mover:
    """`put` returns early; a place is filled when the block ends."""

    def __init__(self, progress: WorkInProgress) -> None:
        self._progress = progress
        self._roads: dict[torch.device, Road] = {}

    def __enter__(self) -> "Mover":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        for road in self._roads.values():
            road.close(error is None)

    def put(self, name: str, tensor: Tensor, place: Tensor) -> None:
        if place.device.type == "cpu" or tensor.device == place.device:
            place.copy_(tensor)
            self._progress.add(place.nbytes)
            return
        road = self._roads.get(place.device) or self._roads.setdefault(place.device, Road(place.device, self._progress))
        for piece, its_place in cut(tensor, place):
            road.send(name, piece, its_place)


def cut(tensor: Tensor, place: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """Both in equal pieces of at most PIECE bytes of the tensor, along the first dimensions."""
    if tensor.nbytes <= PIECE:
        yield tensor, place
        return
    rows = PIECE // (tensor.nbytes // len(tensor))
    for start in range(0, len(tensor), max(rows, 1)):
        if rows:
            yield tensor[start : start + rows], place[start : start + rows]
        else:
            yield from cut(tensor[start], place[start])


class Road:
    """To one GPU. An error of any piece is raised by a later `send`, or by `close`."""

    def __init__(self, device: torch.device, progress: WorkInProgress) -> None:
        self._device, self._progress = device, progress
        torch.cuda.synchronize(device)  # whatever used the places' memory before is over
        self._pool = ThreadPoolExecutor(WORKERS, "quire-load")
        self._own = local()
        self._under_way: deque[tuple[str, Future[None]]] = deque()

    def send(self, name: str, tensor: Tensor, place: Tensor) -> None:
        self._under_way.append((name, self._pool.submit(self._carry, tensor, place)))
        if len(self._under_way) > WAITING:
            self._arrive()

    def close(self, wanted: bool) -> None:
        """Waits for all pieces, unless they are not `wanted` any more."""
        try:
            while wanted and self._under_way:
                self._arrive()
        finally:
            self._pool.shutdown(cancel_futures=True)
            torch.cuda.synchronize(self._device)

    def _arrive(self) -> None:
        name, future = self._under_way.popleft()
        try:
            future.result()
        except Exception as error:
            error.add_note(f"while tensor {name!r} was loaded")
            raise

    def _carry(self, tensor: Tensor, place: Tensor) -> None:
        lane = getattr(self._own, "lane", None)
        if lane is None:
            lane = self._own.lane = Lane(self._device)
        lane.carry(tensor, place)
        self._progress.add(place.nbytes)


class Lane:
    """One thread's stream and its two pinned buffers, used in turn."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._buffers = deque((torch.empty(PIECE, dtype=torch.uint8, pin_memory=True), torch.cuda.Event()) for _ in range(2))  # type: ignore[no-untyped-call]

    def carry(self, tensor: Tensor, place: Tensor) -> None:
        buffer, fetched = self._buffers[0]
        self._buffers.rotate()
        fetched.synchronize()
        source = tensor.contiguous().view(-1).view(torch.uint8)
        np.copyto(buffer.numpy()[: len(source)], source.numpy())  # not torch: it would start threads of its own in each of ours
        staged = buffer[: len(source)].view(tensor.dtype).view(tensor.shape)
        with torch.cuda.stream(self._stream), torch.no_grad():
            if staged.dtype == place.dtype:
                place.copy_(staged, non_blocking=True)
            else:
                place.copy_(staged.to(self._device, non_blocking=True))
            fetched.record(self._stream)


NOT_FINITE = "has numbers that are not finite (NaN or infinity); the file is damaged, fetch it again"
MAY_BE_INFINITE = "sinks"  # within a name; a head without one has -inf there


def is_broken(name: str, tensor: Tensor) -> bool:
    """The sum is quick, but of large numbers may be infinite, too."""
    if tensor.dtype.itemsize == 1 or not tensor.is_floating_point():
        return False
    if MAY_BE_INFINITE in name:
        return not bool((tensor < torch.inf).all())
    return not bool(tensor.sum(dtype=torch.float32).isfinite()) and not bool(tensor.isfinite().all())


def broken_parameters(model: nn.Module) -> list[str]:
    """By the model's names. On a device all sums are made before the host waits for one."""
    rows = {id(own) for part in model.modules() if isinstance(part, Embedding | Head) for own in part.parameters(recurse=False)}
    seen = [
        (name, own)
        for name, own in model.named_parameters()
        if own.is_floating_point() and own.dtype.itemsize > 1 and id(own) not in rows
    ]
    if not seen:
        return []
    finite = torch.stack([own.sum(dtype=torch.float32) for _, own in seen]).isfinite().tolist()
    return [name for (name, own), fine in zip(seen, finite, strict=True) if not fine and is_broken(name, own)]


def broken_tensor(source: Source) -> str | None:
    """The first, as the checkpoint calls it."""
    for part, tensor in source.read([TensorSlice(name) for name in source.shapes]):
        if is_broken(part.name, tensor):
            return part.name
    return None


Renames = Sequence[tuple[str, str | None]]
SHOWN = 10
# of quantized matrices: their methods look at them
_SCALES = re.compile(r"(weight|input|output)(_global)?_scale(_inv|_2)?$|scales$|SCB$|absmax$|quant_map$")


@runtime_checkable
class HasWeightSlices(Protocol):
    def weight_slices(self, path: str) -> WeightSlices: ...


def slices_of_model(model: nn.Module) -> WeightSlices:
    """By checkpoint names after renames."""
    table: WeightSlices = {}
    for path, module in model.named_modules():
        if hasattr(type(module), "weight_slices") and isinstance(
            module, HasWeightSlices
        ):  # to ask a protocol is slow where the answer is no
            table |= module.weight_slices(path)
        else:
            own = module.named_parameters(recurse=False)
            table |= {f"{path}.{name}" if path else name: whole(value.data) for name, value in own}
    return table


def rename(name: str, renames: Renames) -> str | None:
    for pattern, replacement in renames:
        if replacement is None:
            if re.search(pattern, name):
                return None
        else:
            name = re.sub(pattern, replacement, name)
    return name


def assign(table: Mapping[str, CheckpointTensor | None], source: Source, renames: Renames, where: str) -> None:
    """Copies what is claimed of the source's tensors to its places. Nothing is read if any name or shape does not fit."""
    entries = match(table, source, renames, where)
    places = {TensorSlice(name, part.ranges): part.view for name, entry in entries.items() for part in entry.destinations}
    total = sum(place.nbytes for place in places.values())
    with torch.no_grad(), doing("loading weights", total) as progress, Mover(progress) as mover:
        for part, tensor in source.read(places):
            _check_type(part.name, tensor, places[part], where)
            if tensor.ndim < 2 and not _SCALES.search(part.name) and is_broken(part.name, tensor):
                raise ModelError(f"{where}: tensor {part.name!r} {NOT_FINITE}")
            mover.put(part.name, tensor, places[part])


def match(
    table: Mapping[str, CheckpointTensor | None], source: Source, renames: Renames, where: str
) -> dict[str, CheckpointTensor]:
    """WeightSlices by the source's names. Raises ModelError if any name or shape does not fit."""
    entries, problems = _match(table, source.shapes, renames)
    if problems:
        raise ModelError(f"{where} does not fit the model:\n" + "\n".join(problems))
    return entries


def _check_type(name: str, tensor: Tensor, place: Tensor, where: str) -> None:
    """Floats of 16 bits and more become each other; what has few bits must be what was expected."""
    wide = place.is_floating_point() and place.dtype.itemsize > 1
    if wide and not (tensor.is_floating_point() and tensor.dtype.itemsize > 1):
        raise ModelError(f"{where}: tensor {name!r} is stored as {tensor.dtype}, where the model has floats")
    if not wide and tensor.dtype != place.dtype:
        raise ModelError(f"{where}: tensor {name!r} is stored as {tensor.dtype}, where {place.dtype} is expected")


def _match(
    table: Mapping[str, CheckpointTensor | None], shapes: Mapping[str, tuple[int, ...]], renames: Renames
) -> tuple[dict[str, CheckpointTensor], list[str]]:
    """WeightSlices by the source's names, and what is wrong in words."""
    entries: dict[str, CheckpointTensor] = {}
    missing = {name for name, entry in table.items() if entry is not None}
    unknown, misshaped, twice = [], [], []
    for name, shape in shapes.items():
        ours = rename(name, renames)
        if ours is None:
            continue
        if ours not in table:
            unknown.append(name)
            continue
        entry = table[ours]
        if entry is None:
            continue
        if entry.otherwise is not None and entry.otherwise.shape == tuple(shape):
            entry = entry.otherwise
        if ours not in missing:
            twice.append(name)
        elif entry.shape != tuple(shape):
            misshaped.append(f"{name} is {list(shape)}, the model needs {list(entry.shape)}")
        missing.discard(ours)
        entries[name] = entry
    findings = {"missing": missing, "unknown": unknown, "misshaped": misshaped, "given twice": twice}
    return entries, [_list(what, names) for what, names in findings.items() if names]


def _list(what: str, names: Iterable[str]) -> str:
    ordered = sorted(names, key=_natural)
    more = f", and {len(ordered) - SHOWN} more" if len(ordered) > SHOWN else ""
    return f"  {what} ({len(ordered)}): {', '.join(ordered[:SHOWN])}{more}"


def _natural(name: str) -> list[tuple[int, str]]:
    """Layer 2 before layer 10."""
    return [(int(part), "") if part.isdigit() else (-1, part) for part in re.split(r"(\d+)", name)]
