"""`deterministic`: tokens and logprobs of a request are bit-identical alone and in any batch, chunk, prefix hit, preemption
and draft. On CPUs and, in bfloat16, on GPUs."""

import json
import random
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import CONFIG_MAPPING, AutoConfig, AutoModelForCausalLM

from adapters import halves, write_adapter
from encoder_families import ENCODERS, random_texts, save_encoder
from quantized_checkpoints import BLOCKS, fp8, write
from quire import LLM, PoolingParams, SamplingParams
from quire.attn.backend import AttentionSpec
from quire.config.args import EngineArgs
from quire.device.cuda.device import CUDADevice
from quire.features.determinism.device import FixedOrder
from quire.layers.attention import Attention
from quire.ops.native import multiplies_floats, run_decoders
from quire.types.adapter import LoRARequest
from quire.types.errors import ConfigError
from tiny_model import make_tokenizer

ON_GPU = torch.cuda.is_available()
CPU = pytest.mark.skipif(ON_GPU or not multiplies_floats(), reason="for a CPU with C kernels for float32 weights")
SUPPORTED_CPU = pytest.mark.skipif(not multiplies_floats(), reason="every model is refused on other CPUs")
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
ATTENTION = ("num_attention_heads", "num_key_value_heads", "intermediate_size", "head_dim", "max_position_embeddings")
ALONE = dict.fromkeys(ATTENTION)  # models without attention layers have no such settings
LINEAR = {"layer_types": ["linear_attention", "full_attention", "linear_attention"]}
MAMBA2 = {"mamba_n_heads": 8, "mamba_d_head": 64, "mamba_n_groups": 1, "mamba_d_state": 64}
RECURRENT = {
    "qwen3_next": LINEAR | {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 128,
                            "shared_expert_intermediate_size": 128, "linear_num_key_heads": 2, "linear_num_value_heads": 4,
                            "linear_key_head_dim": 64, "linear_value_head_dim": 64},
    "olmo_hybrid": LINEAR | {"linear_num_key_heads": 4, "linear_num_value_heads": 4, "linear_key_head_dim": 48,
                             "linear_value_head_dim": 96},
    "lfm2": {"layer_types": ["conv", "full_attention", "conv"], "block_multiple_of": 16},
    "bamba": MAMBA2 | {"attn_layer_indices": [1]},
    "falcon_h1": MAMBA2 | {"mamba_d_ssm": 512, "mamba_rms_norm": True},
    "zamba2": {"layers_block_type": ["mamba", "hybrid", "hybrid"], "n_mamba_heads": 8, "mamba_d_state": 32, "head_dim": None,
               "adapter_rank": 12},
    "minimax": LINEAR | {"num_local_experts": 4, "num_experts_per_tok": 2},
    "mamba2": ALONE | {"num_heads": 8, "head_dim": 64, "state_size": 64, "n_groups": 1},
    "jamba": {"attn_layer_period": 3, "attn_layer_offset": 1, "num_experts": 4, "mamba_d_state": 16, "mamba_dt_rank": 20},
    "falcon_mamba": ALONE | {"state_size": 16},
}  # fmt: skip
ENCODER_KINDS = ["BERT", "BERT, cross-encoder", "BERT, tokens", "MPNet", "ModernBERT", "ModernBERT, classes", "DistilBERT"]
ENCODER_SIZES = {"hidden_size": 256, "intermediate_size": 512, "max_position_embeddings": 600, "local_attention": 70}
DISTIL_SIZES = {"dim": 256, "hidden_dim": 512, "max_position_embeddings": 600}
RANKS = {"num_key_value_heads": 4, "kv_lora_rank": 512, "q_lora_rank": 128, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64,
         "v_head_dim": 128}  # fmt: skip
