"""Tokens in, logits out."""

from collections.abc import Mapping

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from quire.layers.parameter import parameter
from quire.layers.quant.gguf import look_up, suits
from quire.ops import gemm
from quire.ops.blocks import Stored
from quire.ops.choice import folds, in_pieces
from quire.ops.linear import linear_float
from quire.ops.onnx import Runtime
from quire.ops.product import Product, repack
from quire.ops.session import KEPT_OF_PRODUCT


def fitting(stored: Mapping[str, Stored], name: str, count: int, size: int) -> Stored | None:
    found = stored.get(name)
    return found if found is not None and suits(found) and (len(found), found.columns) == (count, size) else None


class Embedding(nn.Module):
    """`scale` multiplies the looked-up vectors, rounded to the weights' type first (as such models were trained)."""

    def __init__(self, count: int, size: int, scale: float = 1.0) -> None:
        super().__init__()
        self.scale = scale
        self.count, self.size = count, size
        self.stored: Stored | None = None  # where the rows stay as a file has them; there is no weight then
        self.weight: nn.Parameter | None = parameter(count, size)

    def keep(self, path: str, stored: Mapping[str, Stored]) -> frozenset[str]:
        found = fitting(stored, f"{path}.weight", self.count, self.size)
        if found is not None:
            self.stored, self.weight = found, None
        return frozenset() if found is None else frozenset((f"{path}.weight",))

    def leave(self, stored: Stored) -> None:
        """From now on the rows, which are the weight's, are looked up where a file has them, and not held."""
        self.stored, self.weight = stored, None

    def finish(self, device: torch.device) -> None:  # noqa: ARG002
        kind = torch.float32 if self.weight is None else self.weight.dtype
        self.scale = torch.tensor(self.scale, dtype=kind).item()

    def forward(self, ids: Tensor) -> Tensor:
        """ids [T] -> [T, size]."""
        if self.stored is not None:
            x = look_up(self.stored, ids)
        else:
            assert self.weight is not None
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
        self.vocab_size, self.hidden_size = vocab_size, hidden_size
        self.stored: Stored | None = None  # where the matrix of our own stays as a GGUF file has it
        self.product: Product | gemm.Gemm | None = None  # with a matrix that was kept, or packed
        self.own = None if tied is not None else parameter(vocab_size, hidden_size)
        self.bias = parameter(vocab_size) if bias else None

    def keep(self, path: str, stored: Mapping[str, Stored]) -> frozenset[str]:
        found = fitting(stored, f"{path}.weight", self.vocab_size, self.hidden_size)
        if self.own is None or found is None:
            return frozenset()
        self.stored, self.own = found, None
        return frozenset((f"{path}.weight",))

    def pack_blocks(self, runtime: Runtime) -> None:
        """A matrix in blocks is multiplied by as a copy in whole numbers."""
        stored = self.stored if self.tied is None else self.tied.stored
        if stored is not None:
            self.product = Product(repack([stored], self.bias, runtime, folds(runtime)), runtime, KEPT_OF_PRODUCT)

    def pack(self, runtime: Runtime) -> None:
        """From now on it multiplies, by a copy of the float32 matrix in an order of its own."""
        self.product = gemm.Gemm(self._matrix(), self.bias, runtime)
        if self.own is not None and gemm.forgets(runtime):
            self.own.data = self.own.new_empty(0)

    def claims(self, path: str) -> dict[str, Tensor | None]:
        """A checkpoint may store a tied matrix a second time."""
        taken: dict[str, Tensor | None] = {f"{path}.weight": None if self.own is None else self.own.data}
        if self.bias is not None:
            taken[f"{path}.bias"] = self.bias.data
        return taken

    def forward(self, hidden: Tensor) -> Tensor:
        """hidden [P, H] -> [P, V] float32."""
        if self.product is None:
            self.pack_blocks(in_pieces())
        logits = linear_float(hidden, self._matrix(), self.bias) if self.product is None else self.product(hidden)
        if self.scale != 1.0:
            logits = logits * self.scale
        if self.soft_cap is not None:
            logits = torch.tanh(logits / self.soft_cap) * self.soft_cap
        return logits

    def _matrix(self) -> Tensor:
        weight = self.own if self.tied is None else self.tied.weight
        assert weight is not None
        return weight
