"""The device half of deterministic serving: the fixed order on a GPU, and what a CPU cannot run in it."""

from collections.abc import Hashable

import torch

from quire.attn.backend import AttentionSpec
from quire.device.base import Device, Prepared
from quire.features.base import StepPart
from quire.features.determinism.host import NAME
from quire.layers.attention import SelfAttention
from quire.models.decoder import Decoder
from quire.ops.order import fix_order
from quire.types.errors import ConfigError
from quire.types.plan import StepRows


class FixedOrder(StepPart):
    name = "determinism"

    def __init__(self, device: Device, dtype: torch.dtype) -> None:  # noqa: ARG002
        self._device = device

    def transform(self, model: Decoder) -> None:
        if self._device.name == "cuda":
            fix_order()  # before anything is compiled or recorded
        elif any(isinstance(layer, SelfAttention) and _by_torch(layer.core.spec) for layer in model.modules()):
            raise ConfigError(f"{NAME} is not supported with attention sinks or ALiBi on a CPU")

    def check_prepared(self, prepared: Prepared) -> None:
        if prepared.batch_dependence:
            raise ConfigError(f"{NAME} is not supported with {prepared.batch_dependence}")

    def graph_key(self, rows: StepRows) -> Hashable | None:  # noqa: ARG002
        return False


def _by_torch(spec: AttentionSpec) -> bool:
    """Return whether PyTorch runs this attention on a CPU."""
    return spec.sinks or spec.slopes is not None
