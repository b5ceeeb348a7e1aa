"""Prepare a model for a CPU: compile its body, repack its matrices and free memory."""

import gc
import logging
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from quire.attn.batch import Batch, LoRATokens, take_rows, without_lora
from quire.device.base import Body, Prepared, Setting
from quire.device.cpu.autotune import NEVER, choose, dequantize_from, runtime_for_blocks, runtime_for_floats
from quire.device.cpu.encoder import compile_encoder
from quire.device.cpu.graph import Runtime
from quire.device.cpu.network import DecoderNetwork, find_attention_shapes
from quire.device.cpu.openvino import PAGE
from quire.device.cpu.process_memory import gather_in_background, give_back_memory
from quire.device.cpu.program import LowRankTables
from quire.device.cpu.repack import repack
from quire.device.cpu.segments import Segments
from quire.device.cpu.session import PRODUCT_CACHED_ELEMENTS, Product, float_product, packed_product
from quire.device.cpu.trace import Trace, Untraceable, trace_body
from quire.layers.class_linear import ClassLinear
from quire.layers.embedding import Embedding, Head, PlainHead
from quire.layers.linear import Linear, Plain
from quire.layers.lora import LinearBank
from quire.layers.parameter import Method, WeightSlices
from quire.layers.quant.gguf import GGUFHead, GGUFMethod, GGUFRows
from quire.layers.quant.stored import StoredHead, StoredLinear
from quire.load.load import Filling, find_rows
from quire.models.decoder import Decoder
from quire.ops.activation import gated
from quire.ops.blocks import GROUP, IntegerMatrix
from quire.ops.native import adapts, encodes
from quire.ops.quantized_layouts import Int8, PackedInts, Rounding
from quire.types.cache import KVLayout, can_divide

logger = logging.getLogger(__name__)

Compiled = DecoderNetwork | Segments


def prepare(model: Decoder, setting: Setting) -> Prepared:
    convert_quantized_layers(model)
    body: Body = model.run_blocks
    head: nn.Module | None = getattr(model, "lm_head", None)  # absent on other pipeline stages and the fallback
    layout, whole = KVLayout.LINES, setting.dtype == torch.float32 and not isinstance(model, Filling)
    layers = gguf_layers(model)
    floats = runtime_for_floats() if whole else None
    adapted = any(isinstance(layer, Linear) and layer.bank is not None for layer in model.modules())
    if setting.facts.encoder and whole and not setting.tapped and not adapted and encodes():
        encoder = prepare_encoder(model, setting.facts.hidden_size)
        if encoder is not None:
            gather_in_background(setting.facts.weight_bytes)
            return Prepared(encoder, layout)
    compiled: Compiled | None = None
    if layers or floats is not None:
        by_layer = setting.tapped or setting.facts.encoder
        compiled = None if by_layer or model.recurrents else compile_body(
            model.run_blocks, setting.facts.hidden_size, whole=not layers, paged=suits_networks(setting), held=adapted,
            banks=find_banks(model),
        )  # fmt: skip
        if compiled is not None:
            body = CompiledBody(model.run_blocks, compiled)
            if isinstance(compiled, Segments) and compiled.too_many == NEVER and not adapted:
                release_copied([method for _, method in layers])
        if isinstance(compiled, DecoderNetwork):
            layout = KVLayout.SPLIT
        if (compiled is not None and adapted) or (by_layer and not layers):
            multiply_few_rows(model)
            if floats is not None:
                pack_floats(model, floats)
        if compiled is None and layers:
            multiply_by_layer(model)
        elif isinstance(head, Head) and isinstance(head.method, GGUFHead):
            pack_blocks(head)
        elif isinstance(head, Head) and floats is not None:
            head.use(PackedFloats(head.matrix(), head.bias, floats))
            hold_once(model, setting)
        give_back_memory()
    gather_in_background(setting.facts.weight_bytes)
    quantized = bool(layers) or (isinstance(head, Head) and isinstance(head.method, GGUFHead))
    return Prepared(body, layout, batch_dependence=find_batch_dependence(setting, compiled, quantized))


