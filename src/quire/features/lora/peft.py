"""Adapters in PEFT's format: its tensors become additions to the matrices of a model, or an error that names the tensor.

    base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight
    '- prefix -----' '- module, as transformers calls it -' '- half -'

The targets of an adapter are read from its tensors; `target_modules` is not needed.
"""

import logging
import math
import os
import re
import zipfile
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from quire.features.lora.peft_config import AdapterConfig, interpret
from quire.features.lora.peft_vocab_experts import AddedTokens, ExpertTensors, TokenRows
from quire.features.lora.sites import Addition, ExpertsSite, HeadSite, LinearSite, Site
from quire.features.lora.values import LARGE, largest_of
from quire.files.adapter import ADAPTER_LIMITS, AdapterFiles, find_adapter, rank_problem, read_config
from quire.files.reading import error_summary, open_regular, shown
from quire.files.safetensors import read_header
from quire.files.threads import in_threads
from quire.load.assign import Renames, rename
from quire.load.safetensors import DTYPES
from quire.types.errors import AdapterError, ModelError

logger = logging.getLogger(__name__)

PREFIX = "base_model.model."
# end of a tensor's name -> kind
HALVES: tuple[tuple[re.Pattern[str], str], ...] = tuple(
    (re.compile(rf"\.{end}$"), kind)
    for end, kind in (
        (r"lora_A(\.default)?\.weight", "down"),
        (r"lora_B(\.default)?\.weight", "up"),
        (r"lora_B(\.default)?\.bias", "added"),
        (r"lora_embedding_A(\.default)?", "down"),
        (r"lora_embedding_B(\.default)?", "up"),
        (r"lora_magnitude_vector(\.default)?(\.weight)?", "magnitude"),
        (r"token_adapter\.trainable_tokens_delta(\.default)?", "tokens"),
        (r"token_adapter\.trainable_tokens_original(\.default)?", "original"),
        (r"(token_adapter\.)?base_layer\.weight", "base"),
        (r"original_module\.(weight|bias)", "original"),
        (r"(base_layer\.|modules_to_save\.(default\.)?)?bias", "bias"),
        (r"modules_to_save\.(default\.)?weight", "whole"),
        (r"weight", "plain"),
    )
)
REPLACED = ("head", "embedding", "classes")  # kinds of sites whose matrix an adapter may replace
HALF_OF = {"down": "lora_A", "up": "lora_B"}
PIECE_BYTES = 1 << 22  # that a thread reads at once
LARGEST = 1e6  # of a value, and of the factor on a layer's output: beyond it activations overflow


@dataclass(frozen=True)
class Named:
    """A tensor and its name in the file."""

    name: str
    values: Tensor
    largest: float = math.inf  # largest absolute value, or more

    def wrong(self, message: str) -> AdapterError:
        return AdapterError(f"tensor {shown(self.name)} {message}", "lora_path")


@dataclass(frozen=True)
class AdapterModel:
    """The matrices of a model that adapters can change."""

    sites: Mapping[str, Site]
    renames: Renames
    parameters: Mapping[str, Tensor]  # by name: parameters that layers hold as floats
    max_rank: int
    added_tokens: int = 0  # that an adapter may add to the model's own
    other_stages: frozenset[str] = frozenset()  # parameters that other pipeline stages have and check
    fixed: str = ""  # regular expression of modules that run, and that adapters cannot change; "": there are none


def read_adapter(path: str, model: AdapterModel) -> tuple[Mapping[str, Addition], int]:
    """Return the additions by the matrix's path in the checkpoint after renames, and the largest rank. Raise AdapterError for
    what is not supported."""
    files = find_adapter(path)
    config = interpret(read_config(files), str(files.config))
    try:
        return Reader(config, model, files.weights.suffix == ".safetensors").read(_read_tensors(files))
    except AdapterError as error:
        raise AdapterError(f"{path}: {error}", "lora_path") from error


def _read_tensors(files: AdapterFiles) -> list[Named]:
    """Read and check the tensors."""
    try:
        if files.weights.suffix == ".safetensors":
            return _read_safetensors(files.weights)
        _check_archive(files.weights)
        found = torch.load(files.weights, map_location="cpu", weights_only=True)
    except AdapterError:
        raise
    except ModelError as error:
        raise AdapterError(str(error), "lora_path") from error
    except Exception as error:  # torch's reader raises many kinds
        raise AdapterError(f"{files.weights.name} cannot be read: {error_summary(error)}", "lora_path") from error
    if not isinstance(found, dict) or not all(isinstance(k, str) and isinstance(v, Tensor) for k, v in found.items()):
        raise AdapterError(f"{files.weights.name} is not a table of tensors", "lora_path")
    return [_checked(name, values) for name, values in found.items()]


