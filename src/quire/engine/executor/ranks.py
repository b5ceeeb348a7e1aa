"""The executor whose model is divided among processes: the first rank in this one, the others in `workers.py`'s."""

import numpy as np

from quire.device.base import Device
from quire.dist.mesh import Position
from quire.dist.nodes import NodesGroup
from quire.dist.shared_memory import SharedMemoryGroup
from quire.engine.executor import wire
from quire.engine.executor.divided import DividedExecutor
from quire.engine.executor.local import LocalFlight
from quire.engine.executor.workers import Workers
from quire.runner.flight import StepFlight
from quire.runner.step import Runner
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


class RanksExecutor(DividedExecutor):
    """Every plan goes to all ranks, with the tokens that the step before drew; they run it side by side. Ranks are in step or
    lost: a step that fails on one of them is the end of all."""

    def __init__(self, runner: Runner, workers: Workers) -> None:
        super().__init__(runner, workers)
        self.drawn: Ints | None = None  # by the latest step; the other ranks are told with the next

    def submit(self, plan: StepPlan) -> RanksFlight:
        self.check()
        drawn, self.drawn = self.drawn, None
        plan = self._runner.complete(plan)
        self._workers.send(wire.RunStep(drawn, plan))
        with self._in_step(plan):
            flight = self._runner.launch(plan)
        flight.before_following, flight.meanwhile = self._follow, self._meanwhile
        self.drawn = None if self._runner.draws_itself(plan) else flight.drawn_ids()
        return RanksFlight(flight, self)

    def _follow(self, lengths: Ints) -> None:
        """All ranks draft, side by side."""
        drawn, self.drawn = self.drawn, None
        self._workers.send(wire.Follow(np.empty(0, np.int32) if drawn is None else drawn, lengths))
