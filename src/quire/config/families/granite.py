"""Granite, whose embeddings, residuals, attention and logits are scaled, and the families that scale them as well."""

from typing import Any

from quire.config.families.card import BIASES, GGUF, ROPE, SILU, Card, Config
from quire.config.gguf_values import (
    MAMBA_BIASES,
    SOME_ATTEND,
    SSM_REQUIRED,
    SSM_SIZES,
    attending_layers,
    experts_of,
    has_tensor,
    mamba2_fields,
    number,
)
from quire.config.layer_patterns import Layers, kinds_of, mamba2_state
from quire.files.gguf import GGUFHeader
from quire.types.errors import ModelError

NO_POSITIONS_LENGTH = 1 << 20  # what llama.cpp's converter writes for models without positions
GRANITE4_LENGTH = 1 << 17  # in the config.json of Granite 4
_SHARED = tuple(f"mlp.shared_expert.{part}_proj" for part in ("gate", "up", "down"))


def _finish_granite(header: GGUFHeader, config: dict[str, Any]) -> None:
    """Read the multipliers. MiniCPM has the same but for the attention's."""
    if header.get("rope.scaling.finetuned") is False and config["model_type"] != "granitemoehybrid":
        raise ModelError(f"{header.path}: a {header.architecture} without positions (rope.scaling.finetuned) is not supported")
    config["embedding_multiplier"] = number(header, "embedding_scale", 1.0) or 1.0
    config["residual_multiplier"] = number(header, "residual_scale", 1.0) or 1.0
    config["logits_scaling"] = number(header, "logit_scale", 1.0) or 1.0
    config["attention_multiplier"] = number(header, "attention.scale", 0.0) or config["head_dim"] ** -0.5


def _finish_moe(header: GGUFHeader, config: dict[str, Any]) -> None:
    _finish_granite(header, config)
    config["num_local_experts"] = experts_of(header)
    shared = has_tensor(header, "ffn_up_shexp.weight")
    config["shared_intermediate_size"] = header.get("expert_shared_feed_forward_length") if shared else None


def _finish_hybrid(header: GGUFHeader, config: dict[str, Any]) -> None:
    """Also Bamba, whose multipliers are all 1, and which has positions."""
    config["layer_types"] = ["attention" if yes else "mamba" for yes in attending_layers(header, config)]
    mamba2_fields(header, config, "mamba_n_heads", "mamba_d_head", "mamba_n_groups")
    _finish_granite(header, config)
    positions = header.get("rope.scaling.finetuned", True)
    config["position_embedding_type"] = "rope" if positions else "nope"
    if not positions and config["max_position_embeddings"] == NO_POSITIONS_LENGTH:
        config["max_position_embeddings"] = GRANITE4_LENGTH
    experts = config["num_local_experts"] = experts_of(header) if has_tensor(header, "ffn_gate_inp.weight") else 0
    shared = "expert_shared_feed_forward_length" if experts else "feed_forward_length"
    config["shared_intermediate_size"] = header.get(shared)


def granite_multipliers(config: Config) -> Config:
    """Translate MiniCPM's scales to Granite's multipliers."""
    scale = {"embedding_multiplier": config.get("scale_emb", 1.0)}
    depth, layers, width, base = (config.get(n) for n in ("scale_depth", "num_hidden_layers", "hidden_size", "dim_model_base"))
    if isinstance(depth, int | float) and isinstance(layers, int) and layers > 0:
        scale["residual_multiplier"] = depth / layers**0.5
    if isinstance(width, int) and isinstance(base, int) and base > 0:
        scale["logits_scaling"] = width / base
    heads = config.get("num_attention_heads")
    if isinstance(width, int) and isinstance(heads, int) and width >= heads > 0:
        scale["attention_multiplier"] = (width // heads) ** -0.5
    return scale


def _hybrid_layers(config: Config) -> Layers:
    types = config.get("layer_types") or config.get("layers_block_type") or ()
    at = {index for index, kind in enumerate(types) if kind in ("attention", "full_attention")}
    return Layers(kinds_of(config, lambda index: index in at), mamba2_state(config))


CARDS = (
    Card(
        "Granite 3", "dense", "granite:Granite", ("GraniteForCausalLM",), {"granite": ROPE},
        gguf=(
            GGUF("granite", SILU, finish=_finish_granite, flags=BIASES, rotary_pairs=True),
            GGUF("minicpm", SILU, finish=_finish_granite, flags=BIASES, rotary_pairs=True),
        ),
    ),
    Card(
        "Granite 3", "MoE", "granite:GraniteMoE", ("GraniteMoeForCausalLM",), {"granitemoe": ROPE},
        gguf=(GGUF("granitemoe", SILU, finish=_finish_moe, flags=BIASES, rotary_pairs=True, names=_SHARED),),
    ),
    Card("Granite 3", "MoE", "granite:GraniteMoE", ("GraniteMoeSharedForCausalLM",), {"granitemoeshared": ROPE}),
    Card(
        "Granite 4", "hybrid, MoE", "hybrids:GraniteHybrid", ("GraniteMoeHybridForCausalLM",),
        {"granitemoehybrid": {**ROPE, "mamba_d_state": 256}}, layers=_hybrid_layers,
        gguf=(
            GGUF(
                "granitehybrid", SILU, SOME_ATTEND | SSM_SIZES, _finish_hybrid, SSM_REQUIRED, BIASES | MAMBA_BIASES,
                names=_SHARED, exact={"ssm_dt.bias": "mamba.dt_bias"}, rotary_pairs=True,
            ),
        ),
    ),
    Card("HyperCLOVA X", "dense", "granite:HyperCLOVAX", ("HyperCLOVAXForCausalLM",), {"hyperclovax": ROPE}),
    Card("MiniCPM", "dense", "granite:MiniCPM", ("MiniCPMForCausalLM",), {"minicpm": {**ROPE, "tie_word_embeddings": True}},
         derive=granite_multipliers),
)  # fmt: skip
