"""Structured outputs: tokens that a grammar forbids. Which those are is said anew for every step, one bit per token."""

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from quire.runner.transfer import Longs, upload
from quire.types.plan import Words


@dataclass(frozen=True)
class Masks:
    """Bit v of a row, counted from the lowest of its first word, says that token v is allowed. Those behind the last word are
    not: grammars know the model's own tokens."""

    rows: Longs  # [m] indices among the rows that draw
    bits: Words  # [m, W]


def forbid(logits: Tensor, masks: Masks) -> Tensor:
    """logits [N, V], changed in place."""
    device, vocabulary = logits.device, min(logits.shape[1], 32 * masks.bits.shape[1])
    if device.type == "cpu":
        banned = np.unpackbits((~masks.bits).view(np.uint8), axis=1, count=vocabulary, bitorder="little").view(
            np.bool_
        )  # [m, V]
        for row, where in zip(masks.rows.tolist(), banned, strict=True):
            np.copyto(logits[row, :vocabulary].numpy(), -np.inf, where=where)
            logits[row, vocabulary:] = -np.inf
        return logits
    words = upload(masks.bits.view(np.int32), device)  # [m, W]
    bits = words[:, :, None] >> torch.arange(32, dtype=torch.int32, device=device)  # [m, W, 32]
    allowed = (bits & 1).bool().reshape(len(words), -1)[:, :vocabulary]  # [m, V]
    rows = upload(masks.rows, device)
    kept = logits[rows]
    kept[:, :vocabulary].masked_fill_(~allowed, -torch.inf)
    kept[:, vocabulary:] = -torch.inf
    logits[rows] = kept
    return logits
