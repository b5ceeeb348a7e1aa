"""Rotation tables against transformers' own, for every scaling scheme and both ways of writing it."""

import pytest
import torch

from oracle import TINY
from quire.layers.rope import Rope, rope_parameters
from quire.types.errors import ModelError

LONG = {"short_factor": [1.0 + i / 10 for i in range(8)], "long_factor": [2.0 + i for i in range(8)]}
LLAMA3 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 32}
SCALINGS = {
    "default": {"rope_type": "default"},
    "linear": {"rope_type": "linear", "factor": 4.0},
    "dynamic": {"rope_type": "dynamic", "factor": 2.0},
    "llama3": {"rope_type": "llama3"} | LLAMA3,
    "yarn": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32},
    "yarn-betas": {"rope_type": "yarn", "factor": 8.0, "beta_fast": 16, "beta_slow": 2, "original_max_position_embeddings": 64},
    "yarn-magnitudes": {
        "rope_type": "yarn", "factor": 8.0, "mscale": 0.7, "mscale_all_dim": 1.2, "original_max_position_embeddings": 64,
    },
    "yarn-untruncated": {
        "rope_type": "yarn", "factor": 8.0, "truncate": False, "attention_factor": 1.3, "original_max_position_embeddings": 64,
    },
}  # fmt: skip


def tables(hf, head_dim, length, layer_type=None):
    rope = Rope(head_dim, length, hf, rope_parameters(hf, layer_type))
    rope.finish(torch.device("cpu"))
    return rope.table.cos, rope.table.sin


def theirs(config, rotary, length):
    module = rotary(config)
    cos, sin = module(torch.zeros(1, dtype=torch.float32), torch.arange(length).unsqueeze(0))
    half = cos.shape[-1] // 2
    return cos[0, :, :half], sin[0, :, :half]


@pytest.mark.parametrize("length", [128, 256, 300])
@pytest.mark.parametrize("scaling", SCALINGS)
def test_llama_schemes(scaling, length):
    """transformers' dynamic base grows with the text, from the trained length on; ours is that of the stretched length."""
    if scaling == "dynamic" and length != 256:
        pytest.skip("transformers has another base for a text of this length")
    from transformers.models.llama.modeling_llama import LlamaConfig, LlamaRotaryEmbedding

    parameters = {"rope_theta": 5000.0} | SCALINGS[scaling]
    config = LlamaConfig(**TINY | {"head_dim": 16, "rope_parameters": parameters})
    expected = theirs(config, LlamaRotaryEmbedding, length)
    new_style = {"max_position_embeddings": 128, "rope_parameters": parameters}
    old_style = {"max_position_embeddings": 128, "rope_theta": 5000.0, "rope_scaling": SCALINGS[scaling]}
    for hf in (new_style, old_style):
        torch.testing.assert_close(tables(hf, 16, length), expected, atol=2e-5, rtol=1e-5)


@pytest.mark.parametrize(("original", "trained", "length"), [(32, 128, 128), (64, 64, 64), (64, 128, 64), (64, 128, 65)])
@pytest.mark.parametrize("partial", [1.0, 0.5])
def test_longrope_takes_its_factors_from_the_longest_context(original, trained, length, partial):
    from transformers.models.phi3.modeling_phi3 import Phi3Config, Phi3RotaryEmbedding

    factors = {name: values[: int(8 * partial)] for name, values in LONG.items()}
    settings = {
        "max_position_embeddings": trained,
        "original_max_position_embeddings": original,
        "rope_parameters": {"rope_type": "longrope", "rope_theta": 10000.0, "partial_rotary_factor": partial} | factors,
    }
    config = Phi3Config(**TINY | {"hidden_size": 96} | settings)
    torch.testing.assert_close(tables(settings, 16, length), theirs(config, Phi3RotaryEmbedding, length), atol=2e-5, rtol=1e-5)


def test_settings_per_layer_type():
    full = {"rope_theta": 1e6, "rope_type": "linear", "factor": 8.0}
    local = {"rope_theta": 1e4, "rope_type": "default"}
    hf = {"rope_parameters": {"full_attention": full, "sliding_attention": local}}
    assert rope_parameters(hf, "full_attention")["factor"] == 8.0
    assert rope_parameters(hf, "sliding_attention")["rope_type"] == "default"
    assert torch.equal(tables(hf, 16, 50, "full_attention")[0], tables({"rope_parameters": full}, 16, 50)[0])
    assert torch.equal(tables(hf, 16, 50, "sliding_attention")[0], tables({"rope_parameters": local}, 16, 50)[0])


def test_what_is_wrong_with_a_rope_configuration_is_said():
    with pytest.raises(ModelError, match=r"unknown rope type 'spiral'.*yarn"):
        tables({"rope_scaling": {"type": "spiral"}}, 16, 8)
    with pytest.raises(ModelError, match="lack 'factor'"):
        tables({"rope_scaling": {"type": "linear"}}, 16, 8)
    with pytest.raises(ModelError, match="8 factors"):
        tables({"rope_scaling": {"type": "su", "short_factor": [1.0], "long_factor": [1.0]}}, 16, 8)
