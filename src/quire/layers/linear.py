"""Linear layers, alone or several over one input merged into one matrix.

How the numbers are stored and multiplied is a *method*: it names the parameters, claims checkpoint tensors for them, may repack
them when all are loaded, and multiplies.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor, nn

from quire.attn.batch import Tokens
from quire.dist.collectives import Group, add_parts, join_parts
from quire.dist.mesh import Cut, HeadDivision, evenly
from quire.layers.adapter import LinearBank
from quire.layers.claims import Claim, Claims, Take, rows_of
from quire.layers.parameter import Method, MethodLayer, parameter
from quire.layers.role import Role
from quire.ops.adapters import linear_tiled
from quire.ops.linear import gated_linear, linear
from quire.ops.rounded import Rounding, Rows


class LinearMethod(Protocol):
    @property
    def dtypes(self) -> Mapping[str, torch.dtype]:
        """Of stored parameters whose type is not the model's."""
        ...

    def shapes(self, inputs: int, outputs: int) -> Mapping[str, tuple[int, ...]]:
        """The parameters, by names of the method's own."""
        ...

    def claims(self, layer: "Linear", path: str) -> Claims:
        """Where they are in the checkpoint."""
        ...

    def finish(self, layer: "Linear") -> None: ...

    def rounding(self, x: Rows) -> Rounding | None:
        """How it will round rows, if they are as many as x has and of that type; None = it takes them as they are."""
        ...

    # x: Rows, and rounded only where `rounding` says how

    def apply(self, layer: "Linear", x: Any) -> Tensor: ...

    def apply_gated(self, layer: "Linear", x: Any, activation: str, rounding: Rounding | None = None) -> Rows:
        """The first half of the outputs is a gate of the second: activation(gate) * up [..., outputs / 2]. `rounding`: how who
        reads that alone will round it; it may be so already."""
        ...


class Plain(Method):
    """One matrix [outputs, inputs] of the model's type."""

    def shapes(self, inputs: int, outputs: int) -> Mapping[str, tuple[int, ...]]:
        return {"weight": (outputs, inputs)}

    def claims(self, layer: "Linear", path: str) -> Claims:
        taken: Claims = {}
        across = layer.kept_inputs.start, layer.kept_inputs.stop
        for part, matrix in layer.parts(path).items():
            takes = [
                Take(layer.weight.data[start : start + len(rows)], ((rows.start, rows.stop), across))
                for start, rows in matrix.kept
            ]
            claim = Claim((matrix.outputs, layer.all_inputs), tuple(takes)).simple
            taken[f"{part}.weight"] = claim.transposed if layer.transposed else claim
        return taken

    def apply(self, layer: "Linear", x: Tensor) -> Tensor:
        return linear(x, layer.weight, layer.bias)

    def apply_gated(self, layer: "Linear", x: Tensor, activation: str, rounding: Rounding | None = None) -> Rows:  # noqa: ARG002
        return gated_linear(x, layer.weight, layer.bias, activation)


@dataclass(frozen=True)
class Part:
    """What a layer has of one matrix in the checkpoint."""

    outputs: int  # of the whole
    kept: tuple[tuple[int, range], ...]  # where in the layer they begin, and outputs of the whole


