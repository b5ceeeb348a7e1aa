"""Checkpoints that transformers wrote, under the names of architectures whose code is in model repositories."""

import re
from collections.abc import Callable
from typing import Any

import torch

from family import Alias, Tensors

Config = dict[str, Any]


def renamed(*pairs: tuple[str, str]) -> Callable[[Tensors], Tensors]:
    def rename(tensors: Tensors) -> Tensors:
        found = {}
        for name, tensor in tensors.items():
            for pattern, replacement in pairs:
                name = re.sub(pattern, replacement, name)
            found[name] = tensor
        return found

    return rename


def merged(target: str, by_key_head: int = 0) -> Callable[[Tensors], Tensors]:
    """q, k and v become one tensor, one behind the other or for each of so many key heads."""

    def merge(tensors: Tensors) -> Tensors:
        found = {name: tensor for name, tensor in tensors.items() if not re.search(r"\.[qkv]_proj\.", name)}
        for name in tensors:
            if ".q_proj." in name:
                three = [tensors[name.replace(".q_proj.", f".{part}_proj.")] for part in "qkv"]
                if by_key_head:
                    three = [part.unflatten(0, (by_key_head, -1)) for part in three]
                joined = torch.cat(three, dim=1 if by_key_head else 0)
                found[name.replace("q_proj", target)] = (joined.flatten(0, 1) if by_key_head else joined).contiguous()
        return found

    return merge


def chain(*steps: Callable[[Tensors], Tensors]) -> Callable[[Tensors], Tensors]:
    def run(tensors: Tensors) -> Tensors:
        for step in steps:
            tensors = step(tensors)
        return tensors

    return run


def reconfigured(model_type: str, *without: str, **more: Any) -> Callable[[Config], Config]:
    def change(config: Config) -> Config:
        return {name: value for name, value in config.items() if name not in without} | {"model_type": model_type} | more

    return change


def baichuan(architecture: str) -> Alias:
    return Alias(architecture, reconfigured("baichuan", "num_key_value_heads"), merged("W_pack"))


def chatglm(architecture: str) -> Alias:
    def config(given: Config) -> Config:
        common = ("hidden_size", "num_attention_heads", "bos_token_id", "eos_token_id", "pad_token_id", "dtype")
        return {
            **{name: given[name] for name in common},
            "model_type": "chatglm",
            "num_layers": given["num_hidden_layers"],
            "ffn_hidden_size": given["intermediate_size"],
            "kv_channels": given["head_dim"],
            "multi_query_attention": True,
            "multi_query_group_num": given["num_key_value_heads"],
            "padded_vocab_size": given["vocab_size"],
            "seq_length": given["max_position_embeddings"],
            "add_qkv_bias": True,
            "layernorm_epsilon": given["rms_norm_eps"],
            "original_rope": True,
            "tie_word_embeddings": False,
        }

    names = renamed(
        (r"^model\.embed_tokens\.", "transformer.embedding.word_embeddings."),
        (r"^lm_head\.", "transformer.output_layer."),
        (r"^model\.norm\.", "transformer.encoder.final_layernorm."),
        (r"^model\.layers\.", "transformer.encoder.layers."),
        (r"\.self_attn\.o_proj\.", ".self_attention.dense."),
        (r"\.self_attn\.", ".self_attention."),
        (r"\.gate_up_proj\.", ".dense_h_to_4h."),
        (r"\.down_proj\.", ".dense_4h_to_h."),
    )
    return Alias(architecture, config, chain(merged("query_key_value"), names))


def random_routers(model: Any) -> None:
    """Those that begin with zeros."""
    for name, weight in model.named_parameters():
        if name.endswith("router.gate.weight"):
            weight.normal_(0.0, 0.2)


def half_open(model: Any) -> None:
    """The gate of Qwen's shared expert lets half of it through, whatever the token."""
    for name, weight in model.named_parameters():
        if "shared_expert_gate" in name:
            weight.zero_()


