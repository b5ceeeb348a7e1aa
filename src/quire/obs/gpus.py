"""Utilization and memory of the GPUs of this machine, through NVML: a thread reads them, so that nothing waits for the driver.

The package nvidia-ml-py is optional (`pip install 'quire[nvml]'`).
"""

import logging
import threading
from collections.abc import Sequence
from typing import Any, NamedTuple

from quire.device.registry import named_gpus

logger = logging.getLogger(__name__)
SAMPLE_INTERVAL_S = 5.0


class GpuReading(NamedTuple):
    number: str  # of NVML, as in nvidia-smi
    name: str
    utilization: float  # share of the last sample period in which a kernel ran, 0 to 1
    used_bytes: int
    total_bytes: int


class GpuSampler(threading.Thread):
    """Reads all GPUs that engines of this machine may use, now and every SAMPLE_INTERVAL_S seconds."""

    def __init__(self, nvml: Any, interval: float = SAMPLE_INTERVAL_S) -> None:
        """nvml: the module pynvml."""
        super().__init__(name="quire-gpus", daemon=True)
        self.readings: Sequence[GpuReading] = ()
        self._nvml, self._interval, self._over = nvml, interval, threading.Event()

    def run(self) -> None:
        nvml = self._nvml
        try:
            nvml.nvmlInit()
            handles = _handles(nvml)
            while True:
                self.readings = [_read(nvml, handle) for handle in handles]
                if self._over.wait(self._interval):
                    return
        except Exception as error:  # of the driver, which may be missing or fail later
            self.readings = ()
            logger.debug("GPU metrics are off: %s", error)

    def end(self) -> None:
        self._over.set()


def start_sampler() -> GpuSampler | None:
    """Return a running sampler; None without nvidia-ml-py."""
    try:
        import pynvml
    except ImportError as error:
        logger.debug("GPU metrics are off: %s", error)
        return None
    sampler = GpuSampler(pynvml)
    sampler.start()
    return sampler


def _handles(nvml: Any) -> list[Any]:
    named = named_gpus() or [str(index) for index in range(nvml.nvmlDeviceGetCount())]
    return [
        nvml.nvmlDeviceGetHandleByIndex(int(name)) if name.isdigit() else nvml.nvmlDeviceGetHandleByUUID(name) for name in named
    ]


def _read(nvml: Any, handle: Any) -> GpuReading:
    name, memory = nvml.nvmlDeviceGetName(handle), nvml.nvmlDeviceGetMemoryInfo(handle)
    name = name.decode() if isinstance(name, bytes) else str(name)
    busy = nvml.nvmlDeviceGetUtilizationRates(handle).gpu / 100
    return GpuReading(str(nvml.nvmlDeviceGetIndex(handle)), name, busy, int(memory.used), int(memory.total))