class Linear(MethodLayer):
    """`transposed`: the checkpoint stores [inputs, outputs], as GPT-2's does.

    `role`: how ranks share it, each of the `sections` of its outputs, or its inputs, as the `cuts` say. `as_floats`: others
    read its matrix, so that it is one of floats whatever the checkpoint has, and nothing can be added to what it gives.
    """

    weight: nn.Parameter
    group: Group | None = None  # of the ranks whose outputs are to be added, or joined
    joined: range | None = None  # the inputs that this rank brings, where ranks share a ROW layer by its outputs
    bank: LinearBank | None = None  # of the adapters that rows may ask for

    def __init__(
        self,
        inputs: int,
        outputs: int,
        *,
        bias: bool = False,
        transposed: bool = False,
        role: Role = Role.REPLICATED,
        sections: Sequence[int] | None = None,
        cuts: Sequence[Cut] | None = None,
        method: LinearMethod | None = None,
        as_floats: bool = False,
    ) -> None:
        super().__init__()
        self.transposed, self.role, self.as_floats = transposed, role, as_floats
        self.sections = tuple(sections or (outputs,))
        self.cuts = tuple(cuts or map(evenly, (inputs,) if role is Role.ROW else self.sections))
        self.all_inputs, self.biased = inputs, bias
        self.method: LinearMethod = method or Plain()
        self.keep(range(inputs), [range(size) for size in self.sections], bias=bias)

    def keep(self, inputs: range, outputs: Sequence[range], *, bias: bool) -> None:
        """Before anything is loaded: these of its inputs, these of each section's outputs, and with its bias or without."""
        self.kept_inputs, self.kept_outputs = inputs, tuple(outputs)
        self.inputs, self.outputs = len(inputs), sum(map(len, outputs))
        self.bias = parameter(self.outputs) if bias else None
        self.use(self.method)

    def use(self, method: LinearMethod) -> None:
        self.method = method
        self.declare(method.shapes(self.inputs, self.outputs), method.dtypes)

    def tensors(self, path: str) -> Mapping[str, slice]:
        """Path in the checkpoint -> its sections, from the top of the matrix down."""
        return {path: slice(None)}

    def parts(self, path: str) -> Mapping[str, Part]:
        """By the path in the checkpoint, from the top of the matrix down."""
        found, at = {}, 0
        for name, which in self.tensors(path).items():
            first, kept = 0, list[tuple[int, range]]()
            for size, some in zip(self.sections[which], self.kept_outputs[which], strict=True):
                start, rows = at, range(first + some.start, first + some.stop)
                if kept and kept[-1][1].stop == rows.start:  # as they are in the checkpoint
                    start, before = kept.pop()
                    rows = range(before.start, rows.stop)
                kept.append((start, rows))
                first, at = first + size, at + len(some)
            found[name] = Part(first, tuple(kept))
        return found

    def claims(self, path: str) -> Claims:
        taken = self.method.claims(self, path)
        for part, matrix in self.parts(path).items():
            if self.bias is not None:
                views = [(self.bias.data[start : start + len(rows)], rows) for start, rows in matrix.kept]
                taken[f"{part}.bias"] = rows_of((matrix.outputs,), views)
            elif self.biased:
                taken[f"{part}.bias"] = None  # another rank adds it
        return taken

    def finish(self, device: torch.device) -> None:  # noqa: ARG002
        self.method.finish(self)

    def rounding(self, x: Rows) -> Rounding | None:
        """How it will round rows, if they are as many as x has and of that type, so that who makes them for it alone may do it;
        None = it takes them as they are. Adapters do."""
        return self.method.rounding(x) if self.bank is None else None

    if TYPE_CHECKING:

        def __call__(self, x: Any, tokens: Tokens) -> Tensor: ...

    def forward(self, x: Any, tokens: Tokens) -> Tensor:
        """x: Rows [..., inputs] -> [..., outputs]."""
        lora = tokens.lora
        if self.joined is not None and self.group is not None:
            x = join_parts(x, self.group, self.joined, self.all_inputs)
        if lora is None or self.bank is None:
            out = self.method.apply(self, x)
        elif lora.tiles is not None and self.bank.table is not None and isinstance(self.method, Plain):
            out = linear_tiled(x, self.weight, self.bias, lora.tiles, self.bank.table)
        else:
            out = self.bank.add(self.method.apply(self, x), x, lora, self.bias)
        if self.group is None:
            return out
        if self.joined is not None:
            return join_parts(out, self.group, self.kept_outputs[0], sum(self.sections))
        return add_parts(out, self.group)

    def gated(self, x: Any, activation: str, tokens: Tokens, reader: "Linear | None" = None) -> Rows:
        """Apply the layer and `activation(gate) * up` (`LinearMethod.apply_gated`), fused where the method can and no token
        has a LoRA adapter. `reader`: the only layer that reads the result."""
        lora = tokens.lora
        if self.bank is None or lora is None:
            rounding = None if reader is None else reader.rounding(x)
            return self.method.apply_gated(self, x, activation, rounding)
        if lora.tiles is not None and self.bank.table is not None and isinstance(self.method, Plain):
            return linear_tiled(x, self.weight, self.bias, lora.tiles, self.bank.table, activation)
        return self.bank.gated(self.method.apply(self, x), x, lora, self.bias, activation)


