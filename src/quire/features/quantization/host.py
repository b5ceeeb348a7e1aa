"""Quantized weights: memory of their dequantized copies."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from quire.config.fields import FLAG, TEXT, setting
from quire.features.host import NO_MEMORY, Conflict, Feature, Memory, Sizes
from quire.types.cache import DTYPE_BYTES

if TYPE_CHECKING:
    from quire.config.config import Config


@dataclass
class WeightArgs:
    quantization: str | None = setting(
        None,
        TEXT,
        "model",
        "fp8 makes 8 bits of floats as they are loaded; else a name that the checkpoint's own scheme has to have",
        short="-q",
        after="dtype",
    )
    dequantized_copies: bool | None = setting(
        None,
        FLAG,
        "model",
        "copies of quantized matrices in the model's type beside them, by which a GPU multiplies many rows "
        "faster; default: where all of them take at most an eighth of the memory",
        after="quantization",
    )


CONFLICTS: tuple[Conflict, ...] = (
    Conflict(
        "quantized weights of a model that transformers runs",
        lambda c: c.quantization is not None and c.quantization.method != "mxfp4" and c.facts.by_transformers,
        lambda c: (
            f"{c.facts.files.name}: {c.facts.architecture} is run by transformers, without quantized weights, and the "
            f"quantization is {c.quantization and c.quantization.method}. Use a checkpoint that is not quantized"
        ),
        "by transformers",
        "quantization",
    ),
    Conflict(
        "dequantized copies without a use",
        lambda c: bool(c.args.dequantized_copies) and (c.device != "cuda" or c.dtype == "float32"),
        lambda c: (
            f"dequantized_copies requires CUDA and a 16-bit dtype; got {c.dtype} on {c.device}. Remove it"
        ),
    ),
    Conflict(
        "dequantized copies on a shared GPU",
        lambda c: bool(c.args.dequantized_copies) and c.device == "cuda" and c.share_gpus,
        lambda _: (
            "dequantized_copies is not supported where several engines or ranks share a GPU: none knows the memory of the "
            "others. Remove it"
        ),
    ),
)  # fmt: skip


class QuantizedWeights(Feature):
    name = "quantization"
    conflicts = CONFLICTS
    part = "quire.features.quantization.device:QuantizationPart"
    cache_salt = None  # weights have one format as long as the engine lives

    def part_options(self, config: "Config") -> dict[str, Any] | None:
        return {} if may_copy(config) else None

    def memory(self, config: "Config", sizes: Sizes) -> Memory:
        return Memory(optional=sizes.copied_values * DTYPE_BYTES[config.dtype]) if may_copy(config) else NO_MEMORY


def may_copy(config: "Config") -> bool:
    """Several engines or ranks on one GPU have no copies: none of them sees what the others will allocate."""
    wanted = config.args.dequantized_copies is not False
    return wanted and config.device == "cuda" and config.dtype != "float32" and not config.share_gpus
