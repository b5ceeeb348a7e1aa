"""`deterministic`: tokens and logprobs of a request are bit-identical alone and in any batch, chunk, prefix hit, preemption
and draft. On CPUs and, in bfloat16, on GPUs."""

import random

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from quantized_checkpoints import write
from quire import LLM, SamplingParams
from quire.config.args import EngineArgs
from quire.ops import order
from quire.ops.native import run_decoders
from quire.types.errors import ConfigError
from tiny_model import make_tokenizer

ON_GPU = torch.cuda.is_available()
CPU = pytest.mark.skipif(ON_GPU or not run_decoders(), reason="for a CPU whose GEMMs run in C kernels")
GPU = pytest.mark.gpu
SIZES = {"vocab_size": 320, "hidden_size": 256, "num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 2,
         "intermediate_size": 512, "head_dim": 64, "max_position_embeddings": 2048, "bos_token_id": 0, "eos_token_id": 1,
         "pad_token_id": 0}  # fmt: skip
MODELS = {
    "llama": {},
    "qwen3": {},
    "gemma2": {"sliding_window": 40},
    "gemma3_text": {"sliding_window": 33},
    "qwen3_moe": {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 128},
    "gpt_oss": {"num_local_experts": 8, "num_experts_per_tok": 2, "sliding_window": 32},
}
SCHEMES = ["awq", "gptq-8", "ct-int8", "ct-mxfp4", "modelopt-nvfp4", "ct-mxfp8", "gptq-head", "ct-fp8-channel"]
REQUESTS = 24 if ON_GPU else 7
OPTIONS = {"skip_tokenizer_init": True, "max_model_len": 1024, "deterministic": True}
VARIANTS = {
    "chunks": {"max_num_batched_tokens": 96},
    "no prefix cache": {"enable_prefix_caching": False},
    "few pages": {"num_gpu_blocks_override": 200},
    "drafts": {"speculative_config": {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 2}},
    "eager": {"enforce_eager": True},
} | ({"pages of 32": {"block_size": 32}} if ON_GPU else {})


def requests():
    rng = random.Random(7)
    shared = [rng.randrange(2, 320) for _ in range(300)]
    prompts = [
        (shared if rng.random() < 0.4 else [])
        + [rng.randrange(2, 320) for _ in range(rng.choice([1, 2, 15, 40, 130, 280] if ON_GPU else [1, 15, 130]))]
        for _ in range(REQUESTS)
    ]
    params = [
        SamplingParams(temperature=0 if i % 2 else 0.9, seed=i, max_tokens=24 if ON_GPU else 8, ignore_eos=True, logprobs=1)
        for i in range(REQUESTS)
    ]
    return prompts, params


def answers(llm, together):
    prompts, params = requests()
    found = {}
    order = list(range(REQUESTS))
    random.Random(together).shuffle(order)
    for first in range(0, REQUESTS, together):
        some = order[first : first + together]
        outputs = llm.generate([{"prompt_token_ids": prompts[i]} for i in some], [params[i] for i in some], use_tqdm=False)
        for i, output in zip(some, outputs, strict=True):
            one = output.outputs[0]
            found[i] = (
                list(one.token_ids),
                [step[token].logprob for token, step in zip(one.token_ids, one.logprobs, strict=True)],
            )
    return found


def differing(found, expected):
    return [i for i in range(REQUESTS) if found[i] != expected[i]]


@pytest.fixture(autouse=True)
def usual_order_afterwards(monkeypatch):
    matmul = torch.backends.cuda.matmul
    before = matmul.allow_bf16_reduced_precision_reduction, matmul.allow_fp16_reduced_precision_reduction
    monkeypatch.setattr(order, "_fixed", False)
    yield
    torch.backends.cuda.preferred_blas_library("default")
    matmul.allow_bf16_reduced_precision_reduction, matmul.allow_fp16_reduced_precision_reduction = before


def make(directory, kind):
    torch.manual_seed(0)
    config = AutoConfig.for_model(kind, **(SIZES | MODELS[kind]), initializer_range=0.1)
    AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16 if ON_GPU else torch.float32).save_pretrained(directory)
    make_tokenizer(directory)
    return str(directory)


def check(directory, **options):
    """Compare each request alone, on an empty cache, with all other ways to run it."""
    options = OPTIONS | options
    llm = LLM(directory, enable_prefix_caching=False, **options)
    expected = answers(llm, 1)
    assert not differing(answers(llm, REQUESTS), expected), "all at once"
    del llm
    llm = LLM(directory, **options)
    for together in (5, REQUESTS):
        assert not differing(answers(llm, together), expected), f"{together} at once, with prefix hits"
    del llm
    for name, changes in VARIANTS.items():
        llm = LLM(directory, **(options | changes))
        assert not differing(answers(llm, REQUESTS), expected), name
        del llm


@CPU
def test_a_model_on_a_cpu(tmp_path):
    check(make(tmp_path, "gemma2"))


@CPU
def test_quantized_models_on_a_cpu(tmp_path):
    check(str(write("awq", tmp_path)), hf_overrides={"max_position_embeddings": 1024})


@GPU
@pytest.mark.parametrize("kind", MODELS)
def test_models_on_a_gpu(tmp_path, kind):
    check(make(tmp_path, kind), kv_cache_memory_bytes=1 << 28)


@GPU
def test_a_cache_of_8_bits(tmp_path):
    check(make(tmp_path, "llama"), kv_cache_memory_bytes=1 << 28, kv_cache_dtype="fp8")


@GPU
@pytest.mark.parametrize("scheme", SCHEMES)
def test_quantized_models_on_a_gpu(tmp_path, scheme):
    check(str(write(scheme, tmp_path)), max_model_len=1024, hf_overrides={"max_position_embeddings": 1024},
          kv_cache_memory_bytes=1 << 28)  # fmt: skip


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"dtype": "bfloat16", "device": "cpu"}, "deterministic is not supported with dtype=bfloat16 on a CPU. Use float32"),
        (
            {"kv_cache_dtype": "fp8", "device": "cpu"},
            "deterministic is not supported with kv_cache_dtype=fp8 on a CPU. Use auto",
        ),
        (
            {"hf_overrides": {"word_embed_proj_dim": 128}, "device": "cpu"},
            "deterministic is not supported with the layer sizes of LlamaForCausalLM on a CPU",
        ),
        ({"model_impl": "transformers", "device": "cpu"}, "deterministic is not supported with LlamaForCausalLM, which trans"),
    ],
)
def test_what_is_not_built_is_refused_by_name(tmp_path, options, message):
    with pytest.raises(ConfigError, match=message):
        LLM(make(tmp_path, "llama"), deterministic=True, **options)


@CPU
def test_models_that_a_cpu_runs_by_layers_are_refused_by_name(tmp_path):
    by_layers = "deterministic is not supported with Qwen3MoeForCausalLM on a CPU, where PyTorch runs its layers one by one"
    with pytest.raises(ConfigError, match=by_layers):
        LLM(make(tmp_path, "qwen3_moe"), deterministic=True)


def test_dequantized_copies_are_refused():
    assert EngineArgs(model="smollm2", deterministic=True).dequantized_copies is False
    with pytest.raises(ConfigError, match="dequantized_copies is not supported with deterministic"):
        EngineArgs(model="smollm2", deterministic=True, dequantized_copies=True)


@pytest.mark.parametrize(("value", "expected"), [("1", True), ("0", False), ("", False)])
def test_vllms_variable_sets_it(monkeypatch, value, expected):
    monkeypatch.setenv("VLLM_BATCH_INVARIANT", value)
    assert EngineArgs(model="smollm2").deterministic is expected
