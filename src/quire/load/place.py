"""Tensors on their way to their places in the model.

On a CPU, and on the device a tensor is on already, that is a copy. To a GPU there is a road: pieces of a few megabytes are
copied by several threads to memory the GPU can fetch from, and fetched from there behind their backs; types are changed on
the GPU. Which tensor belongs where is not known here.

    file, mapped ──► pinned buffer A ──► place             thread 1: fills A while B is being fetched
                 ╲─► pinned buffer B ──► place             thread 2: ...
"""

import os
from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from threading import local
from types import TracebackType

import numpy as np
import torch
from torch import Tensor

from quire.progress import WorkInProgress

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
