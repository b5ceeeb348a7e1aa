"""The device half of expert parallelism: experts that move between ranks, and experts shared with other engines."""

from collections.abc import Callable, Hashable

from quire.dist.collectives import Group
from quire.dist.mesh import Position
from quire.features.base import Allocation, StepPart
from quire.features.experts.balancer import Balancer, serve_experts
from quire.features.experts.exchange import SharedExperts
from quire.features.experts.host import EplbConfig
from quire.models.decoder import Decoder
from quire.prepare.shard import share_experts
from quire.types.plan import StepPlan, StepRows


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
