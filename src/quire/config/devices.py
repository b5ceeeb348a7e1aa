"""The names of devices: our own, and those that other packages bring under an entry point group (`device/registry.py`)."""

from importlib.metadata import EntryPoint, entry_points

from quire.types.errors import ConfigError

AUTO, OURS = "auto", ("cpu", "cuda")
GROUP = "quire.devices"
# quantized layouts (`ops/quantized_layouts.py`) that our devices multiply by without dequantizing; a CPU where it has kernels.
# Experts are dequantized. "blocks": GGUF blocks are kept, too.
KEEPS = {
    "cpu": frozenset({"blocks", "int4", "int8", "w8a8"}),
    "cuda": frozenset({"int4", "int8", "w8a8", "fp8", "fp4", "experts"}),
}


def brought_devices() -> dict[str, EntryPoint]:
    """By name; those with a name of ours are not heeded. Nothing is imported."""
    return {point.name: point for point in entry_points(group=GROUP) if point.name not in (AUTO, *OURS)}


def check_device(name: str) -> None:
    if name not in (AUTO, *OURS) and name not in (brought := brought_devices()):
        raise ConfigError(f"device must be one of {', '.join([AUTO, *OURS, *sorted(brought)])}; got {name!r}")
