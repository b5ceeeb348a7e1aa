"""NVIDIA's multi-process service: kernels of several processes run on one GPU at the same time."""

import contextlib
import os
import shutil
import subprocess
from pathlib import Path

CONTROL = "nvidia-cuda-mps-control"


@contextlib.contextmanager
def mps(folder: Path):
    """Yield the environment of processes that use it; without the service, one in which they take turns."""
    if shutil.which(CONTROL) is None:
        yield {}
        return
    settings = {"CUDA_MPS_PIPE_DIRECTORY": str(folder / "pipe"), "CUDA_MPS_LOG_DIRECTORY": str(folder / "log")}
    for path in settings.values():
        Path(path).mkdir(parents=True)
    subprocess.run([CONTROL, "-d"], env=os.environ | settings, check=True, timeout=30)
    try:
        yield settings
    finally:
        subprocess.run([CONTROL], env=os.environ | settings, input="quit -t 5\n", text=True, check=False, timeout=60)
