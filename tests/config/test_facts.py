import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from quire.config.facts import ModelFacts, read_facts
from quire.files.resolve import resolve_model
from quire.types.errors import ModelError

BASE: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 64, "intermediate_size": 128,
    "num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 100,
    "max_position_embeddings": 256, "torch_dtype": "bfloat16", "eos_token_id": 2, "bos_token_id": 1,
}  # fmt: skip


def facts_of(directory: Path, overrides: dict[str, Any] | None = None, generation: Any = None, **changes: Any) -> ModelFacts:
    config = {key: value for key, value in {**BASE, **changes}.items() if value is not ...}
    (directory / "config.json").write_text(json.dumps(config))
    if generation is not None:
        (directory / "generation_config.json").write_text(json.dumps(generation))
    return read_facts(resolve_model(str(directory), weights=False), overrides)


def windows(facts: ModelFacts) -> list[int | None]:
    return [layer.window for layer in facts.layers]


def test_plain_llama(tmp_path: Path) -> None:
    facts = facts_of(tmp_path, generation={"eos_token_id": [2, 5], "temperature": 0.6})
    assert (facts.architecture, facts.dtype, facts.vocab_size, facts.hidden_size) == ("LlamaForCausalLM", "bfloat16", 100, 64)
    assert (facts.eos_ids, facts.bos_id, facts.max_position) == ((2, 5), 1, 256)
    assert {(layer.kv_heads, layer.head_dim, layer.window) for layer in facts.layers} == {(2, 16, None)}
    assert facts.generation["temperature"] == 0.6
    assert facts.hf["rope_parameters"] == {"rope_theta": 1e4, "rope_type": "default"}


def test_parameters_are_counted_from_headers_or_estimated(tmp_path: Path) -> None:
    estimated = facts_of(tmp_path, tie_word_embeddings=True)
    per_layer = 64 * 64 * 2 + 64 * 32 * 2 + 3 * 64 * 128
    assert (estimated.weight_bytes, estimated.parameters) == (0, 4 * per_layer + 100 * 64)
    save_file({"a": np.zeros((3, 4), np.float16)}, tmp_path / "model.safetensors")
    counted = read_facts(resolve_model(str(tmp_path)))
    assert (counted.weight_bytes, counted.parameters) == (24, 12)


def test_dtype_comes_from_the_weights_when_the_config_is_silent(tmp_path: Path) -> None:
    save_file({"a": np.zeros((3, 4), np.float16), "b": np.zeros(2, np.float32)}, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps({key: value for key, value in BASE.items() if key != "torch_dtype"}))
    assert read_facts(resolve_model(str(tmp_path))).dtype == "float16"
    assert facts_of(tmp_path, torch_dtype=..., dtype="float32").dtype == "float32"


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"model_type": "mistral", "sliding_window": 32}, [32] * 4),
        ({"model_type": "mistral", "sliding_window": None}, [None] * 4),
        ({"model_type": "mistral"}, [4096] * 4),
        ({"model_type": "mixtral"}, [None] * 4),
        ({"model_type": "phi3", "sliding_window": 32}, [32] * 4),
        ({"model_type": "qwen2", "sliding_window": 32, "use_sliding_window": False}, [None] * 4),
        (
            {"model_type": "qwen2", "sliding_window": 32, "use_sliding_window": True, "max_window_layers": 3},
            [None, None, None, 32],
        ),
        ({"model_type": "qwen2", "sliding_window": 32}, [None] * 4),
        ({"model_type": "qwen3_moe", "sliding_window": 32, "use_sliding_window": True}, [32] * 4),
        ({"model_type": "gemma2", "sliding_window": 32}, [32, None, 32, None]),
        ({"model_type": "gemma3_text", "sliding_window": 32, "sliding_window_pattern": 3}, [32, 32, None, 32]),
        ({"model_type": "gemma3_text", "sliding_window": 32, "_sliding_window_pattern": 2}, [32, None, 32, None]),
        (
            {
                "sliding_window": 8,
                "layer_types": ["sliding_attention", "full_attention", "full_attention", "sliding_attention"],
            },
            [8, None, None, 8],
        ),
    ],
)
def test_windows(tmp_path: Path, changes: dict[str, Any], expected: list[int | None]) -> None:
    assert windows(facts_of(tmp_path, **changes)) == expected


