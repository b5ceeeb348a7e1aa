"""Linear layers: one matrix, or several over the same input merged into one.

A *method* stores the weight and runs the GEMM: it names the parameters, maps checkpoint tensors to them, may repack them after
loading, and multiplies.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor, nn

from quire.attn.batch import Tokens
from quire.dist.collectives import Group, add_parts, join_parts
from quire.dist.mesh import Cut, HeadDivision, evenly
from quire.layers.lora import LinearBank
from quire.layers.parameter import CheckpointTensor, Destination, Method, MethodLayer, Role, WeightSlices, parameter, rows_of
from quire.ops.adapters import linear_tiled
from quire.ops.linear import gated_linear, linear
from quire.ops.quantized_layouts import Activations, Rounding

MATRICES = ("weight", "qweight", "weight_packed")  # names of a matrix in checkpoints, quantized or not


class LinearMethod(Protocol):
    @property
    def dtypes(self) -> Mapping[str, torch.dtype]:
        """Return the dtypes of parameters that differ from the model's."""
        ...

    def shapes(self, inputs: int, outputs: int) -> Mapping[str, tuple[int, ...]]:
        """Return the shapes of the parameters, by the method's own names."""
        ...

    def weight_slices(self, layer: "Linear", path: str) -> WeightSlices:
        """Return which slices of which checkpoint tensors fill them."""
        ...

    def finish(self, layer: "Linear") -> None: ...

    def rounding(self, x: Activations) -> Rounding | None:
        """Return the activation quantization applied to inputs shaped like x; None: inputs stay as they are."""
        ...

    # x: Activations, quantized only as `rounding` returns

    def apply(self, layer: "Linear", x: Any) -> Tensor: ...

    def apply_gated(self, layer: "Linear", x: Any, activation: str, rounding: Rounding | None = None) -> Activations:
        """Return activation(gate) * up [..., outputs / 2]: the first half of the outputs is the gate, the second half `up`.

        rounding: activation quantization of the only reader, which this call may fuse.
        """
        ...


class Plain(Method):
    """One matrix [outputs, inputs] in the model's dtype."""

    def shapes(self, inputs: int, outputs: int) -> Mapping[str, tuple[int, ...]]:
        return {"weight": (outputs, inputs)}

    def weight_slices(self, layer: "Linear", path: str) -> WeightSlices:
        taken: WeightSlices = {}
        across = layer.local_inputs.start, layer.local_inputs.stop
        for part, matrix in layer.parts(path).items():
            destinations = [
                Destination(layer.weight.data[start : start + len(rows)], ((rows.start, rows.stop), across))
                for start, rows in matrix.local
            ]
            entry = CheckpointTensor((matrix.outputs, layer.all_inputs), tuple(destinations)).simple
            taken[f"{part}.weight"] = entry.transposed if layer.transposed else entry
        return taken

    def apply(self, layer: "Linear", x: Tensor) -> Tensor:
        return linear(x, layer.weight, layer.bias)

    def apply_gated(self, layer: "Linear", x: Tensor, activation: str, rounding: Rounding | None = None) -> Activations:  # noqa: ARG002
        return gated_linear(x, layer.weight, layer.bias, activation)


@dataclass(frozen=True)
class MatrixPart:
    """The rows of one checkpoint matrix that a layer holds."""

    outputs: int  # of the checkpoint matrix
    local: tuple[tuple[int, range], ...]  # first output in the layer, and the outputs of the checkpoint matrix stored there

    @classmethod
    def of(cls, outputs: int, rows: Iterable[range], at: int = 0) -> "MatrixPart":
        """Return the part with these rows, one after the other in the layer, from its output `at`."""
        local = list[tuple[int, range]]()
        for some in rows:
            start = at
            at += len(some)
            if local and local[-1][1].stop == some.start:  # contiguous in the checkpoint
                start, before = local.pop()
                some = range(before.start, some.stop)
            if some:
                local.append((start, some))
        return cls(outputs, tuple(local))

    @property
    def rows(self) -> int:
        return sum(len(some) for _, some in self.local)


