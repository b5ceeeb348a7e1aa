"""What a CPU makes of a model: a compiled body where it can be had, packed matrices, and memory that goes back."""

import gc
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
import torch
from torch import Tensor, nn

from quire.attn.batch import Batch, LoRATokens, take_rows, without_lora
from quire.device.base import Body, Prepared, Setting
from quire.device.cpu import gemm
from quire.device.cpu.autotune import NEVER, dequantize_from, runtime_for_blocks, runtime_for_floats
from quire.device.cpu.compiled import Compiled, compile_body
from quire.device.cpu.forms import adopt_forms, let_go
from quire.device.cpu.graph import Runtime
from quire.device.cpu.huge_pages import gather_in_background
from quire.device.cpu.network import DecoderNetwork
from quire.device.cpu.openvino import PAGE
from quire.device.cpu.product import Product, repack
from quire.device.cpu.resident import give_back_memory
from quire.device.cpu.segments import Segments
from quire.device.cpu.session import KEPT_OF_PRODUCT
from quire.layers.embedding import Embedding, Head
from quire.layers.linear import Linear, Plain
from quire.layers.lora import LinearBank
from quire.layers.parameter import Claims, Method
from quire.layers.quant.gguf import GGUFHead, GGUFMethod, GGUFRows
from quire.load.load import Filling, find_rows
from quire.models.decoder import Decoder
from quire.ops.activation import gated
from quire.ops.quantized_layouts import Rounding
from quire.types.cache import KVLayout, can_divide


def prepare(model: Decoder, setting: Setting) -> Prepared:
    adopt_forms(model)
    body: Body = model.run_blocks
    head: nn.Module | None = getattr(model, "lm_head", None)  # which may be another stage's, or transformers'
    layout, whole = KVLayout.LINES, setting.dtype == torch.float32 and not isinstance(model, Filling)
    layers = kept_in_blocks(model)
    floats = runtime_for_floats() if whole else None
    adapted = any(isinstance(layer, Linear) and layer.bank is not None for layer in model.modules())
    if layers or floats is not None:
        compiled = None if setting.tapped or model.recurrents else compile_body(
            model.run_blocks, setting.facts.hidden_size, whole=not layers, paged=suits_networks(setting), held=adapted,
            banks=find_banks(model),
        )  # fmt: skip
        if compiled is not None:
            body = CompiledBody(model.run_blocks, compiled)
            if isinstance(compiled, Segments) and compiled.too_many == NEVER and not adapted:
                let_go([method for _, method in layers])
        if isinstance(compiled, DecoderNetwork):
            layout = KVLayout.SPLIT
        if (compiled is not None and adapted) or (setting.tapped and not layers):
            multiply_few_rows(model)
            if floats is not None:
                pack_floats(model, floats)
        if compiled is None and layers:
            multiply_by_layer(model)
        elif isinstance(head, Head) and isinstance(head.method, GGUFHead):
            pack_blocks(head)
        elif isinstance(head, Head) and floats is not None:
            head.use(PackedHead(head, floats))
            hold_once(model, setting)
        give_back_memory()
    gather_in_background(setting.facts.weight_bytes)
    return Prepared(body, layout)


@dataclass(frozen=True)
class CompiledBody:
    """The compiled decoder, and the decoder itself for batches that it is faster with."""

    blocks: Body
    compiled: Compiled

    def __call__(self, x: Tensor, batch: Batch) -> Tensor:
        """Where rows of one token are for the compiled body whatever is beside them, they are run apart, and last: they may
        read keys that the others write, but not the other way round (`DeviceFacts.single_rows_share`). Rows with an adapter
        that the compiled body does not know are for the decoder itself; they and those without read nothing of each other's."""
        lora = batch.tokens.lora
        if lora is not None and len(plain := self._find_plain(batch, lora)) < len(batch.rows):
            return self._run_apart(x, batch, plain) if plain else self.blocks(x, batch)
        if self.compiled.suit(batch):
            return self.compiled(x, batch)
        some = self.compiled.find_rows(batch)
        return self._run_apart(x, batch, some) if some else self.blocks(x, batch)

    def _find_plain(self, batch: Batch, adapters: LoRATokens) -> list[int]:
        """Rows without an adapter, or with one that the compiled body knows."""
        places = adapters.places[[start for start, _, _ in batch.rows]]
        known = self.compiled.know(adapters) if isinstance(self.compiled, Segments) else []
        return np.flatnonzero(np.isin(places, [0, *known])).tolist()

    def _run_apart(self, x: Tensor, batch: Batch, last: Sequence[int]) -> Tensor:
        """The others, and then these."""
        out = x.new_empty(len(batch.final.ids), x.shape[1])
        for rows in (sorted({*range(len(batch.rows))} - {*last}), last):
            part = take_rows(batch, rows)
            if part.batch.tokens.lora is not None and not part.batch.tokens.lora.groups:
                part = replace(part, batch=without_lora(part.batch))
            out[part.final] = self(x[part.tokens], part.batch)[: len(part.final)]
        return out


