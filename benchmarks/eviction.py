"""Hit rates of eviction policies and of the optimum on generated traffic, by simulation: the table in `docs/simulate.md`.

    python benchmarks/eviction.py [--requests 250] [--seed 0] [--traffic chat agent mooncake]

Lengths and pages are an eighth of usual ones (2 tokens instead of 16), so a page number stands for as large a share of the
traffic, and steps take as long as with Llama-3.1-8B's shape on an H100, roughly.
"""

import argparse

from quire.cache.layout import make_layout
from quire.cache.policies import policy_maker
from quire.sched.scheduler import Scheduler
from quire.sim.analytic import HostTime, StepShape
from quire.sim.fleet import Fleet, RoundRobin, Run
from quire.sim.optimum import optimal_hit_rate
from quire.sim.replica import Replica, SimulatedDevice
from quire.sim.shapes import SHAPES, shaped_trace
from quire.sim.trace import Trace
from quire.types.cache import EVICTION_POLICIES, LayerCache

PAGE, SCALE = 2, 1 / 8
EVEN_PAGES = 3800.0  # of Llama-3.1-8B's shape (`features/tiers/host.py`)
LAYOUT = make_layout([LayerCache(1, 8, None)], PAGE, 2)
PAGES = {"chat": (800, 2000, 5000), "agent": (3000, 6000, 12000), "mooncake": (6000, 12000, 24000)}


class Steps:
    host = HostTime(0.0, 0.0)

    def seconds(self, shape: StepShape) -> float:
        return 0.02 + shape.tokens / SCALE / 30_000

    def latency(self, shape: StepShape) -> float:
        return self.seconds(shape)


def simulate(trace: Trace, pages: int, policy: str) -> Run:
    scheduler = Scheduler(
        LAYOUT, pages=pages, max_model_len=16_000, max_batched_tokens=1024, max_seqs=64,
        evictable=policy_maker(policy, EVEN_PAGES),
    )  # fmt: skip
    steps = Steps()
    device = SimulatedDevice(64, steps, ((None, 1.0),))
    return Fleet([Replica(scheduler, PAGE, device, steps.host, 1)], RoundRobin(1)).run(trace)


def hit_rate(run: Run) -> float:
    return sum(visit.cached for visit in run.visits if visit.done) / sum(visit.prompt for visit in run.visits if visit.done)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=250)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--traffic", nargs="+", choices=tuple(SHAPES), default=tuple(SHAPES))
    given = parser.parse_args()
    print(f"| traffic | pages | {' | '.join(EVICTION_POLICIES)} | optimum |")
    for name in given.traffic:
        trace = shaped_trace(name, given.requests, given.seed, SCALE)
        for pages in PAGES[name]:
            runs = [simulate(trace, pages, policy) for policy in EVICTION_POLICIES]
            rates = [*map(hit_rate, runs), optimal_hit_rate(trace, runs[0], PAGE, pages)]
            print(f"| {name} | {pages:,} | {' | '.join(f'{rate:.1%}' for rate in rates)} |", flush=True)


if __name__ == "__main__":
    main()
