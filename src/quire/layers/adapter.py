"""Low-rank additions to linear layers, of which each row of a batch has one or none."""

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor
from torch.overrides import handle_torch_function, has_torch_function_unary

from quire.attn.batch import AdapterRows


@dataclass(frozen=True)
class BankPart:
    """The additions to some of a layer's outputs, which are one matrix in the checkpoint."""

    start: int  # of those outputs
    down: Tensor  # [adapters, rank, inputs]
    up: Tensor  # [adapters, outputs, rank]


class LinearBank:
    """All adapters of one layer; number n is at n - 1."""

    def __init__(self, parts: Sequence[BankPart]) -> None:
        self.parts = tuple(parts)

    def add(self, out: Tensor, x: Tensor, rows: AdapterRows | None) -> Tensor:
        """out [T, outputs], which it may overwrite, with what each row's adapter makes of x [T, inputs]. It can be overridden.

        A row gets the same numbers whoever is beside it asks for which adapter: of others' it gets nothing times zero.
        """
        if has_torch_function_unary(x):
            return handle_torch_function(LinearBank.add, (x,), self, out, x, rows)
        if rows is None:
            return out
        for adapter in rows.present:
            theirs = (rows.index != adapter).unsqueeze(1)
            for part in self.parts:
                inner = (x @ part.down[adapter - 1].t()).masked_fill_(theirs, 0.0)
                outputs = part.up.shape[1]
                out[:, part.start : part.start + outputs] += inner @ part.up[adapter - 1].t()
        return out
