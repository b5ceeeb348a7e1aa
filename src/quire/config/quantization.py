"""How the weights of a checkpoint are quantized: what its files say, and what a user may say about it.

What the methods store where is known to `layers/quant`; here only their names are.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from quire.config.hf import read_json
from quire.files.reading import shown
from quire.files.safetensors import TensorInfo
from quire.types.errors import ConfigError, ModelError

# method -> its other names, in files and as an argument
METHODS: dict[str, tuple[str, ...]] = {
    "awq": ("awq_marlin", "auto_awq"),
    "bitsandbytes": (),
    "compressed-tensors": ("compressed_tensors",),
    "fp8": ("fbgemm_fp8",),
    "gptq": ("gptq_marlin", "auto_gptq"),
    "modelopt": ("modelopt_fp4", "modelopt_fp8", "modelopt_mixed", "modelopt_mxfp8"),
    "mxfp4": (),
}
ALIASES = {alias: method for method, aliases in METHODS.items() for alias in (method, *aliases)}
ONLINE = ("fp8",)  # may be made of floats as they are loaded
SIDE_FILES = ("quant_config.json", "quantize_config.json")  # of AWQ and GPTQ, where config.json is silent
MODELOPT_FILE = "hf_quant_config.json"
PACKED = ("qweight", "weight_packed")  # words of 32 bits that have several numbers each


@dataclass(frozen=True)
class Quantization:
    method: str  # one of METHODS
    config: Mapping[str, Any]  # as the files have it
    online: bool = False  # the checkpoint has floats, and they become so when loaded


def read_quantization(config: Mapping[str, Any], directory: Path | None) -> Quantization | None:
    """config: config.json's; directory: where else it may be said. None = the weights are floats."""
    found = config.get("quantization_config") or config.get("compression_config")
    if found is None and directory is not None:
        found = _read_side_files(directory)
    if not found:
        return None
    if not isinstance(found, Mapping):
        raise ModelError(f"quantization_config must be an object, got {shown(found)}")
    named = str(found.get("quant_method") or ("compressed-tensors" if "config_groups" in found else "")).lower()
    method = ALIASES.get(named)
    if method is None:
        known = ", ".join(METHODS)
        raise ModelError(
            f"the weights are quantized ({named or 'by an unnamed method'}), which is not read; these are: {known}"
        )
    return Quantization(method, found)


def _read_side_files(directory: Path) -> Mapping[str, Any] | None:
    if (directory / MODELOPT_FILE).is_file():
        found = read_json(directory / MODELOPT_FILE)
        inner = found.get("quantization")
        return {"quant_method": "modelopt", **inner} if isinstance(inner, Mapping) else None
    for name in SIDE_FILES:
        if (directory / name).is_file():
            found = read_json(directory / name)
            if found.get("quant_method") or "w_bit" in found or "bits" in found:
                awq = "w_bit" in found or str(found.get("version", "")).lower() == "gemm"
                return {"quant_method": "awq" if awq else "gptq", **found}
    return None


def choose_quantization(asked: str | None, found: Quantization | None, gguf: bool) -> Quantization | None:
    """What holds, given what a user asked for and what the files say."""
    if asked is None:
        return found
    if gguf or asked == "gguf":
        if not (gguf and asked == "gguf"):
            what = "a GGUF file" if gguf else "files that are not GGUF"
            raise ConfigError(f"quantization={asked!r} does not suit {what}; leave it out")
        return found
    method = ALIASES.get(asked.lower())
    if method is None:
        raise ConfigError(f"quantization={asked!r} is not known; these are: gguf, {', '.join(sorted(ALIASES))}")
    if found is None:
        if method not in ONLINE:
            raise ConfigError(
                f"quantization={asked!r}, but the checkpoint is not quantized; leave it out, or use {' or '.join(ONLINE)}, "
                "which is made as weights are loaded"
            )
        return Quantization(method, {}, online=True)
    if method != found.method:
        raise ConfigError(f"quantization={asked!r}, but the checkpoint says {found.method!r}; leave it out")
    return found


def count_numbers(infos: Mapping[str, TensorInfo], quantization: Quantization) -> int:
    """Parameters of a quantized checkpoint: of tensors that pack several numbers to an entry, all of them; scales are none."""
    bits = quantization.config.get("bits") or quantization.config.get("w_bit") or 4
    total = 0
    for name, info in infos.items():
        last = name.rpartition(".")[2]
        if last in PACKED and info.dtype == "I32":
            each = _bits_of(quantization, bits)
            total += info.elements * 32 // each
        elif info.dtype == "U8" and (last in ("weight", "weight_packed") or last.endswith("_blocks")):
            total += 2 * info.elements
        elif last in ("weight", "bias") or "." not in name:
            total += info.elements
    return total


def _bits_of(quantization: Quantization, default: Any) -> int:
    groups = quantization.config.get("config_groups")
    if isinstance(groups, Mapping):
        for group in groups.values():
            weights = group.get("weights") if isinstance(group, Mapping) else None
            if isinstance(weights, Mapping) and weights.get("num_bits") in (2, 4, 8):
                return int(weights["num_bits"])
    return default if default in (2, 4, 8) else 4
