"""Values that would build a model whose every answer is an error: refused when the configuration is read."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from gguf_files import LLAMA, llama_tensors, write_gguf
from quire.config.facts import ModelFacts, read_facts
from quire.config.sanity_checks import invalid_fields
from quire.files.resolve import resolve_model
from quire.layers.mlp import GatedMLP
from quire.layers.moe import MoE, RoutedMoE
from quire.layers.rope import Rope, rope_parameters
from quire.types.errors import ModelError

CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 32, "intermediate_size": 48,
    "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 48, "max_position_embeddings": 64,
}  # fmt: skip
NAN = float("nan")
ROTATION = "in the rope parameters of the model's config"
POSITIVE = "must be a positive number"
MANY = 2**31 - 1  # a list of so many would take memory before anybody says no
LAYERS = "num_hidden_layers in the model's config must be at most 4,096, got 2147483647"


def facts_of(directory: Path, **changes: Any) -> ModelFacts:
    (directory / "config.json").write_text(json.dumps(CONFIG | changes))
    return read_facts(resolve_model(str(directory), weights=False))


def rope(kind: str, **settings: Any) -> dict[str, Any]:
    return {"rope_parameters": {"rope_type": kind, "rope_theta": 1e4, **settings}}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        *(({"rope_theta": value}, f"rope_theta {ROTATION} {POSITIVE}") for value in (0, -1, NAN, "x", True, 10**400)),
        (rope("default", rope_theta=0), f"rope_theta {ROTATION} {POSITIVE}, got 0"),
        ({"rope_parameters": {"full_attention": {"rope_theta": -1}}}, f"rope_theta {ROTATION} {POSITIVE}, got -1"),
        ({"partial_rotary_factor": 2}, f"partial_rotary_factor {ROTATION} must be a share of a head: .*, got 2"),
        *((rope(kind, factor=0), f"factor {ROTATION} {POSITIVE}, got 0") for kind in ("yarn", "linear", "dynamic", "llama3")),
        *((rope("linear", factor=value), f"factor {ROTATION} {POSITIVE}") for value in (-1, NAN, "x", [2])),
        (rope("yarn", factor=1e30), "factor .* must be one that stretches 64 positions to 1 at least, 1,073,741,824 at most"),
        (rope("linear", factor=1e-9), "factor .* must be one that stretches 64 positions to 1 at least"),
        (rope("yarn", factor=2, original_max_position_embeddings=0), "original_max_position_embeddings .* positive integer"),
        (rope("longrope", long_factor=[0], short_factor=[1]), "long_factor .* a list of positive numbers"),
        (rope("yarn", beta_fast="x"), "beta_fast .* a number of at least 0, got 'x'"),
        ({"rope_parameters": {"rope_type": ["yarn"]}}, "rope_type .* must be a name"),
        ({"rms_norm_eps": -1}, "rms_norm_eps in the model's config must be a number of at least 0 and below 1, got -1"),
        ({"rms_norm_eps": NAN}, "rms_norm_eps .* got nan"),
        ({"intermediate_size": "x"}, "intermediate_size in the model's config must be a positive integer, .*, got 'x'"),
        ({"intermediate_size": True}, "intermediate_size .* got True"),
        ({"tie_word_embeddings": "x"}, "tie_word_embeddings in the model's config must be true or false, got 'x'"),
        ({"final_logit_softcapping": 0}, f"final_logit_softcapping .* {POSITIVE}, got 0"),
        ({"topk_group": 1.5}, "topk_group .* an integer of at least 0"),
        (
            {"model_type": "longcat_flash", "zero_expert_num": MANY},
            "zero_expert_num .* an integer of at least 0, 65,536 at most",
        ),
        *(
            ({"model_type": kind, "num_hidden_layers": MANY, "sliding_window_pattern": "LG"}, LAYERS)
            for kind in (
                "exaone_moe",
                "cwm",
                "llama4_text",
                "kimi_linear",
                "gemma3n_text",
                "gemma4_text",
                "mimo_v2_flash",
                "deci",
            )
        ),
        ({"num_nextn_predict_layers": MANY}, "num_nextn_predict_layers .* an integer of at least 0, 65,536 at most"),
        *(({"model_type": kind, "num_hidden_layers": MANY}, LAYERS) for kind in ("mamba", "jamba", "lfm2", "llama")),
    ],
)
def test_configurations(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelError, match=message):
        facts_of(tmp_path, **changes)


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        (
            "rope.dimension_count",
            65288,
            r"\(in the file: rope.dimension_count, as a share of attention.key_length\) must be .* 1 at",
        ),
        ("rope.dimension_count", "x", "rope.dimension_count must be a number, got 'x'"),
        ("rope.freq_base", 0.0, r"rope_theta \(in the file: rope.freq_base\) must be a positive number, got 0"),
        ("rope.freq_base", NAN, "rope.freq_base.* got nan"),
        ("feed_forward_length", 1.5, r"intermediate_size \(in the file: feed_forward_length\) must be a positive integer"),
        ("attention.head_count", 65288, "rope.dimension_count, as a share"),
        ("attention.layer_norm_rms_epsilon", -1.0, r"rms_norm_eps \(in the file: attention.layer_norm_rms_epsilon\)"),
        ("expert_count", "x", "llama.expert_count must be a positive integer, got .x."),
    ],
)
def test_gguf_files(tmp_path: Path, field: str, value: Any, message: str) -> None:
    path = write_gguf(tmp_path / "m.gguf", fields={**LLAMA, field: value}, tensors=llama_tensors(LLAMA))
    with pytest.raises(ModelError, match=message):
        read_facts(resolve_model(str(path)))


@pytest.mark.parametrize(
    ("architecture", "changes", "message"),
    [
        *(
            (
                name,
                {"block_count": MANY, "attention.sliding_window": 8},
                f"{name}.block_count must be at most 4,096",
            )
            for name in ("gpt-oss", "exaone4", "olmo2", "llama", "gpt2", "mamba", "jamba")
        ),
        ("llama", {"nextn_predict_layers": -float(MANY)}, "llama.block_count must be at most 4,096"),
        ("jamba", {"rope.dimension_count": "x"}, "jamba.rope.dimension_count must be a number, got 'x'"),
        ("gpt-oss", {"attention.value_length": "x"}, "gpt-oss.attention.value_length must be a number, got 'x'"),
        ("mamba", {"context_length": "x"}, "mamba.context_length must be a number, got 'x'"),
        ("gpt-oss", {"attention.sliding_window_pattern": "x"}, "sliding_window_pattern must be an integer, or a list"),
        ("glm4moe", {"expert_weights_norm": "x"}, "expert_weights_norm must be true or false, got 'x'"),
    ],
)
def test_gguf_metadata_of_other_architectures(tmp_path: Path, architecture: str, changes: dict[str, Any], message: str) -> None:
    state = dict.fromkeys(("ssm.conv_kernel", "ssm.inner_size", "ssm.state_size", "ssm.time_step_rank"), 8)
    path = write_gguf(
        tmp_path / "m.gguf", architecture=architecture, fields={**LLAMA, **state, **changes}, tensors=llama_tensors(LLAMA)
    )
    with pytest.raises(ModelError, match=message):
        read_facts(resolve_model(str(path)))


def test_frequencies_of_more_components_than_there_are(tmp_path: Path) -> None:
    tensors = {**llama_tensors(LLAMA), "rope_freqs.weight": np.full(4, 8, np.float32)}
    path = write_gguf(tmp_path / "m.gguf", fields={**LLAMA, "rope.dimension_count": MANY}, tensors=tensors)
    with pytest.raises(ModelError, match=r"is not the rope scaling of Llama 3\.1"):
        read_facts(resolve_model(str(path)))


def test_what_checkpoints_say_is_plausible(tmp_path: Path) -> None:
    facts_of(tmp_path, tie_word_embeddings=None, rope_theta=None, partial_rotary_factor=0.5, intermediate_size=[48, 32])
    hunyuan = {"alpha": 1000.0, "factor": 1.0, "mscale": 1.0, "mscale_all_dim": 0.0, "beta_fast": 32, "rope_type": "dynamic"}
    granite = {"num_local_experts": 0, "num_experts_per_tok": 0, "logits_scaling": 8, "attn_logit_softcapping": None}
    assert not list(invalid_fields({"rope_parameters": hunyuan, "logit_scale": "inv_sqrt_d_model", **granite}))


@pytest.mark.parametrize("share", [0.01, 0.4])
def test_components_turn_in_pairs(share: float) -> None:
    with pytest.raises(ModelError, match="must be an even number of at most 8"):
        Rope(8, 64, {}, rope_parameters({"partial_rotary_factor": share}))


def test_frequencies_that_are_none() -> None:
    with pytest.raises(ModelError, match="give values that are not finite"):
        Rope(8, 64, {}, rope_parameters({"rope_theta": 1e-300}))


def test_weights_of_experts_times_nothing() -> None:
    for field, name in (("scale", "routed_scaling_factor"), ("tolerance", "router_jitter_noise")):
        with pytest.raises(ModelError, match=f"{name} must be a number; got None"):
            RoutedMoE(8, 8, "silu", experts=4, top_k=2, renormalize=True, **{field: None})  # type: ignore[arg-type]


def test_experts_that_are_not_there() -> None:
    with pytest.raises(ModelError, match="num_experts_per_tok must be between 1 and the 4 experts of a layer; got 5"):
        MoE(8, 8, "silu", experts=4, top_k=5, renormalize=True)


def test_a_width_of_nothing() -> None:
    with pytest.raises(ModelError, match="intermediate_size must be a positive integer; got None"):
        GatedMLP(8, None, "silu")  # type: ignore[arg-type]
