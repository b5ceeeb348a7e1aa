"""Load a checkpoint or random weights into a model that was built without weights."""

import logging
from collections.abc import Mapping
from typing import TYPE_CHECKING, Protocol, runtime_checkable

import torch
from torch import nn

from quire.files.reading import reading
from quire.layers.parameter import WeightSlices
from quire.layers.quant.scheme import take_inventory
from quire.layers.quant.stored import Target
from quire.load.assign import NOT_FINITE, Renames, assign, broken_parameters, broken_tensor, match, rename, slices_of_model
from quire.load.cache_scales import KV_SCALES, has_cache_scales, take_cache_scales
from quire.load.safetensors import SafetensorsSource
from quire.load.source import DummySource, Source
from quire.ops.blocks import QuantizedMatrix
from quire.prepare.quantize import find_scheme, quantize
from quire.types.errors import ModelError

if TYPE_CHECKING:
    from quire.config.facts import ModelFacts
    from quire.config.quantization import Quantization

logger = logging.getLogger(__name__)
FORMATS = ("auto", "safetensors", "mistral", "gguf", "dummy")


@runtime_checkable
class Finishing(Protocol):
    def finish(self, device: torch.device) -> None: ...


@runtime_checkable
class Arranging(Protocol):
    """A layer that checkpoints store in different ways. shapes: of the checkpoint's tensors, by names after renames."""

    def arrange(self, path: str, shapes: Mapping[str, tuple[int, ...]]) -> None: ...


@runtime_checkable
class StoredBlocks(Source, Protocol):
    """A source of quantized blocks that layers may use as stored."""

    @property
    def stored(self) -> Mapping[str, QuantizedMatrix]: ...

    def leave_in_blocks(self, names: frozenset[str]) -> None: ...


@runtime_checkable
class Filling(Protocol):
    """A model that loads its weights itself. source None: random weights."""

    def fill(self, source: Source | None, device: torch.device, dtype: torch.dtype, seed: int) -> None: ...


def load_weights(
    model: nn.Module,
    facts: "ModelFacts",
    *,
    device: str | torch.device,
    dtype: str | torch.dtype,
    load_format: str = "auto",
    seed: int = 0,
    keep_quantized: bool = False,
    quantization: "Quantization | None" = None,
    keeps: frozenset[str] = frozenset(),
    cache_scales: bool = False,
) -> None:
    """Put the model on `device` in `dtype` and fill every parameter.

    load_format: "auto": the format of the model's files
    keep_quantized: matrices that a GGUF file stores in blocks stay quantized, where a layer supports it
    quantization: how safetensors are quantized
    keeps: quantized layouts that the device supports (`DeviceFacts.keeps`); all others are dequantized
    cache_scales: the KV cache has 8 bits, so the checkpoint's scales for it are used
    """
    kind = getattr(torch, dtype) if isinstance(dtype, str) else dtype
    with reading(facts.files.path, "the weights cannot be loaded"):
        target = Target(kind, keeps)
        _load(model, facts, torch.device(device), load_format, seed, keep_quantized, quantization, target, cache_scales)


def _load(
    model: nn.Module,
    facts: "ModelFacts",
    device: torch.device,
    load_format: str,
    seed: int,
    keep_quantized: bool,
    quantization: "Quantization | None",
    target: Target,
    cache_scales: bool,
) -> None:
    kind = target.dtype
    if isinstance(model, Filling):
        source = None if load_format == "dummy" else open_source(facts, load_format)
        if source is not None and quantization is not None and quantization.method == "mxfp4":
            from quire.load.safetensors import MXFP4Source

            source = MXFP4Source(source, kind)
        elif quantization is not None:
            raise ModelError(
                f"{facts.files.name}: the weights are quantized ({quantization.method}), but {facts.architecture} is run by "
                "the fallback, which supports unquantized weights only; use those"
            )
        model.fill(source, device, kind, seed)
        return
    source = None if load_format == "dummy" else open_source(facts, load_format)
    table, renames = lay_out(model, source, device, keep_quantized, quantization, target, cache_scales)
    if source is None:
        assign(table, DummySource(table, seed), (), "the set of dummy weights")
    else:
        assign(table, source, renames, str(facts.files.path))
    for module in model.modules():
        if hasattr(type(module), "finish") and isinstance(module, Finishing):
            module.finish(device)
    if device.type == "cuda" and source is not None:
        refuse_broken(model, source, str(facts.files.path), kind)
    if target.dequantized:
        counts = ", ".join(f"{count} {kind}" for kind, count in sorted(target.dequantized.items()))
        logger.info("dequantized to %s: %s", str(kind).removeprefix("torch."), counts)


def check_fit(
    model: nn.Module,
    facts: "ModelFacts",
    *,
    dtype: str,
    keep_quantized: bool = False,
    quantization: "Quantization | None" = None,
    keeps: frozenset[str] = frozenset(),
) -> None:
    """Raise what `load_weights` would raise before it reads a tensor; only headers of the files are read."""
    with reading(facts.files.path, "the weights cannot be loaded"):
        source = open_source(facts, "auto") if facts.files.weights else None
        target = Target(getattr(torch, dtype), keeps)
        table, renames = lay_out(model, source, torch.device("meta"), keep_quantized, quantization, target)
        if source is not None:
            match(table, source, renames, str(facts.files.path))


