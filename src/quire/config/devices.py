"""The names of devices: Quire's own, and plug-ins of an entry point group (`device/registry.py`)."""

from quire.config.plugins import DEVICES, PlugIn, find_plugins, why_missing
from quire.types.errors import ConfigError

AUTO, OURS = "auto", ("cpu", "cuda")
RAY_BUNDLES = "QUIRE_RAY_BUNDLES"  # environment: an engine's bundles of its Ray placement group, with commas; default: all
SHARE = "QUIRE_CUDA_RANKS"  # environment: 1 lets ranks share a GPU, for tests
# quantized layouts (`ops/quantized_layouts.py`) that devices multiply by without dequantizing; a CPU only if it has kernels.
# "experts": those of experts, too; "blocks": GGUF blocks stay as stored.
KEEPS = {
    "cpu": frozenset({"blocks", "int4", "int8", "w8a8"}),
    "cuda": frozenset({"int4", "int8", "w8a8", "fp8", "fp4", "experts"}),
}


def plugin_devices() -> dict[str, PlugIn]:
    """Return the devices of other packages by name; names of Quire's own devices are ignored. Nothing is imported."""
    return find_plugins(DEVICES, (AUTO, *OURS))


def check_device(name: str) -> None:
    if name not in (AUTO, *OURS) and name not in (plugins := plugin_devices()):
        known = ", ".join([AUTO, *OURS, *plugins])
        raise ConfigError(f"device must be one of {known}; got {name!r}{why_missing(DEVICES, name)}")
