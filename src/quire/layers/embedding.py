"""Tokens in, logits out."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from quire.layers.parameter import parameter


class Embedding(nn.Module):
    """`scale` multiplies the looked-up vectors, rounded to the weights' type first (as such models were trained)."""

    def __init__(self, count: int, size: int, scale: float = 1.0) -> None:
        super().__init__()
        self.scale = scale
        self.weight = parameter(count, size)

    def finish(self, device: torch.device) -> None:  # noqa: ARG002
        self.scale = torch.tensor(self.scale, dtype=self.weight.dtype).item()

    def forward(self, ids: Tensor) -> Tensor:
        """ids [T] -> [T, size]."""
        x = F.embedding(ids, self.weight)
        return x if self.scale == 1.0 else x * self.scale


class Head(nn.Module):
    """Hidden states to float32 logits, with a matrix of its own or the embedding's (`tied`)."""

    def __init__(
        self,
        vocab_size: int,
        hidden_size: int,
        *,
        tied: Embedding | None = None,
        bias: bool = False,
        scale: float = 1.0,
        soft_cap: float | None = None,
    ) -> None:
        super().__init__()
        self.tied = tied
        self.scale, self.soft_cap = scale, soft_cap
        self.own = None if tied is not None else parameter(vocab_size, hidden_size)
        self.bias = parameter(vocab_size) if bias else None

    def claims(self, path: str) -> dict[str, Tensor | None]:
        """A checkpoint may store a tied matrix a second time."""
        taken: dict[str, Tensor | None] = {f"{path}.weight": None if self.own is None else self.own.data}
        if self.bias is not None:
            taken[f"{path}.bias"] = self.bias.data
        return taken

    def forward(self, hidden: Tensor) -> Tensor:
        """hidden [P, H] -> [P, V] float32."""
        weight = self.own if self.tied is None else self.tied.weight
        assert weight is not None
        logits = F.linear(hidden, weight, self.bias).float()
        if self.scale != 1.0:
            logits = logits * self.scale
        if self.soft_cap is not None:
            logits = torch.tanh(logits / self.soft_cap) * self.soft_cap
        return logits
