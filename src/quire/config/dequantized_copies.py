"""The rule that decides whether dequantized copies of quantized matrices (`ops/quantized.py`) fit.

The engine applies it to what it measures, `quire plan` to what file headers say.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from quire.config.quantization import Quantization, list_matrices
from quire.files.gguf import FLOAT4_TYPES, GGML_TYPES, INTEGER_TYPES, GGUFTensor
from quire.files.safetensors import TensorInfo

MEMORY_SHARE = 8  # copies may use 1/8 of the engine's memory
NOTHING = "the model has no quantized matrix that can have one (no experts, no schemes with quantized activations)"
RESERVE_SHARE = 16  # 1/16 must remain besides the cache of the longest request, as a margin of error


@dataclass(frozen=True)
class DequantizedCopies:
    """Whether copies fit; sizes in bytes of one device."""

    copies: int
    usable: int
    held: int  # weights, memory of other programs, and all that the engine allocates before the cache
    needed: int  # the minimum cache
    requested: bool = False  # dequantized_copies is set: no limit of MEMORY_SHARE

    @property
    def fit(self) -> bool:
        """Return whether the cache gets at least as much memory as the copies."""
        if not self.requested and self.copies > self.usable // MEMORY_SHARE:
            return False
        return self.left >= self.copies + max(self.copies, self.usable // RESERVE_SHARE)

    @property
    def left(self) -> int:
        """Return the bytes that remain without copies, besides the minimum cache."""
        return self.usable - self.held - self.needed

    @property
    def reason(self) -> str:
        """Return why they do not fit."""
        if not self.requested and self.copies > self.usable // MEMORY_SHARE:
            return f"they would take {self}, more than 1/{MEMORY_SHARE} of the {_size(self.usable)} that may be used"
        left = _size(max(0, self.left))
        return f"they would take {self}, and weights, a step and the cache of the longest request leave {left}"

    def __str__(self) -> str:
        return _size(self.copies)


def _size(count: int) -> str:
    return f"{count / 2**30:.2f} GiB" if count >= 2**30 else f"{count / 2**20:.2f} MiB"


def copied_values(infos: Mapping[str, TensorInfo], quantization: Quantization, keeps: frozenset[str]) -> int:
    """Return the weights of a checkpoint in matrices that can have a copy (`ops.quantized.can_be_copied`).

    A matrix whose parts are quantized in different ways is dequantized; it is counted all the same.
    """
    some = (entry for entry in list_matrices(infos, quantization) if entry.bits and ".experts." not in entry.name)
    return sum(entry.count for entry in some if _has_copy(quantization, infos[entry.name].dtype, entry.bits, keeps))


def estimate_copied(weights_count: int, quantization: Quantization, keeps: frozenset[str]) -> int:
    """Estimate `copied_values` without weight files. weights_count: of all matrices except experts and head."""
    config, weights = quantization.config, [_object(group, "weights") for group in _groups(quantization)]
    bits, dtype = next((int(some["num_bits"]) for some in weights if some.get("num_bits") in (4, 8)), 4), "I32"
    if 8 in (config.get("bits"), config.get("w_bit")) or str(config.get("quant_algo")).startswith(("FP8", "MXFP8")):
        bits = 8
    if any(some.get("type") == "float" for some in weights):
        dtype = "F8_E4M3" if bits == 8 else "U8"
    elif weights and config.get("format") != "pack-quantized":
        bits, dtype = 8, "I8"
    return weights_count if _has_copy(quantization, dtype, bits, keeps) else 0


def _has_copy(quantization: Quantization, dtype: str, bits: int, keeps: frozenset[str]) -> bool:
    """dtype: the file's type for weights of `bits` bits.

    Schemes that quantize activations have no copies, nor have mxfp4 (experts only) and bitsandbytes (no GPU kernel reads it).
    """
    match quantization.method:
        case "awq" | "gptq":
            return f"int{bits}" in keeps
        case "compressed-tensors" if dtype in ("I8", "F8_E4M3"):
            layout = "int8" if dtype == "I8" else "fp8"
            return layout in keeps and not any(map(_quantizes_activations, _groups(quantization)))
        case "compressed-tensors":
            return (f"int{bits}" if dtype == "I32" else "fp4") in keeps
        case "modelopt" if bits == 8:
            return quantization.config.get("quant_algo") in ("FP8_PB_WO", "MXFP8") and "fp8" in keeps
        case "modelopt":
            return "fp4" in keeps
    return False


def _groups(quantization: Quantization) -> list[Mapping[str, Any]]:
    found = quantization.config.get("config_groups")
    return [group for group in found.values() if isinstance(group, Mapping)] if isinstance(found, Mapping) else []


def _object(group: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    found = group.get(name)
    return found if isinstance(found, Mapping) else {}


def _quantizes_activations(group: Mapping[str, Any]) -> bool:
    """Return whether activations are quantized to 8 bits: with integer weights, only if rows have one scale, no zero point."""
    weights = _object(group, "weights")
    if not _object(group, "input_activations") or weights.get("num_bits") != 8:
        return False
    return weights.get("type") == "float" or (weights.get("strategy") != "group" and weights.get("symmetric") is not False)


def copied_gguf_values(tensors: Iterable[GGUFTensor]) -> int:
    """Return `copied_values` of a GGUF file whose matrices stay quantized on a GPU."""
    matrices = (tensor for tensor in tensors if len(tensor.shape) == 2 and tensor.name != "token_embd.weight")
    return sum(tensor.elements for tensor in matrices if GGML_TYPES[tensor.type][0] in INTEGER_TYPES | FLOAT4_TYPES)
