"""Which failures of a step are survived in this process."""

import pytest
import torch

from quire.engine.executor.local import LocalExecutor
from quire.runner.flight import StepFlight
from quire.runner.transfer import Download
from quire.types.errors import EngineDead, EngineError
from quire.types.plan import NOTHING, Outputs, RowShapes, StepPlan


class Device:
    """A runner whose steps fail as ordered."""

    def __init__(self, launch=None, result=None):
        self._launch, self._result = launch, result

    def launch(self, plan):
        if self._launch is not None:
            raise self._launch
        return StepFlight(plan, [], None)

    def wait(self, meanwhile):
        raise self._result


PLAN = StepPlan(slot=NOTHING, end=NOTHING, shapes=RowShapes(NOTHING, NOTHING, Outputs(NOTHING)), step=0)


@pytest.fixture(params=["launch", "result"])
def fail(request, monkeypatch):
    def run(error):
        device = Device(**{request.param: error})
        monkeypatch.setattr(Download, "wait", lambda self, meanwhile=None: device.wait(meanwhile))
        LocalExecutor(device).submit(PLAN).result()

    return run


def test_a_device_error_is_the_end(fail):
    with pytest.raises(EngineDead, match=r"^the device failed: CUDA error: an illegal memory access$"):
        fail(torch.AcceleratorError("CUDA error: an illegal memory access\nmore\nlines"))


def test_other_errors_belong_to_the_step(fail):
    with pytest.raises(torch.OutOfMemoryError):
        fail(torch.OutOfMemoryError("too much"))


def test_only_public_methods_of_a_runner_can_be_called():
    with pytest.raises(EngineError, match="no method '_launch'"):
        LocalExecutor(Device()).call("_launch")