ROUTED = {"n_routed_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 128, "n_shared_experts": 1}
GROUPS = {"n_group": 4, "topk_group": 2, "first_k_dense_replace": 1, "routed_scaling_factor": 1.5}
LATENT = {
    "deepseek_v2": RANKS | ROUTED | {"q_lora_rank": None, "first_k_dense_replace": 1},
    "deepseek_v3": RANKS | ROUTED | GROUPS,
    "glm4_moe_lite": RANKS | ROUTED | {"qk_nope_head_dim": 192, "v_head_dim": 256, "first_k_dense_replace": None},
    "longcat_flash": RANKS | {"num_layers": 2, "num_hidden_layers": None, "intermediate_size": None, "ffn_hidden_size": 512,
                              "expert_ffn_hidden_size": 128, "n_routed_experts": 8, "zero_expert_num": 3, "moe_topk": 3},
    "kimi_linear": LINEAR | RANKS | {
        "linear_head_dim": 64, "linear_num_heads": 4, "q_lora_rank": None, "head_dim": None, "num_local_experts": 8,
        "num_experts_per_tok": 2, "moe_intermediate_size": 128, "num_shared_experts": 1, "first_k_dense_replace": 1,
    },
    "minicpm3": RANKS | {"kv_lora_rank": 256, "qk_nope_head_dim": 64, "qk_rope_head_dim": 32, "v_head_dim": 64, "head_dim": 96},
}  # fmt: skip
SCHEMES = ["awq", "gptq-8", "ct-int8", "ct-mxfp4", "modelopt-nvfp4", "ct-mxfp8", "gptq-head", "ct-fp8-channel"]
REQUESTS = 24 if ON_GPU else 7
OPTIONS = {"skip_tokenizer_init": True, "max_model_len": 1024, "deterministic": True}
VARIANTS = {
    "chunks": {"max_num_batched_tokens": 96},
    "no prefix cache": {"enable_prefix_caching": False},
    "few pages": {"num_gpu_blocks_override": 200},
    "drafts": {
        "speculative_config": {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 2, "adaptive": False}
    },
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


def answers(llm, together, adapters=(None,)):
    prompts, params = requests()
    found = {}
    order = list(range(REQUESTS))
    random.Random(together).shuffle(order)
    for first in range(0, REQUESTS, together):
        some = order[first : first + together]
        adapted = [adapters[i % len(adapters)] for i in some]
        outputs = llm.generate([{"prompt_token_ids": prompts[i]} for i in some], [params[i] for i in some],
                               lora_request=adapted if any(adapted) else None, use_tqdm=False)  # fmt: skip
        for i, output in zip(some, outputs, strict=True):
            one = output.outputs[0]
            found[i] = (
                list(one.token_ids),
                [step[token].logprob for token, step in zip(one.token_ids, one.logprobs, strict=True)],
            )
    return found


def differing(found, expected):
    return [i for i in range(REQUESTS) if found[i] != expected[i]]


def make(directory, kind):
    torch.manual_seed(0)
    sizes = SIZES | (MODELS | RECURRENT | LATENT)[kind]
    given = {name: value for name, value in sizes.items() if value is not None or name == "q_lora_rank"}
    config = AutoConfig.for_model(kind, **given, initializer_range=0.1)
    AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16 if ON_GPU else torch.float32).save_pretrained(directory)
    make_tokenizer(directory)
    return str(directory)


def check(directory, without=(), adapters=(None,), **options):
    """Compare each request alone, on an empty cache, with all other ways to run it but those in `without`.

    adapters: LoRA adapters that the requests have in turn
    """
    options = OPTIONS | options
    llm = LLM(directory, enable_prefix_caching=False, **options)
    expected = answers(llm, 1, adapters)
    assert not differing(answers(llm, REQUESTS, adapters), expected), "all at once"
    del llm
    llm = LLM(directory, **options)
    for together in (5, REQUESTS):
        assert not differing(answers(llm, together, adapters), expected), f"{together} at once, with prefix hits"
    del llm
    for name, changes in VARIANTS.items():
        if name in without:
            continue
        llm = LLM(directory, **(options | changes))
        assert not differing(answers(llm, REQUESTS, adapters), expected), name
        del llm


def make_encoder(directory, kind):
    family = ENCODERS[kind]
    sizes = DISTIL_SIZES if "dim" in family.options else ENCODER_SIZES
    sizes = {name: value for name, value in sizes.items() if name in family.options}
    save_encoder(replace(family, options=family.options | sizes), directory)
    return str(directory)


def check_pooling(directory, lengths, **options):
    """Compare the values of each text alone with those in batches, in graphs, eagerly and in chunks."""
    options = {"skip_tokenizer_init": True, "max_model_len": 512, "dtype": "bfloat16", "deterministic": True,
               "kv_cache_memory_bytes": 1 << 28} | options  # fmt: skip
    texts = [{"prompt_token_ids": text} for text in random_texts(lengths)]

    def pooled(llm, some):
        found = [llm.encode(some, PoolingParams(task=task), use_tqdm=False)
                 for task in llm.supported_tasks if task not in ("score", "generate")]  # fmt: skip
        return [[task[i].outputs.data for task in found] for i in range(len(some))]

    llm = LLM(directory, enable_prefix_caching=False, **options)
    alone = [pooled(llm, [text])[0] for text in texts]
    assert all(np.isfinite(values).all() for text in alone for values in text)
    for changes in ({}, {"enforce_eager": True}, {"max_num_batched_tokens": 512}, {"max_num_seqs": 3}):
        llm = LLM(directory, **(options | changes))
        for _ in range(6):  # buckets are recorded after some steps
            found = pooled(llm, texts)
            for text, expected, values in zip(lengths, alone, found, strict=True):
                assert all(map(np.array_equal, values, expected)), (changes, text)
        del llm


@CPU
def test_a_model_on_a_cpu(tmp_path):
    check(make(tmp_path, "gemma2"))


@CPU
@pytest.mark.skipif(not run_decoders(), reason="for a CPU with C kernels for quantized weights")
def test_quantized_models_on_a_cpu(tmp_path):
    check(str(write("awq", tmp_path)), hf_overrides={"max_position_embeddings": 1024})


@CPU
@pytest.mark.skipif(run_decoders(), reason="for a CPU where libraries multiply by quantized weights")
def test_quantized_models_are_refused_where_libraries_multiply(tmp_path):
    with pytest.raises(ConfigError, match="deterministic is not supported with quantized weights on this CPU"):
        LLM(str(write("awq", tmp_path)), deterministic=True, skip_tokenizer_init=True, max_model_len=256)


@GPU
@pytest.mark.parametrize("kind", MODELS)
def test_models_on_a_gpu(tmp_path, kind):
    check(make(tmp_path, kind), kv_cache_memory_bytes=1 << 28)


@GPU
@pytest.mark.parametrize("kind", [kind for kind in RECURRENT if kind in CONFIG_MAPPING])  # known to this transformers
def test_recurrent_models_on_a_gpu(tmp_path, kind):
    check(make(tmp_path, kind), ("drafts",), kv_cache_memory_bytes=1 << 28, max_num_seqs=64)


@GPU
@pytest.mark.parametrize("kind", [kind for kind in LATENT if kind in CONFIG_MAPPING])
def test_latent_attention_on_a_gpu(tmp_path, kind):
    without = ("drafts",) if kind == "kimi_linear" else ()  # it has recurrent layers, too
    check(make(tmp_path, kind), without, kv_cache_memory_bytes=1 << 28, max_num_seqs=64)


@GPU
def test_latent_attention_in_blocks_of_8_bits(tmp_path):
    directory = Path(make(tmp_path, "deepseek_v3"))
    stored, store = {}, fp8("block", "weight_scale_inv")
    for name, weight in load_file(directory / "model.safetensors").items():
        plain = weight.ndim != 2 or ".mlp.gate." in name or "embed_tokens" in name or "lm_head" in name
        module, tensors = name.removesuffix(".weight"), {} if plain else store(name, weight.float())[0]
        stored |= {name: weight} if plain else {f"{module}.{key}": each for key, each in tensors.items()}
    save_file(stored, directory / "model.safetensors")
    config = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps(config | {"quantization_config": BLOCKS}))
    check(str(directory), kv_cache_memory_bytes=1 << 28)


