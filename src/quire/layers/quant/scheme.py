"""Base of quantization schemes: the configuration says how a matrix is stored, the checkpoint which matrices are quantized."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatch
from itertools import combinations, count, takewhile
from typing import Any

import torch

from quire.files.reading import shown
from quire.files.safetensors import TensorInfo
from quire.layers.embedding import Embedding, Head
from quire.layers.linear import Linear
from quire.layers.moe import Experts, PlainExperts, UngatedExperts
from quire.layers.quant.layout import Dim, Floats, Layout, Raw
from quire.layers.quant.stored import QuantizedSlice, StoredExperts, StoredHead, StoredLinear, Target
from quire.types.errors import ModelError

DTYPES = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16, "F8_E8M0": torch.float8_e8m0fnu,
          "F8_E4M3": torch.float8_e4m3fn, "U8": torch.uint8, "I8": torch.int8, "I32": torch.int32}  # fmt: skip
PLAIN = ("F32", "F16", "BF16")
INTEGER_DTYPES = ("U8", "I8", "I16", "U16", "I32", "U32", "I64", "U64", "BOOL")
ROUTERS = ("gate", "router")  # choose experts; too small to be quantized
ONE = Dim("neither", 1)
MAX_CONFIG_INTEGER = 1 << 31
MATRIX = (Dim("outputs"), Dim("inputs"))


@dataclass(frozen=True)
class Inventory:
    """The tensors of a checkpoint, by the model's names."""

    tensors: Mapping[str, TensorInfo]
    names: Mapping[str, str] = field(default_factory=dict)  # module names: the model's to the checkpoint's


class CheckpointScheme:
    """How a checkpoint stores quantized matrices. `inventory`: the checkpoint's tensors; None: weights are random."""

    reads_ungated = True  # experts without gates are supported; they are dequantized

    def __init__(self, config: Mapping[str, Any], inventory: Inventory | None, target: Target) -> None:
        self.config, self.inventory, self.target = config, inventory, target

    @property
    def grain(self) -> int:
        """Return the least common multiple of values along outputs or inputs that share a scale or a word, over all groups of
        the configuration.
        """
        return 1

    def layout(self, name: str, outputs: int, inputs: int) -> Layout | None:
        """Return how a quantized matrix is stored; None: the configuration excludes it."""
        raise NotImplementedError

    # ---- by layer

    def linear(self, path: str, layer: Linear) -> StoredLinear | None:
        """Return the method of a linear layer. Quantized matrices are [outputs, inputs] even if floats would be transposed."""
        parts = layer.parts(path)
        found = {name: self._find(name, part.outputs, layer.all_inputs, layer.transposed) for name, part in parts.items()}
        if not any(found.values()):
            return None
        matrices = {}
        for number, (name, part) in enumerate(parts.items()):
            whole = part.outputs, layer.all_inputs
            layout = found[name] or Floats({"weight": self.raw(name, "weight", MATRIX, whole)})
            matrices[f"part{number}"] = QuantizedSlice(
                name, layout, whole, tuple(rows for _, rows in part.local), layer.local_inputs, self.checkpoint_name(name)[:1]
            )
        return StoredLinear(matrices, Target(self.target.dtype, frozenset()) if layer.as_floats else self.target)

    def embedding(self, path: str, layer: Embedding) -> None:  # noqa: ARG002
        return None

    def head(self, path: str, layer: Head) -> StoredHead | None:
        layout = None if layer.tied is not None else self._find(path, layer.total, layer.hidden_size)
        if layout is None:
            return None
        matrix = QuantizedSlice(
            path,
            layout,
            (layer.total, layer.hidden_size),
            (layer.local,),
            range(layer.hidden_size),
            self.checkpoint_name(path)[:1],
        )
        return StoredHead({"part0": matrix}, self.target)

    def experts(self, path: str, layer: Experts) -> StoredExperts | None:
        inner, width, slices = layer.total_inner, layer.hidden_size, dict[str, QuantizedSlice]()
        across = range(width)
        # fused experts are floats, which is checked when they are read
        together = self.has(path, "gate_up_proj") or self.has(path, "up_proj")
        if together or type(layer.method) not in (PlainExperts, UngatedExperts):
            return None
        matrices = (
            ("gate", inner, width, layer.local_inner, across),
            ("up", inner, width, layer.local_inner, across),
            ("down", width, inner, across, layer.local_inner),
        )[0 if layer.gated else 1 :]
        for key, outputs, inputs, rows, columns in matrices:
            layout = self._find(f"{path}.0.{key}_proj", outputs, inputs)
            if layout is not None:
                called = tuple(self.checkpoint_name(f"{path}.{expert}.{key}_proj")[0] for expert in layer.local)
                slices[key] = QuantizedSlice(f"{key}_proj", layout, (outputs, inputs), (rows,), columns, called)
        if slices and len(slices) < len(matrices):
            raise ModelError(f"{path}: all of gate, up and down must be quantized, or none; got {' and '.join(slices)}")
        return StoredExperts(slices, self.target, stack=(len(layer.local),)) if slices else None

    def _find(self, name: str, outputs: int, inputs: int, transposed: bool = False) -> Layout | None:
        """Return how a matrix is stored; None if the checkpoint has it as floats, whatever the configuration says."""
        if self.inventory is None:
            return None if name.rpartition(".")[2] in ROUTERS else self.layout(name, outputs, inputs)
        stored = self.inventory.tensors.get(f"{name}.weight")
        shape = (inputs, outputs) if transposed else (outputs, inputs)
        plain = stored is not None and stored.dtype in PLAIN and stored.shape == shape
        return None if plain else self.layout(name, outputs, inputs)

    # ---- for subclasses

    def info(self, name: str, item: str) -> TensorInfo | None:
        return None if self.inventory is None else self.inventory.tensors.get(f"{name}.{item}")

    def has(self, name: str, item: str) -> bool:
        return self.info(name, item) is not None

    def raw(self, name: str, item: str, dims: tuple[Dim, ...], sizes: tuple[int, int], dtype: torch.dtype | None = None) -> Raw:
        """Return the description of a tensor of a quantized matrix.

        Dimensions of size 1 may differ from the checkpoint's.
        sizes: the matrix's outputs and inputs
        dtype: None: floats in the checkpoint's dtype
        """
        info = self.info(name, item)
        if info is None:
            return Raw(dims, dtype)
        if dtype is None and info.dtype in INTEGER_DTYPES:
            raise ModelError(f"{self.checkpoint_name(name)[0]}.{item} must have floats; got {info.dtype}")
        return Raw(_fit(dims, info.shape, *sizes), DTYPES.get(info.dtype) if dtype is None else dtype)

    def unused(self, name: str, item: str, sizes: tuple[int, int], experts: bool = False) -> dict[str, Raw]:
        """Return a scale that is not used but checked: if it is damaged, so is the file.

        Scales of experts are skipped unless the format is known to have one for each: calibration may not have reached all
        experts.
        """
        head, _, own = name.rpartition(".")
        path, _, number = head.rpartition(".")
        if number.isdigit():
            each = takewhile(lambda one: self.has(one, "weight"), (f"{path}.{expert}.{own}" for expert in count()))
            if not experts or not all(self.has(one, item) for one in each):
                return {}
        return {item: self.raw(name, item, (), sizes)} if self.has(name, item) else {}

    def checkpoint_name(self, name: str) -> tuple[str, ...]:
        """Return the names that files and configurations may use for a module."""
        stored = None if self.inventory is None else self.inventory.names.get(name)
        return (stored,) if stored is not None else (name, f"model.{name}")


