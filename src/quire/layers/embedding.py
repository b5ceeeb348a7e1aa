"""Tokens in, logits out. As in a linear layer, how rows are stored, looked up and multiplied by is a method."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from quire.attn.batch import LoRATokens, Tokens
from quire.dist.collectives import Group
from quire.layers.lora import EmbeddingBank, HeadBank
from quire.layers.parameter import Claims, Method, MethodLayer, Role, parameter, rows_of
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

    role = Role.VOCABULARY
    weight: nn.Parameter | None
    group: Group | None = None  # of the ranks that have the other rows
    bank: EmbeddingBank | None = None  # of the adapters that rows may ask for

    def __init__(self, count: int, size: int, scale: float = 1.0) -> None:
        super().__init__()
        self.scale = scale
        self.total, self.size = count, size
        self.method: EmbeddingMethod = PlainEmbedding()
        self.keep(range(count))

    def keep(self, rows: range) -> None:
        """Before anything is loaded: these rows."""
        self.kept = rows
        self.use(self.method)

    def use(self, method: EmbeddingMethod) -> None:
        self.method = method
        self.declare(method.shapes(len(self.kept), self.size))

    def claims(self, path: str) -> Claims:
        return claim_rows(self, path, self.method.shapes(self.total, self.size))

    def finish(self, device: torch.device) -> None:  # noqa: ARG002
        kind = torch.float32 if self.weight is None else self.weight.dtype
        self.scale = torch.tensor(self.scale, dtype=kind).item()

    if TYPE_CHECKING:

        def __call__(self, ids: Tensor, tokens: Tokens) -> Tensor: ...

    def forward(self, ids: Tensor, tokens: Tokens) -> Tensor:
        """ids [T] -> [T, size]."""
        lora = tokens.lora
        x = self.method.look_up(self, ids) if self.group is None and lora is None else self._look_up_all(ids, lora)
        return x if self.scale == 1.0 else x * self.scale

    def _look_up_all(self, ids: Tensor, lora: LoRATokens | None) -> Tensor:
        """With what adapters add, and what other ranks have."""
        bank = None if lora is None else self.bank
        known = ids.clamp(max=self.total - 1) if bank is not None and bank.more else ids
        if self.group is not None:
            x = self.group.add(self._look_up_own(known, lora))
        else:
            x = self.method.look_up(self, known)
            if bank is not None:
                x = bank.add(x, known, lora)
        return bank.add_more(x, ids, lora, self.total) if bank is not None and bank.more else x

    def _look_up_own(self, ids: Tensor, lora: LoRATokens | None) -> Tensor:
        """Zeros for ids that are another rank's."""
        own = ids - self.kept.start
        theirs = (own < 0) | (own >= len(self.kept))
        own = own.masked_fill(theirs, 0)
        x = self.method.look_up(self, own).masked_fill(theirs.unsqueeze(1), 0.0)
        return x if lora is None or self.bank is None else self.bank.add(x, own, lora, theirs)


class PositionEmbedding(Embedding):
    """Of few rows, which every rank has."""

    role = Role.REPLICATED


class HeadMethod(Protocol):
    @property
    def dtypes(self) -> Mapping[str, torch.dtype]: ...

    def shapes(self, vocab_size: int, hidden_size: int) -> Mapping[str, tuple[int, ...]]:
        """The parameters, by names of the method's own; a tied head has none."""
        ...

    def claims(self, layer: "Head", path: str) -> Claims: ...

    def finish(self, layer: "Head") -> None: ...

    def apply(self, layer: "Head", hidden: Tensor) -> Tensor:
        """hidden [P, H] -> [P, V] float32, neither scaled nor capped."""
        ...


class PlainHead(Method):
    def shapes(self, vocab_size: int, hidden_size: int) -> Mapping[str, tuple[int, ...]]:
        return {"weight": (vocab_size, hidden_size)}

    def claims(self, layer: "Head", path: str) -> Claims:
        return claim_rows(layer, path, self.shapes(layer.total, layer.hidden_size)) if layer.tied is None else {}

    def apply(self, layer: "Head", hidden: Tensor) -> Tensor:
        return linear_float(hidden, layer.matrix(), layer.bias)


class Head(MethodLayer):
    """Hidden states to float32 logits, with a matrix of its own or the embedding's (`tied`)."""

    role = Role.VOCABULARY
    weight: nn.Parameter | None
    group: Group | None = None  # of the ranks that have the other tokens
    bank: HeadBank | None = None  # of the adapters that rows may ask for

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
        self.total, self.hidden_size, self.biased = vocab_size, hidden_size, bias
        self.method: HeadMethod = PlainHead()
        self.keep(range(vocab_size))

    def keep(self, tokens: range) -> None:
        """Before anything is loaded: the logits of these tokens."""
        self.kept = tokens
        self.bias = parameter(len(tokens)) if self.biased else None
        self.use(self.method)

    def use(self, method: HeadMethod) -> None:
        self.method = method
        self.declare({} if self.tied is not None else method.shapes(len(self.kept), self.hidden_size), method.dtypes)

    def claims(self, path: str) -> Claims:
        """A checkpoint may store a tied matrix a second time."""
        taken = self.method.claims(self, path)
        if self.bias is not None:
            taken[f"{path}.bias"] = rows_of((self.total,), [(self.bias.data, self.kept)])
        return taken if self.tied is None else {f"{path}.weight": None, **taken}

    def finish(self, device: torch.device) -> None:  # noqa: ARG002
        self.method.finish(self)

    if TYPE_CHECKING:

        def __call__(self, hidden: Tensor, tokens: Tokens) -> Tensor: ...

    def forward(self, hidden: Tensor, tokens: Tokens) -> Tensor:
        """hidden [P, H] -> [P, V] float32; columns for tokens that LoRA adapters add come after the V."""
        logits, lora = self.method.apply(self, hidden), tokens.lora
        if lora is not None and self.bank is not None:
            logits = self.bank.add(logits, hidden, lora, self.bias)
        logits = self._shape(logits)
        if self.group is not None:
            logits = self.group.join(logits, self.total)
        if self.bank is not None and self.bank.more:
            logits = self.bank.widen(logits, hidden, lora, self._shape)
        return logits

    def _shape(self, logits: Tensor) -> Tensor:
        if self.scale != 1.0:
            logits = logits * self.scale
        if self.soft_cap is not None:
            logits = torch.tanh(logits / self.soft_cap) * self.soft_cap
        return logits

    def matrix(self) -> Tensor:
        weight = self.weight if self.tied is None else self.tied.weight
        assert weight is not None
        return weight


def claim_rows(layer: Embedding | Head, path: str, shapes: Mapping[str, tuple[int, ...]]) -> Claims:
    """Of tensors of these shapes in the checkpoint, a layer's rows."""
    return {f"{path}.{name}": rows_of(shapes[name], [(layer.get_parameter(name).data, layer.kept)]) for name in layer.stored}
