"""The machine a figure comes from: processor, GPU, driver, clocks, versions. Asks the system, never torch."""

import os
import platform
import subprocess
from importlib import metadata
from pathlib import Path

CPU_INFO = Path("/proc/cpuinfo")
MEMORY = Path("/proc/self/statm")
GPU_FIELDS = {  # of nvidia-smi → the name in a result
    "name": "gpu",
    "driver_version": "driver",
    "clocks.sm": "sm_clock_mhz",
    "clocks.max.sm": "max_sm_clock_mhz",
    "clocks.mem": "memory_clock_mhz",
    "power.draw": "power_watts",
    "power.limit": "power_limit_watts",
}
MEASURED = ("_mhz", "_watts")
SECONDS = 10.0  # nvidia-smi has to answer


def machine(device: str) -> dict[str, str | int | float | None]:
    """Clocks and power are those of the moment, so this is asked right after a measurement."""
    facts: dict[str, str | int | float | None] = {
        "device": device,
        "cpu": cpu_name(),
        "cpu_count": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "python_version": platform.python_version(),
        "torch_version": version("torch"),
        "triton_version": version("triton"),
    }
    return {**facts, "resident_mb": resident_mb()} if device == "cpu" else {**facts, **gpu()}


def resident_mb() -> float | None:
    """Megabytes of memory that this process holds."""
    try:
        pages = int(MEMORY.read_text().split()[1])
    except OSError:
        return None
    return pages * os.sysconf("SC_PAGE_SIZE") / 1e6


def cpu_name() -> str:
    try:
        lines = CPU_INFO.read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


def version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def gpu() -> dict[str, str | float | None]:
    """The first GPU that this process may use; nothing where nvidia-smi is not there or does not know."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")[0].strip() or "0"
    question = ["nvidia-smi", f"--id={visible}", f"--query-gpu={','.join(GPU_FIELDS)}", "--format=csv,noheader,nounits"]
    try:
        answer = subprocess.run(question, capture_output=True, text=True, check=True, timeout=SECONDS).stdout
    except (OSError, subprocess.SubprocessError):
        return {}
    return read_gpu(answer)


def read_gpu(line: str) -> dict[str, str | float | None]:
    values = [value.strip() for value in line.strip().splitlines()[0].split(",")]
    return {
        name: _number(value) if name.endswith(MEASURED) else value
        for name, value in zip(GPU_FIELDS.values(), values, strict=True)
    }


def _number(text: str) -> float | None:
    """None for [N/A] and its like."""
    try:
        return float(text)
    except ValueError:
        return None
