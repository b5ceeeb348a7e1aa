"""Fills a model that was built without weights."""

from typing import TYPE_CHECKING, Protocol, runtime_checkable

import torch
from torch import nn

from quire.load.assign import Renames, assign, claims_of
from quire.load.dummy import DummySource
from quire.load.safetensors import SafetensorsSource
from quire.load.source import Source
from quire.types.errors import ModelError

if TYPE_CHECKING:
    from quire.config.facts import ModelFacts

FORMATS = ("auto", "safetensors", "gguf", "dummy")


@runtime_checkable
class Finishing(Protocol):
    def finish(self, device: torch.device) -> None: ...


@runtime_checkable
class Filling(Protocol):
    """A model that puts tensors in their places itself. No source = random weights."""

    def fill(self, source: Source | None, device: torch.device, dtype: torch.dtype, seed: int) -> None: ...


def load_weights(
    model: nn.Module,
    facts: "ModelFacts",
    *,
    device: str | torch.device,
    dtype: str | torch.dtype,
    load_format: str = "auto",
    seed: int = 0,
) -> None:
    """Puts the model on `device` in `dtype` and fills every parameter. "auto" reads what the model's files are."""
    device = torch.device(device)
    kind = getattr(torch, dtype) if isinstance(dtype, str) else dtype
    if isinstance(model, Filling):
        model.fill(None if load_format == "dummy" else open_source(facts, load_format), device, kind, seed)
        return
    materialize(model, device, kind)
    table = claims_of(model)
    if load_format == "dummy":
        assign(table, DummySource(table, seed), (), "the set of dummy weights")
    else:
        renames: Renames = getattr(model, "renames", ())
        assign(table, open_source(facts, load_format), renames, str(facts.files.path))
    for module in model.modules():
        if isinstance(module, Finishing):
            module.finish(device)


def open_source(facts: "ModelFacts", load_format: str) -> Source:
    if load_format not in FORMATS:
        raise ModelError(f"unknown load_format {load_format!r}; it must be one of {', '.join(FORMATS)}")
    files = facts.files
    there = "gguf" if files.format == "gguf" else "safetensors"
    if load_format not in ("auto", there):
        raise ModelError(f"load_format {load_format!r} does not suit {files.path}, which holds {there} weights")
    if there == "gguf":
        from quire.load.gguf import GGUFSource

        return GGUFSource(facts)
    return SafetensorsSource(files.path, files.weights)


def materialize(model: nn.Module, device: torch.device, dtype: torch.dtype) -> None:
    """Gives every meta parameter memory of its own; floating ones take the model's type."""
    for module in model.modules():
        for name, old in list(module.named_parameters(recurse=False)):
            kind = dtype if old.is_floating_point() else old.dtype
            new = torch.empty(old.shape, dtype=kind, device=device)
            module.register_parameter(name, nn.Parameter(new, requires_grad=False))
