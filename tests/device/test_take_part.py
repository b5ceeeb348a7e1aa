"""Which part of which device one of several engines gets. GPUs are only counted here: CI has none."""

import os

import pytest

from quire.config.args import EngineArgs
from quire.device.base import Device
from quire.device.cuda.device import CUDADevice
from quire.device.registry import find_device
from quire.engine import assemble
from quire.engine.timeline import Stopwatch
from quire.types.errors import ConfigError
from tiny_model import make_model

VISIBLE = "CUDA_VISIBLE_DEVICES"


def see(monkeypatch: pytest.MonkeyPatch, named: str | None, count: int) -> None:
    monkeypatch.setattr("torch.cuda.device_count", lambda: count)
    monkeypatch.setattr("torch.cuda.is_available", lambda: count > 0)
    monkeypatch.delenv(VISIBLE, raising=False)
    if named is not None:
        monkeypatch.setenv(VISIBLE, named)


@pytest.mark.parametrize(
    ("named", "count", "seen"),
    [(None, 2, ["0", "1"]), ("3, 5", 2, ["3", "5"]), ("GPU-a,GPU-b,GPU-c", 3, ["GPU-a", "GPU-b"])],
)
@pytest.mark.parametrize("sharing", [False, True])
def test_every_engine_sees_one_gpu(named, count, seen, sharing, monkeypatch):
    found = []
    for engine in range(2):
        see(monkeypatch, named, count)
        assert find_device(engine, 2, sharing) == "cuda"
        found.append(os.environ[VISIBLE])
    assert found == seen


@pytest.mark.parametrize(("named", "count", "seen"), [(None, 1, ["0"] * 3), ("7", 1, ["7"] * 3), ("3,5", 2, ["3", "5", "3"])])
def test_engines_whose_memory_is_known_share(named, count, seen, monkeypatch):
    found = []
    for engine in range(3):
        see(monkeypatch, named, count)
        CUDADevice().take_part(engine, 3, sharing=True)
        found.append(os.environ[VISIBLE])
    assert found == seen


@pytest.mark.parametrize(("named", "count"), [(None, 1), ("7", 1), ("", 1), ("7,-1,-1", 1)])
def test_fewer_gpus_than_engines(named, count, monkeypatch):
    see(monkeypatch, named, count)
    with pytest.raises(ConfigError, match=r"requires a GPU for each engine; 1 are visible\. Use at most 1, or set kv_cache"):
        find_device(1, 2)


@pytest.mark.parametrize("named", ["0,0", "3, 5,3"])
def test_a_gpu_that_is_named_twice_is_no_cpu(named, monkeypatch):
    """CUDA sees none then. It is an error however many engines there are, whether or not a GPU was asked for."""
    see(monkeypatch, named, 0)
    for ask in (find_device, lambda: find_device(0, 2), lambda: find_device(1, 2, True), CUDADevice().facts):
        with pytest.raises(ConfigError, match=f"{VISIBLE}={named.replace(' ', '')} names a GPU twice, so CUDA sees no GPU"):
            ask()
    with pytest.raises(ConfigError, match="names a GPU twice"):
        CUDADevice().take_part(0, 2, sharing=True)


@pytest.mark.parametrize(("named", "engines"), [(None, 2), ("0,1", 2), ("0", 3), ("-1,-1", 2), ("", 1)])
def test_without_gpus_it_is_a_cpu(named, engines, monkeypatch):
    see(monkeypatch, named, 0)
    assert find_device(0, engines) == "cpu"


@pytest.mark.parametrize(("device", "told"), [("auto", "cuda"), ("cuda", "cuda")])
def test_the_cache_of_each_is_what_lets_them_share(device, told, tmp_path, monkeypatch):
    """As an engine process asks, up to where it would ask the GPU itself."""
    asked = []
    monkeypatch.setattr(assemble, "describe", lambda name: (asked.append(name), 1 / 0))
    args = {"model": str(make_model(tmp_path)), "device": device, "data_parallel_size": 2}
    see(monkeypatch, None, 1)
    with pytest.raises(ConfigError, match="or set kv_cache_memory_bytes, so that engines can share GPUs"):
        assemble.resolve_here(EngineArgs(**args), Stopwatch(), engine=1)
    see(monkeypatch, None, 1)
    with pytest.raises(ZeroDivisionError):
        assemble.resolve_here(EngineArgs(**args, kv_cache_memory_bytes=1 << 20), Stopwatch(), engine=1)
    assert asked == [told] and os.environ[VISIBLE] == "0"


def test_devices_of_others_are_not_divided():
    with pytest.raises(ConfigError, match="data_parallel_size=2 is not supported with device"):
        Device().take_part(0, 2)


@pytest.mark.parametrize(
    ("named", "count", "seen"),
    [(None, 4, ["0,1", "2,3"]), ("7,6,5,4", 4, ["7,6", "5,4"]), (None, 1, ["0", "0"]), ("3,5,9", 3, ["3,5", "9,3"])],
)
def test_every_engine_sees_a_gpu_for_each_of_its_ranks(named, count, seen, monkeypatch):
    found = []
    for engine in range(2):
        see(monkeypatch, named, count)
        find_device(engine, 2, sharing=True, ranks=2)
        found.append(os.environ[VISIBLE])
    assert found == seen
    see(monkeypatch, named, 3)
    with pytest.raises(
        ConfigError, match=r"data_parallel_size=2 requires 2 GPUs for each engine; 3 are visible\. Use at most 1"
    ):
        see(monkeypatch, "1,2,3", 3)
        find_device(1, 2, ranks=2)


@pytest.mark.parametrize(
    ("named", "count", "seen"),
    [(None, 3, [None, "1,2,0", "2,0,1", "0,1,2"]), ("7,5", 2, ["7,5", "5,7", "7,5", "5,7"]), (None, 1, [None, "0", "0", "0"])],
)
def test_a_ranks_own_gpu_comes_first(named, count, seen, monkeypatch):
    found = []
    for rank in range(4):
        see(monkeypatch, named, count)
        CUDADevice().take_rank(rank)
        found.append(os.environ.get(VISIBLE))
    assert found == seen
