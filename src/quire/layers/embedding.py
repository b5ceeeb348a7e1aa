"""Tokens in, logits out. As in a linear layer, how rows are stored, looked up and multiplied by is a method."""

from collections.abc import Mapping
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from quire.layers.parameter import MethodLayer, parameter
from quire.ops.linear import linear_float


class EmbeddingMethod(Protocol):
    def shapes(self, count: int, size: int) -> Mapping[str, tuple[int, ...]]:
        """The parameters by the name the checkpoint gives them after the layer's path."""
        ...

    def look_up(self, layer: "Embedding", ids: Tensor) -> Tensor:
        """ids [T] -> [T, size]."""
        ...


class PlainEmbedding:
    def shapes(self, count: int, size: int) -> Mapping[str, tuple[int, ...]]:
        return {"weight": (count, size)}

    def look_up(self, layer: "Embedding", ids: Tensor) -> Tensor:
        assert layer.weight is not None
        return F.embedding(ids, layer.weight)


class Embedding(MethodLayer):
    """`scale` multiplies the looked-up vectors, rounded to the weights' type first (as such models were trained)."""

    weight: nn.Parameter | None

    def __init__(self, count: int, size: int, scale: float = 1.0) -> None:
        super().__init__()
        self.scale = scale
        self.count, self.size = count, size
        self.use(PlainEmbedding())

    def use(self, method: EmbeddingMethod) -> None:
        self.method = method
        self.declare(method.shapes(self.count, self.size))

    def finish(self, device: torch.device) -> None:  # noqa: ARG002
        kind = torch.float32 if self.weight is None else self.weight.dtype
        self.scale = torch.tensor(self.scale, dtype=kind).item()

    def forward(self, ids: Tensor) -> Tensor:
        """ids [T] -> [T, size]."""
        x = self.method.look_up(self, ids)
        return x if self.scale == 1.0 else x * self.scale


class HeadMethod(Protocol):
    def shapes(self, vocab_size: int, hidden_size: int) -> Mapping[str, tuple[int, ...]]:
        """The parameters by the name the checkpoint gives them; a tied head has none of its own."""
        ...

    def apply(self, layer: "Head", hidden: Tensor) -> Tensor:
        """hidden [P, H] -> [P, V] float32, neither scaled nor capped."""
        ...


class PlainHead:
    def shapes(self, vocab_size: int, hidden_size: int) -> Mapping[str, tuple[int, ...]]:
        return {"weight": (vocab_size, hidden_size)}

    def apply(self, layer: "Head", hidden: Tensor) -> Tensor:
        return linear_float(hidden, layer.matrix(), layer.bias)


class Head(MethodLayer):
    """Hidden states to float32 logits, with a matrix of its own or the embedding's (`tied`)."""

    weight: nn.Parameter | None

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
        self.vocab_size, self.hidden_size = vocab_size, hidden_size
        self.use(PlainHead())
        self.bias = parameter(vocab_size) if bias else None

    def use(self, method: HeadMethod) -> None:
        self.method = method
        self.declare({} if self.tied is not None else method.shapes(self.vocab_size, self.hidden_size))

    def claims(self, path: str) -> dict[str, Tensor | None]:
        """A checkpoint may store a tied matrix a second time."""
        taken: dict[str, Tensor | None] = {} if self.tied is None else {f"{path}.weight": None}
        return taken | {f"{path}.{name}": own.data for name, own in self.named_parameters(recurse=False)}

    def forward(self, hidden: Tensor) -> Tensor:
        """hidden [P, H] -> [P, V] float32."""
        logits = self.method.apply(self, hidden)
        if self.scale != 1.0:
            logits = logits * self.scale
        if self.soft_cap is not None:
            logits = torch.tanh(logits / self.soft_cap) * self.soft_cap
        return logits

    def matrix(self) -> Tensor:
        weight = self.weight if self.tied is None else self.tied.weight
        assert weight is not None
        return weight
