"""The seam between deciding and executing: whoever can run a StepPlan is an executor."""

from typing import Any, Protocol

from quire.types.adapter import AdapterFacts, AdapterRef
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

    def check(self) -> None:
        """Asked now and then while there is nothing to run. Raises EngineDead if no step could be run any more."""

    def call(self, method: str, *args: Any) -> Any:
        """Anything else asked of the device side, by name; waits for the answer. Where several ranks share a model, each is
        asked, and the first one's answer returned."""

    def call_all(self, method: str, *args: Any) -> list[Any]:
        """The same, with the answers of all ranks in their order."""

    def read_adapter(self, ref: AdapterRef) -> AdapterFacts:
        """Reads and checks an adapter's files; it stays in the host's memory under its version until it is forgotten. May be
        called from another thread, while steps run. Raises an AdapterError that names the file, the field or the tensor."""

    def read_ahead(self, ref: AdapterRef) -> None:
        """The files that have this stamp may be asked for, under a version that is not known yet. Called as `read_adapter`."""

    def put_adapter(self, ref: AdapterRef, place: int) -> None:
        """Host to device, between steps: rows of later steps whose place this is run with it. It was read, and not forgotten;
        places begin at 1. Whoever was in the place is gone, so no tenant may have it."""

    def drop_adapter(self, place: int) -> None:
        """Its memory on the device is given back, between steps. No tenant may have the place; it may be empty already."""

    def forget_adapter(self, version: str) -> None:
        """Its memory on the host is given back; where it lies on the device it stays."""

    def stop(self) -> None:
        """Lets go of the device. No step may be submitted afterwards."""
