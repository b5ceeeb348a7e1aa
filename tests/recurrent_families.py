"""Families some of whose layers are recurrent (see oracle.py)."""

from typing import Any

from family import Family

MAMBA2: dict[str, Any] = {
    "mamba_n_heads": 6,
    "mamba_d_head": 16,
    "mamba_n_groups": 2,
    "mamba_d_state": 8,
    "mamba_expand": 2,
    "mamba_chunk_size": 8,
}

RECURRENT: dict[str, Family] = {
    "bamba": Family("BambaConfig", "BambaForCausalLM", {**MAMBA2, "attn_layer_indices": [1]}),
    "lfm2": Family(
        "Lfm2Config",
        "Lfm2ForCausalLM",
        {"block_multiple_of": 16, "layer_types": ["conv", "full_attention", "conv"], "conv_bias": True},
    ),
}
