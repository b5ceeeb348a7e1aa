"""The executor that runs the device half in this process."""

from collections.abc import Callable
from typing import Any

from torch import AcceleratorError

from quire.engine.executor.base import Flight
from quire.features.lora.device import LoRAPart
from quire.runner.flight import StepFlight
from quire.runner.step import Runner
from quire.types.adapter import AdapterFacts, AdapterRef
from quire.types.errors import EngineDead, EngineError
from quire.types.plan import StepPlan, StepResult, Words
from quire.types.stats import DeviceCounts


class LocalFlight:
    def __init__(self, flight: StepFlight) -> None:
        self._flight = flight

    def draw(self, masks: Words) -> None:
        try:
            self._flight.draw(masks)
        except AcceleratorError as error:
            raise device_lost(error) from error

    def result(self) -> StepResult:
        try:
            return self._flight.result()
        except AcceleratorError as error:
            raise device_lost(error) from error


class LocalExecutor:
    """On a CPU a step is finished when `submit` returns; on a GPU it is only launched.

    A step that fails may be followed by others, unless the device itself reported an error: then nothing works in this process
    any more.
    """

    def __init__(self, runner: Runner) -> None:
        self._runner = runner

    @property
    def counts(self) -> DeviceCounts:
        return self._runner.counts

    def submit(self, plan: StepPlan) -> Flight:
        try:
            return LocalFlight(self._runner.launch(plan))
        except AcceleratorError as error:
            raise device_lost(error) from error

    def idle(self) -> bool:
        try:
            return self._runner.idle()
        except AcceleratorError as error:
            raise device_lost(error) from error

    def check(self) -> None:
        self._runner.check()

    def call(self, method: str, *args: Any) -> Any:
        return self.find(method)(*args)

    def call_all(self, method: str, *args: Any) -> list[Any]:
        return [self.call(method, *args)]

    def find(self, method: str) -> Callable[..., Any]:
        """A public method of the runner."""
        target = None if method.startswith("_") else getattr(self._runner, method, None)
        if not callable(target):
            raise EngineError(f"a runner has no method {method!r}")
        found: Callable[..., Any] = target
        return found

    def read_adapter(self, ref: AdapterRef) -> AdapterFacts:
        return self._runner.part(LoRAPart).cache.read(ref)

    def read_ahead(self, ref: AdapterRef) -> None:
        self._runner.part(LoRAPart).cache.read_ahead(ref)

    def put_adapter(self, ref: AdapterRef, place: int) -> None:
        try:
            self._runner.part(LoRAPart).cache.put(ref, place)
        except AcceleratorError as error:
            raise device_lost(error) from error

    def drop_adapter(self, place: int) -> None:
        self._runner.part(LoRAPart).cache.drop(place)

    def forget_adapter(self, version: str) -> None:
        self._runner.part(LoRAPart).cache.forget(version)

    def stop(self) -> None:
        self._runner.close()


def device_lost(error: AcceleratorError) -> EngineDead:
    return EngineDead(f"the device failed: {str(error).splitlines()[0]}")
