"""What flows into some of a model's layers, for drafters that read it. The model's files know nothing of it."""

from typing import Any

import torch
from torch import Tensor, nn

from quire.models.decoder import Decoder
from quire.types.errors import ConfigError


class Taps:
    """Layers have to be run one by one for it."""

    def __init__(self, model: Decoder, layers: tuple[int, ...]) -> None:
        blocks = getattr(model, "layers", None)
        if layers and not isinstance(blocks, nn.ModuleList):
            raise ConfigError(
                "speculative_config: this model is run by transformers, and drafters cannot read its layers' states"
            )
        self._layers, self._states = layers, dict[int, Tensor]()
        for layer in set(layers):
            model.layers[layer].register_forward_pre_hook(lambda _, given, layer=layer: self._note(layer, given))

    def take(self) -> list[Tensor]:
        """Of the latest run [T, H], in the order of the layers that were asked for."""
        states = [self._states[layer] for layer in self._layers]
        self._states.clear()
        return states

    def _note(self, layer: int, given: tuple[Any, ...]) -> None:
        x, residual = given[0], given[1]
        self._states[layer] = x.clone() if residual is None else x + residual  # they may be overwritten


class KeptStates:
    """Where recorded steps of rows of one token leave the states that a drafter reads: of each tap, or the final ones."""

    def __init__(self, taps: Taps | None, count: int, rows: int, size: int, dtype: torch.dtype, device: torch.device) -> None:
        """`count`: of states."""
        self._taps = taps
        self._buffers = [torch.zeros(rows, size, dtype=dtype, device=device) for _ in range(count)]

    def keep(self, hidden: Tensor, tokens: int) -> None:
        """To be recorded. Steps of longer rows leave nothing."""
        states = [hidden] if self._taps is None else self._taps.take()
        for buffer, state in zip(self._buffers, states, strict=True):
            if tokens == len(hidden) <= len(buffer):
                buffer[:tokens].copy_(state)

    def read(self, rows: int) -> list[Tensor]:
        return [buffer[:rows] for buffer in self._buffers]
