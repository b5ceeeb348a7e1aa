"""The device half of deterministic serving: what a device cannot run in the fixed order. The runner sets the order."""

from collections.abc import Hashable

import torch

from quire.attn.backend import AttentionSpec
from quire.attn.latent_triton import LatentTriton
from quire.attn.triton import TritonAttention
from quire.device.base import Device, Prepared
from quire.features.base import StepPart
from quire.features.determinism.host import NAME
from quire.layers.attention import Attention
from quire.models.decoder import Decoder
from quire.types.errors import ConfigError
from quire.types.plan import StepRows


class FixedOrder(StepPart):
    name = "determinism"

    def __init__(self, device: Device, dtype: torch.dtype) -> None:
        self._device, self._dtype = device, dtype

    def transform(self, model: Decoder) -> None:
        on_gpu = self._device.name == "cuda"
        for spec in {layer.spec for layer in model.modules() if isinstance(layer, Attention)}:
            if on_gpu:
                self._check_on_gpu(spec)
            elif spec.sinks or spec.slopes is not None:
                raise ConfigError(f"{NAME} is not supported with attention sinks or ALiBi on a CPU")

    def _check_on_gpu(self, spec: AttentionSpec) -> None:
        """Raise a ConfigError if PyTorch would run this attention: its bits depend on the other rows of a step."""
        kernels = TritonAttention() if spec.latent is None else LatentTriton()
        if reasons := kernels.refuse(spec, self._device.torch_device, self._dtype):
            raise ConfigError(
                f"{NAME} requires Quire's attention kernels on a GPU, which do not support a layer of this model: "
                f"{'; '.join(reasons)}. Remove it"
            )

    def check_prepared(self, prepared: Prepared) -> None:
        if prepared.batch_dependence:
            raise ConfigError(f"{NAME} is not supported with {prepared.batch_dependence}")

    def graph_key(self, rows: StepRows) -> Hashable | None:  # noqa: ARG002
        return False
