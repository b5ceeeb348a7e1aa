"""From checkpoint names to places in the model: every tensor must have one, and every place must be filled."""

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor, nn

from quire.layers.parameter import Claim, Claims, whole
from quire.load.finite import NOT_FINITE, is_broken
from quire.load.place import Mover
from quire.load.source import Source, TensorSlice
from quire.progress import doing
from quire.types.errors import ModelError

Renames = Sequence[tuple[str, str | None]]
SHOWN = 10
# of quantized matrices: their methods look at them
_SCALES = re.compile(r"(weight|input|output)(_global)?_scale(_inv|_2)?$|scales$|SCB$|absmax$|quant_map$")


@runtime_checkable
class Claiming(Protocol):
    def claims(self, path: str) -> Claims: ...


def claims_of(model: nn.Module) -> Claims:
    """By checkpoint names after renames."""
    table: Claims = {}
    for path, module in model.named_modules():
        if hasattr(type(module), "claims") and isinstance(module, Claiming):  # to ask a protocol is slow where the answer is no
            table |= module.claims(path)
        else:
            own = module.named_parameters(recurse=False)
            table |= {f"{path}.{name}" if path else name: whole(value.data) for name, value in own}
    return table


def rename(name: str, renames: Renames) -> str | None:
    for pattern, replacement in renames:
        if replacement is None:
            if re.search(pattern, name):
                return None
        else:
            name = re.sub(pattern, replacement, name)
    return name


def assign(table: Mapping[str, Claim | None], source: Source, renames: Renames, where: str) -> None:
    """Copies what is claimed of the source's tensors to its places. Nothing is read if any name or shape does not fit."""
    claims = match(table, source, renames, where)
    places = {TensorSlice(name, take.ranges): take.view for name, claim in claims.items() for take in claim.takes}
    total = sum(place.nbytes for place in places.values())
    with torch.no_grad(), doing("loading weights", total) as progress, Mover(progress) as mover:
        for part, tensor in source.read(places):
            _check_type(part.name, tensor, places[part], where)
            if tensor.ndim < 2 and not _SCALES.search(part.name) and is_broken(part.name, tensor):
                raise ModelError(f"{where}: tensor {part.name!r} {NOT_FINITE}")
            mover.put(part.name, tensor, places[part])


def match(table: Mapping[str, Claim | None], source: Source, renames: Renames, where: str) -> dict[str, Claim]:
    """Claims by the source's names. Raises ModelError if any name or shape does not fit."""
    claims, problems = _match(table, source.shapes, renames)
    if problems:
        raise ModelError(f"{where} does not fit the model:\n" + "\n".join(problems))
    return claims


def _check_type(name: str, tensor: Tensor, place: Tensor, where: str) -> None:
    """Floats of 16 bits and more become each other; what has few bits must be what was expected."""
    wide = place.is_floating_point() and place.dtype.itemsize > 1
    if wide and not (tensor.is_floating_point() and tensor.dtype.itemsize > 1):
        raise ModelError(f"{where}: tensor {name!r} is stored as {tensor.dtype}, where the model has floats")
    if not wide and tensor.dtype != place.dtype:
        raise ModelError(f"{where}: tensor {name!r} is stored as {tensor.dtype}, where {place.dtype} is expected")


def _match(
    table: Mapping[str, Claim | None], shapes: Mapping[str, tuple[int, ...]], renames: Renames
) -> tuple[dict[str, Claim], list[str]]:
    """Claims by the source's names, and what is wrong in words."""
    claims: dict[str, Claim] = {}
    missing = {name for name, claim in table.items() if claim is not None}
    unknown, misshaped, twice = [], [], []
    for name, shape in shapes.items():
        ours = rename(name, renames)
        if ours is None:
            continue
        if ours not in table:
            unknown.append(name)
            continue
        claim = table[ours]
        if claim is None:
            continue
        if claim.otherwise is not None and claim.otherwise.shape == tuple(shape):
            claim = claim.otherwise
        if ours not in missing:
            twice.append(name)
        elif claim.shape != tuple(shape):
            misshaped.append(f"{name} is {list(shape)}, the model needs {list(claim.shape)}")
        missing.discard(ours)
        claims[name] = claim
    findings = {"missing": missing, "unknown": unknown, "misshaped": misshaped, "given twice": twice}
    return claims, [_list(what, names) for what, names in findings.items() if names]


def _list(what: str, names: Iterable[str]) -> str:
    ordered = sorted(names, key=_natural)
    more = f", and {len(ordered) - SHOWN} more" if len(ordered) > SHOWN else ""
    return f"  {what} ({len(ordered)}): {', '.join(ordered[:SHOWN])}{more}"


def _natural(name: str) -> list[tuple[int, str]]:
    """Layer 2 before layer 10."""
    return [(int(part), "") if part.isdigit() else (-1, part) for part in re.split(r"(\d+)", name)]
