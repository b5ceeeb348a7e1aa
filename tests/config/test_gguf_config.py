from pathlib import Path
from typing import Any

import numpy as np
import pytest

from gguf_files import LLAMA, llama_tensors, tiny_llama, write_gguf
from quire.config.facts import ModelFacts, read_facts
from quire.config.gguf import llama3_divisors
from quire.files.resolve import resolve_model
from quire.types.errors import ModelError


def facts_of(path: Path) -> ModelFacts:
    return read_facts(resolve_model(str(path)))


def other(path: Path, architecture: str, tensors: dict[str, np.ndarray] | None = None, **fields: Any) -> ModelFacts:
    fields = {**LLAMA, **fields}
    return facts_of(
        write_gguf(
            path / "m.gguf", architecture=architecture, fields=fields, tensors={**llama_tensors(fields), **(tensors or {})}
        )
    )


def test_llama(tmp_path: Path) -> None:
    facts = facts_of(tiny_llama(tmp_path / "m.gguf"))
    assert facts.architecture == "LlamaForCausalLM"
    assert (facts.vocab_size, facts.hidden_size, facts.max_position, facts.dtype) == (48, 32, 64, "float32")
    assert (facts.bos_id, facts.eos_ids) == (1, (2, 46))
    assert [(layer.kv_heads, layer.head_dim, layer.window) for layer in facts.layers] == [(2, 8, None)] * 2
    assert facts.hf["rms_norm_eps"] == 1e-5
    assert facts.hf["rope_parameters"] == {"rope_type": "default", "rope_theta": 1e4}
    assert facts.hf["tie_word_embeddings"] is True
    assert facts.parameters == sum(tensor.size for tensor in llama_tensors(LLAMA).values())
    assert facts.weight_bytes == 4 * facts.parameters


def test_an_output_matrix_unties_the_head(tmp_path: Path) -> None:
    path = tiny_llama(tmp_path / "m.gguf", tensors={"output.weight": np.zeros((48, 32), np.float32)})
    assert facts_of(path).hf["tie_word_embeddings"] is False


def test_half_precision_files(tmp_path: Path) -> None:
    tensors = {name: value.astype(np.float16) for name, value in llama_tensors(LLAMA).items() if "norm" not in name}
    assert facts_of(tiny_llama(tmp_path / "m.gguf", tensors=tensors)).dtype == "float16"


def test_llama3_stretching_is_recognized_from_its_tensor(tmp_path: Path) -> None:
    fields = {"rope.freq_base": 500000.0}
    divisors = np.array(llama3_divisors(500000.0, 8, 32.0), np.float32)
    rope = facts_of(tiny_llama(tmp_path / "m.gguf", fields=fields, tensors={"rope_freqs.weight": divisors})).hf[
        "rope_parameters"
    ]
    assert (rope["rope_type"], rope["factor"], rope["rope_theta"]) == ("llama3", 32.0, 5e5)
    odd = np.array([1.0, 2.0, 3.0, 32.0], np.float32)
    with pytest.raises(ModelError, match="rope_freqs"):
        facts_of(tiny_llama(tmp_path / "odd.gguf", fields=fields, tensors={"rope_freqs.weight": odd}))


def test_llama3_divisors_are_transformers() -> None:
    """Wave lengths under 8192 / 4 are kept, those over 8192 are stretched by the factor, and it is smooth between."""
    divisors = np.array(llama3_divisors(5e5, 128, 8.0))
    waves = 2 * np.pi * 5e5 ** (np.arange(0, 128, 2) / 128)
    assert np.all(divisors[waves < 2048] == 1.0)
    assert np.all(divisors[waves > 8192] == 8.0)
    between = (waves > 2048) & (waves < 8192)
    smooth = (8192 / waves[between] - 1) / 3
    assert np.allclose(1 / divisors[between], (1 - smooth) / 8 + smooth)


def test_mixtral_is_llama_with_experts(tmp_path: Path) -> None:
    facts = other(tmp_path, "llama", expert_count=4, expert_used_count=2)
    assert facts.architecture == "MixtralForCausalLM"
    assert (facts.hf["num_local_experts"], facts.hf["num_experts_per_tok"], facts.hf["intermediate_size"]) == (4, 2, 64)


