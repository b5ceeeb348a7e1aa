"""Memory of a GPU that several processes have mapped: CUDA's inter-process handles, by the driver's own functions.

torch can share tensors between processes, too, but keeps a file of counts in /dev/shm, which a killed process leaves behind.
"""

import ctypes
from typing import Any

import torch
from torch import Tensor

HANDLE = 64  # bytes
_LAZY_PEER_ACCESS = 1


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
    """[size] uint8 of memory that is there already. It counts as `device`'s even where another card has it: whatever finds out
    whose it is (`__cuda_array_interface__` does) would make torch copy it."""
    storage = torch._C._construct_storage_from_data_pointer(address, device, size)
    return torch.empty(0, dtype=torch.uint8, device=device).set_(storage)


def _ask(name: str, *arguments: Any) -> None:
    code = getattr(ctypes.CDLL("libcuda.so.1"), name)(*arguments)
    if code:
        raise RuntimeError(f"{name} failed with CUDA error {code}")
