"""Give a rank its share of every layer, by the layer's role."""

from dataclasses import replace

import torch
from torch import nn

from quire.dist.collectives import Exchange, Group
from quire.dist.mesh import Position, divide, evenly
from quire.layers.attention import SelfAttention
from quire.layers.embedding import Embedding, Head
from quire.layers.latent import LatentAttention
from quire.layers.linear import Linear
from quire.layers.mlp import Cutoff
from quire.layers.moe import Experts
from quire.layers.norm import WidthNorm, WidthNorms
from quire.layers.packed_attention import PackedSelfAttention
from quire.layers.parameter import Role
from quire.layers.recurrent import GatedNorm, Mixer, ShortConvolution
from quire.types.errors import ConfigError


def shard(model: nn.Module, position: Position, group: Group, grain: int = 1, *, exact: bool = False) -> None:
    """Divide the model among ranks, before loading.

    group: for collectives between the layers of the ranks
    grain: see `Position`; for all layers but the vocabulary's
    exact: divide linear layers by outputs instead of inputs, wherever each rank gets a grain of outputs. Each sum is then
        computed by one rank, in the order of a single process, at the cost of an all-gather of the inputs of ROW layers.
    """
    if position.size == 1:
        return
    if not any(isinstance(layer, SelfAttention | LatentAttention | PackedSelfAttention | Mixer) for layer in model.modules()):
        raise ConfigError("tensor parallelism requires a model family of Quire's own")
    with torch.device("meta"):
        for layer in model.modules():
            own = replace(position, grain=grain)
            if exact and isinstance(layer, Linear) and layer.role is Role.ROW and layer.outputs > grain * (position.size - 1):
                _shard_outputs(layer, own, group)
            else:
                _shard_by_role(layer, own, group)


def share_experts(model: nn.Module, exchange: Exchange) -> None:
    """Divide every layer's experts among the ranks of all engines. Before loading, after `shard`."""
    found = find_experts(model)
    if not found:
        raise ConfigError("enable_expert_parallel requires a model with experts; remove it")
    with torch.device("meta"):
        for number, layer in enumerate(found):
            layer.shard(divide(layer.total, exchange.position), range(layer.total_inner))
            layer.exchange, layer.number = exchange, number


def find_experts(model: nn.Module) -> list[Experts]:
    return [layer for layer in model.modules() if isinstance(layer, Experts)]


def _shard_outputs(layer: Linear, position: Position, group: Group) -> None:
    [cut] = layer.cuts
    layer.shard(range(layer.all_inputs), [evenly(size)(position) for size in layer.sections], bias=layer.biased)
    layer.joined, layer.group = cut(position), group


def _shard_by_role(layer: nn.Module, position: Position, group: Group) -> None:
    match layer:
        case Linear(role=Role.COLUMN):
            layer.shard(layer.local_inputs, [cut(position) for cut in layer.cuts], bias=layer.biased)
        case Linear(role=Role.ROW):
            [cut] = layer.cuts
            layer.shard(cut(position), layer.local_outputs, bias=layer.biased and position.rank == 0)
            layer.group = group
        case Embedding(role=Role.VOCABULARY) | Head():
            layer.shard(evenly(layer.total)(replace(position, grain=1)))  # as ranks join logits
            layer.group = group
        case Experts():
            experts, inner = range(layer.total), range(layer.total_inner)
            if position.expert_parallel:
                layer.shard(divide(layer.total, position), inner)
            else:
                layer.shard(experts, evenly(layer.total_inner)(position))
            layer.group = group
        case SelfAttention():
            layer.shard_heads(*layer.division.share(position))
        case PackedSelfAttention():
            layer.shard_heads(layer.division.share(position)[0])
        case LatentAttention():
            layer.shard_heads(position)
        case Mixer():
            layer.shard_heads(position)
        case ShortConvolution():
            layer.shard([cut(position) for cut in layer.cuts])
        case GatedNorm() | WidthNorm():
            layer.shard_heads(position, group)
        case Cutoff():
            layer.group = group
        case WidthNorms():
            layer.shard_heads(*layer.division.share(position))
            layer.group, layer.holders = group, layer.division.holders(position)
