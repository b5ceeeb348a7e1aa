"""Devices by their names: our own, and those that other packages bring under the entry point group `quire.devices`. An entry
point's name is the device's, and it leads to a subclass of `Device`. Nothing is imported before it is asked for.
"""

import importlib
from typing import TYPE_CHECKING

from quire.config.devices import brought_devices, check_device
from quire.device.base import Device
from quire.types.errors import ConfigError

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
    kind = point.load()
    if not (isinstance(kind, type) and issubclass(kind, Device)):
        raise ConfigError(f"the device {name!r}, {point.value}, is not a subclass of quire.device.base.Device")
    brought = kind()
    brought.name = name
    return brought


def find_device() -> str:
    """The one that `auto` is. Imports torch."""
    import torch

    return "cuda" if torch.cuda.is_available() else "cpu"


def describe(name: str) -> "DeviceFacts":
    """A device that this process will use."""
    return open_device(name).facts()


def describe_unseen(name: str) -> "DeviceFacts":
    """A device that another process will use: it is not asked."""
    return open_device(name).facts(memory=0)
