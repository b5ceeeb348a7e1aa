"""Which part of which device one of several engines gets. GPUs are only counted here: CI has none."""

import os

import pytest

from quire.device.base import Device
from quire.device.cuda.device import CUDADevice
from quire.types.errors import ConfigError


@pytest.mark.parametrize(
    ("named", "count", "seen"),
    [(None, 2, ["0", "1"]), ("3,5", 2, ["3", "5"]), ("0, 0", 1, ["0", "0"]), ("GPU-a,GPU-b,GPU-c", 3, ["GPU-a", "GPU-b"])],
)
def test_every_engine_sees_one_gpu(named, count, seen, monkeypatch):
    monkeypatch.setattr("torch.cuda.device_count", lambda: count)
    found = []
    for engine in range(2):
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
        if named is not None:
            monkeypatch.setenv("CUDA_VISIBLE_DEVICES", named)
        CUDADevice().take_part(engine, 2)
        found.append(os.environ["CUDA_VISIBLE_DEVICES"])
    assert found == seen


@pytest.mark.parametrize(("named", "count"), [(None, 1), ("7", 1), ("", 1)])
def test_fewer_gpus_than_engines(named, count, monkeypatch):
    monkeypatch.setattr("torch.cuda.device_count", lambda: count)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if named is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", named)
    with pytest.raises(ConfigError, match="needs a GPU for each engine, and 1 can be seen here; use at most 1"):
        CUDADevice().take_part(1, 2)


def test_devices_of_others_are_not_divided():
    with pytest.raises(ConfigError, match="data_parallel_size=2 cannot be had with device"):
        Device().take_part(0, 2)