class Linear(MethodLayer):
    """y = x @ weight.T + bias, plus the LoRA addition of each token's adapter.

    transposed: the checkpoint stores [inputs, outputs], as GPT-2's does.
    role: how tensor-parallel ranks divide the layer; `cuts` divide each of the `sections` of its outputs, or its inputs.
    as_floats: other code reads the matrix, so it is dequantized at load, and LoRA changes the matrix instead of the output.
    """

    weight: nn.Parameter
    group: Group | None = None  # ranks whose outputs are all-reduced or all-gathered
    joined: range | None = None  # inputs that this rank contributes if ranks divide a ROW layer by its outputs
    bank: LinearBank | None = None  # this layer's share of every loaded LoRA adapter

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
        self.shard(range(inputs), [range(size) for size in self.sections], bias=bias)

    def shard(self, inputs: range, outputs: Sequence[range], *, bias: bool) -> None:
        """Hold only these inputs and these outputs of each section; `bias`: hold the bias. Before loading."""
        self.local_inputs, self.local_outputs = inputs, tuple(outputs)
        self.inputs, self.outputs = len(inputs), sum(map(len, outputs))
        self.bias = parameter(self.outputs) if bias else None
        self.use(self.method)

    def use(self, method: LinearMethod) -> None:
        self.method = method
        self.declare(method.shapes(self.inputs, self.outputs), method.dtypes)

    def tensors(self, path: str) -> Mapping[str, slice]:
        """Return the sections of each checkpoint tensor, by its path, in row order."""
        return {path: slice(None)}

    def parts(self, path: str) -> Mapping[str, MatrixPart]:
        """Return what the layer holds of each checkpoint tensor, by its path, in row order."""
        found, at = {}, 0
        for name, which in self.tensors(path).items():
            firsts = accumulate(self.sections[which], initial=0)
            rows = [range(first + some.start, first + some.stop) for first, some in zip(firsts, self.local_outputs[which])]  # noqa: B905
            found[name] = MatrixPart.of(sum(self.sections[which]), rows, at)
            at += found[name].rows
        return found

    def weight_slices(self, path: str) -> WeightSlices:
        taken = self.method.weight_slices(self, path)
        for part, matrix in self.parts(path).items():
            if self.bias is not None:
                views = [(self.bias.data[start : start + len(rows)], rows) for start, rows in matrix.local]
                taken[f"{part}.bias"] = rows_of((matrix.outputs,), views)
            elif self.biased:
                taken[f"{part}.bias"] = None  # another rank adds it
        return taken

    def finish(self, device: torch.device) -> None:  # noqa: ARG002
        self.method.finish(self)

    def rounding(self, x: Activations) -> Rounding | None:
        """Return the activation quantization that this layer applies to inputs shaped like x, so that the only producer can
        fuse it; None: no quantization. LoRA reads unquantized activations."""
        return self.method.rounding(x) if self.bank is None else None

    if TYPE_CHECKING:

        def __call__(self, x: Any, tokens: Tokens) -> Tensor: ...

    def forward(self, x: Any, tokens: Tokens) -> Tensor:
        """x: Activations [..., inputs] -> [..., outputs]."""
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
            return join_parts(out, self.group, self.local_outputs[0], sum(self.sections))
        return add_parts(out, self.group)

    def gated(self, x: Any, activation: str, tokens: Tokens, reader: "Linear | None" = None) -> Activations:
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
    """q, k and v in one checkpoint matrix, grouped by key head: its query heads, the key head, its value head."""

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

    def parts(self, path: str) -> Mapping[str, MatrixPart]:
        size, group = self.division.size, self.division.queries // self.division.keys
        firsts = [
            (head // each * (group + 2) + first + head % each) * size
            for some, each, first in zip(self.local_outputs, (group, 1, 1), (0, group, group + 1), strict=True)
            for head in range(some.start // size, some.stop // size)
        ]
        return {path: MatrixPart.of(sum(self.sections), [range(row, row + size) for row in firsts])}


class BlockedLinear(Linear):
    """q, k and v in one checkpoint matrix of `blocks` blocks; each block has q, then v, then k of some heads."""

    def __init__(self, inputs: int, division: HeadDivision, blocks: int) -> None:
        size, cut = division.queries * division.size, division.cut_queries
        super().__init__(inputs, 3 * size, role=Role.COLUMN, sections=(size,) * 3, cuts=(cut,) * 3)
        self.division, self.each = division, division.queries // blocks

    def parts(self, path: str) -> Mapping[str, MatrixPart]:
        size = self.division.size
        firsts = [
            ((head // self.each * 3 + position) * self.each + head % self.each) * size
            for some, position in zip(self.local_outputs, (0, 2, 1), strict=True)
            for head in range(some.start // size, some.stop // size)
        ]
        return {path: MatrixPart.of(sum(self.sections), [range(row, row + size) for row in firsts])}


class KeyHeadLinear(Linear):
    """Projections of a recurrent layer in one checkpoint matrix, grouped by key head: its outputs of `per_key`, then those of
    `per_head` for its heads. The layer has the same order.

    per_key, per_head: outputs of each projection for one key head, and for one head
    """

    def __init__(self, inputs: int, division: HeadDivision, per_key: Sequence[int], per_head: Sequence[int]) -> None:
        keyed, headed = ([replace(division, size=size) for size in sizes] for sizes in (per_key, per_head))
        sections = [each.keys * each.size for each in keyed] + [each.queries * each.size for each in headed]
        cuts = [each.cut_keys for each in keyed] + [each.cut_queries for each in headed]
        super().__init__(inputs, sum(sections), role=Role.COLUMN, sections=sections, cuts=cuts)
        self.division, self.per_key, self.per_head = division, sum(per_key), tuple(per_head)

    def parts(self, path: str) -> Mapping[str, MatrixPart]:
        each, last, rows = self.division.queries // self.division.keys, self.local_outputs[-1], list[range]()
        held = range(last.start // self.per_head[-1], last.stop // self.per_head[-1])
        for key in range(held.start // each, -(-held.stop // each)):
            heads = range(max(held.start - key * each, 0), min(held.stop - key * each, each))  # among those of the key head
            first = key * (self.per_key + each * sum(self.per_head))
            rows.append(range(first, first + self.per_key))
            first += self.per_key
            for size in self.per_head:
                rows.append(range(first + heads.start * size, first + heads.stop * size))
                first += each * size
        return {path: MatrixPart.of(sum(self.sections), rows)}


class MergedLinear(Linear):
    """Sibling tensors of the checkpoint in one matrix: `a.qkv` with parts q_proj, ... loads `a.q_proj.weight`, ...

    parts: outputs of each tensor, or of its sections
    """

    def __init__(
        self,
        inputs: int,
        parts: Mapping[str, int | Sequence[int]],
        *,
        bias: bool = False,
        role: Role = Role.REPLICATED,
        cuts: Sequence[Cut] | None = None,
        method: LinearMethod | None = None,
    ) -> None:
        sections = [(size,) if isinstance(size, int) else tuple(size) for size in parts.values()]
        sizes = [size for section in sections for size in section]
        super().__init__(inputs, sum(sizes), bias=bias, role=role, sections=sizes, cuts=cuts, method=method)
        ends = [*accumulate(map(len, sections))]
        self.names = {name: slice(end - len(own), end) for name, own, end in zip(parts, sections, ends, strict=True)}

    def tensors(self, path: str) -> Mapping[str, slice]:
        above = path.rpartition(".")[0]
        return {f"{above}.{name}" if above else name: which for name, which in self.names.items()}


class FusedLinear(MergedLinear):
    """The parts are one checkpoint tensor at the layer's own path; some files store them as siblings instead."""

    separate = False

    def arrange(self, path: str, shapes: Mapping[str, tuple[int, ...]]) -> None:
        fused, first = ([f"{name}.{kind}" for kind in MATRICES] for name in (path, next(iter(super().tensors(path)))))
        self.separate = shapes.keys().isdisjoint(fused) and not shapes.keys().isdisjoint(first)

    def tensors(self, path: str) -> Mapping[str, slice]:
        return super().tensors(path) if self.separate else {path: slice(None)}
