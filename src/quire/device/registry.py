"""Open devices by name: `cpu`, `cuda`, and those of other packages, from the entry point group `quire.devices`.

An entry point's name is the device's name, its value a subclass of `Device`. Nothing is imported before it is opened.
"""

import importlib
import os
from itertools import takewhile
from typing import TYPE_CHECKING

from quire.config.devices import check_device, plugin_devices
from quire.device.base import Device
from quire.types.errors import ConfigError

if TYPE_CHECKING:
    from quire.config.facts import DeviceFacts

VISIBLE = "CUDA_VISIBLE_DEVICES"  # environment
DEVICES = {"cpu": "quire.device.cpu.device:CPUDevice", "cuda": "quire.device.cuda.device:CUDADevice"}


def named_gpus() -> list[str]:
    """Return the GPUs named in CUDA_VISIBLE_DEVICES; none if it is not set. Does not query a GPU or import torch.

    Raises ConfigError if a GPU is named twice: CUDA would then see no GPU at all, and `auto` would choose the CPU.
    """
    names = [name.strip() for name in os.environ.get(VISIBLE, "").split(",")]
    named = list(takewhile(lambda name: name and not name.startswith("-"), names))  # CUDA ignores the rest
    if len(set(named)) < len(named):
        raise ConfigError(
            f"{VISIBLE}={','.join(names)} names a GPU twice, so CUDA sees no GPU. Name each GPU once. Engines of "
            "data_parallel_size share GPUs if kv_cache_memory_bytes is set"
        )
    return named


def open_device(name: str) -> Device:
    """Return the device of this name. Raises ConfigError if there is none or if its package fails."""
    if name in DEVICES:
        module, attribute = DEVICES[name].split(":")
        device: Device = getattr(importlib.import_module(module), attribute)()
        return device
    check_device(name)
    plugin = plugin_devices()[name]
    kind = plugin.load()
    with plugin.blamed():
        if not (isinstance(kind, type) and issubclass(kind, Device)):
            raise ConfigError("it is not a subclass of quire.device.base.Device")
        custom = kind()
    custom.name = name
    return custom


def find_device(engine: int = 0, engines: int = 1, sharing: bool = False, ranks: int = 1) -> str:
    """Return the device that `auto` stands for. Imports torch.

    Each of several engines selects its GPUs, one per rank, before CUDA is initialized.
    """
    import torch

    named_gpus()
    if engines > 1 and torch.cuda.device_count():
        open_device("cuda").take_part(engine, engines, sharing, ranks)
    return "cuda" if torch.cuda.is_available() else "cpu"


def describe(name: str) -> "DeviceFacts":
    """Return the facts of a device that this process will use."""
    return _facts(name)


def describe_unseen(name: str) -> "DeviceFacts":
    """Return the facts of a device that another process will use, without querying it."""
    return _facts(name, memory=0)


def _facts(name: str, **known: int) -> "DeviceFacts":
    from quire.config.facts import DeviceFacts

    device = open_device(name)
    if name in DEVICES:
        return device.facts(**known)
    with plugin_devices()[name].blamed():
        facts = device.facts(**known)
        if not isinstance(facts, DeviceFacts):
            raise ConfigError(f"facts() must return DeviceFacts; got {facts!r}")
    return facts
