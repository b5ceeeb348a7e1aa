"""How several engines are, taken as one."""

from collections.abc import Sequence

from quire.engine.supervisor import State
from quire.engine.view import EngineState


class Together:
    engines: Sequence[EngineState]

    @property
    def state(self) -> State:
        """`ready` is whoever takes requests, so one that is ready is enough, once all of them were."""
        states = {engine.state for engine in self.engines}
        order: tuple[State, ...] = ("starting", "ready", "restarting")
        return next((state for state in order if state in states), "dead")

    @property
    def heartbeat_age(self) -> float:
        """Of the one that was not heard of for longest, among those that should be."""
        return max((engine.heartbeat_age for engine in self.engines if engine.state == "ready"), default=0.0)

    @property
    def busy_for(self) -> float:
        return max(engine.busy_for for engine in self.engines)

    @property
    def restarts(self) -> int:
        return sum(engine.restarts for engine in self.engines)

    @property
    def replayed(self) -> int:
        return sum(engine.replayed for engine in self.engines)

    @property
    def last_loss(self) -> str | None:
        if len(self.engines) == 1:
            return self.engines[0].last_loss
        lost = {number: engine.last_loss for number, engine in enumerate(self.engines) if engine.last_loss is not None}
        return ". ".join(f"engine {number}: {why}" for number, why in lost.items()) or None

    @property
    def pid(self) -> int | None:
        """Of the first; `engines` have their own."""
        return self.engines[0].pid
