"""What schemes of quantized checkpoints have in common. One says how a matrix is stored, by its name; which matrices are
quantized at all is seen in the files."""

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
from quire.layers.quant.stored import Piece, StoredExperts, StoredHead, StoredLinear, Target
from quire.types.errors import ModelError

DTYPES = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16, "F8_E8M0": torch.float8_e8m0fnu,
          "F8_E4M3": torch.float8_e4m3fn, "U8": torch.uint8, "I8": torch.int8, "I32": torch.int32}  # fmt: skip
PLAIN = ("F32", "F16", "BF16")
WHOLE_NUMBERS = ("U8", "I8", "I16", "U16", "I32", "U32", "I64", "U64", "BOOL")
ROUTERS = ("gate", "router")  # which choose experts: small, and nobody quantizes them
ONE = Dim("neither", 1)
MOST = 1 << 31  # of a number in a configuration
MATRIX = (Dim("outputs"), Dim("inputs"))


@dataclass(frozen=True)
class Inventory:
    """The tensors of a checkpoint, by the model's names."""

    tensors: Mapping[str, TensorInfo]
    names: Mapping[str, str] = field(default_factory=dict)  # of modules: the model's name -> the checkpoint's


class CheckpointScheme:
    """`inventory`: None where weights are made up."""

    reads_ungated = True  # experts without gates, which become floats

    def __init__(self, config: Mapping[str, Any], inventory: Inventory | None, target: Target) -> None:
        self.config, self.inventory, self.target = config, inventory, target

    @property
    def grain(self) -> int:
        """Neighbours along a matrix's outputs or inputs that share a scale or a word, of all that the configuration names."""
        return 1

    def layout(self, name: str, outputs: int, inputs: int) -> Layout | None:
        """How a matrix is stored that is quantized; None = it is not meant to be."""
        raise NotImplementedError

    # ---- by layer

    def linear(self, path: str, layer: Linear) -> StoredLinear | None:
        """Of what a checkpoint of floats stores as [inputs, outputs], quantized matrices lie as all others do."""
        parts = layer.parts(path)
        found = {name: self._find(name, part.outputs, layer.all_inputs, layer.transposed) for name, part in parts.items()}
        if not any(found.values()):
            return None
        pieces = {}
        for number, (name, part) in enumerate(parts.items()):
            whole = part.outputs, layer.all_inputs
            layout = found[name] or Floats({"weight": self.raw(name, "weight", MATRIX, whole)})
            pieces[f"part{number}"] = Piece(
                name, layout, whole, tuple(rows for _, rows in part.kept), layer.kept_inputs, self.checkpoint_name(name)[:1]
            )
        return StoredLinear(pieces, Target(self.target.dtype, frozenset()) if layer.as_floats else self.target)

    def embedding(self, path: str, layer: Embedding) -> None:  # noqa: ARG002
        return None

    def head(self, path: str, layer: Head) -> StoredHead | None:
        layout = None if layer.tied is not None else self._find(path, layer.total, layer.hidden_size)
        if layout is None:
            return None
        piece = Piece(
            path,
            layout,
            (layer.total, layer.hidden_size),
            (layer.kept,),
            range(layer.hidden_size),
            self.checkpoint_name(path)[:1],
        )
        return StoredHead({"part0": piece}, self.target)

    def experts(self, path: str, layer: Experts) -> StoredExperts | None:
        inner, width, pieces = layer.total_inner, layer.hidden_size, dict[str, Piece]()
        across = range(width)
        # all experts in one tensor: of floats, which is checked when it is read
        together = self.has(path, "gate_up_proj") or self.has(path, "up_proj")
        if together or type(layer.method) not in (PlainExperts, UngatedExperts):
            return None
        matrices = (
            ("gate", inner, width, layer.kept_inner, across),
            ("up", inner, width, layer.kept_inner, across),
            ("down", width, inner, across, layer.kept_inner),
        )[0 if layer.gated else 1 :]
        for key, outputs, inputs, rows, columns in matrices:
            layout = self._find(f"{path}.0.{key}_proj", outputs, inputs)
            if layout is not None:
                called = tuple(self.checkpoint_name(f"{path}.{expert}.{key}_proj")[0] for expert in layer.kept)
                pieces[key] = Piece(f"{key}_proj", layout, (outputs, inputs), (rows,), columns, called)
        if pieces and len(pieces) < len(matrices):
            raise ModelError(f"{path}: only {' and '.join(pieces)} of its experts are quantized; all or none must be")
        return StoredExperts(pieces, self.target, stack=(len(layer.kept),)) if pieces else None

    def _find(self, name: str, outputs: int, inputs: int, transposed: bool = False) -> Layout | None:
        """What the files have as plain floats is not quantized, whatever else is said of it."""
        if self.inventory is None:
            return None if name.rpartition(".")[2] in ROUTERS else self.layout(name, outputs, inputs)
        stored = self.inventory.tensors.get(f"{name}.weight")
        shape = (inputs, outputs) if transposed else (outputs, inputs)
        plain = stored is not None and stored.dtype in PLAIN and stored.shape == shape
        return None if plain else self.layout(name, outputs, inputs)

    # ---- for those who say how

    def info(self, name: str, item: str) -> TensorInfo | None:
        return None if self.inventory is None else self.inventory.tensors.get(f"{name}.{item}")

    def has(self, name: str, item: str) -> bool:
        return self.info(name, item) is not None

    def raw(self, name: str, item: str, dims: tuple[Dim, ...], sizes: tuple[int, int], dtype: torch.dtype | None = None) -> Raw:
        """A tensor of that type; None = of floats, as the file has them. Where the file has more dimensions, or fewer, those of
        one entry are not counted. sizes: the matrix's outputs and inputs."""
        info = self.info(name, item)
        if info is None:
            return Raw(dims, dtype)
        if dtype is None and info.dtype in WHOLE_NUMBERS:
            raise ModelError(f"{self.checkpoint_name(name)[0]}.{item} is stored as {info.dtype}, where floats are expected")
        return Raw(_fit(dims, info.shape, *sizes), DTYPES.get(info.dtype) if dtype is None else dtype)

    def unused(self, name: str, item: str, sizes: tuple[int, int], experts: bool = False) -> dict[str, Raw]:
        """A scale that has no use here, to be looked at if it is there: where it is damaged, so is the file. Those of experts
        are left aside, unless the format says what they are and all have one: calibration may not have reached some."""
        head, _, own = name.rpartition(".")
        path, _, number = head.rpartition(".")
        if number.isdigit():
            each = takewhile(lambda one: self.has(one, "weight"), (f"{path}.{expert}.{own}" for expert in count()))
            if not experts or not all(self.has(one, item) for one in each):
                return {}
        return {item: self.raw(name, item, (), sizes)} if self.has(name, item) else {}

    def checkpoint_name(self, name: str) -> tuple[str, ...]:
        """What files and configurations may call a module."""
        there = None if self.inventory is None else self.inventory.names.get(name)
        return (there,) if there is not None else (name, f"model.{name}")