@GPU
@pytest.mark.parametrize("kind", ENCODER_KINDS)
def test_encoders_on_a_gpu(tmp_path, kind):
    check_pooling(make_encoder(tmp_path, kind), [1, 5, 63, 64, 65, 200, 512, 3, 130, 17, 340, 64, 90])


@GPU
def test_a_decoder_that_pools_on_a_gpu(tmp_path):
    check_pooling(make(tmp_path, "qwen3"), [1, 5, 63, 64, 65, 200, 512, 3, 130], runner="pooling",
                  pooler_config={"pooling_type": "MEAN"})  # fmt: skip


@GPU
def test_adapters_on_a_gpu(tmp_path):
    inputs = {"self_attn.q_proj": (256, 256), "self_attn.v_proj": (256, 128), "self_attn.o_proj": (256, 256),
              "mlp.gate_proj": (256, 512), "mlp.up_proj": (256, 512), "mlp.down_proj": (512, 256)}  # fmt: skip
    adapters = [None]
    for rank in (8, 16):
        tensors = {}
        for layer in range(SIZES["num_hidden_layers"]):
            for seed, (name, (wide, out)) in enumerate(inputs.items()):
                tensors |= halves(f"base_model.model.model.layers.{layer}.{name}", out, wide, rank, 10 * layer + seed + rank)
        path = write_adapter(tmp_path / f"rank-{rank}", tensors, r=rank, lora_alpha=2, target_modules=list(inputs))
        adapters.append(LoRARequest(f"rank-{rank}", rank, path))
    check(make(tmp_path / "model", "llama"), adapters=adapters, kv_cache_memory_bytes=1 << 28, enable_lora=True, max_loras=2,
          max_lora_rank=16)  # fmt: skip


