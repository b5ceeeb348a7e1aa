"""A model family: Llama with norms whose weight is stored as the difference from one, and names of its own.

The card is read in every process, also in those that never import torch: the class is named, not imported.
"""

from quire.config.families.card import Card

CARD = Card(
    "Example",
    "dense",
    "quire_example.model:Example",
    ("ExampleForCausalLM",),
    {"example": {"hidden_act": "silu", "rms_norm_eps": 1e-6, "rope_theta": 1e4}},
    names={"width": "hidden_size", "inner_width": "intermediate_size", "depth": "num_hidden_layers"},
    weights=((r"^example\.", "model."),),
)
