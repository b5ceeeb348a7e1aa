"""What a runner is made with, and how a rank's share of the model is built and loaded."""

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch

from quire.device.base import Device
from quire.dist.collectives import Group
from quire.dist.mesh import Position
from quire.load.load import load_weights
from quire.models.decoder import Decoder
from quire.models.registry import build_model
from quire.prepare.quantize import find_grain
from quire.prepare.shard import find_experts, shard
from quire.types.sampling import LogprobsMode

if TYPE_CHECKING:
    from quire.config.facts import ModelFacts
    from quire.config.quantization import Quantization

DTYPES = {
    "float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16,
    "fp8_e4m3": torch.float8_e4m3fn, "fp8_e5m2": torch.float8_e5m2,
}  # fmt: skip


@dataclass(frozen=True)
class WeightSettings:
    load_format: str = "auto"
    seed: int = 0  # of dummy weights
    model_impl: str = "auto"
    keep_quantized: bool = False  # weights stay quantized
    quantization: "Quantization | None" = None
    keeps: frozenset[str] = frozenset()  # quantized layouts that the device runs as they are

    def build(self, facts: "ModelFacts", device: Device, position: Position, group: Group | None) -> Decoder:
        """Return a rank's share of the model, without weights."""
        model = build_model(facts, self.model_impl)
        if group is not None:
            # CPU kernels quantize activations to 8 bits, which amplifies rounding differences between summation orders
            exact = self.keep_quantized and device.torch_device.type == "cpu"
            shard(model, position, group, find_grain(self.quantization), exact=exact)
        return model

    def load(self, model: Decoder, facts: "ModelFacts", device: Device, dtype: torch.dtype, cache_dtype: torch.dtype) -> None:
        load_weights(
            model, facts, device=device.torch_device, dtype=dtype, load_format=self.load_format, seed=self.seed,
            keep_quantized=self.keep_quantized, quantization=self.quantization, keeps=self.keeps,
            cache_scales=cache_dtype.itemsize == 1,
        )  # fmt: skip


@dataclass(frozen=True)
class RunnerSettings:
    dtype: str
    max_seqs: int
    max_batched_tokens: int
    cache_dtype: str | None = None  # of the KV cache; None: as `dtype`
    num_draft_tokens: int = 0  # per row, at most
    added_tokens: int = 0  # vocabulary entries beyond the model's own
    logprobs_mode: LogprobsMode = "raw_logprobs"
    enforce_eager: bool = False  # no CUDA graphs
    fixed_order: bool = False  # of the sums, see `ops/order.py`
    weights: WeightSettings = field(default_factory=WeightSettings)


def describe_model(model: Decoder) -> dict[str, int]:
    """Return the sizes of a rank's share."""
    spec = model.attentions[0].spec if model.attentions else None
    return {
        "heads": spec.heads if spec else 0,
        "kv_heads": spec.kv_heads if spec else 0,
        "experts": max((len(layer.local) for layer in find_experts(model)), default=0),
    }
