"""`quire plan` and `quire models` know quantized checkpoints."""

import json

import pytest

from quantized_checkpoints import LLAMA, SCHEMES, SIZES, write
from quire.cli.memory_plan import make_plan
from quire.cli.models import gather, render
from quire.cli.plan import render as render_plan
from quire.config.args import EngineArgs
from quire.config.facts import read_facts
from quire.config.quantization_methods import BUILT_IN
from quire.files.resolve import resolve_model
from quire.prepare.quantize import find_scheme
from quire.types.errors import ConfigError

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
    outputs = 2 * (2 * 128 + 2 * 64 + 2 * 192 + 128)  # each has a scale of 4 bytes
    assert plans["online"].weights_loaded == 2 * (PARAMETERS - 245_760) + 245_760 + 4 * outputs
    if plans["awq"].weights_as.startswith("awq"):  # there are kernels here
        assert plans["awq"].weights_loaded == 4 * (PARAMETERS - 245_760) + 245_760 // 2 + 245_760 // 32 * 8


@pytest.mark.parametrize("scheme", SCHEMES)
def test_a_configuration_alone_tells_what_files_do(tmp_path, scheme):
    """Embedding, norms, routers, heads that no one quantized and layers that are left out are floats. Files of GPTQ and with
    act-order also have zero points that are all the same, or the order of inputs; mxfp8's scales are bytes in files only."""
    rel = 0.06 if scheme == "ct-mxfp8" else 0.05 if "gptq" in scheme or "act-order" in scheme else 0.015
    directory = write(scheme, tmp_path)
    options = {"model": str(directory), "max_model_len": 64}
    devices = [EngineArgs(device=device, **options) for device in ("cuda", "cpu")]
    files = [make_plan(args, 1 << 30) for args in devices]
    (directory / "model.safetensors").unlink()
    for found, expected in zip((make_plan(args, 1 << 30) for args in devices), files, strict=True):
        assert found.weights_loaded == pytest.approx(expected.weights_loaded, rel=rel)
        assert found.weights_as == expected.weights_as and not found.parameters_counted


def configured(directory, quantization, **more):
    directory.mkdir()
    (directory / "config.json").write_text(json.dumps(LLAMA | SIZES | {"quantization_config": quantization} | more))
    return planned(directory, 80 << 30).weights_loaded / 2**30


def test_a_llama_of_8b_that_is_not_here(tmp_path):
    shape = {"hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32, "num_attention_heads": 32,
             "num_key_value_heads": 8, "vocab_size": 128256}  # fmt: skip
    awq = {"quant_method": "awq", "bits": 4, "group_size": 128, "zero_point": True, "version": "gemm"}
    fp8 = {"quant_method": "fp8", "activation_scheme": "dynamic"}
    assert configured(tmp_path / "awq", awq, **shape) == pytest.approx(5.33, abs=0.01)
    assert configured(tmp_path / "fp8", fp8, **shape) == pytest.approx(8.46, abs=0.01)
    assert configured(tmp_path / "tied", fp8, **shape, tie_word_embeddings=True) == pytest.approx(7.48, abs=0.01)
    left_out = awq | {"modules_to_not_convert": ["self_attn"]}
    attention = 32 * 2 * 4096 * (4096 + 1024) * (2 - (4 + 20 / 128) / 8) / 2**30
    assert configured(tmp_path / "attention", left_out, **shape) == pytest.approx(5.33 + attention, abs=0.01)


def test_experts_of_gpt_oss_alone_are_quantized(tmp_path):
    more = {"architectures": ["GptOssForCausalLM"], "model_type": "gpt_oss", "num_local_experts": 4, "num_experts_per_tok": 2,
            "head_dim": 32, "sliding_window": 16, "layer_types": ["sliding_attention", "full_attention"]}  # fmt: skip
    found = configured(tmp_path / "gpt-oss", {"quant_method": "mxfp4"}, **more) * 2**30
    experts = 2 * 4 * 3 * 128 * 192
    floats = 2 * 320 * 128 + 2 * (2 * 128 * 128 + 2 * 128 * 64) + 2 * 4 * 128
    assert found == pytest.approx(2 * floats + experts * (4 + 8 / 32) / 8, rel=0.03)


def planned(directory, memory, **options):
    return make_plan(EngineArgs(model=str(directory), max_model_len=64, **options), memory)


def test_copies_are_counted(tmp_path):
    """By the engine's rule: all matrices of one device, or none."""
    directory = write("awq", tmp_path / "awq")
    size = 2 * 245_760
    plain, copied = (planned(directory, 8 << 30, dequantized_copies=asked) for asked in (False, None))
    assert (plain.copies, copied.copies) == (0, size) and plain.cache - copied.cache == size
    assert copied == planned(directory, 8 << 30, dequantized_copies=True)
    assert "480 KiB in bfloat16, for large batches (--no-dequantized-copies: none)" in render_plan(copied)
    assert "Copies" not in render_plan(plain)
    assert planned(directory, 8 << 30, tensor_parallel_size=2).copies == size // 2
    assert planned(directory, 8 << 30, pipeline_parallel_size=2).copies == size // 2
    for none in ({"dtype": "float32"}, {"device": "cpu"}, {"data_parallel_size": 2, "kv_cache_memory_bytes": 1 << 20}):
        found = planned(directory, 8 << 30, **none)
        assert (found.copies, found.no_copies) == (0, "")
    rounding = write("fp8-block", tmp_path / "fp8")
    assert (planned(rounding, 8 << 30).copies, planned(rounding, 8 << 30).no_copies) == (0, "")
    asked = planned(rounding, 8 << 30, dequantized_copies=True)
    assert asked.fits and asked.copies == 0 and "no quantized matrix that can have one" in asked.no_copies
    with pytest.raises(ConfigError, match="is not supported where several engines or ranks share a GPU"):
        planned(directory, 8 << 30, data_parallel_size=2, kv_cache_memory_bytes=1 << 20, dequantized_copies=True)


def test_copies_that_there_is_no_room_for(tmp_path):
    directory = write("awq", tmp_path)
    cache = (8 << 30) * 92 // 100 - (1414 << 20)
    found = planned(directory, 8 << 30, kv_cache_memory_bytes=cache)
    assert found.copies == 0 and found.fits and "they would take 0.47 MiB, and weights" in found.no_copies
    assert f"Copies           none: {found.no_copies}" in render_plan(found)
    asked = planned(directory, 8 << 30, kv_cache_memory_bytes=cache, dequantized_copies=True)
    assert not asked.fits and asked.advice == (f"dequantized_copies: {found.no_copies}",)
    large = planned(directory, 8 << 30, gpu_memory_utilization=0.0004)
    assert large.copies == 0 and "more than 1/8" in large.no_copies


def test_models_lists_methods_by_device():
    found = gather()["quantization"]
    assert set(found) == {method.name for method in BUILT_IN}
    assert all(find_scheme(name) for name in found)
    assert found["gptq"]["kept"] == {"cpu": ["int4", "int8"], "cuda": ["int4", "int8"]}
    assert "gptq               cpu runs int4, int8; cuda runs int4, int8" in render(gather())
