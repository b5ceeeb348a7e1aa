"""Checkpoints with groups that ranks cannot share evenly are cut between groups, and give the tokens of one process."""

import json

import gguf
import numpy as np
import pytest
import torch
from divided_model import GREEDY, SEEDED, family_engine, ids

from forked import nursery
from gguf_files import LLAMA, llama_tensors, tiny_llama
from quantized_checkpoints import AWQ, BLOCKS, GPTQ, SCHEMES, compressed, fp8, write
from quire import SamplingParams
from quire.config.quantization import Quantization
from quire.engine.executor import workers
from quire.ops.native import run_decoders
from quire.prepare.quantize import find_grain
from quire.types.errors import ModelError

PROMPTS = [torch.randint(3, 320, (n,), generator=torch.Generator().manual_seed(n)).tolist() for n in (33, 5, 18)]


@pytest.fixture(scope="module", autouse=True)
def _forked(tmp_path_factory):
    with nursery(tmp_path_factory.mktemp("nursery"), "rank") as command, pytest.MonkeyPatch.context() as patch:
        patch.setattr(workers, "COMMAND", command)
        yield


@pytest.mark.parametrize(
    ("scheme", "inner", "size"),
    [("awq", 256, 3), ("awq", 192, 4), ("gptq", 256, 3), ("gptq-asymmetric", 192, 4), ("gptq-8", 200, 4),
     ("ct-int4-asymmetric", 256, 3), ("ct-int4", 192, 2), ("ct-several", 256, 3), ("ct-mxfp4", 256, 3),
     ("modelopt-nvfp4", 256, 3)],
)  # fmt: skip
def test_ranks_give_the_tokens_of_one_process(tmp_path, scheme, inner, size):
    """Of 8 groups between two matrices three ranks have 2, 3 and 3; gptq-8 has no groups, but words of 4 numbers."""
    check(write(scheme, tmp_path, inner), size)


def test_blocks_of_which_the_last_is_less(tmp_path, monkeypatch):
    """Attention, which is cut by heads of 32, is of floats; of 320 numbers between two matrices ranks have 128, 128 and 64."""
    ignored = [f"model.layers.{layer}.self_attn" for layer in range(2)]
    writers = (
        BLOCKS | {"modules_to_not_convert": ignored},
        lambda name: None if "attn" in name else fp8("block", "weight_scale_inv"),
    )
    monkeypatch.setitem(SCHEMES, "fp8-block-mlp", writers)
    check(write("fp8-block-mlp", tmp_path, 320), 3)


@pytest.mark.parametrize("size", [2, 3])
def test_ranks_of_a_quantized_model_on_a_cpu_give_the_bits_of_one_process(tmp_path, size):
    """Whatever the order of sums, heads and blocks are: no product is shared."""
    sizes = {"embedding_length": 160, "feed_forward_length": 320, "attention.head_count": 5, "attention.head_count_kv": 5}
    fields = LLAMA | sizes | {"rope.dimension_count": 32}
    kind, small = gguf.GGMLQuantizationType.Q4_1, {name: value / 12 for name, value in llama_tensors(fields).items()}
    stored = {
        name: value * 12 if "norm" in name else (gguf.quants.quantize(value.astype(np.float32), kind), kind)
        for name, value in small.items()
    }
    path = tiny_llama(tmp_path / "model.gguf", fields=fields, tensors=stored)
    prompts = [{"prompt_token_ids": [3 + 7 * i % 40 for i in range(length)]} for length in (33, 5, 18)]
    params = SamplingParams(temperature=0, max_tokens=16, ignore_eos=True, logprobs=3)

    def answers(**args):
        llm = family_engine(path, **args)
        outputs = [output.outputs[0] for output in llm.generate(prompts, params, use_tqdm=False)]
        llm.llm_engine.shutdown()
        return [[{token: each.logprob for token, each in some.items()} for some in output.logprobs] for output in outputs]

    divided, whole = answers(tensor_parallel_size=size), answers()
    if run_decoders():
        assert divided == whole
    else:  # libraries multiply on this CPU, and shapes change their last bits
        for found, expected in zip(divided, whole, strict=True):
            assert found == [pytest.approx(step, abs=1e-5) for step in expected]


def check(directory, size):
    alone = family_engine(directory)
    prompts, params = PROMPTS * 2, [GREEDY] * len(PROMPTS) + [SEEDED] * len(PROMPTS)
    expected = ids(alone, prompts, params)
    alone.llm_engine.shutdown()
    llm = family_engine(directory, tensor_parallel_size=size)
    try:
        assert ids(llm, prompts, params) == expected
    finally:
        llm.llm_engine.shutdown()


def test_a_head_that_is_less_than_a_group_is_told(tmp_path):
    message = (
        r"o_proj.weight_scale: 0 to 32 of 128 inputs are not whole groups of 64.* use a smaller one, or pipeline_parallel_size"
    )
    with pytest.raises(ModelError, match=message):
        family_engine(write("ct-int4", tmp_path), tensor_parallel_size=3)


@pytest.mark.parametrize(
    ("scheme", "grain"),
    [("awq", 32), ("awq-channel", 8), ("gptq", 32), ("gptq-8", 8), ("ct-int4", 64), ("ct-int8", 8), ("ct-w8a8", 1),
     ("ct-fp8-channel", 1), ("ct-nvfp4", 16), ("ct-mxfp4", 32), ("ct-mxfp8", 32), ("ct-several", 32), ("fp8-tensor", 1),
     ("fp8-block", 128), ("modelopt-fp8", 1), ("modelopt-nvfp4", 16), ("bnb-nf4", 1)],
)  # fmt: skip
def test_what_a_configuration_says_of_groups(scheme, grain):
    config = SCHEMES[scheme][0]
    method = config["quant_method"]
    assert find_grain(Quantization(method, json.loads(json.dumps(config)))) == grain


def test_several_sizes_of_groups():
    dynamic = {"+:.*down.*": {"group_size": 48}, "-:.*up.*": {"group_size": 7}, "+:.*gate.*": False}
    assert find_grain(Quantization("gptq", GPTQ | {"dynamic": dynamic})) == 96
    mixed = {"a": {"quant_algo": "NVFP4"}, "b": {"quant_algo": "FP8_PB_WO"}}
    assert find_grain(Quantization("modelopt", {"quant_algo": "MIXED_PRECISION", "quantized_layers": mixed})) == 128
    blocks = compressed("float-quantized", {"num_bits": 8, "type": "float", "strategy": "block", "block_structure": [64, 128]})
    assert find_grain(Quantization("compressed-tensors", blocks)) == 128
    assert find_grain(Quantization("mxfp4", {})) == 32
    assert find_grain(None) == find_grain(Quantization("fp8", {}, online=True)) == 1
    assert find_grain(Quantization("awq", AWQ | {"bits": "x"})) == 1  # who reads the files says so
