"""Whatever is wrong is told in words that help, and the engine goes on as if nothing had happened."""

import json
import math
import os
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny import TEXT, open_model

from quire import LLM, LoRARequest, SamplingParams
from quire.types.errors import (
    ConfigError,
    InvalidParameter,
    ModelError,
    ModelNotFound,
    NotSupported,
    PromptTooLong,
    RequestError,
)

OK = SamplingParams(temperature=0, max_tokens=3, ignore_eos=True)

PROMPTS = {
    "empty text": ("", "empty"),
    "no tokens": ([], "empty"),
    "empty dict": ({}, "string, a list of token ids"),
    "id beyond the vocabulary": ({"prompt_token_ids": [5, 320]}, "token id 320 is out of vocabulary: ids go from 0 to 319"),
    "negative id": ({"prompt_token_ids": [-1]}, "token id -1"),
    "ids that are no integers": ({"prompt_token_ids": ["a"]}, "must be integers"),
    "ids that are no list": ({"prompt_token_ids": 5}, "list of integers"),
    "unknown dict key": ({"prompt": "x", "image": 1}, "image"),
    "empty salt": ({"prompt": "x", "cache_salt": ""}, "cache_salt"),
    "a number": (5, "prompt"),
    "nothing": (None, "prompt"),
}


@pytest.mark.parametrize("case", PROMPTS)
def test_bad_prompts(llm, case):
    prompt, message = PROMPTS[case]
    with pytest.raises(RequestError, match=message):
        llm.generate([TEXT[0], prompt], OK, use_tqdm=False)
    assert llm.generate(TEXT[0], OK, use_tqdm=False)[0].finished


@pytest.mark.parametrize("length", [256, 300, 5000])
def test_a_prompt_that_is_too_long_says_by_how_much(llm, length):
    with pytest.raises(PromptTooLong, match=f"together\\): shorten the prompt by at least {length - 255}"):
        llm.generate({"prompt_token_ids": [5] * length}, OK, use_tqdm=False)


def test_the_longest_prompt_that_fits(llm):
    output = llm.generate({"prompt_token_ids": [5] * 255}, SamplingParams(temperature=0, max_tokens=50), use_tqdm=False)[0]
    assert len(output.outputs[0].token_ids) == 1 and output.outputs[0].finish_reason in ("length", "stop")


PARAMS = [
    ({"logprobs": 21}, "max_logprobs"),
    ({"prompt_logprobs": -1}, "max_logprobs"),
    ({"logit_bias": {320: 1.0}}, "logit_bias: token id 320"),
    ({"logit_bias": {-1: 1.0}}, "logit_bias: token id -1"),
    ({"allowed_token_ids": [1, 999]}, "allowed_token_ids: token id 999"),
    ({"stop_token_ids": [320]}, "stop_token_ids: token id 320"),
    ({"logprob_token_ids": [320]}, "logprob_token_ids: token id 320"),
]


@pytest.mark.parametrize(("values", "message"), PARAMS)
def test_parameters_that_do_not_suit_the_model(llm, values, message):
    with pytest.raises(InvalidParameter, match=message):
        llm.generate(TEXT, SamplingParams(**values), use_tqdm=False)


def test_wrong_calls(llm):
    with pytest.raises(InvalidParameter, match="2 entries for 3 prompts"):
        llm.generate(TEXT, [OK, OK])
    with pytest.raises(InvalidParameter, match="1 entries for 3 prompts"):
        llm.generate(TEXT, OK, priority=[1])
    with pytest.raises(InvalidParameter, match="priority must be an integer"):
        llm.generate(TEXT, OK, priority=["a", "b", "c"])
    with pytest.raises(InvalidParameter, match="must be a LoRARequest"):
        llm.generate(TEXT, OK, lora_request=object())
    with pytest.raises(NotSupported, match="started without enable_lora"):
        llm.generate(TEXT, OK, lora_request=LoRARequest("a", 1, "somewhere"))
    with pytest.raises(InvalidParameter, match="lora_request has 1 entries for 3 prompts"):
        llm.generate(TEXT, OK, lora_request=[None])
    with pytest.raises(InvalidParameter, match="sampling_params"):
        llm.generate(TEXT[0], [{"temperature": 0}])
    llm.llm_engine.add_request("twice", TEXT[0], OK)
    with pytest.raises(RequestError, match="'twice' is in use"):
        llm.llm_engine.add_request("twice", TEXT[0], OK)
    while llm.llm_engine.has_unfinished_requests():
        llm.llm_engine.step()


def test_a_request_that_fails_fails_alone(tiny_model, tmp_path):
    """Token 7's embedding is not a number: whoever has it in the prompt fails, nobody else."""
    directory = shutil.copytree(tiny_model, tmp_path / "broken")
    weights = load_file(directory / "model.safetensors")
    weights["model.embed_tokens.weight"][7] = math.nan
    save_file(weights, directory / "model.safetensors", metadata={"format": "pt"})
    llm = open_model(directory)
    good = open_model(tiny_model).generate({"prompt_token_ids": [5, 6, 8]}, OK, use_tqdm=False)[0].outputs[0].token_ids
    for _ in range(2):  # the second time nothing bad may come from the prefix cache
        outputs = llm.generate([{"prompt_token_ids": ids} for ids in ([5, 6, 8], [5, 7, 8], [5, 6, 8])], OK, use_tqdm=False)
        assert [output.outputs[0].finish_reason for output in outputs] == ["length", "error", "length"]
        assert "NaN" in outputs[1].outputs[0].error
        assert outputs[0].outputs[0].token_ids == outputs[2].outputs[0].token_ids == good
    llm.llm_engine.core.scheduler.roster.check()


