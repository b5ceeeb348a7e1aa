"""Families that transformers runs without a cache of keys and values (see oracle.py): every step computes whole sequences."""

from typing import Any

from family import Family

PLAIN: dict[str, Any] = {"num_key_value_heads": None, "intermediate_size": None}

RECOMPUTED: dict[str, Family] = {
    # an attention of its own, half of it through windows
    "gpt-neo": Family(
        "GPTNeoConfig",
        "GPTNeoForCausalLM",
        {**PLAIN, "num_hidden_layers": None, "num_layers": 2, "num_heads": 6, "window_size": 8,
         "attention_types": [[["global", "local"], 1]]},
    ),
    # a recurrent state beside attention
    "recurrent-gemma": Family(
        "RecurrentGemmaConfig",
        "RecurrentGemmaForCausalLM",
        {"lru_width": 48, "attention_window_size": 8, "w_init_variance_scale": 0.2},
    ),
    # positions that it counts itself
    "xglm": Family(
        "XGLMConfig",
        "XGLMForCausalLM",
        {**PLAIN, "hidden_size": None, "num_hidden_layers": None, "num_attention_heads": None, "initializer_range": None,
         "d_model": 48, "num_layers": 2, "attention_heads": 6, "ffn_dim": 80, "init_std": 0.2},
    ),
    # and that do not begin at 0
    "roberta": Family("RobertaConfig", "RobertaForCausalLM", {"num_key_value_heads": None, "is_decoder": True}),
}  # fmt: skip
