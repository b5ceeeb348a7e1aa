"""The seam between deciding and executing: whoever can run a StepPlan is an executor."""

from typing import Any, Protocol

from quire.types.plan import StepPlan, StepResult, Words
from quire.types.stats import DeviceCounts


class Flight(Protocol):
    """A step on its way."""

    def draw(self, masks: Words) -> None:
        """A step with masked rows gets their masks [masked, W], before its result is awaited and the next step submitted."""

    def result(self) -> StepResult:
        """Waits for the step. Raises if it was lost."""


class Executor(Protocol):
    @property
    def counts(self) -> DeviceCounts:
        """Since the start. Asked after every step."""

    def submit(self, plan: StepPlan) -> Flight:
        """Starts a step without waiting for it. Steps take effect in the order they were submitted."""

    def idle(self) -> bool:
        """Told when there is nothing to run: it may prepare for later steps, a fraction of a second at a time. False = no more
        to prepare."""

    def call(self, method: str, *args: Any) -> Any:
        """Anything else asked of the device side, by name; waits for the answer."""

    def stop(self) -> None:
        """Lets go of the device. No step may be submitted afterwards."""
