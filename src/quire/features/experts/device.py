"""The device half of expert parallelism: experts that move between ranks, and experts shared with other engines.

Load balancing (`enable_eplb`) moves experts between ranks while requests run:

    every step                  each layer counts the tokens of each expert (`layers.moe.Balance`)
    every step_interval steps   copies get new slots, and their weights are sent to the new ranks

All ranks count the same tokens, so they decide the same in the same step; only weights are exchanged. If several engines share
experts, their common turns at a layer (`exchange.py`) count instead of steps.
"""

import logging
from collections.abc import Callable, Hashable, Sequence
from functools import partial

import torch
from torch import Tensor, nn

from quire.dist.collectives import Group
from quire.dist.mesh import Position
from quire.features.base import Allocation, StepPart
from quire.features.experts.exchange import SharedExperts
from quire.features.experts.host import EplbConfig
from quire.layers.moe import FREE_SLOT, Balance, Experts
from quire.models.decoder import Decoder
from quire.prepare.shard import find_experts, share_experts
from quire.types.errors import ConfigError
from quire.types.plan import StepPlan, StepRows

# ---- load balancing of experts

logger = logging.getLogger(__name__)


class ExpertBalancer:
    """Move experts between ranks so that all ranks have about the same load."""

    def __init__(self, model: nn.Module, position: Position, group: Group, wanted: EplbConfig) -> None:
        """Add free slots for copies to every layer. Call it when the weights are loaded."""
        self._position, self._group, self._wanted = position, group, wanted
        self._layers = find_experts(model)
        self._steps = [0] * len(self._layers)
        self.moves = 0  # copies that this rank received
        self.rebalanced = 0  # number of times
        for layer in self._layers:
            self._add_slots(layer)

    def _add_slots(self, layer: Experts) -> None:
        size, total = self._position.size, layer.total
        if layer.stored != ("up", "down"):
            raise ConfigError("enable_eplb is built for experts of floats, and these are quantized; leave it out")
        own = [range(total * rank // size, total * (rank + 1) // size) for rank in range(size)]
        copies = self._wanted.num_redundant_experts
        self._slots = [len(own[rank]) + copies * (rank + 1) // size - copies * rank // size for rank in range(size)]
        ranks = [[*experts, *[FREE_SLOT] * (slots - len(experts))] for experts, slots in zip(own, self._slots, strict=True)]
        begin = sum(self._slots[: self._position.rank])
        for parameter in _stacks(layer):
            free = self._slots[self._position.rank] - len(parameter)
            parameter.data = torch.cat([parameter.data, parameter.data.new_zeros(free, *parameter.shape[1:])])
        layer.local, layer.total = range(begin, begin + self._slots[self._position.rank]), sum(self._slots)
        layer.balance = Balance(total, ranks, layer.up.device)

    def before_step(self) -> None:
        """Count a step of every layer. All ranks call it before the same steps."""
        for number in range(len(self._layers)):
            self.before(number)

    def before(self, number: int) -> None:
        """Count a step of one layer, and rebalance it when due. All ranks call it before the same tokens."""
        self._steps[number] += 1
        left = -self._steps[number] % self._wanted.step_interval
        if left == self._wanted.window_size:
            _forget(self._layers[number])
        if not left:
            self._rebalance(self._layers[number])
            self.rebalanced += number == 0
            _forget(self._layers[number])

    def forget(self) -> None:
        """Reset the loads of all layers."""
        for layer in self._layers:
            _forget(layer)

    @torch.inference_mode()
    def _rebalance(self, layer: Experts) -> None:
        balance = layer.balance
        assert balance is not None
        loads, before = balance.loads.tolist(), balance.ranks
        if not any(loads):
            return
        after = place_experts(before, spread(loads, self._slots), self._slots)
        was, becomes = balance_of(loads, before), balance_of(loads, after)
        worth_it = becomes > was
        if self._wanted.log_balancedness and self._position.rank == 0:
            logger.info("experts: balance %.3f, now %.3f", was, becomes if worth_it else was)
        if not worth_it:
            return
        changed = [
            (rank, slot, expert)
            for rank, experts in enumerate(after)
            for slot, expert in enumerate(experts)
            if expert not in (FREE_SLOT, before[rank][slot])
        ]
        received = {expert: self._broadcast(layer, expert) for expert in sorted({expert for _, _, expert in changed})}
        for rank, slot, expert in changed:
            if rank == self._position.rank:
                self.moves += 1
                for parameter, weights in zip(_stacks(layer), received[expert], strict=True):
                    parameter.data[slot] = weights
        balance.place(after)

    def _broadcast(self, layer: Experts, expert: int) -> list[Tensor]:
        """Broadcast an expert's weights from the first rank that has it."""
        assert layer.balance is not None
        owner, slot = next((r, e.index(expert)) for r, e in enumerate(layer.balance.ranks) if expert in e)
        ours = owner == self._position.rank
        return [
            self._group.add(parameter.data[slot] if ours else torch.zeros_like(parameter.data[0]))  # other ranks add zeros
            for parameter in _stacks(layer)
        ]


def _forget(layer: Experts) -> None:
    if layer.balance is not None:
        layer.balance.loads.zero_()


def _stacks(layer: Experts) -> list[nn.Parameter]:
    """Return the parameters with a row per expert."""
    return [one for one in (layer.up, layer.down, layer.up_bias, layer.down_bias) if one is not None]


def serve_experts(model: nn.Module, exchange: SharedExperts, wanted: EplbConfig | None) -> None:
    """Run this rank's experts for the tokens of all engines from now on. Call it when the weights are loaded.

    wanted: settings of load balancing; None: experts stay on their ranks
    """
    balancer = None if wanted is None else ExpertBalancer(model, exchange.position, exchange.group, wanted)

    def run(number: int, layer: Experts, x: Tensor, weights: Tensor, experts: Tensor) -> Tensor:
        if balancer is not None:
            balancer.before(number)
        return layer.run_own(x, weights, experts)

    layers = find_experts(model)
    exchange.serve([(layer.hidden_size, partial(run, number, layer)) for number, layer in enumerate(layers)])


# ---- placement: every rank computes it from the same counts ----------------------------------------------------------------


def spread(loads: Sequence[int], slots: Sequence[int]) -> list[list[int]]:
    """Return the experts of every rank. Free slots go to copies of the experts with the highest load per copy. Experts are
    assigned by falling load, each to the rank with the lowest load so far.

    loads: tokens of every expert
    slots: number of expert slots of every rank
    """
    copies = [1] * len(loads)
    for _ in range(min(sum(slots), len(loads) * len(slots)) - len(loads)):
        once_more = [expert for expert, count in enumerate(copies) if count < len(slots)]
        copies[max(once_more, key=lambda expert: (loads[expert] / copies[expert], -expert))] += 1
    found: list[list[int]] = [[] for _ in slots]
    costs = [0.0] * len(slots)
    for expert in sorted(range(len(loads)), key=lambda expert: (-loads[expert] / copies[expert], expert)):
        for _ in range(copies[expert]):
            free = [rank for rank, experts in enumerate(found) if len(experts) < slots[rank]]
            others = [rank for rank in free if expert not in found[rank]] or free
            rank = min(others, key=lambda rank: (costs[rank], rank))
            found[rank].append(expert)
            costs[rank] += loads[expert] / copies[expert]
    return found


def place_experts(before: Sequence[Sequence[int]], wanted: Sequence[Sequence[int]], slots: Sequence[int]) -> list[list[int]]:
    """Return the experts of every rank by slot. An expert that stays on a rank keeps its slot."""
    assigned = []
    for old, new, count in zip(before, wanted, slots, strict=True):
        kept = [expert if expert in new and expert not in old[:slot] else FREE_SLOT for slot, expert in enumerate(old)]
        coming = list(new)
        for expert in kept:
            if expert != FREE_SLOT:
                coming.remove(expert)
        kept = [expert if expert != FREE_SLOT or not coming else coming.pop(0) for expert in kept]
        assigned.append(kept[:count])
    return assigned


def balance_of(loads: Sequence[int], ranks: Sequence[Sequence[int]]) -> float:
    """Return the mean load of the ranks divided by the highest: 1 is even."""
    copies = [max(1, sum(expert in experts for experts in ranks)) for expert in range(len(loads))]
    costs = [sum(loads[expert] / copies[expert] for expert in {*experts} - {FREE_SLOT}) for experts in ranks]
    return sum(costs) / len(costs) / max(costs) if any(costs) else 1.0


# ---- the step part


class ExpertsPart(StepPart):
    name = "experts"

    def __init__(
        self, position: Position, group: Group | None, eplb: EplbConfig | None, exchange: SharedExperts | None
    ) -> None:
        """eplb: balance experts over the ranks of `group`, or of `exchange`. exchange: share experts with other engines."""
        self._position, self._group, self._eplb, self._exchange = position, group, eplb, exchange
        self._balancer: ExpertBalancer | None = None

    def transform(self, model: Decoder) -> None:
        if self._exchange is not None:
            share_experts(model, self._exchange)

    def load(self, model: Decoder, reserved_bytes: Callable[[], int]) -> None:  # noqa: ARG002
        if self._exchange is not None:
            serve_experts(model, self._exchange, self._eplb)
        elif self._eplb is not None and self._group is not None:
            self._balancer = ExpertBalancer(model, self._position, self._group, self._eplb)

    def allocate(self, allocation: Allocation) -> None:  # noqa: ARG002
        if self._balancer is not None:
            self._balancer.forget()  # the loads of profile and warm-up runs

    def prepare(self, plan: StepPlan) -> None:
        if self._balancer is not None and len(plan.slot):
            self._balancer.before_step()

    def graph_key(self, rows: StepRows) -> Hashable:  # noqa: ARG002
        """Ranks do not record graphs."""
        return False

    def check(self) -> None:
        if self._exchange is not None:
            self._exchange.check()

    def describe(self) -> dict[str, int]:
        balancer = self._balancer
        return {} if balancer is None else {"rebalanced": balancer.rebalanced, "moved_experts": balancer.moves}

    def close(self) -> None:
        if self._exchange is not None:
            self._exchange.close()
        self._exchange = self._balancer = self._group = None
