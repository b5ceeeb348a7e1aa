"""Read weights from GGUF files under Hugging Face's names: dequantized, or as stored blocks where a layer supports them.

    blk.0.attn_q.weight  ->  model.layers.0.self_attn.q_proj.weight, rows in Hugging Face's rotary order

The `gguf` package knows the Hugging Face names of each GGUF tensor. Where it knows several, the usual one is taken, or the
one that the family's card names (`config/families/`). What the conversion to GGUF did to the values is undone.
"""

import functools
import mmap
import os
import re
from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from sys import modules
from types import ModuleType
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from quire.config.families import find_gguf
from quire.config.families.card import GGUF
from quire.config.gguf import join_headers
from quire.files.gguf import GGML_TYPES, GGUFTensor, read_gguf_shards
from quire.layers.parameter import Ranges
from quire.load.source import TensorSlice, cut, map_file
from quire.ops.blocks import QuantizedMatrix, dequantize
from quire.types.errors import ModelError

if TYPE_CHECKING:
    from quire.config.facts import ModelFacts

Undo = Callable[[Tensor], Tensor]
_LAYER = re.compile(r"^blk\.(?P<layer>\d+)\.(?P<rest>.+)$")
_PART = re.compile(r"^(?P<part>\w+?|shortconv\.\w+)(\.(?P<expert>\d+))?(?P<kind>\.weight|\.bias|)$")
# the names of most families, of the whole model and of a layer
_USUAL = re.compile(r"embed_tokens|norm")
_USUAL_IN_LAYER = re.compile(
    r"(input|post_attention|pre_feedforward|post_feedforward)_layernorm"
    r"|self_attn\.([qkvo]_proj|[qk]_norm)|mlp\.(experts\.|shared_experts\.)?(gate|up|down)_proj"
    r"|mlp\.gate(\.e_score_correction)?|(mamba|mixer)\.[a-zA-Z]\w*"
)
_HEADS = {"cls": "classifier.dense", "cls.output": "classifier.out_proj"}  # of classification
# the config has these: how rotary frequencies are scaled
IN_CONFIG = frozenset({"rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight"})


@dataclass(frozen=True)
class Name:
    """One Hugging Face tensor: which slice of a GGUF tensor it is, and how its values are restored."""

    hf: str
    expert: int | None = None
    undo: Undo | None = None  # restores the order of rows
    values: Undo | None = None  # restores each value
    transposed: bool = False
    shape: tuple[int, ...] | None = None  # where the conversion removed or added dimensions of size 1


def hf_names(row: GGUF, hf: Mapping[str, Any], gguf_name: str, shape: tuple[int, ...]) -> Iterator[Name]:
    """Yield the Hugging Face tensors inside one GGUF tensor: one, or one per expert, or none when the config holds it."""
    if gguf_name in IN_CONFIG:
        return
    match = _LAYER.match(gguf_name)
    if match is None:
        part, _, kind = gguf_name.rpartition(".")
        plus_one = row.norm_plus_one and "norm" in part
        one_class = (1, *shape) if gguf_name == "cls.output.weight" and len(shape) == 1 else None
        yield Name(f"{_module(row, part, gguf_name)}.{kind}", values=_minus_one if plus_one else None, shape=one_class)
        return
    if hf.get("num_nextn_predict_layers") and int(match["layer"]) >= hf["num_hidden_layers"]:
        return  # draft layers
    rest, prefix = match["rest"], f"{row.layers}.{match['layer']}"
    if rest in row.exact:
        yield Name(f"{prefix}.{row.exact[rest]}")
        return
    found = _PART.match(rest)
    if found is None:
        raise _unknown(row.name, gguf_name)
    part, kind, expert = found["part"], found["kind"], found["expert"]
    if expert or part.endswith("_exps"):
        module = _module(row, f"blk.0.{part.removesuffix('_exps')}_exps", gguf_name)
        template = f"{prefix}.{module.replace('.experts.', '.experts.{}.')}{kind}"
        if expert:  # older files have one tensor per expert
            yield Name(template.format(expert))
        else:
            yield from (Name(template.format(index), index) for index in range(shape[0]))
        return
    module = _module(row, f"blk.0.{part}", gguf_name)
    yield Name(
        f"{prefix}.{module}" + ("" if module.endswith(".weight") else kind),
        undo=_undo(row, hf, part),
        values=_log if module.endswith(".A_log") else _minus_one if row.norm_plus_one and part.endswith("norm") else None,
        transposed=part in row.transposed and kind == ".weight",
        shape=_shape(rest, shape),
    )