def test_qwen(tmp_path: Path) -> None:
    assert other(tmp_path, "qwen2").architecture == "Qwen2ForCausalLM"
    facts = other(tmp_path, "qwen3", **{"attention.key_length": 16})
    assert (facts.architecture, facts.layers[0].head_dim) == ("Qwen3ForCausalLM", 16)
    facts = other(tmp_path, "qwen3moe", expert_count=4, expert_used_count=2, expert_feed_forward_length=24)
    assert facts.architecture == "Qwen3MoeForCausalLM"
    assert (facts.hf["num_experts"], facts.hf["moe_intermediate_size"], facts.hf["norm_topk_prob"]) == (4, 24, True)


def test_yarn(tmp_path: Path) -> None:
    scaling = {"rope.scaling.type": "yarn", "rope.scaling.factor": 4.0, "rope.scaling.original_context_length": 64}
    facts = other(tmp_path, "qwen2", **scaling)
    assert facts.max_position == 256
    assert facts.hf["rope_parameters"]["factor"] == 4.0


def test_gemma2(tmp_path: Path) -> None:
    facts = other(
        tmp_path, "gemma2", **{"attention.sliding_window": 16, "attention.key_length": 8, "attn_logit_softcapping": 50.0}
    )
    assert [layer.window for layer in facts.layers] == [16, None]
    assert (facts.hf["query_pre_attn_scalar"], facts.hf["attn_logit_softcapping"]) == (8, 50.0)


def test_gemma3(tmp_path: Path) -> None:
    facts = other(tmp_path, "gemma3", **{"attention.sliding_window": 16, "block_count": 7, "rope.freq_base": 1e6})
    assert [layer.window for layer in facts.layers] == [16] * 5 + [None, 16]
    assert facts.hf["rope_parameters"]["sliding_attention"]["rope_theta"] == 1e4
    assert facts.hf["rope_parameters"]["full_attention"]["rope_theta"] == 1e6


def test_phi3_longrope(tmp_path: Path) -> None:
    factors = {f"rope_factors_{kind}.weight": np.full(4, value, np.float32) for kind, value in (("long", 4.0), ("short", 1.5))}
    facts = other(tmp_path, "phi3", factors, **{"rope.scaling.original_context_length": 32, "rope.scaling.attn_factor": 1.19})
    rope = facts.hf["rope_parameters"]
    assert (rope["rope_type"], rope["long_factor"], rope["short_factor"]) == ("longrope", [4.0] * 4, [1.5] * 4)
    assert (rope["original_max_position_embeddings"], rope["attention_factor"]) == (32, 1.19)


def test_gpt2(tmp_path: Path) -> None:
    fields = {
        "block_count": 2,
        "context_length": 16,
        "embedding_length": 8,
        "attention.head_count": 2,
        "feed_forward_length": 32,
    }
    path = write_gguf(
        tmp_path / "m.gguf", architecture="gpt2", fields=fields, tensors={"token_embd.weight": np.zeros((9, 8), np.float32)}
    )
    facts = facts_of(path)
    assert (facts.architecture, facts.hf["n_embd"], facts.max_position, facts.vocab_size) == ("GPT2LMHeadModel", 8, 16, 9)
    assert "rope_parameters" not in facts.hf


def test_wrong_files_are_told(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="'rwkv7' is not supported; these are: arcee, "):
        other(tmp_path, "rwkv7")
    with pytest.raises(ModelError, match="token_embd"):
        facts_of(write_gguf(tmp_path / "m.gguf", fields=LLAMA))
    with pytest.raises(ModelError, match="must be a positive integer, got 'many'"):
        other(tmp_path, "llama", context_length="many")
    with pytest.raises(ModelError, match="must be a number, got 'thin'"):
        facts_of(tiny_llama(tmp_path / "m.gguf", metadata={"llama.attention.key_length": "thin"}))
    with pytest.raises(ModelError, match="differs from layer to layer"):
        facts_of(tiny_llama(tmp_path / "m.gguf", metadata={"llama.attention.head_count_kv": [1, 2]}))
    missing = {key: value for key, value in LLAMA.items() if key != "attention.head_count"}
    with pytest.raises(ModelError, match=r"llama\.attention\.head_count must be a positive integer, got None"):
        facts_of(write_gguf(tmp_path / "m.gguf", fields=missing, tensors=llama_tensors(LLAMA)))
