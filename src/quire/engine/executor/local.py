"""The executor that runs the device half in this process."""

from typing import Any

from quire.runner.flight import StepFlight
from quire.runner.step import Runner
from quire.types.errors import EngineError
from quire.types.plan import StepPlan


class LocalExecutor:
    """On a CPU a step is finished when `submit` returns; on a GPU it is only launched."""

    def __init__(self, runner: Runner) -> None:
        self._runner = runner

    def submit(self, plan: StepPlan) -> StepFlight:
        return self._runner.launch(plan)

    def call(self, method: str, *args: Any) -> Any:
        """Calls a public method of the runner by name."""
        target = None if method.startswith("_") else getattr(self._runner, method, None)
        if not callable(target):
            raise EngineError(f"a runner has no method {method!r}")
        return target(*args)

    def stop(self) -> None:
        self._runner.close()
