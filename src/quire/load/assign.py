"""Assign a checkpoint's tensors to a model's parameters: match names, check values, copy.

On a CPU, and for tensors that are on the device already, `Mover` copies directly. To a GPU, several threads copy chunks of a
few megabytes to pinned memory, from which the GPU fetches them asynchronously; dtypes are converted on the GPU.

    file, mapped ──► pinned buffer A ──► parameter             thread 1: fills A while B is being fetched
                 ╲─► pinned buffer B ──► parameter             thread 2: ...
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

CHUNK_BYTES = 16 << 20
WORKERS = min(6, os.cpu_count() or 1)
MAX_PENDING_CHUNKS = 4 * WORKERS


class Mover:
    """Copy tensors to parameters. `put` returns early; all are copied when the with block ends."""

    def __init__(self, progress: WorkInProgress) -> None:
        self._progress = progress
        self._copiers: dict[torch.device, DeviceCopier] = {}

    def __enter__(self) -> "Mover":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        for copier in self._copiers.values():
            copier.close(error is None)

    def put(self, name: str, tensor: Tensor, place: Tensor) -> None:
        if place.device.type == "cpu" or tensor.device == place.device:
            place.copy_(tensor)
            self._progress.add(place.nbytes)
            return
        copier = self._copiers.get(place.device)
        if copier is None:
            copier = self._copiers[place.device] = DeviceCopier(place.device, self._progress)
        for chunk, target in cut(tensor, place):
            copier.send(name, chunk, target)


def cut(tensor: Tensor, place: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield both tensors in equal chunks of at most CHUNK_BYTES, along the first dimensions."""
    if tensor.nbytes <= CHUNK_BYTES:
        yield tensor, place
        return
    rows = CHUNK_BYTES // (tensor.nbytes // len(tensor))
    for start in range(0, len(tensor), max(rows, 1)):
        if rows:
            yield tensor[start : start + rows], place[start : start + rows]
        else:
            yield from cut(tensor[start], place[start])


class DeviceCopier:
    """Copies to one GPU. An error of a chunk is raised by a later `send` or by `close`."""

    def __init__(self, device: torch.device, progress: WorkInProgress) -> None:
        self._device, self._progress = device, progress
        torch.cuda.synchronize(device)  # earlier users of this memory are done
        self._pool = ThreadPoolExecutor(WORKERS, "quire-load")
        self._own = local()
        self._pending: deque[tuple[str, Future[None]]] = deque()

    def send(self, name: str, tensor: Tensor, place: Tensor) -> None:
        self._pending.append((name, self._pool.submit(self._carry, tensor, place)))
        if len(self._pending) > MAX_PENDING_CHUNKS:
            self._arrive()

    def close(self, complete: bool) -> None:
        """Wait for all chunks; complete False: cancel those that have not started."""
        try:
            while complete and self._pending:
                self._arrive()
        finally:
            self._pool.shutdown(cancel_futures=True)
            torch.cuda.synchronize(self._device)

    def _arrive(self) -> None:
        name, future = self._pending.popleft()
        try:
            future.result()
        except Exception as error:
            error.add_note(f"while tensor {name!r} was loaded")
            raise

    def _carry(self, tensor: Tensor, place: Tensor) -> None:
        stream = getattr(self._own, "stream", None)
        if stream is None:
            stream = self._own.stream = CopyStream(self._device)
        stream.carry(tensor, place)
        self._progress.add(place.nbytes)