def test_a_step_that_fails_ends_its_requests_and_no_others(llm, monkeypatch):
    engine = llm.llm_engine
    runner = engine.core.executor._runner
    engine.add_request("a", TEXT[0], OK)

    def explode(_plan):
        raise MemoryError("no memory for this step")

    with monkeypatch.context() as patch:
        patch.setattr(runner, "launch", explode)
        outputs = engine.step()
    assert outputs[0].outputs[0].finish_reason == "error" and "no memory" in outputs[0].outputs[0].error
    assert llm.generate(TEXT[0], OK, use_tqdm=False)[0].outputs[0].finish_reason == "length"


def _no_config(directory):
    (directory / "config.json").unlink()


def _bad_json(directory):
    (directory / "config.json").write_text("{")


def _edit_config(directory, **values):
    path = directory / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | values))


def _edit_weights(directory, change):
    path = directory / "model.safetensors"
    weights = dict(load_file(path))
    change(weights)
    save_file(weights, path, metadata={"format": "pt"})


def _truncate(directory):
    path = directory / "model.safetensors"
    os.truncate(path, path.stat().st_size // 2)


CHECKPOINTS = {
    "missing tensor": (lambda d: _edit_weights(d, lambda w: w.pop("model.norm.weight")), r"missing \(1\).*norm"),
    "unknown tensor": (lambda d: _edit_weights(d, lambda w: w.update(extra=torch.ones(1))), r"unknown \(1\).*extra"),
    "wrong shape": (
        lambda d: _edit_weights(d, lambda w: w.update({"model.norm.weight": torch.ones(5)})),
        r"model\.norm\.weight is \[5\], the model requires \[32\]",
    ),
    "truncated file": (_truncate, "model.safetensors"),
    "no weights": (lambda d: (d / "model.safetensors").unlink(), "safetensors"),
    "no configuration": (_no_config, "config.json"),
    "broken configuration": (_bad_json, "config.json"),
    "unknown architecture": (lambda d: _edit_config(d, architectures=["NoSuchModel"], model_type="nosuch"), "NoSuchModel"),
    "impossible heads": (lambda d: _edit_config(d, num_attention_heads="four"), "num_attention_heads"),
    "quantized": (lambda d: _edit_config(d, quantization_config={"quant_method": "awq"}), "awq"),
    "broken tokenizer": (lambda d: (d / "tokenizer.json").write_text("{}"), "tokenizer"),
}


@pytest.mark.parametrize("case", CHECKPOINTS)
def test_broken_checkpoints(tiny_model, tmp_path, case):
    change, message = CHECKPOINTS[case]
    directory = shutil.copytree(tiny_model, tmp_path / "model")
    change(directory)
    with pytest.raises(ModelError, match=message):
        open_model(directory)


def test_a_model_that_is_not_there(tmp_path, monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    for name in (str(tmp_path / "nothing"), "./nothing", "nobody/nothing", "nothing.gguf"):
        with pytest.raises(ModelNotFound, match="nothing"):
            LLM(name)


ARGS = [
    ({"max_model_length": 5}, "max_model_len"),
    ({"pipeline_parallel_size": 5}, "2 layers cannot be divided among that many stages"),
    ({"decode_context_parallel_size": 2}, "decode_context_parallel_size"),
    ({"enable_lora": True, "max_loras": 4, "max_cpu_loras": 2}, "max_cpu_loras 2 is less than max_loras 4"),
    ({"enable_lora": True, "lora_dtype": "bfloat16"}, "lora_dtype bfloat16 differs from dtype float32"),
    ({"lora_modules": ["a=b"]}, "quire serve takes it"),
    ({"dtype": "int3"}, "dtype"),
    ({"max_model_len": 10000}, "256 positions"),
    ({"block_size": 3}, "block_size"),
    ({"max_num_seqs": 100, "max_num_batched_tokens": 50}, "max_num_seqs"),
    ({"gpu_memory_utilization": 1.5}, "gpu_memory_utilization"),
    ({"kv_cache_memory_bytes": 100}, "page"),
    ({"kv_cache_memory_bytes": 4096, "max_model_len": 256}, "max_model_len"),
    ({"scheduling_policy": "random"}, "scheduling_policy"),
    ({"enable_chunked_prefill": False, "max_num_batched_tokens": 64}, "max_num_batched_tokens"),
]


@pytest.mark.parametrize(("args", "message"), ARGS)
def test_impossible_settings(tiny_model, args, message):
    with pytest.raises(ConfigError, match=message):
        open_model(tiny_model, **args)


def test_the_context_shrinks_to_what_fits_and_says_so(tiny_model, caplog):
    llm = open_model(tiny_model, kv_cache_memory_bytes=10 * 4 * 512)  # ten pages of 4 tokens, 512 bytes each token
    assert llm.llm_engine.max_model_len < 256
    assert "max_model_len reduced" in caplog.text
    with pytest.raises(PromptTooLong):
        llm.generate({"prompt_token_ids": [5] * 100}, OK, use_tqdm=False)
    assert llm.generate(TEXT[0][:10], OK, use_tqdm=False)[0].finished


def test_an_unwritable_cache(tmp_path, monkeypatch):
    """A file stands where the cache directory should be: not even root can write below it."""
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("QUIRE_CACHE", str(tmp_path / "file" / "cache"))
    with pytest.raises(ModelError, match="QUIRE_CACHE"):
        LLM("smollm2")
