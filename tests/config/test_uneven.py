"""Models whose layers keep unlike keys and values, or none of their own: what their configurations say, and what is wrong."""

import pytest

from quire.config.families.gemma import gemma4
from quire.config.families.llama import decilm
from quire.config.layer_patterns import key_owners, staging_problem
from quire.types.errors import ModelError

FULL, SLIDING = "full_attention", "sliding_attention"
DECI = {"num_hidden_layers": 2, "num_attention_heads": 6, "hidden_size": 48}


def test_the_last_layers_attend_to_the_last_before_them_of_their_type():
    types = [SLIDING, FULL, SLIDING, FULL, SLIDING]
    assert key_owners({"layer_types": types, "num_kv_shared_layers": 2}) == [0, 1, 2, 1, 2]
    assert key_owners({"layer_types": types}) == [0, 1, 2, 3, 4]


@pytest.mark.parametrize("shared", [5, -1, "two"])
def test_more_shared_layers_than_there_are(shared):
    with pytest.raises(ModelError, match="num_kv_shared_layers must be less than the 5 layers"):
        key_owners({"layer_types": [FULL] * 5, "num_kv_shared_layers": shared})


def test_nobody_to_attend_to():
    with pytest.raises(ModelError, match="a layer of 'full_attention' shares the KV cache of an earlier one"):
        key_owners({"layer_types": [SLIDING, FULL], "num_kv_shared_layers": 1})


def test_gemma4_in_older_and_newer_words():
    older = {"num_hidden_layers": 7, "head_dim": 8, "global_head_dim": 16, "num_key_value_heads": 4}
    found = gemma4(older)
    assert found["layer_types"] == [*[SLIDING] * 5, FULL, FULL]  # the last sees everything in any case
    assert found["layer_shapes"] == [*[(4, 8)] * 5, (4, 16), (4, 16)]
    assert gemma4({**older, "num_global_key_value_heads": 1, "attention_k_eq_v": True})["layer_shapes"][6] == (1, 16)
    newer = gemma4({**older, "per_layer_config": {"05": {"head_dim": 32}, "6": {"num_key_value_heads": 2}}})
    assert newer["layer_shapes"] == [*[(4, 8)] * 5, (4, 32), (2, 8)]


def test_key_heads_of_every_layer():
    blocks = [{"attention": {"n_heads_in_group": 3}, "ffn": {}}, {"attention": {"no_op": True}, "ffn": {}}]
    assert decilm({**DECI, "block_configs": blocks}) == {"layer_shapes": [(2, 8), None]}
    assert decilm({**DECI, "num_key_value_heads_per_layer": [3, 1]}) == {"layer_shapes": [(3, 8), (1, 8)]}


@pytest.mark.parametrize(
    ("blocks", "named"),
    [
        ([{"attention": {}, "ffn": {}}], "layer 1 lacks attention"),
        ("two", "layer 0 lacks attention"),
        ([{"attention": {"n_heads_in_group": 4}, "ffn": {}}] * 2, "n_heads_in_group of layer 0 must divide 6 heads, got 4"),
        ([{"attention": {"is_mamba": True}, "ffn": {}}] * 2, "is_mamba of layer 0"),
    ],
)
def test_blocks_that_make_no_sense(blocks, named):
    with pytest.raises(ModelError, match=named):
        decilm({**DECI, "block_configs": blocks})


def test_what_is_not_divided_into_stages():
    assert staging_problem({"hidden_size": 8}) == ""
    assert "num_kv_shared_layers" in staging_problem({"num_kv_shared_layers": 2})
    assert "block_configs" in staging_problem({"layer_shapes": [(1, 8), None]})