class CopyStream:
    """One thread's CUDA stream and its two pinned buffers, used in turn."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        events = (torch.cuda.Event() for _ in range(2))  # type: ignore[no-untyped-call]
        self._buffers = deque((torch.empty(CHUNK_BYTES, dtype=torch.uint8, pin_memory=True), event) for event in events)

    def carry(self, tensor: Tensor, place: Tensor) -> None:
        buffer, fetched = self._buffers[0]
        self._buffers.rotate()
        fetched.synchronize()
        source = tensor.contiguous().view(-1).view(torch.uint8)
        np.copyto(buffer.numpy()[: len(source)], source.numpy())  # torch would start threads of its own in each of ours
        staged = buffer[: len(source)].view(tensor.dtype).view(tensor.shape)
        with torch.cuda.stream(self._stream), torch.no_grad():
            if staged.dtype == place.dtype:
                place.copy_(staged, non_blocking=True)
            else:
                place.copy_(staged.to(self._device, non_blocking=True))
            fetched.record(self._stream)


NOT_FINITE = "has values that are NaN or infinite; the file is damaged, download it again"
MAY_BE_INFINITE = "sinks"  # within a name; a head without an attention sink has -inf there


def is_broken(name: str, tensor: Tensor) -> bool:
    """Return whether a tensor has NaN or infinite values. A sum is quick to check, but may itself overflow."""
    if tensor.dtype.itemsize == 1 or not tensor.is_floating_point():
        return False
    if MAY_BE_INFINITE in name:
        return not bool((tensor < torch.inf).all())
    return not bool(tensor.sum(dtype=torch.float32).isfinite()) and not bool(tensor.isfinite().all())


def broken_parameters(model: nn.Module) -> list[str]:
    """Return the names of parameters with NaN or infinite values. All sums are launched before the host waits for one."""
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
    """Return the checkpoint's name of the first tensor with NaN or infinite values."""
    for part, tensor in source.read([TensorSlice(name) for name in source.shapes]):
        if is_broken(part.name, tensor):
            return part.name
    return None


Renames = Sequence[tuple[str, str | None]]
MAX_LISTED = 10
# of quantized matrices: their methods check them
_SCALES = re.compile(r"(weight|input|output)(_global)?_scale(_inv|_2)?$|scales$|SCB$|absmax$|quant_map$")


@runtime_checkable
class HasWeightSlices(Protocol):
    def weight_slices(self, path: str) -> WeightSlices: ...


def slices_of_model(model: nn.Module) -> WeightSlices:
    """Return the weight slices of all modules, by checkpoint names after renames."""
    table: WeightSlices = {}
    for path, module in model.named_modules():
        # the protocol check is slow for modules that fail it, so look for the attribute first
        if hasattr(type(module), "weight_slices") and isinstance(module, HasWeightSlices):
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
    """Copy the source's tensors to their destinations. Nothing is read if a name or shape does not fit."""
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
    """Return checkpoint tensors by the source's names. Raise ModelError if a name or shape does not fit."""
    entries, problems = _match(table, source.shapes, renames)
    if problems:
        raise ModelError(f"{where} does not fit the model:\n" + "\n".join(problems))
    return entries


def _check_type(name: str, tensor: Tensor, place: Tensor, where: str) -> None:
    """Check a tensor's dtype: floats of 16 bits and more are converted to each other; all others must match."""
    wide = place.is_floating_point() and place.dtype.itemsize > 1
    if wide and not (tensor.is_floating_point() and tensor.dtype.itemsize > 1):
        raise ModelError(f"{where}: tensor {name!r} is stored as {tensor.dtype}, but the model requires floats")
    if not wide and tensor.dtype != place.dtype:
        raise ModelError(f"{where}: tensor {name!r} is stored as {tensor.dtype}; expected {place.dtype}")


def _match(
    table: Mapping[str, CheckpointTensor | None], shapes: Mapping[str, tuple[int, ...]], renames: Renames
) -> tuple[dict[str, CheckpointTensor], list[str]]:
    """Return checkpoint tensors by the source's names, and descriptions of all problems."""
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
            misshaped.append(f"{name} is {list(shape)}, the model requires {list(entry.shape)}")
        missing.discard(ours)
        entries[name] = entry
    findings = {"missing": missing, "unknown": unknown, "misshaped": misshaped, "given twice": twice}
    return entries, [_list(what, names) for what, names in findings.items() if names]


def _list(what: str, names: Iterable[str]) -> str:
    ordered = sorted(names, key=_natural)
    more = f", and {len(ordered) - MAX_LISTED} more" if len(ordered) > MAX_LISTED else ""
    return f"  {what} ({len(ordered)}): {', '.join(ordered[:MAX_LISTED])}{more}"


def _natural(name: str) -> list[tuple[int, str]]:
    """Return a sort key with layer 2 before layer 10."""
    return [(int(part), "") if part.isdigit() else (-1, part) for part in re.split(r"(\d+)", name)]