class HeadsLinear(Linear):
    """q, k and v in one matrix of the checkpoint: for one key head after the other its query heads, itself and its values."""

    def __init__(self, inputs: int, division: HeadDivision, *, bias: bool = False, transposed: bool = False) -> None:
        queries, keys = division.queries * division.size, division.keys * division.size
        cuts = division.cut_queries, division.cut_keys, division.cut_keys
        super().__init__(
            inputs,
            queries + 2 * keys,
            bias=bias,
            transposed=transposed,
            role=Role.COLUMN,
            sections=(queries, keys, keys),
            cuts=cuts,
        )
        self.division = division

    def parts(self, path: str) -> Mapping[str, Part]:
        size, group = self.division.size, self.division.queries // self.division.keys
        kept, at = list[tuple[int, range]](), 0
        for some, each, first in zip(self.kept_outputs, (group, 1, 1), (0, group, group + 1), strict=True):
            for head in range(some.start // size, some.stop // size):
                row = (head // each * (group + 2) + first + head % each) * size
                start, rows = at, range(row, row + size)
                if kept and kept[-1][1].stop == row:
                    start, before = kept.pop()
                    rows = range(before.start, rows.stop)
                kept.append((start, rows))
                at += size
        return {path: Part(sum(self.sections), tuple(kept))}


class BlockedLinear(Linear):
    """q, k and v in one matrix of the checkpoint, which has so many blocks: of each some heads' q, then their v, then k."""

    def __init__(self, inputs: int, division: HeadDivision, blocks: int) -> None:
        size, cut = division.queries * division.size, division.cut_queries
        super().__init__(inputs, 3 * size, role=Role.COLUMN, sections=(size,) * 3, cuts=(cut,) * 3)
        self.division, self.each = division, division.queries // blocks

    def parts(self, path: str) -> Mapping[str, Part]:
        size, kept, at = self.division.size, list[tuple[int, range]](), 0
        for some, place in zip(self.kept_outputs, (0, 2, 1), strict=True):
            for head in range(some.start // size, some.stop // size):
                row = ((head // self.each * 3 + place) * self.each + head % self.each) * size
                kept.append((at, range(row, row + size)))
                at += size
        return {path: Part(sum(self.sections), tuple(kept))}


class MergedLinear(Linear):
    """Siblings in the checkpoint, one matrix here: at `a.qkv` with parts q_proj, ... it takes `a.q_proj.weight`, ..."""

    def __init__(
        self,
        inputs: int,
        parts: Mapping[str, int],
        *,
        bias: bool = False,
        role: Role = Role.REPLICATED,
        cuts: Sequence[Cut] | None = None,
        method: LinearMethod | None = None,
    ) -> None:
        sizes = tuple(parts.values())
        super().__init__(inputs, sum(sizes), bias=bias, role=role, sections=sizes, cuts=cuts, method=method)
        self.names = tuple(parts)

    def tensors(self, path: str) -> Mapping[str, slice]:
        above = path.rpartition(".")[0]
        return {f"{above}.{name}" if above else name: slice(i, i + 1) for i, name in enumerate(self.names)}


class FusedLinear(MergedLinear):
    """The parts are one matrix of the checkpoint, at its own path; other files have them apart, beside it."""

    apart = False

    def arrange(self, path: str, shapes: Mapping[str, tuple[int, ...]]) -> None:
        self.apart = f"{path}.weight" not in shapes and f"{next(iter(super().tensors(path)))}.weight" in shapes

    def tensors(self, path: str) -> Mapping[str, slice]:
        return super().tensors(path) if self.apart else {path: slice(None)}
