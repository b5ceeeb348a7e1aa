"""The CPU of this process."""

import mmap
import platform
import warnings
from collections.abc import Callable
from contextlib import suppress
from functools import cache
from hashlib import sha256
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING

from quire.config.devices import KEEPS
from quire.config.facts import DeviceFacts
from quire.config.host import available_host_bytes, count_threads, take_cores
from quire.config.memory import host_cache_bytes
from quire.device.base import GIB, Device, PlannedBudget, Prepared, Setting, no_memory
from quire.ops.native import multiplies, multiplies_floats

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from quire.device.cpu.process_memory import AllocatorTrim
    from quire.models.decoder import Decoder

ADVICE = (
    "no kernels for quantized weights are installed, so weights are dequantized to float32, which takes more memory and "
    "time. On x86 Linux run pip install 'quire[cpu]'; on ARM install Quire with a C compiler."
)
BATCH_DEPENDENCE = "this CPU. It requires Quire's C kernels and, on x86, AVX2"
CPU_INFO = Path("/proc/cpuinfo")
CPU_INFO_FIELDS = ("model name", "flags", "Features", "CPU")  # x86 writes the first two, ARM the others
PAGE, NETWORK_PAGE = 16, 32  # tokens; OpenVINO attention requires the second


@cache
def has_openvino() -> bool:
    """Return whether OpenVINO is installed. Only on x86 does it keep weights quantized."""
    if platform.machine() not in ("x86_64", "AMD64"):
        return False
    try:
        version("openvino")
    except PackageNotFoundError:
        return False
    return True


def cpu_features() -> str:
    """Return a digest of the CPU's name and instructions; "": the system does not tell them."""
    with suppress(OSError):
        lines = {line for line in CPU_INFO.read_text().splitlines() if line.startswith(CPU_INFO_FIELDS)}
        return sha256("\n".join(sorted(lines)).encode()).hexdigest()[:16]
    return ""


def kernel_set() -> str:
    """Return what the bits of a step depend on besides the model: instructions, C kernels and OpenVINO where it is used."""
    own = f"C kernels: {multiplies()}, for floats: {multiplies_floats()}"
    library = f"openvino {version('openvino')}" if has_openvino() and not multiplies() else "no openvino"
    return f"{cpu_features()}, {own}, {library}"


def multiply_quantized() -> bool:
    """Return whether any kernel multiplies by quantized weights."""
    return has_openvino() or multiplies()


class CPUDevice(Device):
    name = "cpu"

    def __init__(self) -> None:
        self._trim: AllocatorTrim | None = None

    def facts(self, memory: int | None = None) -> DeviceFacts:
        available = available_host_bytes() if memory is None else memory
        able = multiply_quantized()
        return DeviceFacts(
            self.name,
            self.name,
            total_bytes=available,
            free_bytes=available,
            page_size=PAGE,
            keeps=KEEPS["cpu"] if able else frozenset(),
            quantized_page_size=NETWORK_PAGE,
            advice="" if able else ADVICE,
            reads_in_place=True,
            one_memory=True,
            batch_dependence="" if multiplies_floats() else BATCH_DEPENDENCE,
            packs_floats=multiplies_floats(),
            kernels=kernel_set(),
        )

    def take_part(self, engine: int, engines: int, sharing: bool = False, ranks: int = 1) -> None:  # noqa: ARG002
        take_cores(engine * ranks, engines * ranks)

    @property
    def torch_device(self) -> "torch.device":
        import torch

        return torch.device("cpu")

    def start(self) -> None:
        import torch

        from quire.device.cpu.process_memory import AllocatorTrim

        # bfloat16 on a CPU without support: slow but correct
        warnings.filterwarnings("ignore", "mkldnn_matmul failed, switching to BLAS gemm")
        torch.set_num_threads(count_threads())
        self._trim = AllocatorTrim()

    def prepare(self, model: "Decoder", setting: Setting) -> Prepared:
        from quire.device.cpu.prepare import prepare

        return prepare(model, setting)

    def allocate(self, pages: int, page_bytes: int) -> "Tensor":
        """Return zeroed memory that is allocated at the first access. Huge pages are off: a few tokens of one head would
        allocate 2 MiB.
        """
        import torch

        memory = mmap.mmap(-1, pages * page_bytes, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        if hasattr(mmap, "MADV_NOHUGEPAGE"):
            memory.madvise(mmap.MADV_NOHUGEPAGE)
        return torch.frombuffer(memory, dtype=torch.uint8).view(pages, page_bytes)

    def budget(self, utilization: float, profile_run: Callable[[], None], reserve: int) -> int:  # noqa: ARG002
        """Return a cautious share of the memory that is free after the model was loaded."""
        available = available_host_bytes()
        budget = host_cache_bytes(available)
        if budget <= 0:
            raise no_memory(
                f"{available / GIB:.2f} GiB are free after loading the model. "
                "Use a smaller model or dtype, free some memory, or set kv_cache_memory_bytes."
            )
        return budget

    def plan_budget(self, total: int, utilization: float, used: int) -> PlannedBudget:  # noqa: ARG002
        return PlannedBudget(total, 0, host_cache_bytes(total - used))

    def note(self, tokens: int) -> None:
        if self._trim is not None:
            self._trim.note(tokens)