def find_batch_dependence(setting: Setting, compiled: Compiled | None, quantized: bool) -> str:
    """Return why a token's bits depend on the other rows of a step; "": they do not."""
    if quantized and runtime_for_blocks() is not Runtime.OWN:
        return "quantized weights on this CPU. They require Quire's C kernels and ARM dot-product instructions or AVX-512 VNNI"
    if setting.tapped:
        return "a drafter that reads hidden states between layers on a CPU. Use another method in speculative_config"
    if not isinstance(compiled, Segments):
        return f"{setting.facts.architecture} on a CPU, where PyTorch runs its layers one by one"
    return ""


def prepare_encoder(model: Decoder, columns: int) -> Body | None:
    """Compile an encoder and pack the matrices of its classifier; None if it cannot be compiled."""
    try:
        body = compile_encoder(model.run_blocks, columns)
    except Untraceable as reason:
        logger.info("encoder runs layer by layer: cannot compile %s", reason)
        return None
    multiply_few_rows(model)
    pack_floats(model, Runtime.OWN)
    give_back_memory()
    return body


@dataclass(frozen=True)
class CompiledBody:
    """The compiled decoder, and the decoder itself for batches where it is faster."""

    blocks: Body
    compiled: Compiled

    def __call__(self, x: Tensor, batch: Batch) -> Tensor:
        """Run a batch, in two parts if decode rows suit the compiled body although the whole batch does not.

        Those rows run last: they may read keys that other rows write, but not the other way round
        (`DeviceFacts.single_rows_share`). Rows whose adapter the compiled body does not support run in the decoder itself;
        rows with different adapters never read each other's keys.
        """
        lora = batch.tokens.lora
        if lora is not None and len(plain := self._find_plain(batch, lora)) < len(batch.rows):
            return self._run_split(x, batch, plain) if plain else self.blocks(x, batch)
        if self.compiled.suit(batch):
            return self.compiled(x, batch)
        some = self.compiled.find_rows(batch)
        return self._run_split(x, batch, some) if some else self.blocks(x, batch)

    def _find_plain(self, batch: Batch, adapters: LoRATokens) -> list[int]:
        """Return the rows without an adapter or with one that the compiled body supports."""
        slots = adapters.slots[[start for start, _, _ in batch.rows]]
        known = self.compiled.know(adapters) if isinstance(self.compiled, Segments) else []
        return np.flatnonzero(np.isin(slots, [0, *known])).tolist()

    def _run_split(self, x: Tensor, batch: Batch, last: Sequence[int]) -> Tensor:
        """Run the other rows, then the rows in `last`."""
        out = x.new_empty(len(batch.final.ids), x.shape[1])
        for rows in (sorted({*range(len(batch.rows))} - {*last}), last):
            part = take_rows(batch, rows)
            if part.batch.tokens.lora is not None and not part.batch.tokens.lora.groups:
                part = replace(part, batch=without_lora(part.batch))
            out[part.final] = self(x[part.tokens], part.batch)[: len(part.final)]
        return out


def find_banks(model: Decoder) -> list[LinearBank]:
    """Return the LoRA banks of the body; none if any is of another kind."""
    layers = [layer for layer in model.modules() if not isinstance(layer, Head | Embedding | ClassLinear)]
    banks = [bank for layer in layers if (bank := getattr(layer, "bank", None)) is not None]
    return banks if all(type(bank) is LinearBank for bank in banks) else []


def suits_networks(setting: Setting) -> bool:
    """Return whether the KV cache can have the layout that an OpenVINO network requires."""
    layout = setting.layout
    paged = len(layout.groups) == 1 and layout.page_size == PAGE
    return paged and can_divide(layout, setting.facts.layers, setting.dtype.itemsize)


