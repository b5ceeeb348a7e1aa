"""Moving small arrays between the host and the device, without making the host wait where that is a CUDA device's."""

import time
from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

Longs = npt.NDArray[np.int64]
LOOK = 0.1  # seconds between looks at those who are waited for


def upload(array: npt.NDArray[np.generic], device: torch.device) -> Tensor:
    """The array on `device`. On a CPU the tensor shares the array's memory.

    Pinned memory comes from torch's caching allocator, which does not hand it out again before the copy has happened.
    """
    tensor = torch.from_numpy(array)
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor.to(device)


def upload_together(arrays: Sequence[npt.NDArray[np.integer]], device: torch.device) -> list[Tensor]:
    """Several one-dimensional integer arrays in one copy; each comes out as an int64 view of one device buffer. On a CPU it
    shares the array's memory, if that is int64."""
    if device.type == "cuda":
        return _upload_packed(arrays, device)
    return [torch.from_numpy(array.astype(np.int64, copy=False)).to(device) for array in arrays]


def _upload_packed(arrays: Sequence[npt.NDArray[np.integer]], device: torch.device) -> list[Tensor]:
    """In the buffer each begins at a multiple of 16 bytes: kernels are compiled anew for pointers that do not."""
    starts = np.cumsum([0, *(len(array) + len(array) % 2 for array in arrays)]).tolist()
    packed = torch.empty(starts[-1], dtype=torch.int64, pin_memory=True)
    numbers = packed.numpy()
    for start, array in zip(starts, arrays, strict=False):
        numbers[start : start + len(array)] = array
    there = packed.to(device, non_blocking=True)
    return [there[start : start + len(array)] for start, array in zip(starts, arrays, strict=False)]


class Download:
    """Tensors on their way to the host. The copies are queued here and waited for in `wait`, so they run behind the work that
    makes them and ahead of whatever is launched next."""

    def __init__(self, tensors: list[Tensor]) -> None:
        self._host = [tensor.to("cpu", non_blocking=tensor.is_cuda).numpy() for tensor in tensors]
        on_device = [tensor for tensor in tensors if tensor.is_cuda]
        self._event: torch.cuda.Event | None = None
        if on_device:
            self._event = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._event.record(torch.cuda.current_stream(on_device[0].device))

    def wait(self, meanwhile: Callable[[float], None] | None = None) -> list[npt.NDArray[np.generic]]:
        """`meanwhile` is asked now and then, with the seconds that it takes already, and may raise: what was launched may wait
        for another process, which may be gone."""
        if self._event is not None:
            if meanwhile is None:
                self._event.synchronize()
            else:
                _look_after(self._event, meanwhile)
        return self._host


def _look_after(event: torch.cuda.Event, meanwhile: Callable[[float], None]) -> None:
    """As `synchronize` does, which also keeps a core busy."""
    began = looked = time.monotonic()
    while not event.query():  # type: ignore[no-untyped-call]
        time.sleep(0)  # other threads may want to run
        now = time.monotonic()
        if now - looked > LOOK:
            meanwhile(now - began)
            looked = now
