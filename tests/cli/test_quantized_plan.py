"""`quire plan` and `quire models` know quantized checkpoints."""

import pytest

from quantized_checkpoints import write
from quire.cli.models import gather, render
from quire.cli.plan import make_plan
from quire.config.args import EngineArgs
from quire.config.facts import read_facts
from quire.config.quantization import FORMS, METHODS
from quire.files.resolve import resolve_model
from quire.prepare.quantize import SCHEMES

PARAMETERS = 328_320  # of the tiny Llama: 2 x 122,880 in matrices, the rest in embedding, head and norms


@pytest.mark.parametrize(
    ("scheme", "bits", "scales"),  # of a number, and bytes of scales for all of them
    [
        ("awq", 4, 245_760 // 32 * 2.5),
        ("gptq-8", 8, 10_240),
        ("ct-fp8-channel", 8, 2 * 2 * 896),
        ("fp8-block", 8, 1_000),
        ("bnb-nf4", 4, 245_760 // 64 * 4 + 5_000),
    ],
)
def test_bytes_on_a_gpu_are_the_files(tmp_path, scheme, bits, scales):
    directory = write(scheme, tmp_path)
    assert read_facts(resolve_model(directory)).parameters == PARAMETERS
    plan = make_plan(EngineArgs(model=str(directory), max_model_len=64), 1 << 30)
    floats = (PARAMETERS - 245_760) * 2
    assert plan.weights_loaded == pytest.approx(floats + 245_760 * bits // 8 + scales, rel=0.02)
    assert plan.weights_as.endswith("the rest bfloat16")


def test_bytes_on_a_cpu_and_of_floats_that_become_fp8(tmp_path):
    awq, fp8 = write("awq", tmp_path / "awq"), write("fp8-block", tmp_path / "fp8")
    plans = {
        name: make_plan(EngineArgs(model=str(directory), device=device, max_model_len=64, **more), 1 << 30)
        for name, directory, device, more in (
            ("awq", awq, "cpu", {}),
            ("fp8", fp8, "cpu", {}),
            ("explicit", awq, "cpu", {"dtype": "float32"}),
            ("online", awq.parent / "floats", "cuda", {"quantization": "fp8"}),
        )
    }
    assert plans["fp8"].weights_loaded == plans["explicit"].weights_loaded == 4 * PARAMETERS
    assert plans["online"].weights_loaded < 2 * PARAMETERS
    if plans["awq"].weights_as.startswith("awq"):  # there are kernels here
        assert plans["awq"].weights_loaded == 4 * (PARAMETERS - 245_760) + 245_760 // 2 + 245_760 // 32 * 8


def test_models_lists_methods_by_device():
    found = gather()["quantization"]
    assert set(found) == set(METHODS) == set(FORMS) == {name.partition(" ")[0] for name in SCHEMES} - {"gguf"} | {"mxfp4"}
    assert found["gptq"]["kept"] == {"cpu": ["int4", "int8"], "cuda": ["int4", "int8"]}
    assert "gptq               cpu keeps int4, int8; cuda keeps int4, int8" in render(gather())
