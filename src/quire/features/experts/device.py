"""The device half of expert parallelism: experts that move between ranks, and experts shared with other engines.

Load balancing (`enable_eplb`) moves experts between ranks while requests run:

    every step                  each layer counts the tokens of each expert (`layers.moe.Balance`)
    every step_interval steps   copies are placed anew, and their weights are sent to the new ranks

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
        ranks = [[*experts, *[FREE_SLOT] * (places - len(experts))] for experts, places in zip(own, self._places, strict=True)]
        begins = sum(self._places[: self._position.rank])
        for parameter in _stacks(layer):
            room = self._places[self._position.rank] - len(parameter)
            parameter.data = torch.cat([parameter.data, parameter.data.new_zeros(room, *parameter.shape[1:])])
        layer.local, layer.total = range(begins, begins + self._places[self._position.rank]), sum(self._places)
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
        after = place_experts(before, spread(loads, self._places), self._places)
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
            if expert not in (FREE_SLOT, before[rank][place])
        ]
        brought = {expert: self._bring(layer, expert) for expert in sorted({expert for _, _, expert in changed})}
        for rank, place, expert in changed:
            if rank == self._position.rank:
                self.moves += 1
                for parameter, weights in zip(_stacks(layer), brought[expert], strict=True):
                    parameter.data[place] = weights
        balance.place(after)

    def _bring(self, layer: Experts, expert: int) -> list[Tensor]:
        """Broadcast an expert's weights from the first rank that has it."""
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


# ---- placement: every rank computes it from the same counts ----------------------------------------------------------------


def spread(loads: Sequence[int], places: Sequence[int]) -> list[list[int]]:
    """loads: of every expert. places: how many experts each rank has room for. -> experts of every rank.

    What is left of the places goes to further copies of those that are used most, and ranks get equally much to do as far as
    that can be: the heaviest first, each to the rank that has the least.
    """
    copies = [1] * len(loads)
    for _ in range(min(sum(places), len(loads) * len(places)) - len(loads)):
        once_more = [expert for expert, count in enumerate(copies) if count < len(places)]
        copies[max(once_more, key=lambda expert: (loads[expert] / copies[expert], -expert))] += 1
    found: list[list[int]] = [[] for _ in places]
    costs = [0.0] * len(places)
    for expert in sorted(range(len(loads)), key=lambda expert: (-loads[expert] / copies[expert], expert)):
        for _ in range(copies[expert]):
            free = [rank for rank, experts in enumerate(found) if len(experts) < places[rank]]
            others = [rank for rank in free if expert not in found[rank]] or free
            rank = min(others, key=lambda rank: (costs[rank], rank))
            found[rank].append(expert)
            costs[rank] += loads[expert] / copies[expert]
    return found


def place_experts(before: Sequence[Sequence[int]], wanted: Sequence[Sequence[int]], places: Sequence[int]) -> list[list[int]]:
    """Return the experts of every rank by slot. An expert that stays on a rank keeps its slot."""
    assigned = []
    for old, new, room in zip(before, wanted, places, strict=True):
        kept = [expert if expert in new and expert not in old[:place] else FREE_SLOT for place, expert in enumerate(old)]
        coming = list(new)
        for expert in kept:
            if expert != FREE_SLOT:
                coming.remove(expert)
        kept = [expert if expert != FREE_SLOT or not coming else coming.pop(0) for expert in kept]
        assigned.append(kept[:room])
    return assigned


def balance_of(loads: Sequence[int], ranks: Sequence[Sequence[int]]) -> float:
    """What ranks have to do on average, of what the one has that has most: 1 is even."""
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
        self._balancer: Balancer | None = None

    def transform(self, model: Decoder) -> None:
        if self._exchange is not None:
            share_experts(model, self._exchange)

    def load(self, model: Decoder, reserved_bytes: Callable[[], int]) -> None:  # noqa: ARG002
        if self._exchange is not None:
            serve_experts(model, self._exchange, self._eplb)
        elif self._eplb is not None and self._group is not None:
            self._balancer = Balancer(model, self._position, self._group, self._eplb)

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
