"""Latent attention through the whole engine: beside what `test_matrix.py` asks of every family."""

import copy
import json

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from adapters import halves, write_adapter
from oracle import in_pieces
from quantized_checkpoints import BLOCKS, fp8
from quire import LLM, SamplingParams
from quire.config.facts import read_facts
from quire.config.memory import estimate_parameters
from quire.files.resolve import resolve_model
from quire.layers.latent import LatentAttention
from quire.layers.linear import Plain
from quire.load.load import load_weights
from quire.lora.request import LoRARequest
from quire.models.registry import build_model
from quire.types.errors import ConfigError

PROMPTS = [torch.randint(3, 199, (n,), generator=torch.Generator().manual_seed(n)).tolist() for n in (21, 6, 34)]
GREEDY = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)


def engine(directory, on="cpu", **more):
    return LLM(str(directory), skip_tokenizer_init=True, dtype="float32", device=on, block_size=4, max_model_len=64, **more)


def tokens(llm, params=GREEDY):
    return [[one.token_ids for one in output.outputs] for output in llm.generate(PROMPTS, params, use_tqdm=False)]


def test_a_row_for_all_heads_is_all_that_is_kept(checkpoint):
    facts = checkpoint("deepseek-v3").facts
    assert {(layer.kind, layer.kv_heads, layer.head_dim, layer.latent) for layer in facts.layers} == {("full", 1, 40, 32)}
    assert facts.layers[0].page_bytes(16, 2) == 16 * 40 * 2
    named = checkpoint("deepseek-v3").model.named_parameters()
    counted = sum(weight.numel() for name, weight in named if weight.ndim > 1)
    assert estimate_parameters(facts.hf) == counted


def test_several_sampled_from_one_prompt_and_drafts(checkpoint):
    directory = checkpoint("deepseek-v2").directory
    plain = engine(directory, max_num_batched_tokens=16)
    drawn = SamplingParams(n=3, seed=4, temperature=1.0, max_tokens=12, ignore_eos=True)
    expected, several = tokens(plain), tokens(plain, drawn)
    assert len({tuple(ids) for ids in several[0]}) == 3
    drafting = engine(
        directory, speculative_config={"method": "synthetic", "synthetic_acceptance_rates": [0.6], "num_speculative_tokens": 3}
    )
    assert tokens(drafting) == expected
    assert tokens(drafting, drawn) == several


def test_adapters_of_what_makes_keys_and_values(checkpoint, tmp_path):
    """Beside rows of another and of none, after a prefix hit and in chunks: tokens are those of matrices with both in them."""
    case, loras, expected = checkpoint("deepseek-v3"), [None], []
    with torch.inference_mode():
        for place in range(3):
            merged, tensors = copy.deepcopy(case.reference), {}
            for layer in range(place and len(case.facts.layers)):
                module = f"model.layers.{layer}.self_attn.kv_b_proj"
                weight = merged.get_submodule(module).weight
                down, up = halves(f"base_model.model.{module}", *weight.shape, seed=10 * place + layer).values()
                tensors |= halves(f"base_model.model.{module}", *weight.shape, seed=10 * place + layer)
                weight += up @ down * 2
            if place:
                loras.append(LoRARequest(f"a{place}", place, write_adapter(tmp_path / f"{place}", tensors)))
            told = merged.generate(torch.tensor([PROMPTS[2]]), max_new_tokens=12, min_new_tokens=12, do_sample=False)
            expected.append(told[0, len(PROMPTS[2]) :].tolist())
    assert len(set(map(tuple, expected))) == 3
    llm, order = engine(case.directory, enable_lora=True, max_loras=2, max_num_batched_tokens=16), [1, 0, 2, 1]
    for _ in range(2):
        outputs = llm.generate(
            [PROMPTS[2]] * len(order), GREEDY, use_tqdm=False, lora_request=[loras[place] for place in order]
        )
        assert [output.outputs[0].token_ids for output in outputs] == [expected[place] for place in order]


def test_a_checkpoint_in_blocks_of_8_bits(checkpoint, tmp_path):
    case = checkpoint("deepseek-v3")
    write, stored, meant = fp8("block", "weight_scale_inv"), {}, {}
    for name, weight in load_file(case.directory / "model.safetensors").items():
        plain = weight.ndim != 2 or ".mlp.gate." in name or "embed_tokens" in name or "lm_head" in name
        written, meant[name] = ({"weight": weight}, weight) if plain else write(name, weight)
        module = name.removesuffix(".weight")
        stored |= {name: weight} if plain else {f"{module}.{key}": value for key, value in written.items()}
    config = json.loads((case.directory / "config.json").read_text())
    for directory, tensors, more in ((tmp_path / "8", stored, {"quantization_config": BLOCKS}), (tmp_path / "32", meant, {})):
        directory.mkdir()
        save_file(tensors, directory / "model.safetensors")
        (directory / "config.json").write_text(json.dumps(config | more))
    assert tokens(engine(tmp_path / "8")) == tokens(engine(tmp_path / "32"))
    facts = read_facts(resolve_model(tmp_path / "8"))
    model = build_model(facts)
    load_weights(model, facts, device="cpu", dtype="float32", quantization=facts.quantization, keeps=frozenset({"fp8"}))
    layers = [layer for layer in model.modules() if isinstance(layer, LatentAttention)]
    plain = [isinstance(linear.method, Plain) for layer in layers for linear in (layer.kv_b_proj, layer.down)]
    assert plain == [True, False] * 3
    assert all(logits.isfinite().all() for logits in in_pieces(model, *(2 * [PROMPTS[2] + PROMPTS[1]])))


