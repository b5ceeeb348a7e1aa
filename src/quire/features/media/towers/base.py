"""What an encoder of images and videos has to define."""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from quire.types.media import Modality


class Tower(nn.Module, ABC):
    """An encoder with its projection to the language model. Built on the meta device, then loaded as the model is."""

    # (pattern, replacement) applied in order to every name of the checkpoint; None: the tensor is not the tower's
    renames: tuple[tuple[str, str | None], ...]

    @abstractmethod
    def __init__(self, config: Mapping[str, Any]) -> None:
        """config: the whole config.json of the checkpoint."""
        super().__init__()

    @abstractmethod
    def encode(self, modality: Modality, items: Sequence[Mapping[str, Tensor]]) -> list[Tensor]:
        """Return the embeddings of each item, [embeddings, levels * hidden size] in the dtype of the weights.

        items: arrays by the names of `MediaFamily`. Floats and bools are on the tower's device, floats in the dtype of the
        weights. Integers are on the host: they are sizes, which to read from a device would mean to wait for it.
        """

    def finish(self, device: torch.device) -> None:
        """Make tables that are no weights, when the weights are loaded."""
