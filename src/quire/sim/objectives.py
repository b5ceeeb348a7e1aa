"""What was promised, and how few replicas keep it."""

from collections.abc import Callable
from dataclasses import dataclass

from quire.sim.fleet import Run, Visit
from quire.types.errors import ConfigError


@dataclass(frozen=True)
class Objectives:
    """Of `percent` of the requests, the first token comes within `ttft` milliseconds, and the others every `tpot`
    milliseconds in the mean. A request that is refused has not got what was promised."""

    ttft: float | None = None
    tpot: float | None = None
    percent: float = 99.0

    def __post_init__(self) -> None:
        for flag, value in (("slo-ttft", self.ttft), ("slo-tpot", self.tpot)):
            if value is not None and not 0 < value < float("inf"):
                raise ConfigError(f"--{flag} must be above 0 milliseconds, got {value:g}")
        if not 0 < self.percent <= 100:
            raise ConfigError(f"--slo-percentile must be above 0 and at most 100, got {self.percent:g}")

    def kept(self, visit: Visit) -> bool:
        if not visit.done:
            return False
        return (self.ttft is None or 1000 * visit.ttft <= self.ttft) and (self.tpot is None or 1000 * visit.tpot <= self.tpot)

    def allowed(self, requests: int) -> int:
        """So many may miss them."""
        return int(requests * (100 - self.percent) / 100 + 1e-9)

    def __str__(self) -> str:
        parts = [f"{name} ≤ {most:g} ms" for name, most in (("TTFT", self.ttft), ("TPOT", self.tpot)) if most is not None]
        return f"{' and '.join(parts)} for {self.percent:g} % of the requests"


class Misses:
    """Counts them while a run goes on: it can be given up as soon as there are too many."""

    def __init__(self, objectives: Objectives, most: int) -> None:
        self._objectives, self._left = objectives, most

    def __call__(self, visit: Visit) -> bool:
        self._left -= not self._objectives.kept(visit)
        return self._left >= 0


@dataclass(frozen=True)
class Trial:
    replicas: int
    kept: bool
    share: float | None  # of requests that got what was promised; None where the run was given up


@dataclass(frozen=True)
class Search:
    trials: list[Trial]
    replicas: int  # the fewest that keep the objectives, or where none do the most that were tried
    kept: bool
    run: Run  # with this number of replicas


Simulate = Callable[[int, Callable[[Visit], bool]], Run]


def fewest_replicas(
    simulate: Simulate, objectives: Objectives, requests: int, most: int, tell: Callable[[Trial], None] = lambda _: None
) -> Search:
    """It supposes that more replicas are never worse: their number is doubled until it is enough, then halved between."""
    trials: list[Trial] = []

    def attempt(replicas: int) -> Run:
        run = simulate(replicas, Misses(objectives, objectives.allowed(requests)))
        share = sum(map(objectives.kept, run.visits)) / requests if run.complete else None
        trials.append(Trial(replicas, run.complete, share))
        tell(trials[-1])
        return run

    low, high, best = 0, 1, attempt(1)  # `low` are too few
    while not best.complete:
        if high == most:
            return Search(trials, most, False, simulate(most, lambda _: True))
        low, high = high, min(2 * high, most)
        best = attempt(high)
    while high - low > 1:
        middle = (low + high) // 2
        run = attempt(middle)
        if run.complete:
            high, best = middle, run
        else:
            low = middle
    return Search(trials, high, True, best)
