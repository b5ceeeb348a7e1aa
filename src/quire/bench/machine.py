"""Describe the machine of a measurement: processor, GPU, driver, clocks, versions. Asks the system, never torch."""

import datetime
import os
import platform
import shlex
import subprocess
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path

from quire import __version__

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
NVIDIA_SMI_TIMEOUT_S = 10.0


def machine(device: str) -> dict[str, str | int | float | None]:
    """Return facts of the machine. Clocks and power are current values, so call it right after a measurement."""
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
    """Return the resident memory of this process in megabytes."""
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
        answer = subprocess.run(question, capture_output=True, text=True, check=True, timeout=NVIDIA_SMI_TIMEOUT_S).stdout
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
    """Return the number, or None for [N/A] and the like."""
    try:
        return float(text)
    except ValueError:
        return None


SECRET_FLAGS = ("--api-key", "--header", "--hf-token")


def provenance(argv: Sequence[str]) -> dict[str, str | None]:
    return {
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "command": shlex.join(without_secrets(argv)),
        "quire_version": __version__,
        "commit": commit(Path(__file__)),
    }


def commit(file: Path) -> str | None:
    """Return the commit of the checkout that tracks this file, with `-dirty` if it has changes; None without a checkout."""
    try:
        _git(file.parent, "ls-files", "--error-unmatch", file.name)
        head = _git(file.parent, "rev-parse", "HEAD")
        changed = _git(file.parent, "status", "--porcelain", "--untracked-files=no")
    except (OSError, subprocess.SubprocessError):
        return None
    return f"{head}-dirty" if changed else head


def without_secrets(argv: Sequence[str]) -> list[str]:
    shown: list[str] = []
    hidden = False
    for text in argv:
        flag, equals, _ = text.partition("=")
        if text.startswith("--"):
            hidden = flag.replace("_", "-") in SECRET_FLAGS
            shown.append(f"{flag}=..." if hidden and equals else text)
        else:
            shown.append("..." if hidden else text)
    return shown


def _git(directory: Path, *words: str) -> str:
    done = subprocess.run(["git", "-C", str(directory), *words], capture_output=True, text=True, check=True, timeout=10)
    return done.stdout.strip()