@pytest.mark.parametrize(("name", "apart"), [("deepseek-v3", True), ("deepseek-v2", False)])
def test_gguf(checkpoint, name, apart, tmp_path):
    """As llama.cpp converts them, today and before: what makes keys and values is apart, or not."""
    import gguf

    from gguf_files import write_gguf

    case, tensors, stacks = checkpoint(name), {}, {}
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.DEEPSEEK2, 3)
    for full, tensor in load_file(case.directory / "model.safetensors").items():
        weight, (_, _, layer, *path) = tensor.numpy(), f"{full}..".split(".")
        block, module = f"blk.{layer}.", ".".join(path).rstrip(".").removesuffix(".weight")
        if ".experts." in full:
            expert, part = module.split(".")[2:]
            stacks.setdefault(f"{block}ffn_{part.removesuffix('_proj')}_exps.weight", {})[int(expert)] = weight
        elif full.endswith("correction_bias"):
            tensors[f"{block}exp_probs_b.bias"] = weight
        elif module == "self_attn.kv_b_proj" and apart:
            keys, values = np.split(weight.reshape(6, 22, 32), [12], axis=1)
            tensors |= {f"{block}attn_k_b.weight": keys.transpose(0, 2, 1), f"{block}attn_v_b.weight": values}
        else:
            tensors[names.get_name(full, try_suffixes=(".weight",))] = weight
    tensors |= {name: np.stack([experts[i] for i in range(8)]) for name, experts in stacks.items()}
    sizes = {"attention.key_length_mla": 20, "attention.value_length_mla": 10} if apart else {}
    fields = {
        "block_count": 3, "context_length": 128, "embedding_length": 48, "feed_forward_length": 80, "attention.head_count": 6,
        "attention.head_count_kv": 1 if apart else 6, "attention.layer_norm_rms_epsilon": 1e-6, "rope.freq_base": 10000.0,
        "rope.dimension_count": 8, "attention.key_length": 40 if apart else 20, "attention.value_length": 32 if apart else 10,
        "attention.kv_lora_rank": 32, "leading_dense_block_count": 1, "expert_count": 8, "expert_used_count": 3,
        "expert_shared_count": 2, "expert_feed_forward_length": 24, "expert_weights_scale": 1.5,
        "expert_weights_norm": apart, "expert_gating_func": 2 if apart else 1, "rope.scaling.type": "yarn",
        "rope.scaling.factor": 4.0, "rope.scaling.original_context_length": 32, "rope.scaling.yarn_log_multiplier": 0.12,
        **({"attention.q_lora_rank": 20, "expert_group_count": 4, "expert_group_used_count": 2} if apart else {}), **sizes,
    }  # fmt: skip
    file = write_gguf(tmp_path / "m.gguf", architecture="deepseek2", fields=fields, tensors=tensors)
    equal = {"rope_parameters": case.facts.hf["rope_parameters"] | {"mscale": 1.2}}  # a GGUF file has one of both
    expected = engine(case.directory, hf_overrides=equal)
    assert tokens(engine(file)) == tokens(expected)


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["deepseek-v2", "deepseek-v3", "minicpm3"])
def test_on_a_gpu(checkpoint, name, monkeypatch):
    """Prompts are expanded, and cut into pieces that are not; steps are launched one by one, and as graphs."""
    from quire.attn import latent_triton

    monkeypatch.setattr(latent_triton, "LONG_ROW_TOKENS", 30)
    directory = checkpoint(name).directory
    expected = tokens(engine(directory))
    for more in ({"enforce_eager": True}, {}, {"max_num_batched_tokens": 16}):
        there = engine(directory, on="cuda", kv_cache_memory_bytes=1 << 24, **more)
        assert [tokens(there) for _ in range(4)] == [expected] * 4
    assert there.llm_engine.core.executor._runner.graphs.replays > 0


def test_a_cache_of_8_bits_is_refused(checkpoint):
    with pytest.raises(ConfigError, match="not built for latent attention"):
        engine(checkpoint("deepseek-v3").directory, kv_cache_dtype="fp8")
