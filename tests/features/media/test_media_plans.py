"""Step plans with images and videos reach the other ranks as they are; memory plans have room for their encoder."""

import json
from dataclasses import replace

import numpy as np
import pytest
from test_published_shapes import SHAPES

from quire.cli.memory_plan import make_plan
from quire.config.args import EngineArgs
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


@pytest.mark.parametrize(("length", "most"), [(16384, 7), (128000, 12)])
def test_long_videos_do_not_take_the_memory_of_the_cache(tmp_path, length, most):
    """They are encoded in parts. A video may have millions of embeddings, an image 16,384."""
    name, config = SHAPES["Qwen/Qwen2.5-VL-7B-Instruct"]
    text = {"num_hidden_layers": 28, "vocab_size": 152064, "max_position_embeddings": 128000, "rope_theta": 1e6,
            "rope_scaling": {"type": "mrope", "mrope_section": [16, 24, 24]}}  # fmt: skip
    whole = {"architectures": [f"{name}ForConditionalGeneration"], "model_type": "qwen2_5_vl", "torch_dtype": "bfloat16"}
    (tmp_path / "config.json").write_text(json.dumps({**config, **text, **whole, "hidden_act": "silu", "rms_norm_eps": 1e-6}))
    (tmp_path / "preprocessor_config.json").write_text(json.dumps({"min_pixels": 3136, "max_pixels": 12845056}))
    args = EngineArgs(model=str(tmp_path), device="cuda", load_format="dummy", max_model_len=length)
    without = make_plan(replace(args, language_model_only=True), 140 << 30)
    taken = without.cache - make_plan(args, 140 << 30).cache
    assert 1 << 30 < taken < most << 30
