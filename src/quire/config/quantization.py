"""The quantization of a checkpoint: what its files declare, and what a user may request.

The methods are in `quantization_methods.py`, the storage layout of each is in `layers/quant`.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from quire.config.devices import KEEPS
from quire.config.hf import read_json
from quire.config.quantization_methods import aliases, methods
from quire.files.reading import shown
from quire.files.safetensors import TensorInfo
from quire.types.errors import ConfigError, ModelError

# vLLM's others
NOT_BUILT = (
    "torchao", "quark", "inc", "auto-round", "moe_wna16", "experts_int8", "humming", "online", "mxfp8", "deepseek_v4_fp8",
    "fp8_per_tensor", "fp8_per_block", "fp8_per_channel", "int8_per_channel_weight_only", "nvfp4_per_token", "ptpc_fp8",
    "fp_quant", "hqq", "rtn",
)  # fmt: skip
ONLINE = ("fp8",)  # can quantize a float checkpoint at load
SIDE_FILES = ("quant_config.json", "quantize_config.json")  # of AWQ and GPTQ, if config.json has no quantization
MODELOPT_FILE = "hf_quant_config.json"
PACKED = ("qweight", "weight_packed")  # 32-bit words with several weights each


@dataclass(frozen=True)
class Quantization:
    method: str  # one of `methods()`
    config: Mapping[str, Any]  # as the files have it
    online: bool = False  # the checkpoint has floats, which are quantized at load


def quantization_table() -> dict[str, dict[str, Any]]:
    """Return for each method its other names, its layouts, and those that each device multiplies by without dequantizing."""
    return {
        name: {
            "names": list(method.names),
            "forms": list(method.layouts),
            "kept": {device: [layout for layout in method.layouts if layout in keeps] for device, keeps in KEEPS.items()},
        }
        for name, method in methods().items()
    }


def read_quantization(config: Mapping[str, Any], directory: Path | None) -> Quantization | None:
    """Return the quantization of config.json or of side files in `directory`; None: the weights are floats."""
    for name in ("quantization_config", "compression_config"):
        if not isinstance(config.get(name, {}), Mapping | None):
            raise ModelError(f"{name} must be an object, got {shown(config[name])}")
    found = config.get("quantization_config") or config.get("compression_config")
    if found is None and directory is not None:
        found = _read_side_files(directory)
    if not found:
        return None
    named = found.get("quant_method", "compressed-tensors" if "config_groups" in found else "")
    if not isinstance(named, str):
        raise ModelError(f"quantization_config: quant_method must be a string, got {shown(named)}")
    return Quantization(_find_method(named.lower(), found), found)


def _find_method(named: str, config: Mapping[str, Any]) -> str:
    """Return the method of this name, or the one that recognizes its configuration."""
    if named in aliases():
        return aliases()[named]
    own = [method.name for method in methods().values() if method.applies is not None and method.applies(config)]
    if len(own) > 1:
        raise ModelError(f"quantization_config fits the methods {' and '.join(own)}. Uninstall all but one of their packages")
    if not own:
        known = ", ".join(methods())
        raise ModelError(
            f"the weights are quantized ({named or 'by an unnamed method'}), which is not supported; these methods are: {known}"
        )
    return own[0]


def _read_side_files(directory: Path) -> Mapping[str, Any] | None:
    if (directory / MODELOPT_FILE).is_file():
        found = read_json(directory / MODELOPT_FILE)
        inner = found.get("quantization")
        if inner is not None and not isinstance(inner, Mapping):
            raise ModelError(f"{MODELOPT_FILE}: quantization must be an object, got {shown(inner)}")
        return None if inner is None else {"quant_method": "modelopt", **inner}
    for name in SIDE_FILES:
        if (directory / name).is_file():
            found = read_json(directory / name)
            if found.get("quant_method") or "w_bit" in found or "bits" in found:
                awq = "w_bit" in found or str(found.get("version", "")).lower() == "gemm"
                return {"quant_method": "awq" if awq else "gptq", **found}
    return None


def choose_quantization(asked: str | None, found: Quantization | None, gguf: bool) -> Quantization | None:
    """Return the quantization to use, given the user's argument and the checkpoint's own."""
    if asked is None:
        return found
    if gguf or asked == "gguf":
        if not (gguf and asked == "gguf"):
            what = "a GGUF file" if gguf else "files that are not GGUF"
            raise ConfigError(f"quantization={asked!r} does not fit {what}; leave it out")
        return found
    method = aliases().get(asked.lower())
    if method is None:
        what = "is not supported" if asked.lower() in NOT_BUILT else "is unknown"
        raise ConfigError(f"quantization={asked!r} {what}; these are: gguf, {', '.join(sorted(aliases()))}")
    if found is None:
        if method not in ONLINE:
            raise ConfigError(
                f"quantization={asked!r}, but the checkpoint is not quantized; leave it out, or use {' or '.join(ONLINE)}, "
                "which quantizes weights at load"
            )
        return Quantization(method, {}, online=True)
    if method != found.method:
        raise ConfigError(f"quantization={asked!r}, but the checkpoint has {found.method!r}; leave it out")
    return found


def stays_quantized(quantization: Quantization, keeps: frozenset[str]) -> bool:
    """Return whether a device that keeps these layouts multiplies by the method's weights without dequantizing them."""
    layouts = methods()[quantization.method].layouts
    return not layouts or not keeps.isdisjoint(layouts)


