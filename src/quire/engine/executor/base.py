"""The interface between deciding and executing: an executor runs step plans."""

from typing import Any, Protocol

from quire.types.adapter import AdapterFacts, AdapterRef
from quire.types.plan import StepPlan, StepResult, Words
from quire.types.stats import DeviceCounts


class Flight(Protocol):
    """A step in flight."""

    def sample(self, masks: Words) -> None:
        """Give a step with masked rows their masks [masked, W], before its result is awaited and the next step submitted."""

    def result(self) -> StepResult:
        """Wait for the step. Raises if it was lost."""


class Executor(Protocol):
    @property
    def counts(self) -> DeviceCounts:
        """Counts since the start. Read after every step."""

    def submit(self, plan: StepPlan) -> Flight:
        """Start a step without waiting for it. Steps take effect in the order in which they were submitted."""

    def idle(self) -> bool:
        """Prepare for later steps while there is nothing to run, for a fraction of a second. Return False if nothing is left
        to prepare.
        """

    def check(self) -> None:
        """Raise EngineDead if no step can run any more. Called regularly while there is nothing to run."""

    def call(self, method: str, *args: Any) -> Any:
        """Call any other method of the device side; wait for the result. It is called on every rank; the first rank's result
        is returned.
        """

    def call_all(self, method: str, *args: Any) -> list[Any]:
        """Call a method on every rank; return all results in their order."""

    def read_adapter(self, ref: AdapterRef) -> AdapterFacts:
        """Read and check an adapter's files. It stays in host memory under its version until `forget_adapter`.

        May be called from another thread while steps run. Raises an AdapterError that names the file, the field or the
        tensor.
        """

    def read_ahead(self, ref: AdapterRef) -> None:
        """Read files of this stamp, which may be used later under a version that is not known yet. Called like
        `read_adapter`.
        """

    def put_adapter(self, ref: AdapterRef, slot: int) -> None:
        """Copy a read adapter to the device, between steps. Rows of later steps with this slot run with it.

        slot: adapter slot, from 1 on. No request may use the adapter that is in it.
        """

    def drop_adapter(self, slot: int) -> None:
        """Free an adapter slot on the device, between steps. No request may use it; it may be empty already."""

    def forget_adapter(self, version: str) -> None:
        """Free an adapter's host memory; its copy on the device stays."""

    def stop(self) -> None:
        """Release the device. No step may be submitted afterwards."""