def pack_blocks(head: Head) -> None:
    """Multiply by a repacked copy of the LM head."""
    runtime = runtime_for_blocks()
    if isinstance(head.method, GGUFHead) and runtime is not None:
        head.method.product = packed_product(repack([head.method.matrix], head.bias, runtime), runtime, PRODUCT_CACHED_ELEMENTS)


class PackedFloats(Method):
    """Multiply by a repacked copy of a float32 matrix; the layer itself holds none.

    The sums of a token are then the same whatever else is in the batch.
    """

    def __init__(self, weight: Tensor, bias: Tensor | None, runtime: Runtime) -> None:
        self._product = float_product(weight, bias, runtime)

    def shapes(self, inputs: int, outputs: int) -> Mapping[str, tuple[int, ...]]:  # noqa: ARG002
        return {}

    def weight_slices(self, layer: Linear | Head, path: str) -> WeightSlices:  # noqa: ARG002
        return {}

    def apply(self, layer: Linear | Head, x: Tensor) -> Tensor:  # noqa: ARG002
        return self._product(x)

    def apply_gated(self, layer: Linear, x: Tensor, activation: str, rounding: Rounding | None = None) -> Tensor:  # noqa: ARG002
        inner = self.apply(layer, x)
        if activation == "gelu":  # torch's result for strided memory has other bits, and one row alone is never strided
            gate, up = inner.chunk(2, dim=-1)
            return F.gelu(gate.contiguous()).mul_(up)
        return gated(inner, activation)


def hold_once(model: Decoder, setting: Setting) -> None:
    """Free an embedding matrix that the packed LM head also holds; its rows are read from the file."""
    embedding = model.lm_head.tied
    stored = None if embedding is None else find_rows(model, embedding, setting.facts, setting.load_format)
    rows = None if embedding is None or stored is None else stored.cut(embedding.local, range(embedding.size))
    if embedding is not None and rows is not None:
        embedding.use(GGUFRows(rows))


def pack_floats(model: Decoder, runtime: Runtime) -> None:
    gc.collect()  # frees the traces, which hold matrices; each matrix is then freed once its copy is made
    for layer in model.modules():
        if isinstance(layer, Linear) and isinstance(layer.method, Plain) and layer.weight.numel():  # not compiled already
            layer.use(PackedFloats(layer.weight, layer.bias, runtime))


def gguf_layers(model: Decoder) -> list[tuple[Linear, GGUFMethod]]:
    linear = [module for module in model.modules() if isinstance(module, Linear)]
    return [(layer, layer.method) for layer in linear if isinstance(layer.method, GGUFMethod)]


def multiply_by_layer(model: Decoder) -> None:
    """Multiply few tokens by repacked GGUF matrices, layer by layer."""
    head: nn.Module | None = getattr(model, "lm_head", None)  # an encoder has none
    if isinstance(head, Head):
        pack_blocks(head)
    multiply_few_rows(model)


def multiply_few_rows(model: Decoder) -> None:
    runtime = runtime_for_blocks()
    for layer, method in gguf_layers(model):
        method.few = None if runtime is None else FewRows(layer, method, runtime)


@dataclass
class FewRows:
    """The product of a layer with few tokens."""

    layer: Linear
    method: GGUFMethod
    runtime: Runtime

    @cached_property
    def product(self) -> Product:
        """Return the product, repacked at the first use."""
        return packed_product(repack(self.method.parts, self.layer.bias, self.runtime), self.runtime)

    def __call__(self, x: Tensor) -> Tensor | None:
        return None if len(x) >= dequantize_from(self.method.dequantizes_quickly) else self.product(x)


