"""Tokens in, logits out."""

from collections.abc import Mapping

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from quire.layers.parameter import parameter
from quire.layers.quant.gguf import look_up, row_bytes, suits
from quire.ops.blocks import take_apart
from quire.ops.linear import linear_float
from quire.ops.nbits import Product, pack


class Embedding(nn.Module):
    """`scale` multiplies the looked-up vectors, rounded to the weights' type first (as such models were trained)."""

    def __init__(self, count: int, size: int, scale: float = 1.0) -> None:
        super().__init__()
        self.scale = scale
        self.count, self.size = count, size
        self.stored_type: int | None = None  # ggml's, where the rows are kept as a GGUF file has them
        self.weight = parameter(count, size)

    def keep(self, path: str, types: Mapping[str, int]) -> frozenset[str]:
        name = f"{path}.weight"
        if name not in types or not suits(types[name], self.size):
            return frozenset()
        self.stored_type = types[name]
        self.weight = parameter(self.count, row_bytes(self.stored_type, self.size), dtype=torch.uint8)
        return frozenset((name,))

    def finish(self, device: torch.device) -> None:  # noqa: ARG002
        kind = self.weight.dtype if self.stored_type is None else torch.float32
        self.scale = torch.tensor(self.scale, dtype=kind).item()

    def forward(self, ids: Tensor) -> Tensor:
        """ids [T] -> [T, size]."""
        x = (
            F.embedding(ids, self.weight)
            if self.stored_type is None
            else look_up(self.weight, self.stored_type, ids, self.size)
        )
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
        self.vocab_size, self.hidden_size = vocab_size, hidden_size
        self.stored_type: int | None = None  # ggml's, where the matrix of our own is kept as a GGUF file has it
        self.product: Product | None = None  # with a matrix that was kept
        self.own = None if tied is not None else parameter(vocab_size, hidden_size)
        self.bias = parameter(vocab_size) if bias else None

    def keep(self, path: str, types: Mapping[str, int]) -> frozenset[str]:
        name = f"{path}.weight"
        if self.own is None or name not in types or not suits(types[name], self.hidden_size):
            return frozenset()
        self.stored_type = types[name]
        self.own = parameter(self.vocab_size, row_bytes(self.stored_type, self.hidden_size), dtype=torch.uint8)
        return frozenset((name,))

    def finish(self, device: torch.device) -> None:  # noqa: ARG002
        rows, type_ = (self.own, self.stored_type) if self.tied is None else (self.tied.weight, self.tied.stored_type)
        if type_ is not None and rows is not None:
            self.product = Product(pack([take_apart(rows.data, type_)], self.bias))
            self.own = None

    def claims(self, path: str) -> dict[str, Tensor | None]:
        """A checkpoint may store a tied matrix a second time."""
        taken: dict[str, Tensor | None] = {f"{path}.weight": None if self.own is None else self.own.data}
        if self.bias is not None:
            taken[f"{path}.bias"] = self.bias.data
        return taken

    def forward(self, hidden: Tensor) -> Tensor:
        """hidden [P, H] -> [P, V] float32."""
        if self.product is not None:
            logits = self.product(hidden)
        else:
            weight = self.own if self.tied is None else self.tied.weight
            assert weight is not None
            logits = linear_float(hidden, weight, self.bias)
        if self.scale != 1.0:
            logits = logits * self.scale
        if self.soft_cap is not None:
            logits = torch.tanh(logits / self.soft_cap) * self.soft_cap
        return logits
