"""The executor whose model is divided among processes: the first rank in this one, the others in `workers.py`'s."""

from typing import Any

import numpy as np

from quire.device.base import Device
from quire.dist.mesh import Position
from quire.dist.nodes import NodesGroup
from quire.dist.shared_memory import SharedMemoryGroup
from quire.engine.executor import wire
from quire.engine.executor.local import LocalFlight
from quire.engine.executor.shared_adapters import SharedAdapters
from quire.engine.executor.workers import Workers
from quire.runner.flight import StepFlight
from quire.runner.step import Runner
from quire.types.errors import EngineDead
from quire.types.plan import Ints, StepPlan, Words


def join_group(device: Device, workers: Workers, position: Position) -> SharedMemoryGroup:
    """The first rank's way to the others."""
    if workers.remote:
        return NodesGroup(position, workers.memory, workers.peers, workers, workers.remote)
    return device.group(position, workers.memory, workers.peers, workers)


class RanksFlight(LocalFlight):
    """Of the first rank, which draws for all."""

    def __init__(self, flight: StepFlight, executor: "RanksExecutor") -> None:
        super().__init__(flight)
        self._executor = executor

    def draw(self, masks: Words) -> None:
        super().draw(masks)
        self._executor.drawn = self._flight.drawn_ids()


class RanksExecutor(SharedAdapters):
    """Every plan goes to all ranks, with the tokens that the step before drew; they run it side by side. Ranks are in step or
    lost: a step that fails on one of them is the end of all."""

    def __init__(self, runner: Runner, workers: Workers) -> None:
        super().__init__(runner, workers)
        self.drawn: Ints | None = None  # by the latest step; the other ranks are told with the next

    def submit(self, plan: StepPlan) -> RanksFlight:
        self.check()
        drawn, self.drawn = self.drawn, None
        plan = self._runner.told(plan)
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
        self.drawn, flight.before_guessing = flight.drawn_ids(), self._follow
        return RanksFlight(flight, self)

    def _follow(self, lengths: Ints) -> None:
        """All ranks draft, side by side."""
        drawn, self.drawn = self.drawn, None
        self._workers.send(wire.Follow(np.empty(0, np.int32) if drawn is None else drawn, lengths))

    def tell(self, command: wire.Command) -> None:
        """All other ranks."""
        self._workers.send(command)

    def call(self, method: str, *args: Any) -> Any:
        """On all ranks; the answer is the first one's."""
        return self.call_all(method, *args)[0]

    def call_all(self, method: str, *args: Any) -> list[Any]:
        self.check()
        target = self.find(method)
        self._workers.send(wire.CallRank(method, list(args)))
        return [target(*args), *self._workers.answers()]

    def stop(self) -> None:
        self._workers.finish()
        super().stop()
