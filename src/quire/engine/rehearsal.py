"""A model as an engine would build it, but without its weights: what can be known of it so, and what its start would refuse.

Importing this file does not import torch; `rehearse` does.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from quire.config.config import Config
from quire.config.facts import DTYPE_BYTES
from quire.dist.stages import Seat
from quire.engine.runners import bounded_facts

if TYPE_CHECKING:
    from torch import Tensor, nn


@dataclass(frozen=True)
class Rehearsal:
    """Bytes, of all ranks together."""

    adapters: int = 0  # set aside for them on the device
    held_twice: int = 0  # matrices that adapters add to, of which a CPU's kernels have a copy of their own


def rehearse(config: Config) -> Rehearsal:
    """Raises what is wrong with a rank's share of the model, and with the model where adapters are asked for. It takes as long
    as torch takes to import, so whoever asks for neither is not kept waiting."""
    if config.world == 1 and not config.max_loras:
        return Rehearsal()
    import torch

    from quire.load.load import check_fit
    from quire.prepare.adapt import adapt
    from quire.runner.adapters import set_aside

    room = config.max_loras, config.args.max_lora_rank
    apart = not config.device_facts.one_memory
    aside = twice = 0
    for model in _build_ranks(config):
        if config.max_loras:
            dtype, meta = getattr(torch, config.dtype), torch.device("meta")
            tabled = room if config.device == "cuda" else None
            adapters = adapt(model, device=meta, dtype=dtype, tabled=tabled, more=config.more_tokens)
            aside += set_aside(adapters, *room) if apart else 0
        check_fit(
            model,
            config.facts,
            dtype=config.dtype,
            keep_quantized=config.keep_quantized,
            quantization=config.quantization,
            keeps=config.kept_forms,
        )
        twice += _floats(model) * DTYPE_BYTES[config.dtype] if _holds_twice(config) else 0
    return Rehearsal(aside, twice)


def _build_ranks(config: Config) -> "Iterator[nn.Module]":
    from quire.models.registry import build_model
    from quire.prepare.quantize import find_grain
    from quire.prepare.shard import shard
    from quire.prepare.stage import keep_stage

    layers, expert_parallel = config.stage_layers, config.args.enable_expert_parallel
    for rank in range(config.world):
        seat = Seat.of(rank, layers, config.ranks, expert_parallel)
        model = build_model(bounded_facts(config), config.args.model_impl)
        exact = config.keep_quantized and config.device_facts.kind == "cpu"
        shard(model, seat.position, _Nobody(), find_grain(config.quantization), exact=exact)
        if config.stages > 1:
            keep_stage(model, seat.stage)
        yield model


def _holds_twice(config: Config) -> bool:
    """Not where layers are run one by one: those with recurrent states, and where a head listens between them."""
    compiled = not config.facts.states and not (config.draft_head and config.draft_head.taps)
    return config.max_loras > 0 and config.device_facts.packs_floats and config.dtype == "float32" and compiled


def _floats(model: "nn.Module") -> int:
    from quire.layers.linear import Linear, Plain

    layers = (layer for layer in model.modules() if isinstance(layer, Linear) and isinstance(layer.method, Plain))
    return sum(layer.weight.numel() for layer in layers)


class _Nobody:
    """A group whose ranks never meet: sizes are all there is to add and to join."""

    def add(self, part: "Tensor") -> "Tensor":
        return part

    def join(self, part: "Tensor", total: int) -> "Tensor":
        return part.new_empty(*part.shape[:-1], total)

    def close(self) -> None:
        pass
