"""Plans with images and videos reach the other ranks as they are."""

import numpy as np

from quire.engine.executor.wire import RunStep, decode_command, encode
from quire.types.media import MediaArray, MediaItem
from quire.types.plan import Admission, Outputs, RowShapes, StepPlan
from quire.types.prompts import Extras
from quire.types.sampling import SamplingParams


def ints(*values):
    return np.array(values, np.int32)


def test_a_plan_with_media_reaches_another_rank():
    arrays = (
        MediaArray("pixel_values", "float32", (2, 3), bytes(range(24))),
        MediaArray("grid", "int64", (1, 3), path="/x", offset=64),
    )
    items = (
        MediaItem("image", 1, 3, "ab", arrays),
        MediaItem("video", 4, 9, "cd", arrays[1:], ((1, 2), (5, 2)), (2, 1, 2), 0.5),
    )
    admission = Admission(3, ints(*range(14)), 13, 0, SamplingParams(), 7, (), (), Extras(media=items))
    shapes = RowShapes(ints(13), ints(0), Outputs.last(ints(13), ints(0)))
    plan = StepPlan(ints(3), ints(13), shapes, 0, admitted=(admission,), forget=("ef",), encode=((3, 0), (3, 1)))
    received = decode_command(encode(RunStep(None, plan)))
    assert isinstance(received, RunStep)
    found = received.plan
    assert (found.forget, found.encode) == (("ef",), ((3, 0), (3, 1)))
    assert found.admitted[0].extras.media == items
