"""GPU memory and events that several processes share, by CUDA's inter-process handles.

The driver is called directly: torch can share tensors too, but keeps reference counts in a file in /dev/shm, which stays
after a process was killed.
"""

import ctypes
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor

HANDLE = 64  # bytes
_LAZY_PEER_ACCESS = 1

Event: Any = torch.cuda.Event  # torch has no types for it


class _Handle(ctypes.Structure):
    _fields_ = (("reserved", ctypes.c_char * HANDLE),)


def share_bytes(size: int, device: torch.device) -> tuple[Tensor, bytes]:
    """Allocate memory; return it and the handle by which other processes open it. `free_bytes` gives it back."""
    address, handle = ctypes.c_uint64(), _Handle()
    with torch.cuda.device(device):
        torch.cuda.current_stream().synchronize()  # the device's context is this thread's now
        _ask("cuMemAlloc_v2", ctypes.byref(address), ctypes.c_size_t(size))
        _ask("cuIpcGetMemHandle", ctypes.byref(handle), address)
    return view_bytes(address.value, size, device), ctypes.string_at(ctypes.byref(handle), HANDLE)


def open_bytes(handle: bytes, size: int, device: torch.device) -> Tensor:
    """Map memory that another process shares, on this GPU or on one that this GPU can access. `close_bytes` unmaps it."""
    address = ctypes.c_uint64()
    with torch.cuda.device(device):
        torch.cuda.current_stream().synchronize()
        _ask("cuIpcOpenMemHandle_v2", ctypes.byref(address), _Handle.from_buffer_copy(handle), ctypes.c_uint(_LAZY_PEER_ACCESS))
    return view_bytes(address.value, size, device)


def free_bytes(memory: Tensor) -> None:
    """Free what `share_bytes` allocated. No other process may have it open."""
    _release("cuMemFree_v2", memory)


def close_bytes(memory: Tensor) -> None:
    """Unmap what `open_bytes` mapped."""
    _release("cuIpcCloseMemHandle", memory)


def _release(name: str, memory: Tensor) -> None:
    with torch.cuda.device(memory.device):
        torch.cuda.current_stream().synchronize()
        _ask(name, ctypes.c_uint64(memory.data_ptr()))


def view_bytes(address: int, size: int, device: torch.device) -> Tensor:
    """Return [size] uint8 over memory that is already allocated.

    It is labelled as memory of `device` even if another GPU has it. With an interface that looks up the owner, such as
    `__cuda_array_interface__`, torch would copy it.
    """
    storage = torch._C._construct_storage_from_data_pointer(address, device, size)
    return torch.empty(0, dtype=torch.uint8, device=device).set_(storage)


def _ask(name: str, *arguments: Any) -> None:
    code = getattr(ctypes.CDLL("libcuda.so.1"), name)(*arguments)
    if code:
        raise RuntimeError(f"{name} failed with CUDA error {code}")


class CUDALinks:
    """Memory, events and streams for the channel between pipeline stages on GPUs (`channel.py`)."""

    def __init__(self, device: torch.device) -> None:
        self.device = torch.device(device.type, torch.cuda.current_device())

    def share(self, size: int) -> tuple[Tensor, bytes]:
        return share_bytes(size, self.device)

    def open(self, handle: bytes, size: int) -> Tensor:
        return open_bytes(handle, size, self.device)

    def free(self, memory: Tensor) -> None:
        free_bytes(memory)

    def close(self, memory: Tensor) -> None:
        close_bytes(memory)

    def event(self, shared: bool = False) -> Any:
        return Event(interprocess=shared)

    def open_event(self, handle: bytes) -> Any:
        return Event.from_ipc_handle(self.device, handle)

    def stream(self) -> Any:
        return torch.cuda.Stream(self.device)  # type: ignore[no-untyped-call]

    def current(self) -> Any:
        return torch.cuda.current_stream(self.device)

    def on(self, stream: Any) -> AbstractContextManager[Any]:
        return torch.cuda.stream(stream)
