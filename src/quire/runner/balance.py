"""Experts move between ranks while requests run, so that each rank has equally much to do (`enable_eplb`).

    every step                  each layer counts how many tokens its experts get (`layers/balance.py`)
    every step_interval steps   copies are shared out anew (`dist/placement.py`), and their weights go where they are wanted

All ranks count the same tokens, so all of them decide the same, in the same step; nothing is said but the weights. Where
several engines share experts, the turns that all of them take at a layer (`dist/experts.py`) count in place of steps.
"""

import logging
from functools import partial

import torch
from torch import Tensor, nn

from quire.dist.collectives import Group
from quire.dist.experts import SharedExperts
from quire.dist.mesh import Position
from quire.dist.placement import NOBODY, balance_of, settle, spread
from quire.features.experts.host import EplbConfig
from quire.layers.balance import Balance
from quire.layers.moe import Experts
from quire.prepare.shard import find_experts
from quire.types.errors import ConfigError

logger = logging.getLogger(__name__)


class Balancer:
    def __init__(self, model: nn.Module, position: Position, group: Group, wanted: EplbConfig) -> None:
        """When all is loaded: every rank has its own experts, and gets room for copies."""
        self._position, self._group, self._wanted = position, group, wanted
        self._layers = find_experts(model)
        self._steps = [0] * len(self._layers)
        self.moves = 0  # copies that came to this rank
        self.rebalanced = 0  # times
        for layer in self._layers:
            self._make_room(layer)

    def _make_room(self, layer: Experts) -> None:
        size, total = self._position.size, layer.total
        if layer.stored != ("up", "down"):
            raise ConfigError("enable_eplb is built for experts of floats, and these are quantized; leave it out")
        own = [range(total * rank // size, total * (rank + 1) // size) for rank in range(size)]
        copies = self._wanted.num_redundant_experts
        self._places = [len(own[rank]) + copies * (rank + 1) // size - copies * rank // size for rank in range(size)]
        ranks = [[*experts, *[NOBODY] * (places - len(experts))] for experts, places in zip(own, self._places, strict=True)]
        begins = sum(self._places[: self._position.rank])
        for parameter in _stacks(layer):
            room = self._places[self._position.rank] - len(parameter)
            parameter.data = torch.cat([parameter.data, parameter.data.new_zeros(room, *parameter.shape[1:])])
        layer.kept, layer.total = range(begins, begins + self._places[self._position.rank]), sum(self._places)
        layer.balance = Balance(total, ranks, layer.up.device)

    def before_step(self) -> None:
        """Called by all ranks before the same steps."""
        for number in range(len(self._layers)):
            self.before(number)

    def before(self, number: int) -> None:
        """Of the layer with this number; called by all ranks before the same tokens."""
        self._steps[number] += 1
        left = -self._steps[number] % self._wanted.step_interval
        if left == self._wanted.window_size:
            _forget(self._layers[number])
        if not left:
            self._rebalance(self._layers[number])
            self.rebalanced += number == 0
            _forget(self._layers[number])

    def forget(self) -> None:
        """What was counted so far."""
        for layer in self._layers:
            _forget(layer)

    @torch.inference_mode()
    def _rebalance(self, layer: Experts) -> None:
        balance = layer.balance
        assert balance is not None
        loads, before = balance.loads.tolist(), balance.ranks
        if not any(loads):
            return
        after = settle(before, spread(loads, self._places), self._places)
        was, becomes = balance_of(loads, before), balance_of(loads, after)
        worth_it = becomes > was
        if self._wanted.log_balancedness and self._position.rank == 0:
            logger.info("experts: balance %.3f, now %.3f", was, becomes if worth_it else was)
        if not worth_it:
            return
        changed = [
            (rank, place, expert)
            for rank, experts in enumerate(after)
            for place, expert in enumerate(experts)
            if expert not in (NOBODY, before[rank][place])
        ]
        brought = {expert: self._bring(layer, expert) for expert in sorted({expert for _, _, expert in changed})}
        for rank, place, expert in changed:
            if rank == self._position.rank:
                self.moves += 1
                for parameter, numbers in zip(_stacks(layer), brought[expert], strict=True):
                    parameter.data[place] = numbers
        balance.place(after)

    def _bring(self, layer: Experts, expert: int) -> list[Tensor]:
        """An expert's numbers, from the first rank that has it to all."""
        assert layer.balance is not None
        owner, place = next((r, e.index(expert)) for r, e in enumerate(layer.balance.ranks) if expert in e)
        ours = owner == self._position.rank
        return [
            self._group.add(parameter.data[place] if ours else torch.zeros_like(parameter.data[0]))  # the others' are zeros
            for parameter in _stacks(layer)
        ]


def _forget(layer: Experts) -> None:
    if layer.balance is not None:
        layer.balance.loads.zero_()


def _stacks(layer: Experts) -> list[nn.Parameter]:
    """Whatever has a row for every expert."""
    return [one for one in (layer.up, layer.down, layer.up_bias, layer.down_bias) if one is not None]


def serve_experts(model: nn.Module, exchange: SharedExperts, wanted: EplbConfig | None) -> None:
    """When all is loaded: from now on this rank runs its experts for the rows of all engines; they move if that is wanted."""
    balancer = None if wanted is None else Balancer(model, exchange.position, exchange.group, wanted)

    def run(number: int, layer: Experts, x: Tensor, weights: Tensor, experts: Tensor) -> Tensor:
        if balancer is not None:
            balancer.before(number)
        return layer.run_own(x, weights, experts)

    layers = find_experts(model)
    exchange.serve([(layer.hidden_size, partial(run, number, layer)) for number, layer in enumerate(layers)])
