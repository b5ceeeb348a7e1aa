"""A rank's share of a model: of every layer what its role says."""

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
from quire.layers.norm import WidthNorms
from quire.layers.parameter import Role
from quire.types.errors import ConfigError


def shard(model: nn.Module, position: Position, group: Group, grain: int = 1, *, exact: bool = False) -> None:
    """Before anything is loaded. What the ranks' layers say to each other goes through `group`. grain: see `Position`; it is
    for all but the vocabulary. exact: ranks share the outputs of linear layers, not their inputs, wherever each rank gets a
    grain of outputs. Each product is then computed by one rank, in the order of one process, at the price of joining the inputs
    of ROW layers."""
    if position.size == 1:
        return
    if not any(isinstance(layer, SelfAttention | LatentAttention) for layer in model.modules()):
        raise ConfigError("only models of a family of our own can be divided among several devices")
    with torch.device("meta"):
        for layer in model.modules():
            own = replace(position, grain=grain)
            if exact and isinstance(layer, Linear) and layer.role is Role.ROW and layer.outputs > grain * (position.size - 1):
                _keep_outputs(layer, own, group)
            else:
                _keep_share(layer, own, group)


def share_experts(model: nn.Module, exchange: Exchange) -> None:
    """Before anything is loaded, and behind `shard`: of every layer's experts a rank has some, among all engines' ranks."""
    found = find_experts(model)
    if not found:
        raise ConfigError("enable_expert_parallel: the model has no experts that engines could share; leave it out")
    with torch.device("meta"):
        for number, layer in enumerate(found):
            layer.shard(divide(layer.total, exchange.position), range(layer.total_inner))
            layer.exchange, layer.number = exchange, number


def find_experts(model: nn.Module) -> list[Experts]:
    return [layer for layer in model.modules() if isinstance(layer, Experts)]


def _keep_outputs(layer: Linear, position: Position, group: Group) -> None:
    [cut] = layer.cuts
    layer.shard(range(layer.all_inputs), [evenly(size)(position) for size in layer.sections], bias=layer.biased)
    layer.joined, layer.group = cut(position), group


def _keep_share(layer: nn.Module, position: Position, group: Group) -> None:
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
        case LatentAttention():
            layer.shard_heads(position)
        case Cutoff():
            layer.group = group
        case WidthNorms():
            layer.shard_heads(*layer.division.share(position))
            layer.group, layer.holders = group, layer.division.holders(position)