def _module(row: GGUF, tensor: str, gguf_name: str) -> str:
    """Return the Hugging Face module of a GGUF tensor without its suffix; of a layer, below the path of the layer."""
    if tensor == "output":
        return "lm_head"
    if tensor in _HEADS:
        return _HEADS[tensor] if row.layers.startswith("encoder.") else "score"
    in_layer = tensor.startswith("blk.")
    top = f"{row.layers.partition('.')[0]}." if row.root is None else row.root
    root, usual = (f"{row.layers}.0.", _USUAL_IN_LAYER) if in_layer else (top, _USUAL)
    found = [name.removeprefix(root) for name in _known_names(row.name).get(tensor, ()) if name.startswith(root)]
    for fits in (lambda name: name in row.names, usual.fullmatch, lambda _: True):
        chosen = [name for name in found if fits(name)]
        if len(chosen) == 1:
            return chosen[0] if in_layer else root + chosen[0]
    raise _unknown(row.name, gguf_name)


@functools.cache
def _known_names(architecture: str) -> Mapping[str, list[str]]:
    """Return the Hugging Face names that the `gguf` package knows for each GGUF tensor of the model and of layer 0."""
    constants, mapping = (_gguf_module(name) for name in ("constants", "tensor_mapping"))
    kinds = [kind for kind, name in constants.MODEL_ARCH_NAMES.items() if name == architecture]
    if not kinds:
        raise ModelError(f"the installed gguf package does not support the architecture {architecture!r}; upgrade it")
    found: dict[str, list[str]] = {}
    for hf, (_, gguf_name) in mapping.get_tensor_name_map(kinds[0], 1).mapping.items():
        found.setdefault(gguf_name, []).append(hf)
    return found


def _gguf_module(name: str) -> Any:
    """Import a module of the `gguf` package without the rest of it, which imports tokenizers for seconds."""
    package = "quire_gguf"
    spec = find_spec("gguf")
    if package not in modules and spec is not None:
        modules[package] = ModuleType(package)
        modules[package].__path__ = list(spec.submodule_search_locations or ())
    return import_module(f"{package}.{name}")


def _shape(rest: str, stored: tuple[int, ...]) -> tuple[int, ...] | None:
    """Return the Hugging Face shape where it differs.

    The conversion makes a matrix of one row a vector, a vector a matrix of one column or of one row per group, and removes the
    dimension of size 1 of a convolution.
    """
    match rest:
        case "ffn_gate_inp_shexp.weight" if len(stored) == 1:
            return (1, *stored)
        case "ssm_conv1d.weight" | "shortconv.conv.weight" if len(stored) == 2:
            return (stored[0], 1, stored[1])
        case "ssm_norm.weight" if len(stored) == 2:
            return (stored[0] * stored[1],)
        case "ssm_a" | "ssm_d" if len(stored) == 2 and stored[1] == 1:
            return stored[:1]
    return None


def _undo(row: GGUF, hf: Mapping[str, Any], part: str) -> Undo | None:
    if row.rotary_pairs and part in ("attn_q", "attn_k"):
        heads = int(hf["num_attention_heads"] if part == "attn_q" else hf["num_key_value_heads"])
        return lambda rows: split_pairs(rows, heads)
    if row.by_key_head and part == "attn_qkv":
        heads, keys = int(hf["num_attention_heads"]), int(hf["num_kv_heads"] or 1)
        return lambda rows: join_heads(rows, heads, keys)
    return None


def join_heads(rows: Tensor, heads: int, keys: int) -> Tensor:
    """Group rows [(heads + 2 * keys) * head_dim, ...] of q, then k, then v by key head: its queries, its key, its value."""
    size = rows.shape[0] // (heads + 2 * keys)
    parts = torch.split(rows, [heads * size, keys * size, keys * size])
    grouped = [part.reshape(keys, -1, *rows.shape[1:]) for part in parts]
    return torch.cat(grouped, dim=1).reshape(rows.shape)


