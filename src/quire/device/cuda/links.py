"""What stages on GPUs hand on by: memory, events and streams of CUDA."""

from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor

from quire.device.cuda.shared_bytes import close_bytes, free_bytes, open_bytes, share_bytes

Event: Any = torch.cuda.Event  # which has no types


class CUDALinks:
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