def find_banks(model: Decoder) -> list[LinearBank]:
    """Of the body: none if something in it has a bank of another kind."""
    layers = [layer for layer in model.modules() if not isinstance(layer, Head | Embedding)]
    banks = [bank for layer in layers if (bank := getattr(layer, "bank", None)) is not None]
    return banks if all(type(bank) is LinearBank for bank in banks) else []


def suits_networks(setting: Setting) -> bool:
    """Can the cache be as they want it?"""
    layout = setting.layout
    paged = len(layout.groups) == 1 and layout.page_size == PAGE
    return paged and can_divide(layout, setting.facts.layers, setting.dtype.itemsize)


def pack_blocks(head: Head) -> None:
    """A matrix in blocks is multiplied by as a copy in whole numbers."""
    runtime = runtime_for_blocks()
    if isinstance(head.method, GGUFHead) and runtime is not None:
        head.method.product = Product(repack([head.method.matrix], head.bias, runtime), runtime, KEPT_OF_PRODUCT)


class PackedHead(Method):
    """A float32 matrix is multiplied by as a copy in an order of its own, and the head holds none."""

    def __init__(self, head: Head, runtime: Runtime) -> None:
        self._product = gemm.Gemm(head.matrix(), head.bias, runtime)

    def shapes(self, vocab_size: int, hidden_size: int) -> Mapping[str, tuple[int, ...]]:  # noqa: ARG002
        return {}

    def claims(self, layer: Head, path: str) -> Claims:  # noqa: ARG002
        return {}

    def apply(self, layer: Head, hidden: Tensor) -> Tensor:  # noqa: ARG002
        return self._product(hidden)


def hold_once(model: Decoder, setting: Setting) -> None:
    """A matrix that embeds tokens as well is held by its packed head; its rows are looked up in the file."""
    embedding = model.lm_head.tied
    stored = None if embedding is None else find_rows(model, embedding, setting.facts, setting.load_format)
    rows = None if embedding is None or stored is None else stored.cut(embedding.kept, range(embedding.size))
    if embedding is not None and rows is not None:
        embedding.use(GGUFRows(rows))


class PackedLinear(Method):
    """As `PackedHead`, for layers that are also run by themselves: a row's sums are then the same whoever is beside it."""

    def __init__(self, layer: Linear, runtime: Runtime) -> None:
        self._product = gemm.Gemm(layer.weight, layer.bias, runtime)

    def shapes(self, inputs: int, outputs: int) -> Mapping[str, tuple[int, ...]]:  # noqa: ARG002
        return {}

    def claims(self, layer: Linear, path: str) -> Claims:  # noqa: ARG002
        return {}

    def apply(self, layer: Linear, x: Tensor) -> Tensor:  # noqa: ARG002
        return self._product(x)

    def apply_gated(self, layer: Linear, x: Tensor, activation: str, rounding: Rounding | None = None) -> Tensor:  # noqa: ARG002
        return gated(self.apply(layer, x), activation)


def pack_floats(model: Decoder, runtime: Runtime) -> None:
    gc.collect()  # what was written down to be compiled holds matrices, too; now each goes when its copy is there
    for layer in model.modules():
        if isinstance(layer, Linear) and isinstance(layer.method, Plain):
            layer.use(PackedLinear(layer, runtime))


def kept_in_blocks(model: Decoder) -> list[tuple[Linear, GGUFMethod]]:
    linear = [module for module in model.modules() if isinstance(module, Linear)]
    return [(layer, layer.method) for layer in linear if isinstance(layer.method, GGUFMethod)]


def multiply_by_layer(model: Decoder) -> None:
    """Layers that are run by themselves multiply few rows by copies of their blocks in whole numbers."""
    head: nn.Module = model.lm_head
    if isinstance(head, Head):
        pack_blocks(head)
    multiply_few_rows(model)


def multiply_few_rows(model: Decoder) -> None:
    runtime = runtime_for_blocks()
    for layer, method in kept_in_blocks(model):
        method.few = None if runtime is None else FewRows(layer, method, runtime)


@dataclass
class FewRows:
    layer: Linear
    method: GGUFMethod
    runtime: Runtime

    @cached_property
    def product(self) -> Product:
        """It is made when it is first wanted."""
        return Product(repack(self.method.parts, self.layer.bias, self.runtime), self.runtime)

    def __call__(self, x: Tensor) -> Tensor | None:
        return None if len(x) >= dequantize_from(self.method.dequantizes_quickly) else self.product(x)