def split_pairs(rows: Tensor, heads: int) -> Tensor:
    """Reorder rows [heads * head_dim, ...]: each head's rows a0 b0 a1 b1 ... become a0 a1 ... b0 b1 ..."""
    pairs = rows.reshape(heads, rows.shape[0] // heads // 2, 2, *rows.shape[1:])
    return pairs.transpose(1, 2).reshape(rows.shape)


def _minus_one(weight: Tensor) -> Tensor:
    return weight - 1


def _log(decay: Tensor) -> Tensor:
    """Return A_log; files have -exp(A_log)."""
    return torch.log(-decay)


def _unknown(architecture: str, gguf_name: str) -> ModelError:
    return ModelError(f"GGUF tensor {gguf_name!r} is not known in a {architecture!r} model")


WORKERS = min(4, os.cpu_count() or 1)


@dataclass(frozen=True)
class GGUFSlice:
    """One Hugging Face tensor and its bytes in the file."""

    name: Name
    path: Path
    type: int  # ggml type
    offset: int
    nbytes: int
    stored: tuple[int, ...]  # shape in the file

    @property
    def shape(self) -> tuple[int, ...]:
        if self.name.shape is not None:
            return self.name.shape
        return self.stored[::-1] if self.name.transposed else self.stored

    @property
    def in_rows(self) -> bool:
        """Return whether it is a matrix whose rows are stored whole, in the same or another order."""
        name = self.name
        return len(self.stored) == 2 and not name.transposed and name.shape is None and name.values is None


class GGUFSource:
    def __init__(self, facts: "ModelFacts") -> None:
        self._in_blocks: frozenset[str] = frozenset()
        self._files: dict[Path, mmap.mmap] = {}
        headers = read_gguf_shards(facts.files.weights)
        _, row = find_gguf(join_headers(headers))
        self.tensors: dict[str, GGUFSlice] = {}
        for header in headers:
            for tensor in header.tensors.values():
                for name in hf_names(row, facts.hf, tensor.name, tensor.shape):
                    if name.hf in self.tensors:
                        raise ModelError(f"{header.path}: {tensor.name!r} is a second {name.hf!r}")
                    self.tensors[name.hf] = _slice(header.path, tensor, name)

    @property
    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        return {name: tensor.shape for name, tensor in self.tensors.items() if name not in self._in_blocks}

    @property
    def stored(self) -> Mapping[str, QuantizedMatrix]:
        """Return the matrices that are stored in quantized blocks along their rows."""
        return {
            name: self._stored(tensor)
            for name, tensor in self.tensors.items()
            if tensor.in_rows and GGML_TYPES[tensor.type][1] > 1
        }

    def leave_in_blocks(self, names: frozenset[str]) -> None:
        """Exclude matrices that layers use as stored."""
        self._in_blocks = names

    def read(self, slices: Collection[TensorSlice]) -> Iterator[tuple[TensorSlice, Tensor]]:
        """Yield tensors in file order; up to WORKERS are dequantized ahead in threads."""
        found = [(self.tensors[part.name], part) for part in slices]
        found.sort(key=lambda entry: (entry[0].path, entry[0].offset, entry[1].ranges))
        ahead: deque[tuple[TensorSlice, Future[Tensor]]] = deque()
        with ThreadPoolExecutor(WORKERS, "dequantize") as pool:
            for tensor_slice, part in found:
                ahead.append((part, pool.submit(self._take, self._file(tensor_slice.path), tensor_slice, part.ranges)))
                if len(ahead) > WORKERS:
                    first, future = ahead.popleft()
                    yield first, future.result()
            for first, future in ahead:
                yield first, future.result()

    def find_rows(self, name: str) -> QuantizedMatrix | None:
        tensor_slice = self.tensors[name]
        return self._stored(tensor_slice) if tensor_slice.in_rows else None

    def _take(self, data: mmap.mmap, tensor_slice: GGUFSlice, ranges: Ranges) -> Tensor:
        if ranges and (tensor_slice.in_rows or (len(tensor_slice.stored) == 2 and tensor_slice.name.transposed)):
            return self._take_blocks(tensor_slice, ranges)
        raw = torch.frombuffer(data, dtype=torch.uint8, count=tensor_slice.nbytes, offset=tensor_slice.offset)
        tensor = dequantize(raw, tensor_slice.type, tensor_slice.stored)
        if tensor_slice.name.undo is not None:
            tensor = tensor_slice.name.undo(tensor)
        if tensor_slice.name.values is not None:
            tensor = tensor_slice.name.values(tensor)
        if tensor_slice.name.shape is not None:
            tensor = tensor.view(tensor_slice.name.shape)
        return cut(tensor.t() if tensor_slice.name.transposed else tensor, ranges)

    def _take_blocks(self, tensor_slice: GGUFSlice, ranges: Ranges) -> Tensor:
        """Dequantize only the blocks of a matrix that the slice is in."""
        (start, stop), (left, right) = ranges[::-1] if tensor_slice.name.transposed else ranges
        _, elements, nbytes = GGML_TYPES[tensor_slice.type]
        first, last = left // elements, -(-right // elements)
        blocks = self._stored(tensor_slice).read(start, stop)[:, first * nbytes : last * nbytes]
        values = dequantize(blocks.flatten(), tensor_slice.type, (stop - start, (last - first) * elements))
        tensor = values[:, left - first * elements : right - first * elements]
        return tensor.t() if tensor_slice.name.transposed else tensor

    def _stored(self, tensor_slice: GGUFSlice) -> QuantizedMatrix:
        file, (count, columns), undo = self._file(tensor_slice.path), tensor_slice.stored, tensor_slice.name.undo
        raw = torch.frombuffer(file, dtype=torch.uint8, count=tensor_slice.nbytes, offset=tensor_slice.offset)
        order = None if undo is None else undo(torch.arange(count))
        return QuantizedMatrix(
            tensor_slice.type, columns, raw.view(count, -1), order, file, tensor_slice.offset, tensor_slice.name.hf
        )

    def _file(self, path: Path) -> mmap.mmap:
        if path not in self._files:
            self._files[path] = map_file(path)
        return self._files[path]


def _slice(path: Path, tensor: GGUFTensor, name: Name) -> GGUFSlice:
    if name.expert is None:
        return GGUFSlice(name, path, tensor.type, tensor.offset, tensor.nbytes, tensor.shape)
    nbytes = tensor.nbytes // tensor.shape[0]
    return GGUFSlice(name, path, tensor.type, tensor.offset + name.expert * nbytes, nbytes, tensor.shape[1:])
