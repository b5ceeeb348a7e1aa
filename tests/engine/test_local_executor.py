"""Which failures of a step are survived in this process."""

import pytest
import torch

from quire.engine.executor.local import LocalExecutor
from quire.types.errors import EngineDead, EngineError


class Device:
    """A runner whose steps fail as ordered."""

    def __init__(self, launch=None, result=None):
        self._launch, self._result = launch, result

    def launch(self, plan):
        if self._launch is not None:
            raise self._launch
        return self

    def result(self):
        raise self._result


@pytest.mark.parametrize("place", ["launch", "result"])
def test_a_device_error_is_the_end(place):
    executor = LocalExecutor(Device(**{place: torch.AcceleratorError("CUDA error: an illegal memory access\nmore\nlines")}))
    with pytest.raises(EngineDead, match=r"^the device failed: CUDA error: an illegal memory access$"):
        executor.submit(None).result()


@pytest.mark.parametrize("place", ["launch", "result"])
def test_other_errors_belong_to_the_step(place):
    executor = LocalExecutor(Device(**{place: torch.OutOfMemoryError("too much")}))
    with pytest.raises(torch.OutOfMemoryError):
        executor.submit(None).result()


def test_only_public_methods_of_a_runner_can_be_called():
    with pytest.raises(EngineError, match="no method '_launch'"):
        LocalExecutor(Device()).call("_launch")