def _check_archive(path: Path) -> None:
    """torch.save does not compress. Refuse archives that state more bytes than their file has."""
    with open_regular(path) as file:
        if file.read(4) != b"PK\x03\x04":  # an older format, which has no parts
            return
        size = file.seek(0, os.SEEK_END)
    held = _unpacked_bytes(path)
    if held > size:
        raise AdapterError(f"{path.name} has {size:,} bytes, and {held:,} in it: torch.save does not compress", "lora_path")


def _unpacked_bytes(path: Path) -> int:
    """Return the size that an archive states for all its records together."""
    archive = torch._C.PyTorchFileReader(str(path))
    if hasattr(archive, "get_record_size"):  # not in torch 2.11
        return sum(archive.get_record_size(name) for name in archive.get_all_records())
    with zipfile.ZipFile(path) as records:
        return sum(record.file_size for record in records.infolist())


def _read_safetensors(path: Path) -> list[Named]:
    """Read the tensors into memory. The file is not mapped, as it may be overwritten with a new version."""
    header = read_header(path, ADAPTER_LIMITS)
    for name, info in header.items():
        if info.dtype not in DTYPES:
            raise AdapterError(f"tensor {shown(name)} is stored as {info.dtype}, which is not supported", "lora_path")
        _check_size(name, info.shape)
    first = min((info.offset for info in header.values()), default=0)
    last = max((info.offset + info.nbytes for info in header.values()), default=0)
    kinds = {DTYPES[info.dtype] for info in header.values()}
    kind = kinds.pop() if len(kinds) == 1 else torch.int8
    room = np.empty(-(-(last - first) // 8) * 8, np.uint8)  # numpy asks for huge pages
    room[last - first :] = 0
    with open_regular(path) as file:

        def read(begin: int) -> float:
            some = room[begin : begin + PIECE_BYTES]
            done, needed = 0, min(len(some), last - first - begin)
            while done < needed:
                came = os.preadv(file.fileno(), [some[done:].data], first + begin + done)
                if not came:
                    raise AdapterError(f"{path.name} was changed while it was read", "lora_path")
                done += came
            return largest_of(torch.from_numpy(some).view(kind)) if kind.is_floating_point and kind.itemsize > 1 else math.inf

        bound = max(in_threads(read, range(0, len(room), PIECE_BYTES)), default=0.0)
    found = []
    for name, info in header.items():
        at = info.offset - first
        whole = at % DTYPES[info.dtype].itemsize == 0
        some = room[at : at + info.nbytes] if whole else room[at : at + info.nbytes].copy()
        values = torch.from_numpy(some).view(DTYPES[info.dtype]).view(info.shape)
        found.append(Named(name, values, bound) if bound <= LARGEST and whole else _checked(name, values))
    return found


class Reader:
    def __init__(self, config: AdapterConfig, model: AdapterModel, readable: bool = True) -> None:
        """readable: the file's header has shapes, from which the API process counts added tokens."""
        self._config, self._model = config, model
        self._largest = 0
        self._tokens = AddedTokens(model.added_tokens, readable)
        self._rows = TokenRows(config.tokens)

    def read(self, tensors: Iterable[Named]) -> tuple[dict[str, Addition], int]:
        modules: dict[str, dict[str, Named]] = defaultdict(dict)
        for named in tensors:
            module, kind = parse_name(named)
            if kind in modules[module]:
                raise named.wrong("occurs twice, under different names")
            modules[module][kind] = named
        for halves in modules.values():  # with added vocabulary, PEFT saves such a matrix three times
            halves.pop("original", None)
            plain = halves.pop("plain", None)
            if plain is not None:
                halves.setdefault("whole", plain)
        found: dict[str, Addition] = {}
        experts = ExpertTensors(self)
        for module, halves in modules.items():
            first = next(iter(halves.values()))
            ours = rename(f"{module}.weight", self._model.renames)
            if ours is None:
                if self._model.fixed and re.match(self._model.fixed, module):
                    raise first.wrong(
                        "adds to the encoder of images, which is not supported. Use an adapter of the language model alone, or "
                        "set language_model_only"
                    )
                logger.info("%s belongs to a part of the model that is not run: ignored", first.name)
                continue
            path = ours.removesuffix(".weight")
            target = experts.find(path, self._model.sites)
            if target is not None:
                experts.add(target, *self._halves(module, halves, first), module)
                continue
            addition = self._addition(path, module, halves, first)
            if addition is not None:
                found[path] = addition
        found |= experts.finish(self._model.sites)
        self._rows.finish(found, self._model.sites)
        self._tokens.check(found, self._model.sites)
        if not found:
            raise AdapterError("it has no tensors that add anything to the model", "lora_path")
        return found, max(self._largest, 1)

    def _addition(self, path: str, module: str, halves: dict[str, Named], first: Named) -> Addition | None:
        site = self._model.sites.get(path)
        if site is None:
            self._check_nothing(path, halves)
            return None
        if isinstance(site, ExpertsSite):
            raise first.wrong("adds to experts in a way that is not supported")
        outputs, inputs = site.shapes[path]
        addition = Addition()
        if "down" in halves or "up" in halves:
            down, up = self._halves(module, halves, first)
            self.check_rank(down, down.values.shape[0] if down.values.ndim == 2 else 0, module)
            rank = self._config.rank_of(module)
            self._check_shape(down, (rank, inputs), site)
            self._check_shape(up, (outputs, rank), site)
            self.check_size(down, up, module)
            scale = self._config.scale_of(module)
            check_scale(up, scale)
            addition = replace(addition, down=down.values, up=up.values, scale=scale)
        for kind, shape in (("magnitude", (outputs,)), ("added", (outputs,)), ("bias", (outputs,))):
            if kind in halves:
                self._check_shape(halves[kind], shape, site)
        if "magnitude" in halves:
            if not self._config.dora or addition.down is None or not isinstance(site, LinearSite | HeadSite):
                raise halves["magnitude"].wrong("is of DoRA, which requires use_dora, and lora_A and lora_B of a linear layer")
            addition = replace(addition, magnitude=halves["magnitude"].values)
        elif self._config.dora and addition.down is not None:
            raise first.wrong("has no lora_magnitude_vector, though use_dora is true")
        if "added" in halves:
            if addition.down is None or not isinstance(site, LinearSite | HeadSite) or site.kind == "latent":
                raise halves["added"].wrong("has no lora_A and lora_B of a linear layer")
            addition = replace(addition, added=scaled(halves["added"], self._config.scale_of(module)))
        if "bias" in halves:
            if not isinstance(site, LinearSite | HeadSite) or not site.biased:
                raise halves["bias"].wrong("is a bias for a layer that has none")
            addition = replace(addition, bias=halves["bias"].values)
        return self._with_whole(path, module, site, halves, addition)

    def _with_whole(self, path: str, module: str, site: Site, halves: dict[str, Named], addition: Addition) -> Addition | None:
        """Add a saved matrix; PEFT's copy next to low-rank additions counts only if it differs from the model's."""
        whole, outputs, inputs = halves.get("whole"), *site.shapes[path]
        shape = (inputs, outputs) if site.kind == "embedding" else (outputs, inputs)
        if whole is not None and site.kind not in REPLACED:
            raise whole.wrong(
                "is a whole matrix (modules_to_save); an adapter can only replace those of the LM head, embedding and "
                "classification head"
            )
        base = halves.get("base") if site.kind in REPLACED else None
        given = base if whole is None else whole
        if given is not None:
            self._check_shape(given, shape, site)
            addition = replace(addition, whole=given.values)
        if "tokens" in halves:
            addition = self._rows.read(addition, halves["tokens"], module, site)
        addition = self._tokens.split(addition, site, next(iter(halves.values())))
        if addition.whole is not None and (whole is None or addition.more is not None):
            own = self._model.parameters.get(f"{path}.weight")
            same = whole is None if own is None else torch.equal(own.cpu(), addition.whole.to(own.dtype))
            addition = replace(addition, whole=None if same else addition.whole)
        return None if addition.is_nothing else addition

    def _check_nothing(self, path: str, halves: dict[str, Named]) -> None:
        """Refuse tensors for a layer without matrices, except its unchanged bias: with bias="all", PEFT saves all biases."""
        for kind, named in halves.items():
            if kind == "bias" and f"{path}.bias" in self._model.other_stages:
                continue
            own = self._model.parameters.get(f"{path}.bias")
            if kind != "bias" or own is None:
                raise named.wrong("is for a layer that the model does not have, or that adapters cannot change")
            if not torch.equal(own.cpu(), named.values.to(own.dtype)):
                raise named.wrong("is the bias of a norm, which adapters cannot change")

    def _halves(self, module: str, halves: dict[str, Named], first: Named) -> tuple[Named, Named]:
        for half, other in (("down", "up"), ("up", "down")):
            if half in halves and other not in halves:
                raise halves[half].wrong(f"has no {HALF_OF[other]} ({shown(module)} needs both)")
        if "down" not in halves:
            raise first.wrong("is not supported for experts")
        return halves["down"], halves["up"]

    def scale_of(self, module: str) -> float:
        return self._config.scale_of(module)

    def check_rank(self, named: Named, rank: int, module: str, merged: int = 1) -> None:
        expected = self._config.rank_of(module)
        if rank != expected:
            raise named.wrong(f"has rank {rank}, where adapter_config.json has {shown(expected)}")
        if rank > self._model.max_rank * merged:
            raise named.wrong(rank_problem(-(-rank // merged), self._model.max_rank))
        self._largest = max(self._largest, rank)

    def check_size(self, down: Named, up: Named, module: str) -> None:
        """Refuse a pair that may overflow, by an upper bound of the norm of up @ down.

        The bound from the largest values is enough for most pairs; for the others the norms are computed.
        """
        bounds = [named.largest * math.sqrt(named.values.numel()) for named in (down, up)]
        if math.prod(bounds) * abs(self.scale_of(module)) <= LARGEST:
            return
        lengths = [float(torch.linalg.vector_norm(named.values, dtype=torch.float64)) for named in (down, up)]
        product = math.prod(lengths) * abs(self.scale_of(module))
        if product > LARGEST:
            raise down.wrong(f"and its lora_B add up to {product:.0e} to a layer: more than {LARGEST:.0e} overflows")

    def _check_shape(self, named: Named, shape: tuple[int, ...], site: Site) -> None:
        found = tuple(named.values.shape)
        if found == shape or self._tokens.allow(named, shape, site):
            return
        raise named.wrong(f"has shape {list(found)}, where the model needs {list(shape)}")


def check_scale(named: Named, scale: float) -> None:
    if named.largest * abs(scale) > LARGE:
        raise named.wrong(f"is too large for its scale of {scale:g}")


def scaled(named: Named, scale: float) -> Tensor:
    check_scale(named, scale)
    return named.values.float() * scale


def parse_name(named: Named) -> tuple[str, str]:
    """Return the module, as transformers calls it, and the kind of the tensor (a value of HALVES)."""
    name = named.name.removeprefix(PREFIX)
    for pattern, kind in HALVES:
        if (match := pattern.search(name)) is not None:
            return name[: match.start()], kind
    raise named.wrong("is not of a kind that LoRA adapters have (lora_A, lora_B, ...)")


def _check_size(name: str, shape: Sequence[int]) -> None:
    if not math.prod(shape):
        raise AdapterError(
            f"tensor {shown(name)} has shape {shown(list(shape))}, and no values: the rank must be at least 1",
            "lora_path",
        )


def _checked(name: str, values: Tensor) -> Named:
    named = Named(name, values)
    if not values.is_floating_point() or values.dtype.itemsize < 2:
        raise named.wrong(f"is stored as {str(values.dtype).removeprefix('torch.')}, where floats are needed")
    if values.layout is not torch.strided or values.device.type != "cpu":
        raise named.wrong("is not stored as plain values")
    if values.untyped_storage().nbytes() < values.numel() * values.dtype.itemsize:
        raise named.wrong(f"of shape {list(values.shape)} has more values than its file")
    _check_size(name, values.shape)
    largest = largest_of(values)
    if not math.isfinite(largest):
        raise named.wrong("has values that are not finite (NaN or infinity)")
    if largest > LARGEST:
        raise named.wrong(f"has a value of {largest:.0e}: more than {LARGEST:.0e} overflows")
    return replace(named, largest=largest)
