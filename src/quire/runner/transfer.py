"""Copies of small arrays between host and device. With CUDA the host does not wait for them."""

import time
from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

Longs = npt.NDArray[np.int64]
CHECK_INTERVAL_S = 0.1  # between calls of `meanwhile`


def upload(array: npt.NDArray[np.generic], device: torch.device) -> Tensor:
    """Return the array on `device`. On a CPU the tensor shares the array's memory.

    Pinned memory comes from torch's caching allocator, which does not hand it out again before the copy has happened.
    """
    tensor = torch.from_numpy(array)
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor.to(device)


def upload_together(arrays: Sequence[npt.NDArray[np.integer]], device: torch.device) -> list[Tensor]:
    """Return one-dimensional integer arrays on `device`, by one copy: each is an int64 view of one device buffer.

    On a CPU it shares the array's memory if that is int64.
    """
    if device.type == "cuda":
        return _upload_packed(arrays, device)
    return [torch.from_numpy(array.astype(np.int64, copy=False)).to(device) for array in arrays]


def _upload_packed(arrays: Sequence[npt.NDArray[np.integer]], device: torch.device) -> list[Tensor]:
    """Upload with one copy. Each array begins at a multiple of 16 bytes: Triton recompiles kernels for other alignments."""
    starts = np.cumsum([0, *(len(array) + len(array) % 2 for array in arrays)]).tolist()
    packed = torch.empty(starts[-1], dtype=torch.int64, pin_memory=True)
    numbers = packed.numpy()
    for start, array in zip(starts, arrays, strict=False):
        numbers[start : start + len(array)] = array
    on_device = packed.to(device, non_blocking=True)
    return [on_device[start : start + len(array)] for start, array in zip(starts, arrays, strict=False)]


class Download:
    """Copies of tensors to the host, queued after the work that makes them. `wait` waits for them."""

    def __init__(self, tensors: list[Tensor]) -> None:
        self._host = [tensor.to("cpu", non_blocking=tensor.is_cuda).numpy() for tensor in tensors]
        on_device = [tensor for tensor in tensors if tensor.is_cuda]
        self._event: torch.cuda.Event | None = None
        if on_device:
            self._event = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._event.record(torch.cuda.current_stream(on_device[0].device))

    def wait(self, meanwhile: Callable[[float], None] | None = None) -> list[npt.NDArray[np.generic]]:
        """Return the arrays.

        meanwhile: called regularly with the seconds waited, and may raise: launched work may wait for a process that died.
        """
        if self._event is not None:
            if meanwhile is None:
                self._event.synchronize()
            else:
                _poll(self._event, meanwhile)
        return self._host


def _poll(event: torch.cuda.Event, meanwhile: Callable[[float], None]) -> None:
    """Wait for the event, polling as `synchronize` does."""
    began = looked = time.monotonic()
    while not event.query():  # type: ignore[no-untyped-call]
        time.sleep(0)  # let other threads run
        now = time.monotonic()
        if now - looked > CHECK_INTERVAL_S:
            meanwhile(now - began)
            looked = now