def all_open(tensors: Tensors) -> Tensors:
    """Without that gate."""
    kept = {name: tensor for name, tensor in tensors.items() if "shared_expert_gate" not in name}
    return {name: tensor / 2 if "shared_expert.down_proj" in name else tensor for name, tensor in kept.items()}


def settle_blocks(model: Any) -> None:
    """Halves that DeciLM leaves out give nothing, and key heads of a group are alike."""
    config = model.config
    size = config.hidden_size // config.num_attention_heads
    for layer, block in zip(model.model.layers, config.block_configs, strict=True):
        attention, feed = block["attention"], block["ffn"]
        if attention.get("no_op"):
            layer.self_attn.o_proj.weight.zero_()
        elif not attention.get("replace_with_linear"):
            for part in (layer.self_attn.k_proj.weight, layer.self_attn.v_proj.weight):
                heads = part.view(-1, attention["n_heads_in_group"], size, config.hidden_size)
                heads.copy_(heads[:, :1].clone())
        if feed.get("no_op"):
            layer.mlp.down_proj.weight.zero_()
        elif feed.get("intermediate_size"):
            layer.mlp.down_proj.weight[:, feed["intermediate_size"] :] = 0.0


def partial(tensors: Tensors) -> Tensors:
    """Without what DeciLM's blocks have not: keys and values of one head of each group, and what gives nothing."""
    found = {}
    for name, tensor in tensors.items():
        number = re.search(r"layers\.(\d+)\.", name)
        block = BLOCKS[int(number[1])] if number else {"attention": {}, "ffn": {}}
        half = block["attention" if re.search(r"self_attn|input_layernorm", name) else "ffn"]
        if half.get("no_op"):
            continue
        if re.search(r"\.[kv]_proj\.", name):
            tensor = tensor.unflatten(0, (-1, half["n_heads_in_group"], 8))[:, 0].flatten(0, 1)
        if (inner := half.get("intermediate_size")) is not None and "norm" not in name:
            tensor = tensor[:, :inner] if "down_proj" in name else tensor[:inner]
        found[name] = tensor.contiguous()
    return found


