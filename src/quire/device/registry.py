"""Devices by their names: our own, and those that other packages bring under the entry point group `quire.devices`. An entry
point's name is the device's, and it leads to a subclass of `Device`. Nothing is imported before it is asked for.
"""

import importlib
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from quire.config.devices import brought_devices, check_device
from quire.device.base import Device
from quire.device.visible import named_gpus
from quire.types.errors import ConfigError, QuireError

if TYPE_CHECKING:
    from quire.config.facts import DeviceFacts

DEVICES = {"cpu": "quire.device.cpu.device:CPUDevice", "cuda": "quire.device.cuda.device:CUDADevice"}


def open_device(name: str) -> Device:
    if name in DEVICES:
        module, attribute = DEVICES[name].split(":")
        device: Device = getattr(importlib.import_module(module), attribute)()
        return device
    check_device(name)
    point = brought_devices()[name]
    with _blamed(name, point.value):
        kind = point.load()
        if not (isinstance(kind, type) and issubclass(kind, Device)):
            raise ConfigError("it is not a subclass of quire.device.base.Device")
        brought = kind()
    brought.name = name
    return brought


@contextmanager
def _blamed(name: str, where: str) -> Iterator[None]:
    """Whatever another package's device does wrong is an error that names it."""
    try:
        yield
    except (Exception, SystemExit) as error:
        why = str(error) if isinstance(error, QuireError) else f"{type(error).__name__}: {error}"
        raise ConfigError(f"the device {name!r}, {where}, cannot be used: {why}") from error


def find_device(engine: int = 0, engines: int = 1, sharing: bool = False, ranks: int = 1) -> str:
    """The one that `auto` is. Imports torch. Of several engines each takes its own GPUs, one for each of its ranks, before CUDA
    is asked anything, or some that it shares."""
    import torch

    named_gpus()
    if engines > 1 and torch.cuda.device_count():
        open_device("cuda").take_part(engine, engines, sharing, ranks)
    return "cuda" if torch.cuda.is_available() else "cpu"


def describe(name: str) -> "DeviceFacts":
    """A device that this process will use."""
    return _facts(name)


def describe_unseen(name: str) -> "DeviceFacts":
    """A device that another process will use: it is not asked."""
    return _facts(name, memory=0)


def _facts(name: str, **known: int) -> "DeviceFacts":
    from quire.config.facts import DeviceFacts

    device = open_device(name)
    if name in DEVICES:
        return device.facts(**known)
    with _blamed(name, type(device).__qualname__):
        facts = device.facts(**known)
        if not isinstance(facts, DeviceFacts):
            raise ConfigError(f"its facts() gave {facts!r}, not DeviceFacts")
    return facts
