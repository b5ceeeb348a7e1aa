"""`vllm.platforms.current_platform`: the device, as programs written for vLLM query it."""

from functools import cached_property
from typing import Any


class Platform:
    """The device that an engine gets unless the program chooses another one: the first GPU, or the CPU."""

    @cached_property
    def device_type(self) -> str:
        from quire.device.registry import find_device

        return find_device()

    @property
    def device_name(self) -> str:
        return self.device_type

    def is_cuda(self) -> bool:
        return self.device_type == "cuda"

    def is_cuda_alike(self) -> bool:
        return self.is_cuda()

    def is_cpu(self) -> bool:
        return self.device_type == "cpu"

    def is_rocm(self) -> bool:
        return False

    def is_tpu(self) -> bool:
        return False

    def is_xpu(self) -> bool:
        return False

    def is_out_of_tree(self) -> bool:
        return self.device_type not in ("cuda", "cpu")

    def device_count(self) -> int:
        return self._torch.cuda.device_count() if self.is_cuda() else 1

    def get_device_name(self, device_id: int = 0) -> str:
        return self._torch.cuda.get_device_name(device_id) if self.is_cuda() else "cpu"

    def get_device_capability(self, device_id: int = 0) -> tuple[int, int] | None:
        return self._torch.cuda.get_device_capability(device_id) if self.is_cuda() else None

    def has_device_capability(self, capability: tuple[int, int] | int, device_id: int = 0) -> bool:
        """capability: (major, minor), or both as one number such as 90"""
        found = self.get_device_capability(device_id)
        required = divmod(capability, 10) if isinstance(capability, int) else capability
        return found is not None and found >= required

    @property
    def _torch(self) -> Any:
        import torch

        return torch


current_platform = Platform()