BLOCKS: list[dict[str, Any]] = [
    {"attention": {"n_heads_in_group": 3}, "ffn": {"ffn_mult": 2.5}},
    {"attention": {"no_op": True, "n_heads_in_group": None}, "ffn": {"intermediate_size": 100}},
    {"attention": {"n_heads_in_group": 1}, "ffn": {"no_op": True, "ffn_mult": None}},
    {"attention": {"replace_with_linear": True}, "ffn": {"ffn_mult": 2.5}},
    {"attention": {"no_op": True}, "ffn": {"replace_with_linear": True}},
]
BAICHUAN, BAICHUAN_OLDER = baichuan("BaichuanForCausalLM"), baichuan("BaiChuanForCausalLM")
BAICHUAN_13B = Alias(
    "BaichuanForCausalLM",
    reconfigured("baichuan", *("num_key_value_heads", "max_position_embeddings", "rope_parameters"), model_max_length=128),
    merged("W_pack"),
)
CHATGLM, CHATGLM_OLDER = chatglm("ChatGLMForConditionalGeneration"), chatglm("ChatGLMModel")
DECILM = Alias(
    "DeciLMForCausalLM", reconfigured("nemotron-nas", "num_key_value_heads", "intermediate_size", "head_dim"), partial
)
DEEPSEEK = Alias(
    "DeepseekForCausalLM",
    lambda config: reconfigured(
        "deepseek",
        *("num_experts", "shared_expert_intermediate_size", "mlp_only_layers", "qkv_bias", "layer_types"),
        *("sliding_window", "use_sliding_window", "max_window_layers", "decoder_sparse_step"),
        n_routed_experts=config["num_experts"],
        n_shared_experts=config["shared_expert_intermediate_size"] // config["moe_intermediate_size"],
        first_k_dense_replace=len(config["mlp_only_layers"]),
    )(config),
    chain(all_open, renamed((r"\.shared_expert\.", ".shared_experts."))),
)
EXAONE = Alias(
    "ExaoneForCausalLM",
    lambda config: reconfigured(
        "exaone",
        *("num_hidden_layers", "hidden_act", "rms_norm_eps", "head_dim"),
        num_layers=config["num_hidden_layers"],
        activation_function="silu",
        layer_norm_epsilon=config["rms_norm_eps"],
    )(config),
    renamed(
        (r"^model\.embed_tokens\.", "transformer.wte."),
        (r"^model\.norm\.", "transformer.ln_f."),
        (r"^model\.layers\.", "transformer.h."),
        (r"\.input_layernorm\.", ".ln_1."),
        (r"\.post_attention_layernorm\.", ".ln_2."),
        (r"\.self_attn\.o_proj\.", ".attn.attention.out_proj."),
        (r"\.self_attn\.", ".attn.attention."),
        (r"\.gate_proj\.", ".c_fc_0."),
        (r"\.up_proj\.", ".c_fc_1."),
        (r"\.down_proj\.", ".c_proj."),
    ),
)
AQUILA, AQUILA_OLDER = (Alias(name, reconfigured("aquila"), dict) for name in ("AquilaForCausalLM", "AquilaModel"))
IQUEST = Alias("IQuestCoderForCausalLM", reconfigured("iquestcoder"), dict)
LLAMA_OLDER, XVERSE = Alias("LLaMAForCausalLM", dict, dict), Alias("XverseForCausalLM", reconfigured("xverse"), dict)
BAILING = Alias(
    "BailingMoeV2ForCausalLM",
    lambda config: reconfigured(
        "bailing_moe_v2",
        *("n_routed_experts", "n_shared_experts", "attention_bias"),
        num_experts=config["n_routed_experts"],
        num_shared_experts=config["n_shared_experts"],
    )(config),
    chain(
        merged("query_key_value"),
        renamed(
            (r"embed_tokens", "word_embeddings"),
            (r"\.q_norm\.", ".query_layernorm."),
            (r"\.k_norm\.", ".key_layernorm."),
            (r"\.o_proj\.", ".dense."),
            (r"\.self_attn\.", ".attention."),
            (r"e_score_correction_bias", "expert_bias"),
        ),
    ),
)
BAILING_OLDER = Alias(
    "BailingMoeForCausalLM",
    lambda config: reconfigured(
        "bailing_moe",
        *("shared_expert_intermediate_size", "mlp_only_layers", "qkv_bias", "layer_types"),
        *("sliding_window", "use_sliding_window", "max_window_layers", "decoder_sparse_step"),
        num_shared_experts=config["shared_expert_intermediate_size"] // config["moe_intermediate_size"],
        first_k_dense_replace=len(config["mlp_only_layers"]),
        use_qkv_bias=True,
    )(config),
    chain(
        all_open,
        merged("query_key_value"),
        renamed(
            (r"embed_tokens", "word_embeddings"),
            (r"\.o_proj\.", ".dense."),
            (r"\.self_attn\.", ".attention."),
            (r"\.shared_expert\.", ".shared_experts."),
        ),
    ),
)
FALCON_OLDER = Alias(
    "RWForCausalLM",
    lambda config: reconfigured(
        "RefinedWeb",
        *("num_attention_heads", "num_hidden_layers", "num_kv_heads", "new_decoder_architecture", "max_position_embeddings"),
        n_head=config["num_attention_heads"],
        n_layer=config["num_hidden_layers"],
        n_head_kv=config["num_kv_heads"],
    )(config),
    dict,
)
INTERNLM, PANGU = (
    Alias(name, reconfigured(kind, "attention_bias", bias=True), dict)
    for name, kind in (("InternLMForCausalLM", "internlm"), ("PanguEmbeddedForCausalLM", "PanguEmbedded"))
)
ORION = Alias(
    "OrionForCausalLM",
    lambda config: reconfigured(
        "orion", "layer_norm_eps", "partial_rotary_factor", "rope_parameters", rms_norm_eps=config["layer_norm_eps"]
    )(config),
    dict,
)
QWEN = Alias(
    "QWenLMHeadModel",
    lambda config: reconfigured(
        "qwen",
        *("rms_norm_eps", "num_key_value_heads", "rope_parameters", "layer_types", "use_sliding_window", "hidden_act"),
        layer_norm_epsilon=config["rms_norm_eps"],
        seq_length=config["max_position_embeddings"],
        rotary_emb_base=config["rope_parameters"]["rope_theta"],
        kv_channels=config["hidden_size"] // config["num_attention_heads"],
        intermediate_size=2 * config["intermediate_size"],
        max_position_embeddings=8 * config["max_position_embeddings"],
        use_logn_attn=True,
        use_dynamic_ntk=True,
    )(config),
    chain(
        merged("c_attn"),
        renamed(
            (r"^model\.embed_tokens\.", "transformer.wte."),
            (r"^model\.norm\.", "transformer.ln_f."),
            (r"^model\.layers\.", "transformer.h."),
            (r"\.input_layernorm\.", ".ln_1."),
            (r"\.post_attention_layernorm\.", ".ln_2."),
            (r"\.self_attn\.o_proj\.", ".attn.c_proj."),
            (r"\.self_attn\.", ".attn."),
            (r"\.up_proj\.", ".w1."),
            (r"\.gate_proj\.", ".w2."),
            (r"\.down_proj\.", ".c_proj."),
        ),
    ),
)
STABLELM_OLDER = Alias(
    "StableLMEpochForCausalLM",
    lambda config: reconfigured(
        "stablelm_epoch",
        *("layer_norm_eps", "partial_rotary_factor", "rope_parameters"),
        norm_eps=config["layer_norm_eps"],
        rope_pct=config["rope_parameters"]["partial_rotary_factor"],
    )(config),
    dict,
)
EXAONE_MOE = Alias("ExaoneMoEForCausalLM", reconfigured("exaone_moe", "layer_types", sliding_window_pattern="LLLG"), dict)
INTERNLM2 = Alias(
    "InternLM2ForCausalLM",
    reconfigured("internlm2", bias=False),
    chain(
        merged("wqkv", by_key_head=2),
        renamed(
            (r"^model\.embed_tokens\.", "model.tok_embeddings."),
            (r"^lm_head\.", "output."),
            (r"\.input_layernorm\.", ".attention_norm."),
            (r"\.post_attention_layernorm\.", ".ffn_norm."),
            (r"\.self_attn\.o_proj\.", ".attention.wo."),
            (r"\.self_attn\.", ".attention."),
            (r"\.mlp\.gate_proj\.", ".feed_forward.w1."),
            (r"\.mlp\.down_proj\.", ".feed_forward.w2."),
            (r"\.mlp\.up_proj\.", ".feed_forward.w3."),
        ),
    ),
)
INTERNLM3 = Alias(
    "InternLM3ForCausalLM", reconfigured("internlm3", "attention_bias", "mlp_bias", bias=True, qkv_bias=True), dict
)
MIMO = Alias(
    "MiMoForCausalLM",
    reconfigured("mimo", "layer_types"),
    lambda tensors: tensors | {"model.mtp_layers.0.final_layernorm.weight": torch.ones(48)},  # which is for drafts
)
MINICPM = Alias(
    "MiniCPMForCausalLM",
    lambda config: reconfigured(
        "minicpm",
        *("attention_multiplier", "logits_scaling", "residual_multiplier", "embedding_multiplier", "tie_word_embeddings"),
        scale_emb=config["embedding_multiplier"],
        scale_depth=config["residual_multiplier"] * config["num_hidden_layers"] ** 0.5,
        dim_model_base=16,
    )(config),
    dict,
)
SOLAR = Alias("SolarForCausalLM", reconfigured("solar", sliding_window=9), dict)
PHIMOE = Alias("PhiMoEForCausalLM", reconfigured("phimoe"), dict)
MPT = Alias("MPTForCausalLM", dict, dict)
