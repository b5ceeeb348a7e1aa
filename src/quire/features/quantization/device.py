"""The device half of quantization: dequantized copies of weights for large batches (`ops/quantized.py`), if memory is left."""

import logging
from collections.abc import Callable, Hashable
from dataclasses import dataclass

import torch
from torch import nn

from quire.config.dequantized_copies import NOTHING, DequantizedCopies
from quire.device.base import Device
from quire.features.base import StepPart
from quire.models.decoder import Decoder
from quire.prepare.quantize import count_copied, make_copies
from quire.types.errors import ConfigError
from quire.types.plan import StepRows

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Needs:
    """What must fit into device memory beside the copies, in bytes."""

    utilization: float  # share of the device's memory
    cache: int  # of the smallest KV cache
    others: int  # taken after the weights are loaded
    asked: bool | None  # True: copies are required; None: if they fit


class QuantizationPart(StepPart):
    name = "quantization"

    def __init__(self, device: Device, dtype: torch.dtype) -> None:
        self._device, self._dtype = device, dtype
        self._model: Decoder | None = None
        self._reserved: Callable[[], int] | None = None

    def load(self, model: Decoder, reserved_bytes: Callable[[], int]) -> None:
        self._model, self._reserved = model, reserved_bytes

    def copy_matrices(self, gpu_memory_utilization: float, cache: int, step: int, asked: bool | None) -> None:
        """Make dequantized copies if they fit. cache, step: bytes of the smallest KV cache and of the largest step."""
        assert self._model is not None and self._reserved is not None
        needs = Needs(gpu_memory_utilization, cache, step + self._reserved(), asked)
        copy_matrices(self._model, self._dtype, self._device, needs)

    def graph_key(self, rows: StepRows) -> Hashable:  # noqa: ARG002
        return False

    def close(self) -> None:
        self._model = self._reserved = None


def copy_matrices(model: nn.Module, dtype: torch.dtype, device: Device, needs: Needs) -> None:
    """Make copies of all matrices, or of none."""
    wanted = count_copied(model, dtype) * dtype.itemsize
    usable, held = device.held(needs.utilization) if wanted else (0, 0)
    if needs.asked and not wanted:
        logger.warning("dequantized_copies: %s", NOTHING)
    if not usable:
        return
    copies = DequantizedCopies(wanted, usable, held + needs.others, needs.cache, bool(needs.asked))
    if copies.fit:
        make_copies(model, dtype)
        logger.info("copies of quantized matrices in %s, for many rows: %s", str(dtype).removeprefix("torch."), copies)
    elif needs.asked:
        raise ConfigError(f"{copies.reason}; leave dequantized_copies out, or give the engine more memory")
    else:
        logger.info("no copies of quantized matrices: %s", copies.reason)
