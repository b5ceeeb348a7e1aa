"""What is known of a model family without importing torch: one `Card` per model class."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from quire.config.layer_patterns import Layers
from quire.files.gguf import GGUFHeader

Config = Mapping[str, Any]
Renames = tuple[tuple[str, str | None], ...]

FIELDS = {
    "block_count": "num_hidden_layers",
    "context_length": "max_position_embeddings",
    "embedding_length": "hidden_size",
    "feed_forward_length": "intermediate_size",
    "attention.head_count": "num_attention_heads",
    "attention.head_count_kv": "num_key_value_heads",
    "attention.key_length": "head_dim",
    "attention.layer_norm_rms_epsilon": "rms_norm_eps",
    "attention.sliding_window": "sliding_window",
    "attn_logit_softcapping": "attn_logit_softcapping",
    "final_logit_softcapping": "final_logit_softcapping",
    "expert_used_count": "num_experts_per_tok",
    "expert_feed_forward_length": "moe_intermediate_size",
}
REQUIRED = ("block_count", "context_length", "embedding_length", "attention.head_count")
ROPE = {"rope_theta": 1e4}
SILU = {"hidden_act": "silu"}
BIASES = {"attention_bias": "attn_q.bias", "mlp_bias": "ffn_up.bias"}  # GGUF.flags


@dataclass(frozen=True)
class GGUF:
    """How GGUF files describe a model, and what their conversion did to its tensors."""

    name: str  # `general.architecture`
    fixed: Mapping[str, Any] = field(default_factory=dict)  # config fields that files do not record
    fields: Mapping[str, str] = field(default_factory=lambda: FIELDS)  # metadata key -> config field
    finish: Callable[[GGUFHeader, dict[str, Any]], None] | None = None  # completes the config
    required: tuple[str, ...] = REQUIRED  # metadata keys that must be positive integers
    flags: Mapping[str, str] = field(default_factory=dict)  # config field -> tensor; true if a layer has the tensor
    when: Callable[[GGUFHeader], bool] | None = None  # which files of this architecture are meant; None: all others
    layers: str = "model.layers"  # path of the layers in Hugging Face names
    root: str | None = None  # what other Hugging Face names begin with; None: the first part of `layers`, and a dot
    # Hugging Face module names, where the `gguf` package knows several for a tensor and the usual one is not meant
    names: tuple[str, ...] = ()
    exact: Mapping[str, str] = field(default_factory=dict)  # tensors of a layer that the package does not know
    rotary_pairs: bool = False  # q and k rows were reordered: the two components of a rotary pair are neighbours
    norm_plus_one: bool = False  # norm weights were stored with 1 added
    by_key_head: bool = False  # fused q, k, v are stored one after the other; Hugging Face groups them by key head
    transposed: frozenset[str] = frozenset()  # matrices that Hugging Face stores [in, out]


@dataclass(frozen=True)
class Card:
    """A model family: its names, its configuration, its files, and the class that runs it."""

    title: str  # what people call it; cards with one title share a row of docs/models.md
    kind: str  # dense, MoE, MLA, hybrid, recurrent or encoder; several are separated by ", "
    model: str  # "module:Class" below quire.models, or of another package
    architectures: tuple[str, ...]  # class names in config.json
    types: Mapping[str, Config]  # model_type -> fields that its config.json may leave out
    names: Mapping[str, str] = field(default_factory=dict)  # own field name -> common field name
    derive: Callable[[Config], Config] | None = None  # common fields that follow from others
    first_layers_full: bool = False  # of layers with a sliding window, the first `max_window_layers` have none
    chunked_attention: bool = False  # layers of type chunked_attention see the chunk that their token is in
    overflows_in_float16: bool = False
    layers: Callable[[Config], Layers] | None = None  # which layers are recurrent, and their state
    weights: Renames = ()  # (pattern, replacement) applied to checkpoint names before the model's own
    gguf: tuple[GGUF, ...] = ()
    text: tuple[str, ...] = ()  # model types that a multimodal checkpoint may have as its text model
    sizes: Config = field(default_factory=dict)  # what a nested text config of the first type may leave out

    def common_fields(self, config: Config) -> dict[str, Any]:
        """Return the fields of a config that this family spells in its own way, by their common names."""
        found = {common: config[own] for own, common in self.names.items() if config.get(own) is not None}
        return found if self.derive is None else {**found, **self.derive(config)}