@GPU
def test_a_cache_of_8_bits(tmp_path):
    check(make(tmp_path, "llama"), kv_cache_memory_bytes=1 << 28, kv_cache_dtype="fp8")


@GPU
@pytest.mark.parametrize("scheme", SCHEMES)
def test_quantized_models_on_a_gpu(tmp_path, scheme):
    check(str(write(scheme, tmp_path)), max_model_len=1024, hf_overrides={"max_position_embeddings": 1024},
          kv_cache_memory_bytes=1 << 28)  # fmt: skip


@SUPPORTED_CPU
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


@SUPPORTED_CPU
def test_recurrent_layers_and_encoders_are_refused_on_a_cpu(tmp_path):
    (tmp_path / "recurrent").mkdir()
    with pytest.raises(ConfigError, match="with the recurrent layers of Lfm2ForCausalLM on a CPU"):
        LLM(make(tmp_path / "recurrent", "lfm2"), deterministic=True, device="cpu")
    with pytest.raises(ConfigError, match="with encoders such as BertModel on a CPU"):
        LLM(make_encoder(tmp_path, "BERT"), deterministic=True, device="cpu", skip_tokenizer_init=True)


@SUPPORTED_CPU
def test_latent_attention_is_refused_on_a_cpu(tmp_path):
    with pytest.raises(ConfigError, match="not supported with the latent attention of DeepseekV3ForCausalLM on a CPU"):
        LLM(make(tmp_path, "deepseek_v3"), deterministic=True, device="cpu")


@CPU
def test_models_that_a_cpu_runs_by_layers_are_refused_by_name(tmp_path):
    by_layers = "deterministic is not supported with Qwen3MoeForCausalLM on a CPU, where PyTorch runs its layers one by one"
    with pytest.raises(ConfigError, match=by_layers):
        LLM(make(tmp_path, "qwen3_moe"), deterministic=True)


@pytest.mark.parametrize(
    ("spec", "reason"),
    [
        (AttentionSpec(8, 2, 512, 1.0), "head_dim must be at most 256; got 512"),  # Gemma 4
        (AttentionSpec(71, 1, 64, 1.0), "query heads per KV head must be at most 64; got 71"),  # Falcon 7B
    ],
)
def test_attention_that_pytorch_runs_on_a_gpu_is_refused(monkeypatch, spec, reason):
    pytest.importorskip("triton")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    with pytest.raises(ConfigError, match=rf"do not support a layer of this model: {reason}\. Remove it"):
        FixedOrder(CUDADevice(), torch.bfloat16).transform(torch.nn.ModuleList([Attention(spec)]))


def test_dequantized_copies_are_refused():
    assert EngineArgs(model="smollm2", deterministic=True).dequantized_copies is False
    with pytest.raises(ConfigError, match="dequantized_copies is not supported with deterministic"):
        EngineArgs(model="smollm2", deterministic=True, dequantized_copies=True)


@pytest.mark.parametrize(("value", "expected"), [("1", True), ("0", False), ("", False)])
def test_vllms_variable_sets_it(monkeypatch, value, expected):
    monkeypatch.setenv("VLLM_BATCH_INVARIANT", value)
    assert EngineArgs(model="smollm2").deterministic is expected
    assert EngineArgs(model="smollm2", deterministic=False).deterministic is False
    assert EngineArgs(model="smollm2", deterministic=True).deterministic is True


@pytest.mark.parametrize("value", ["true", "false", "2", " 1"])
def test_other_values_of_vllms_variable_are_refused(monkeypatch, value):
    monkeypatch.setenv("VLLM_BATCH_INVARIANT", value)
    with pytest.raises(ConfigError, match=f"VLLM_BATCH_INVARIANT must be 0 or 1; got '{value}'"):
        EngineArgs(model="smollm2")