def test_names_of_older_families(tmp_path: Path) -> None:
    gpt2 = {"architectures": ["GPT2LMHeadModel"], "model_type": "gpt2", "n_layer": 2, "n_head": 4, "n_embd": 32,
            "n_positions": 64, "vocab_size": 50}  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(gpt2))
    facts = read_facts(resolve_model(str(tmp_path), weights=False))
    assert (facts.hidden_size, facts.max_position, len(facts.layers), facts.eos_ids) == (32, 64, 2, ())
    assert (facts.layers[0].kv_heads, facts.layers[0].head_dim, facts.dtype) == (4, 8, "float32")
    assert "rope_parameters" not in facts.hf


@pytest.mark.parametrize(
    ("rope", "length"),
    [
        ({"rope_type": "llama3", "factor": 8.0, "original_max_position_embeddings": 64}, 256),
        ({"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 256}, 1024),
        ({"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}, 256),
        ({"type": "linear", "factor": 2.0}, 512),
        ({"type": "dynamic", "factor": 2.0}, 512),
        ({"type": "su", "long_factor": [1.0], "short_factor": [1.0]}, 256),
    ],
)
def test_length_with_stretched_rope(tmp_path: Path, rope: dict[str, Any], length: int) -> None:
    facts = facts_of(tmp_path, rope_scaling=rope, rope_theta=5e5)
    assert facts.max_position == length
    assert facts.hf["rope_parameters"]["rope_theta"] == 5e5
    assert facts.hf["rope_parameters"]["rope_type"] == {"su": "longrope"}.get(
        rope.get("type", ""), rope.get("type") or "llama3"
    )


def test_gemma3_has_two_ropes(tmp_path: Path) -> None:
    facts = facts_of(tmp_path, model_type="gemma3_text", rope_scaling={"rope_type": "linear", "factor": 8.0})
    assert facts.hf["rope_parameters"] == {
        "full_attention": {"rope_theta": 1e6, "rope_type": "linear", "factor": 8.0},
        "sliding_attention": {"rope_theta": 1e4, "rope_type": "default"},
    }
    assert facts.max_position == 256
    assert facts.layers[0].head_dim == 256


LOCAL = {"rope_type": "default", "rope_theta": 1e4}


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"rope_scaling": None}, {"rope_type": "default", "rope_theta": 1e4}),
        ({"rope_theta": None, "rope_scaling": None, "rope_parameters": None}, {"rope_type": "default", "rope_theta": 1e4}),
        ({"rope_parameters": None, "rope_theta": 5.0}, {"rope_type": "default", "rope_theta": 5.0}),
        (
            {"rope_parameters": None, "rope_theta": 5.0, "rope_scaling": {"type": "linear", "factor": 2.0}},
            {"rope_type": "linear", "rope_theta": 5.0, "factor": 2.0},
        ),
        (
            {"rope_parameters": {"rope_type": "default", "rope_theta": 5.0, "factor": None}},
            {"rope_type": "default", "rope_theta": 5.0},
        ),
        ({"rope_scaling": {"type": "mrope", "mrope_section": [1]}, "rope_theta": 5.0}, {"rope_type": "default"}),
        ({"model_type": "gemma3_text", "rope_parameters": None}, {"sliding_attention": LOCAL}),
        (
            {"model_type": "gemma3_text", "rope_parameters": {"full_attention": None, "sliding_attention": None}},
            {"full_attention": {"rope_type": "default", "rope_theta": 1e6}, "sliding_attention": LOCAL},
        ),
        (
            {"model_type": "gemma3_text", "rope_parameters": {"full_attention": {"rope_theta": 5.0, "factor": None}}},
            {"full_attention": {"rope_type": "default", "rope_theta": 5.0}, "sliding_attention": LOCAL},
        ),
    ],
)
def test_null_is_silence_about_rope(tmp_path: Path, changes: dict[str, Any], expected: dict[str, Any]) -> None:
    rope = facts_of(tmp_path, **changes).hf["rope_parameters"]
    assert rope | expected == rope
    assert None not in rope.values()


