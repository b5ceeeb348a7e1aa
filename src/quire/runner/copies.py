"""Dequantized copies of quantized matrices (`ops/copies.py`), made when the weights are loaded and nothing else is."""

import logging
from dataclasses import dataclass

import torch
from torch import nn

from quire.config.dequantized_copies import NOTHING, DequantizedCopies
from quire.device.base import Device
from quire.prepare.copies import count_copied, make_copies
from quire.types.errors import ConfigError

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Needs:
    """What has to have room beside them, in bytes."""

    utilization: float  # of the device's memory
    cache: int  # the least
    others: int  # that are taken later
    asked: bool | None  # for copies


def copy_matrices(model: nn.Module, dtype: torch.dtype, device: Device, needs: Needs) -> None:
    """Of all matrices, or of none."""
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
