"""Small replicas with simple step times, and the figures that come of them."""

from dataclasses import dataclass

from quire.cache.layout import make_layout
from quire.sched.scheduler import Scheduler
from quire.sim.analytic import HostTime, StepShape
from quire.sim.fleet import Fleet, Run, router_maker
from quire.sim.replica import Replica, SimulatedDevice
from quire.sim.trace import Arrival, Trace
from quire.types.cache import LayerCache

PAGE = 4
LAYOUT = make_layout([LayerCache(1, 8, None)], PAGE, 2)


@dataclass(frozen=True)
class PerToken:
    """A step takes a second, and a tenth for each token."""

    host: HostTime

    def seconds(self, shape: StepShape) -> float:
        return 1.0 + 0.1 * shape.tokens

    def latency(self, shape: StepShape) -> float:
        return self.seconds(shape)


def replica(*, pages: int = 200, max_seqs: int = 4, budget: int = 64, depth: int = 0, host: float = 0.0, **more) -> Replica:
    scheduler = Scheduler(
        LAYOUT, pages=pages, max_model_len=more.pop("max_model_len", 200), max_batched_tokens=budget, max_seqs=max_seqs, **more
    )
    timing = PerToken(HostTime(host, 0.0))
    return Replica(scheduler, PAGE, SimulatedDevice(max_seqs, timing, ((None, 1.0),)), timing.host, depth)


def simulate(trace: Trace, replicas: int = 1, name: str = "round-robin", most: int | None = None, **numbers) -> Run:
    make_router = router_maker(name, numbers.get("pages", 200), PAGE, numbers.get("max_seqs", 4))
    return Fleet([replica(**numbers) for _ in range(replicas)], make_router(replicas), most).run(trace)


def trace(*arrivals: tuple[float, tuple[tuple[int, int], ...], int]) -> Trace:
    return Trace("a test", [Arrival(at, blocks, output) for at, blocks, output in arrivals])


def alone(at: float, length: int, output: int, content: int = 1) -> tuple[float, tuple[tuple[int, int], ...], int]:
    return at, ((content, length),), output