def test_numbers_that_json_does_not_have(tmp_path: Path) -> None:
    limits = [{"__float__": "Infinity"}, {"__float__": "-Infinity"}, {"__float__": "other"}, {"__float__": "NaN"}]
    hf = facts_of(tmp_path, limits=limits, nested={"__float__": "Infinity", "more": 1}).hf
    assert hf["limits"][:3] == [float("inf"), float("-inf"), {"__float__": "other"}]
    assert hf["limits"][3] != hf["limits"][3]
    assert hf["nested"] == {"__float__": "Infinity", "more": 1}


def test_overrides(tmp_path: Path) -> None:
    facts = facts_of(
        tmp_path,
        {"rope_theta": 7.0, "max_position_embeddings": 99},
        rope_parameters={"rope_type": "default", "rope_theta": 5.0},
    )
    assert (facts.hf["rope_parameters"]["rope_theta"], facts.max_position) == (7.0, 99)
    facts = facts_of(
        tmp_path, {"rope_parameters": {"rope_theta": 9.0}}, rope_parameters={"rope_type": "default", "rope_theta": 5.0}
    )
    assert facts.hf["rope_parameters"] == {"rope_type": "default", "rope_theta": 9.0}
    scaled = facts_of(
        tmp_path,
        {"rope_scaling": {"rope_type": "yarn", "factor": 2.0}},
        rope_parameters={"rope_type": "default", "rope_theta": 5.0},
    )
    assert scaled.hf["rope_parameters"]["rope_type"] == "yarn"
    assert scaled.hf["rope_parameters"]["rope_theta"] == 5.0
    assert scaled.max_position == 512


def test_text_part_of_a_larger_model(tmp_path: Path) -> None:
    outer = {"architectures": ["Gemma3ForConditionalGeneration"], "model_type": "gemma3", "eos_token_id": [1, 106],
             "text_config": {"model_type": "gemma3_text", "hidden_size": 64, "num_hidden_layers": 6}}  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(outer))
    facts = read_facts(resolve_model(str(tmp_path), weights=False))
    assert (facts.architecture, facts.vocab_size, facts.eos_ids) == ("Gemma3ForConditionalGeneration", 262208, (1, 106))
    assert windows(facts) == [4096] * 5 + [None]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"architectures": ..., "model_type": "unheard_of"}, "lacks 'architectures'"),
        ({"architectures": [], "model_type": ...}, r"architectures .* must be a list"),
        ({"num_hidden_layers": ...}, "lacks 'num_hidden_layers'"),
        ({"num_hidden_layers": "four"}, "num_hidden_layers .* positive integer, got 'four'"),
        ({"num_hidden_layers": 10**12}, "must be at most 4,096"),
        ({"num_key_value_heads": 3}, "divisor of num_attention_heads"),
        ({"vocab_size": -1}, "vocab_size .* positive integer, got -1"),
        ({"hidden_size": True}, "hidden_size .* positive integer"),
        ({"eos_token_id": "</s>"}, "eos_token_id .* token id"),
        ({"torch_dtype": "float8"}, "dtype"),
        ({"layer_types": ["full_attention"]}, "a list of 4 layer types"),
        ({"layer_types": ["mamba"] * 4}, "layers of type 'mamba' are not supported"),
        ({"layer_types": ["sliding_attention"] * 4}, "sliding_window"),
        (
            {"quantization_config": {"quant_method": "hqq"}},
            r"quantized \(hqq\), which is not supported; these methods are: awq",
        ),
        ({"is_encoder_decoder": True}, "encoder-decoder"),
        ({"kv_lora_rank": 4}, "lacks 'qk_rope_head_dim'"),
        ({"kv_lora_rank": 4, "qk_rope_head_dim": 4, "index_topk": 8}, "sparse attention by an indexer"),
        ({"rope_scaling": "yes"}, "rope_scaling must be an object"),
        ({"rope_parameters": [1]}, "rope_parameters must be an object"),
        ({"num_attention_heads": ...}, "none of num_attention_heads, n_head, n_heads"),
    ],
)
def test_wrong_configs_are_told(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelError, match=message):
        facts_of(tmp_path, **changes)


@pytest.mark.parametrize("text", ["", "[]", "{", "\xff"])
def test_broken_json(tmp_path: Path, text: str) -> None:
    (tmp_path / "config.json").write_bytes(text.encode("latin-1"))
    with pytest.raises(ModelError, match=r"config\.json"):
        read_facts(resolve_model(str(tmp_path), weights=False))
