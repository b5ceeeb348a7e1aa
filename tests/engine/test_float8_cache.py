"""A cache of 8 bits: the tokens are those of transformers with a cache that rounds every token's key and value, by head, as it
takes them in; however prompts are cut, after a prefix hit and after a preemption."""

import json
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file

from oracle import FAMILIES, TINY, make_checkpoint
from quire import LLM, SamplingParams
from quire.cache.layout import make_layout, pages_for
from quire.cli.memory_plan import make_plan
from quire.config.args import EngineArgs
from quire.types.cache import LayerCache
from quire.types.errors import ConfigError, ModelError
from rounded_cache import RoundedCache
from serving import NAME, Running
from tiny_model import make_tokenizer

NEW_TOKENS, PENALTY = 16, 1.5
PROMPTS = [torch.randint(3, TINY["vocab_size"], (n,), generator=torch.Generator().manual_seed(n)).tolist() for n in (33, 5, 18)]
GREEDY = SamplingParams(temperature=0.0, repetition_penalty=PENALTY, max_tokens=NEW_TOKENS, ignore_eos=True)


def answers(reference, kind, scales=None):
    out = []
    for prompt in PROMPTS:
        with torch.inference_mode():
            ids = reference.generate(
                torch.tensor([prompt]), attention_mask=torch.ones(1, len(prompt), dtype=torch.long), do_sample=False,
                min_new_tokens=NEW_TOKENS, max_new_tokens=NEW_TOKENS, eos_token_id=None, pad_token_id=0,
                repetition_penalty=PENALTY, past_key_values=RoundedCache(reference.config, kind, scales),
            )  # fmt: skip
        out.append(ids[0, len(prompt) :].tolist())
    return out


def engine(directory, **args):
    defaults = {
        "skip_tokenizer_init": True, "dtype": "float32", "device": "cpu", "block_size": 4, "max_num_seqs": 8,
        "max_num_batched_tokens": 512, "kv_cache_memory_bytes": 4 << 20, "kv_cache_dtype": "fp8",
    }  # fmt: skip
    return LLM(str(directory), **(defaults | args))


def tokens(outputs):
    return [list(output.outputs[0].token_ids) for output in outputs]


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("name", ["llama", "gemma3", "gpt-oss", "persimmon"])
def test_in_any_order_of_things(checkpoint, name, device):
    """Windows, norms of heads, sinks; a model that transformers runs."""
    family, args = checkpoint(name), {"device": device}
    expected = answers(family.reference, torch.float8_e4m3fn)
    llm = engine(family.directory, **args)
    assert tokens(llm.generate(PROMPTS, GREEDY, use_tqdm=False)) == expected
    again = llm.generate(PROMPTS, GREEDY, use_tqdm=False)
    assert tokens(again) == expected and again[0].num_cached_tokens == 32
    longest, budget = max(map(len, PROMPTS)) + NEW_TOKENS, 16
    pages = pages_for(make_layout(family.facts.layers, 4, 1), longest, budget) + 1
    short = {"num_gpu_blocks_override": pages, "max_model_len": longest, "max_num_batched_tokens": budget}
    llm = engine(family.directory, **args, **short, long_prefill_token_threshold=7)
    outputs = llm.generate(PROMPTS, GREEDY, use_tqdm=False)
    if name == "llama":  # windows keep so few pages that nobody lacks one
        assert sum(output.metrics.num_preemptions for output in outputs) > 0
    assert tokens(outputs) == expected


def test_the_other_kind(checkpoint):
    family = checkpoint("llama")
    expected = answers(family.reference, torch.float8_e5m2)
    assert tokens(engine(family.directory, kv_cache_dtype="fp8_e5m2").generate(PROMPTS, GREEDY, use_tqdm=False)) == expected
    assert expected != answers(family.reference, torch.float8_e4m3fn)


def test_served(checkpoint, tmp_path):
    family = checkpoint("llama")
    shutil.copytree(family.directory, tmp_path, dirs_exist_ok=True)
    make_tokenizer(tmp_path)
    server = Running(tmp_path, dtype="float32", kv_cache_dtype="fp8_e4m3", max_num_batched_tokens=16)
    try:
        body = {"model": NAME, "prompt": PROMPTS, "max_tokens": NEW_TOKENS, "temperature": 0, "ignore_eos": True,
                "repetition_penalty": PENALTY, "return_token_ids": True}  # fmt: skip
        answer = server.http.post("/v1/completions", json=body).json()
    finally:
        server.close()
    assert [choice["token_ids"] for choice in answer["choices"]] == answers(family.reference, torch.float8_e4m3fn)