def compile_body(
    body: Callable[[Any, Any], Any],
    columns: int,
    *,
    whole: bool,
    paged: bool,
    held: bool = False,
    banks: Collection[LinearBank] = (),
) -> Compiled | None:
    """Compile a decoder body, from embedded tokens [T, columns] to its last hidden states; None if it is not faster or not
    possible.

    It becomes one network where OpenVINO is faster and supports all of it, otherwise segments.

    whole: the body itself will not run again, so its float matrices are freed, unless `held`.
    paged: the KV cache can have the layout of a network.
    banks: all LoRA banks in the body.
    """
    try:
        trace = trace_body(body, columns)
    except Untraceable as reason:
        logger.info("model runs layer by layer: cannot compile %s", reason)
        return None
    attending = find_attention_shapes(trace) if paged and not whole and not trace.divided and choose().networks else None
    if attending:
        try:
            return DecoderNetwork(trace, attending)
        except RuntimeError as reason:  # OpenVINO's errors
            logger.warning("OpenVINO cannot run the model as one network; compiling segments: %s", reason)
    runtime = _runtime(blocks=not whole, floats=trace.has_floats)
    if runtime is Runtime.OWN and banks and adapts():
        trace = _with_adapters(body, columns, banks) or trace
    return None if runtime is None else Segments(trace, runtime, whole=whole, held=held)


def _with_adapters(body: Callable[[Any, Any], Any], columns: int, banks: Collection[LinearBank]) -> Trace | None:
    """Return a trace that includes LoRA, or None if that is not possible for all banks."""
    tables = LowRankTables()
    try:
        trace = trace_body(body, columns, tables)
    except Untraceable as reason:
        logger.info("tokens with a LoRA adapter run layer by layer: cannot compile %s", reason)
        return None
    if tables.banks != {*banks}:
        return None
    tables.subscribe()
    return trace


def _runtime(*, blocks: bool, floats: bool) -> Runtime | None:
    """Return the runtime that is best for both kinds of matrices; if they differ, OpenVINO, which supports both."""
    of_blocks = runtime_for_blocks() if blocks else None
    of_floats = runtime_for_floats() if floats else None
    if of_blocks == of_floats or not (blocks and floats):
        return of_blocks or of_floats
    return Runtime.OPENVINO if Runtime.OPENVINO in (of_blocks, of_floats) else None


def convert_quantized_layers(model: nn.Module) -> None:
    """Hold 4- and 8-bit checkpoint matrices in groups of 32, as GGUF matrices are; as floats where groups do not allow it."""
    dequantized = 0
    for layer in model.modules():
        if isinstance(layer, Linear) and isinstance(layer.method, StoredLinear):
            found = as_blocks(layer.method.matrix)
            layer.hold(Plain(), weight=found) if isinstance(found, Tensor) else layer.hold(GGUFMethod([found]))
        elif isinstance(layer, Head) and isinstance(layer.method, StoredHead):
            found = as_blocks(layer.method.matrix)
            layer.hold(PlainHead(), weight=found) if isinstance(found, Tensor) else layer.hold(GGUFHead(found))
        else:
            continue
        dequantized += isinstance(found, Tensor)
    if dequantized:
        logger.info("%d quantized matrices are held as float32: their groups are not of %d adjacent inputs", dequantized, GROUP)


def as_blocks(matrix: Any) -> IntegerMatrix | Tensor:
    """Return the matrix in groups of 32, or as floats if that is not possible."""
    if isinstance(matrix, Int8):  # one value per byte with zero point 128
        matrix = PackedInts(8, matrix.inputs, matrix.numbers.view(torch.uint8) ^ 128, matrix.scale, None, None)
    if isinstance(matrix, PackedInts) and matrix.order is None and matrix.group % GROUP == 0:
        return IntegerMatrix(matrix)
    values: Tensor = matrix.dequantize()
    return values


def release_copied(methods: Iterable[GGUFMethod]) -> None:
    """Release matrices that were repacked and that the decoder itself will not read again."""
    for method in methods:
        if any(isinstance(part, IntegerMatrix) for part in method.parts):
            method.parts = ()