def _fit(dims: tuple[Dim, ...], shape: tuple[int, ...], outputs: int, inputs: int) -> tuple[Dim, ...]:
    """Return dims with dimensions of size 1 inserted or removed to match the shape in the file."""
    real = [dim for dim in dims if dim != ONE]
    for places in combinations(range(len(shape)), len(real)):
        fitted = [ONE] * len(shape)
        for place, dim in zip(places, real, strict=True):
            fitted[place] = dim
        if tuple(dim.size(outputs, inputs) for dim in fitted) == tuple(shape):
            return tuple(fitted)
    return dims


def take_inventory(names: Iterable[tuple[str, str]], infos: Mapping[str, TensorInfo]) -> Inventory:
    """Return an inventory; names: pairs (checkpoint's name, model's name)."""
    tensors, modules = {}, dict[str, str]()
    for theirs, ours in names:
        tensors[ours] = infos[theirs]
        for _ in range(3):
            theirs, _, tail = theirs.rpartition(".")
            ours, _, same = ours.rpartition(".")
            if tail != same or not ours:
                break
            modules.setdefault(ours, theirs)
    return Inventory(tensors, modules)


def contains(patterns: Iterable[str], names: Iterable[str]) -> bool:
    """Return whether a pattern is a part of one of the names, or a glob that matches it."""
    each = list(names)
    return any(
        pattern in name or fnmatch(name, pattern) or fnmatch(name, f"{pattern}.*") for pattern in patterns for name in each
    )


def get_int(config: Mapping[str, Any], *names: str, default: int | None = None) -> int:
    for name in names:
        value = config.get(name)
        if value is not None:
            if isinstance(value, bool) or not isinstance(value, int) or abs(value) > MAX_CONFIG_INTEGER:
                raise ModelError(f"quantization_config: {name} must be an integer; got {shown(value)}")
            return value
    if default is None:
        raise ModelError(f"quantization_config lacks {names[0]!r}")
    return default


def get_bool(config: Mapping[str, Any], name: str, default: bool = False) -> bool:
    value = config.get(name)
    if value is None:
        return default
    if not isinstance(value, bool):
        raise ModelError(f"quantization_config: {name} must be true or false; got {shown(value)}")
    return value


def get_text(config: Mapping[str, Any], name: str) -> str | None:
    value = config.get(name)
    if value is not None and not isinstance(value, str):
        raise ModelError(f"quantization_config: {name} must be a string; got {shown(value)}")
    return value


def get_object(config: Mapping[str, Any], name: str) -> Mapping[str, Any] | None:
    return None if config.get(name) is None else as_object(name, config[name])


def as_object(name: str, value: Any) -> Mapping[str, Any]:
    if not isinstance(value, Mapping):
        raise ModelError(f"quantization_config: {name} must be an object; got {shown(value)}")
    return value


def get_names(config: Mapping[str, Any], *names: str) -> list[str]:
    found: list[str] = []
    for name in names:
        value = config.get(name)
        if value is None:
            continue
        if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
            raise ModelError(f"quantization_config: {name} must be a list of names; got {shown(value)}")
        found += value
    return found