def test_a_page_has_its_scales(checkpoint):
    family = checkpoint("llama")

    def plan(kind):
        return make_plan(
            EngineArgs(str(family.directory), kv_cache_memory_bytes=1 << 20, kv_cache_dtype=kind, dtype="bfloat16"), None
        )

    layer = LayerCache(2, 128)
    assert [layer.bytes_per_token(size) for size in (4, 2, 1)] == [2048, 1024, 528]
    wide, narrow = plan("auto"), plan("fp8")
    assert (wide.cache_dtype, narrow.cache_dtype) == ("bfloat16", "fp8_e4m3")
    assert narrow.bytes_per_page == 3 * 16 * 2 * 2 * (8 + 4)
    assert narrow.pages == (1 << 20) // narrow.bytes_per_page - 1 > wide.pages


# ---- scales of a checkpoint

SPELLED = {  # layer -> names of its scales, and how many numbers they have
    0: ("self_attn.k_scale", "self_attn.v_scale", 1),
    1: ("self_attn.k_proj.k_scale", "self_attn.v_proj.v_scale", 2),
    2: ("self_attn.k_proj.output_scale", "self_attn.v_cache.scale", 0),
}


@pytest.fixture(scope="module")
def scaled(checkpoint, tmp_path_factory):
    """A checkpoint with scales, which are so small that some numbers are cut off, and what they are by layer."""
    directory, scales = tmp_path_factory.mktemp("scaled"), []
    shutil.copytree(checkpoint("llama").directory, directory, dirs_exist_ok=True)
    found = load_file(directory / "model.safetensors")
    random = torch.Generator().manual_seed(0)
    for layer, (*names, count) in SPELLED.items():
        values = [torch.rand((count,) if count else (), generator=random) * 0.002 + 0.001 for _ in names]
        found |= {f"model.layers.{layer}.{name}": value for name, value in zip(names, values, strict=True)}
        scales.append(values)
    save_file(found, directory / "model.safetensors")
    return directory, scales


def test_scales_of_the_checkpoint_are_used(checkpoint, scaled):
    directory, scales = scaled
    expected = answers(checkpoint("llama").reference, torch.float8_e4m3fn, scales)
    assert tokens(engine(directory).generate(PROMPTS, GREEDY, use_tqdm=False)) == expected
    assert expected != answers(checkpoint("llama").reference, torch.float8_e4m3fn)


BROKEN = {
    "one alone": ("self_attn.v_scale", None, r"self_attn\.k_scale requires v_scale of layers\.0\.self_attn as well"),
    "zero": ("self_attn.v_scale", torch.tensor(0.0), r"v_scale has a scale that is not a positive finite"),
    "NaN": ("self_attn.k_scale", torch.tensor(torch.nan), r"k_scale has a scale that is not a positive finite"),
    "too many": ("self_attn.k_scale", torch.ones(6), r"k_scale must have 1 value or one per head \(2\); got 6"),
    "zero points": ("self_attn.k_zero_point", torch.zeros(1), r"k_zero_point: zero points are not supported for an 8-bit"),
    "elsewhere": ("mlp.k_scale", torch.ones(1), r"mlp\.k_scale is a KV cache scale, but 'layers\.0\.mlp' is not an attention"),
}  # fmt: skip


@pytest.mark.parametrize("case", BROKEN)
def test_scales_that_cannot_be_used(scaled, tmp_path, case):
    name, value, message = BROKEN[case]
    shutil.copytree(scaled[0], tmp_path, dirs_exist_ok=True)
    found = load_file(tmp_path / "model.safetensors")
    found.pop(f"model.layers.0.{name}", None)
    save_file(found | ({} if value is None else {f"model.layers.0.{name}": value}), tmp_path / "model.safetensors")
    with pytest.raises(ModelError, match=message):
        engine(tmp_path)


def test_what_cannot_be_had(checkpoint, tmp_path):
    with pytest.raises(
        ConfigError, match=r"kv_cache_dtype bfloat16 is not the model's float32; use auto, fp8 for 8 bits, or dtype=bfloat16"
    ):
        engine(checkpoint("llama").directory, kv_cache_dtype="bfloat16")
    make_checkpoint(FAMILIES["llama"], tmp_path)
    settings = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(settings | {"head_dim": 15, "num_key_value_heads": 1}))
    with pytest.raises(ConfigError, match=r"whole words of 4 bytes; block_size 2 would do"):
        engine(tmp_path, block_size=1)