def lay_out(
    model: nn.Module,
    source: Source | None,
    device: torch.device,
    keep_quantized: bool,
    quantization: "Quantization | None",
    target: Target,
    cache_scales: bool = False,
) -> tuple[WeightSlices, Renames]:
    """Allocate every parameter on the device. Return the weight slices of the checkpoint, and the renames of its tensors."""
    renames: Renames = getattr(model, "renames", ())
    if source is not None:
        arrange(model, source, renames)
    if keep_quantized and isinstance(source, StoredBlocks):
        use_blocks(model, source, renames, target, device)
    if cache_scales and source is not None:
        count = take_cache_scales(model, source, renames, device)
        logger.info("KV cache scales: %s", f"the checkpoint's, in {count} layers" if count else "computed for every token")
    elif quantization is not None and source is not None and has_cache_scales(source, renames):
        logger.info("the checkpoint's KV cache scales are unused: they require kv_cache_dtype='fp8'")
    if quantization is not None or cache_scales:
        renames = (*renames, *KV_SCALES)
    if quantization is not None:
        use_scheme(model, quantization, source, renames, target)
    materialize(model, device, target.dtype)
    return slices_of_model(model), renames


def refuse_broken(model: nn.Module, source: Source, where: str, dtype: torch.dtype) -> None:
    if names := broken_parameters(model):
        if (tensor := broken_tensor(source)) is not None:
            raise ModelError(f"{where}: tensor {tensor!r} {NOT_FINITE}")
        raise ModelError(
            f"{where}: {names[0]} has values beyond the range of {str(dtype).removeprefix('torch.')}; use another dtype, "
            "such as bfloat16"
        )


def use_scheme(model: nn.Module, quantization: "Quantization", source: Source | None, renames: Renames, target: Target) -> None:
    """Give every layer the method for its part of a quantized checkpoint."""
    if source is not None and not isinstance(source, SafetensorsSource):
        raise ModelError(f"quantization {quantization.method!r} requires safetensors")
    inventory = None
    if source is not None:
        names = [(name, ours) for name in source.shapes if (ours := rename(name, renames)) is not None]
        inventory = take_inventory(names, source.infos)
    scheme = find_scheme(f"{quantization.method} online" if quantization.online else quantization.method)
    try:
        quantize(model, scheme(quantization.config, inventory, target))
    except ModelError as error:
        raise ModelError(f"the weights are quantized ({quantization.method}): {error}") from error


def arrange(model: nn.Module, source: Source, renames: Renames) -> None:
    """Show the checkpoint's tensor shapes to every layer that adapts to them."""
    some = [(path, module) for path, module in model.named_modules() if hasattr(type(module), "arrange")]
    layers = [(path, module) for path, module in some if isinstance(module, Arranging)]
    if layers:
        shapes = {ours: shape for name, shape in source.shapes.items() if (ours := rename(name, renames)) is not None}
        for path, module in layers:
            module.arrange(path, shapes)


def use_blocks(model: nn.Module, source: StoredBlocks, renames: Renames, target: Target, device: torch.device) -> None:
    """Use the source's blocks as stored, or convert them to a quantized layout, wherever layer and device support it."""
    stored = source.stored
    names = {ours: name for name in stored if (ours := rename(name, renames)) is not None}
    mine = {ours: stored[name] for ours, name in names.items()}
    mapped = not target.keeps or "blocks" in target.keeps
    scheme = find_scheme("gguf")(mine) if mapped else find_scheme("gguf layouts")(mine, target, device)
    quantize(model, scheme)
    source.leave_in_blocks(frozenset(names[name] for name in scheme.in_blocks))


def find_rows(model: nn.Module, part: nn.Module, facts: "ModelFacts", load_format: str) -> QuantizedMatrix | None:
    """Return the rows of a module's weight in the files, if they can be read one by one."""
    if load_format == "dummy":
        return None
    [path] = [path for path, module in model.named_modules() if module is part]
    source, renames = open_source(facts, load_format), getattr(model, "renames", ())
    names = [name for name in source.shapes if rename(name, renames) == f"{path}.weight"]
    return source.find_rows(names[0]) if names else None


def open_source(facts: "ModelFacts", load_format: str) -> Source:
    if load_format not in FORMATS:
        raise ModelError(f"unknown load_format {load_format!r}; it must be one of {', '.join(FORMATS)}")
    files = facts.files
    stored = "safetensors" if files.format == "hf" else files.format
    if load_format not in ("auto", "mistral", stored):  # mistral decided which files these are
        raise ModelError(f"load_format {load_format!r} requires {load_format} files; {files.path} has {stored} weights")
    if stored == "gguf":
        from quire.load.gguf import GGUFSource

        return GGUFSource(facts)
    if stored == "mistral":
        from quire.load.mistral import MistralSource

        return MistralSource(facts)
    return SafetensorsSource(files.path, files.weights)


def materialize(model: nn.Module, device: torch.device, dtype: torch.dtype) -> None:
    """Allocate every meta parameter; floats take the model's dtype, unless a method fixed theirs."""
    for module in model.modules():
        for name, old in list(module.named_parameters(recurse=False)):
            kind = dtype if old.is_floating_point() and name not in getattr(module, "fixed", ()) else old.dtype
            new = torch.empty(old.shape, dtype=kind, device=device)
            module.register_parameter(name, nn.Parameter(new, requires_grad=False))