def _fit(dims: tuple[Dim, ...], shape: tuple[int, ...], outputs: int, inputs: int) -> tuple[Dim, ...]:
    """Dimensions of one entry put in or left out, so that they are the file's."""
    real = [dim for dim in dims if dim != ONE]
    for places in combinations(range(len(shape)), len(real)):
        fitted = [ONE] * len(shape)
        for place, dim in zip(places, real, strict=True):
            fitted[place] = dim
        if tuple(dim.size(outputs, inputs) for dim in fitted) == tuple(shape):
            return tuple(fitted)
    return dims


def take_inventory(names: Iterable[tuple[str, str]], infos: Mapping[str, TensorInfo]) -> Inventory:
    """names: (a checkpoint's, the model's)."""
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
    """A part of the path, or a pattern with stars."""
    each = list(names)
    return any(
        pattern in name or fnmatch(name, pattern) or fnmatch(name, f"{pattern}.*") for pattern in patterns for name in each
    )


def get_int(config: Mapping[str, Any], *names: str, default: int | None = None) -> int:
    for name in names:
        value = config.get(name)
        if value is not None:
            if isinstance(value, bool) or not isinstance(value, int) or abs(value) > MOST:
                raise ModelError(f"quantization_config: {name} must be a whole number, got {shown(value)}")
            return value
    if default is None:
        raise ModelError(f"quantization_config lacks {names[0]!r}")
    return default


def get_bool(config: Mapping[str, Any], name: str, default: bool = False) -> bool:
    value = config.get(name)
    if value is None:
        return default
    if not isinstance(value, bool):
        raise ModelError(f"quantization_config: {name} must be true or false, got {shown(value)}")
    return value


def get_text(config: Mapping[str, Any], name: str) -> str | None:
    value = config.get(name)
    if value is not None and not isinstance(value, str):
        raise ModelError(f"quantization_config: {name} must be a string, got {shown(value)}")
    return value


def get_object(config: Mapping[str, Any], name: str) -> Mapping[str, Any] | None:
    return None if config.get(name) is None else as_object(name, config[name])


def as_object(name: str, value: Any) -> Mapping[str, Any]:
    if not isinstance(value, Mapping):
        raise ModelError(f"quantization_config: {name} must be an object, got {shown(value)}")
    return value


def get_names(config: Mapping[str, Any], *names: str) -> list[str]:
    found: list[str] = []
    for name in names:
        value = config.get(name)
        if value is None:
            continue
        if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
            raise ModelError(f"quantization_config: {name} must be a list of names, got {shown(value)}")
        found += value
    return found