def count_parameters(infos: Mapping[str, TensorInfo], quantization: Quantization) -> int:
    """Return the parameters of a quantized checkpoint: packed weights are counted one by one, scales not at all."""
    return sum(entry.count for entry in list_matrices(infos, quantization))


@dataclass(frozen=True)
class Entry:
    """A tensor of weights: `bits` each, 0 for plain floats."""

    name: str
    count: int
    bits: int


def list_matrices(infos: Mapping[str, TensorInfo], quantization: Quantization) -> Iterator[Entry]:
    own = methods()[quantization.method].tensors
    for name, info in infos.items():
        last = name.rpartition(".")[2]
        if last in own:
            yield Entry(name, info.nbytes * 8 // own[last], own[last])
        elif last in PACKED and info.dtype == "I32":
            bits = _bits_of(quantization)
            yield Entry(name, info.elements * 32 // bits, bits)
        elif info.dtype == "U8" and (last in ("weight", "weight_packed") or last.endswith("_blocks")):
            yield Entry(name, 2 * info.elements, 4)
        elif last in ("weight", "bias") and info.dtype in ("I8", "F8_E4M3"):
            yield Entry(name, info.elements, 8)
        elif last in ("weight", "bias") or last.endswith("_bias"):
            yield Entry(name, info.elements, 0)


def _bits_of(quantization: Quantization) -> int:
    """Return the bits of integer weights that are packed to words."""
    config = quantization.config
    found: list[Any] = [config.get("bits"), config.get("w_bit")]
    groups = config.get("config_groups")
    for group in groups.values() if isinstance(groups, Mapping) else ():
        weights = group.get("weights") if isinstance(group, Mapping) else None
        if isinstance(weights, Mapping) and weights.get("type", "int") == "int":
            found.append(weights.get("num_bits"))
    return next((int(bits) for bits in found if bits in (2, 4, 8)), 4)


def quantized_bytes(infos: Mapping[str, TensorInfo], quantization: Quantization, keeps: frozenset[str], element: int) -> int:
    """Return the bytes of the weights in memory. keeps: see `DeviceFacts`; element: bytes of the model's dtype.

    On a CPU, integer weights have a scale and an offset of 4 bytes each per 32 weights; on a GPU scales are as stored.
    """
    entries = {entry.name: entry for entry in list_matrices(infos, quantization)}
    as_stored = not methods()[quantization.method].layouts
    total = 0
    for name, info in infos.items():
        entry = entries.get(name)
        if as_stored and (entry is None or entry.bits):
            total += info.nbytes
            continue
        floats = 0 if entry is None else entry.count * element
        if (".experts." in name and "experts" not in keeps) or (entry is not None and not entry.bits):
            total += floats
        elif "fp8" in keeps:
            total += info.nbytes
        elif entry is not None and info.dtype in ("I32", "I8") and f"int{entry.bits}" in keeps:
            total += entry.count * entry.bits // 8 + entry.count // 32 * 8
        else:
            total += floats
    return total
