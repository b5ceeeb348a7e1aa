"""The executor whose model is divided among processes: the first rank in this one, the others in `workers.py`'s."""

from collections.abc import Sequence
from typing import Any

from quire.dist.mesh import Position
from quire.dist.nodes import NodesGroup
from quire.dist.shared_memory import SharedMemoryGroup
from quire.engine.executor import wire
from quire.engine.executor.local import LocalExecutor, LocalFlight
from quire.engine.executor.workers import Workers
from quire.runner.flight import StepFlight
from quire.runner.step import Runner
from quire.types.adapter import AdapterFacts, AdapterRef
from quire.types.errors import AdapterError, EngineDead, EngineError
from quire.types.plan import Ints, StepPlan, Words


def join_group(workers: Workers, position: Position) -> SharedMemoryGroup:
    """The first rank's way to the others."""
    if workers.remote:
        return NodesGroup(position, workers.memory, workers.peers, workers, workers.remote)
    return SharedMemoryGroup(position, workers.memory, workers.peers, workers)


class RanksFlight(LocalFlight):
    """Of the first rank, which draws for all."""

    def __init__(self, flight: StepFlight, executor: "RanksExecutor") -> None:
        super().__init__(flight)
        self._executor = executor

    def draw(self, masks: Words) -> None:
        super().draw(masks)
        self._executor.drawn = self._flight.drawn_ids()


class RanksExecutor(LocalExecutor):
    """Every plan goes to all ranks, with the tokens that the step before drew; they run it side by side. Ranks are in step or
    lost: a step that fails on one of them is the end of all."""

    def __init__(self, runner: Runner, workers: Workers) -> None:
        super().__init__(runner)
        self._workers = workers
        self.drawn: Ints | None = None  # by the latest step; the other ranks are told with the next

    def submit(self, plan: StepPlan) -> RanksFlight:
        self.check()
        drawn, self.drawn = self.drawn, None
        self._workers.send(wire.RunStep(drawn, plan))
        try:
            flight = self._runner.launch(plan)
        except EngineDead:
            raise
        except BaseException as error:  # an interrupt, too, leaves the others waiting
            dead = self._workers.give_up(f"the ranks are out of step: step {plan.step} failed on the first: {error!r}")
            if isinstance(error, Exception):
                raise dead from error
            raise
        self.drawn = flight.drawn_ids()
        return RanksFlight(flight, self)

    def check(self) -> None:
        self._workers.check()

    def call(self, method: str, *args: Any) -> Any:
        """On all ranks; the answer is the first one's."""
        return self.call_all(method, *args)[0]

    def call_all(self, method: str, *args: Any) -> list[Any]:
        self.check()
        target = self.find(method)
        self._workers.send(wire.CallRank(method, list(args)))
        return [target(*args), *self._workers.answers()]

    # ---- adapters: `rank_adapters.py`

    def read_adapter(self, ref: AdapterRef) -> AdapterFacts:
        self._workers.read_adapter(ref)
        try:
            return super().read_adapter(ref)
        except BaseException:
            self._workers.read_adapter(ref, wanted=False)
            raise

    def put_adapter(self, ref: AdapterRef, place: int) -> None:
        self._refuse(ref, self._ask_others("hold_adapter", ref.version))
        self._tell_others("put_adapter", ref.version, place)
        try:
            super().put_adapter(ref, place)
        except AdapterError:
            self._workers.answers()
            self._drop(place)
            raise
        wrong = self._workers.answers()
        if any(wrong):
            self._drop(place)
        self._refuse(ref, wrong)

    def drop_adapter(self, place: int) -> None:
        self._drop(place)

    def forget_adapter(self, version: str) -> None:
        super().forget_adapter(version)
        self._ask_others("forget_adapter", version)

    def _drop(self, place: int) -> None:
        super().drop_adapter(place)
        self._ask_others("drop_adapter", place)

    def _refuse(self, ref: AdapterRef, wrong: Sequence[str]) -> None:
        """What is wrong on the other ranks."""
        for rank, message in enumerate(wrong, 1):
            if message:
                raise EngineError(f"rank {rank} cannot have {ref.path}: {message}")

    def _tell_others(self, method: str, *args: Any) -> None:
        self.check()
        self._workers.send(wire.CallRank(method, list(args)))

    def _ask_others(self, method: str, *args: Any) -> list[Any]:
        self._tell_others(method, *args)
        return self._workers.answers()

    def stop(self) -> None:
        self._workers.finish()
        super().stop()
