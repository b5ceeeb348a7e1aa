"""GGUF architectures some of whose layers are recurrent, and Granite's others.

llama.cpp counts key heads in every layer: one that has none is recurrent. A length of 2 ** 20 is what its converter writes for
models without positions, whose own files say another, or none.
"""

from typing import Any

from quire.config.gguf_values import FIELDS, Architecture, experts_of, number, one_value
from quire.files.gguf import GGUFHeader
from quire.types.errors import ModelError

WITHOUT_POSITIONS = 1 << 20
GRANITE_LENGTH = 1 << 17  # of Granite 4's own files
_SIZES = {"ssm.conv_kernel": "mamba_d_conv", "ssm.state_size": "mamba_d_state"}
_SOME_ATTEND = {key: name for key, name in FIELDS.items() if key != "attention.head_count_kv"}
_ALONE = {
    "block_count": "num_hidden_layers",
    "embedding_length": "hidden_size",
    "attention.layer_norm_rms_epsilon": "layer_norm_epsilon",
    "ssm.conv_kernel": "conv_kernel",
    "ssm.state_size": "state_size",
}
_SSM = ("ssm.conv_kernel", "ssm.inner_size", "ssm.state_size", "ssm.time_step_rank")
_ALONE_REQUIRED = ("block_count", "embedding_length", *_SSM)
_REQUIRED = ("block_count", "context_length", "embedding_length", "attention.head_count", *_SSM)
_SILU = {"hidden_act": "silu"}


def has(header: GGUFHeader, part: str) -> bool:
    """Any layer."""
    return any(name.startswith("blk.") and name.endswith(f".{part}") for name in header.tensors)


def finish_granite(header: GGUFHeader, config: dict[str, Any]) -> None:
    """Also MiniCPM, whose multipliers are the same by other names; only Granite's say how queries are scaled."""
    if header.get("rope.scaling.finetuned") is False and config["model_type"] != "granitemoehybrid":
        raise ModelError(f"{header.path}: a {header.architecture} without positions (rope.scaling.finetuned) is not supported")
    config["embedding_multiplier"] = number(header, "embedding_scale", 1.0) or 1.0
    config["residual_multiplier"] = number(header, "residual_scale", 1.0) or 1.0
    config["logits_scaling"] = number(header, "logit_scale", 1.0) or 1.0
    config["attention_multiplier"] = number(header, "attention.scale", 0.0) or config["head_dim"] ** -0.5
    config["attention_bias"] = has(header, "attn_q.bias")
    config["mlp_bias"] = has(header, "ffn_up.bias")


def _finish_granite_moe(header: GGUFHeader, config: dict[str, Any]) -> None:
    finish_granite(header, config)
    config["num_local_experts"] = experts_of(header)
    config["shared_intermediate_size"] = header.get("expert_shared_feed_forward_length") if has(header, _SHARED) else None


def _finish_granite_hybrid(header: GGUFHeader, config: dict[str, Any]) -> None:
    """Also Bamba, whose multipliers are all 1, and which has positions."""
    attends = _attends(header, config)
    config["layer_types"] = ["attention" if yes else "mamba" for yes in attends]
    _mamba2(header, config, "mamba_n_heads", "mamba_d_head", "mamba_n_groups")
    finish_granite(header, config)
    positions = header.get("rope.scaling.finetuned", True)
    config["position_embedding_type"] = "rope" if positions else "nope"
    if not positions and config["max_position_embeddings"] == WITHOUT_POSITIONS:
        config["max_position_embeddings"] = GRANITE_LENGTH
    experts = config["num_local_experts"] = experts_of(header) if has(header, "ffn_gate_inp.weight") else 0
    shared = "expert_shared_feed_forward_length" if experts else "feed_forward_length"
    config["shared_intermediate_size"] = header.get(shared)
    config["mamba_conv_bias"], config["mamba_proj_bias"] = has(header, "ssm_conv1d.bias"), has(header, "ssm_in.bias")


def _finish_falcon_h1(header: GGUFHeader, config: dict[str, Any]) -> None:
    """What its config multiplies by is in the file's matrices already."""
    _mamba2(header, config, "mamba_n_heads", "mamba_d_head", "mamba_n_groups")
    config["mamba_rms_norm"] = has(header, "ssm_norm.weight")
    for name, part in (
        ("mamba_conv_bias", "ssm_conv1d.bias"),
        ("mamba_proj_bias", "ssm_in.bias"),
        ("projectors_bias", "ssm_out.bias"),
        ("attention_bias", "attn_q.bias"),
        ("mlp_bias", "ffn_up.bias"),
    ):
        config[name] = has(header, part)


def _finish_jamba(header: GGUFHeader, config: dict[str, Any]) -> None:
    config["attn_layer_period"], config["attn_layer_offset"] = _period(header, _attends(header, config), "attend")
    tells = [f"blk.{layer}.ffn_gate_inp.weight" in header.tensors for layer in range(config["num_hidden_layers"])]
    config["num_experts"] = experts_of(header) if any(tells) else 1
    config["expert_layer_period"], config["expert_layer_offset"] = (
        _period(header, tells, "have experts") if any(tells) else (1, 0)
    )
    config |= {"mamba_expand": _expansion(header), "mamba_dt_rank": header.get("ssm.time_step_rank")}
    config["mamba_conv_bias"], config["mamba_proj_bias"] = has(header, "ssm_conv1d.bias"), has(header, "ssm_in.bias")


def _finish_mamba(header: GGUFHeader, config: dict[str, Any]) -> None:
    config |= {"expand": _expansion(header), "time_step_rank": header.get("ssm.time_step_rank")}
    config["use_bias"], config["use_conv_bias"] = has(header, "ssm_in.bias"), has(header, "ssm_conv1d.bias")
    if header.get("ssm.dt_b_c_rms"):
        config |= {"architectures": ["FalconMambaForCausalLM"], "model_type": "falcon_mamba"}


def _finish_mamba2(header: GGUFHeader, config: dict[str, Any]) -> None:
    _mamba2(header, config, "num_heads", "head_dim", "n_groups")
    config["use_bias"], config["use_conv_bias"] = has(header, "ssm_in.bias"), has(header, "ssm_conv1d.bias")


def _mamba2(header: GGUFHeader, config: dict[str, Any], heads: str, head_dim: str, groups: str) -> None:
    """Under a family's names."""
    inner, count = _size(header, "ssm.inner_size"), _size(header, "ssm.time_step_rank")
    if inner % count:
        raise ModelError(f"{header.path}: ssm.inner_size {inner} is no multiple of the {count} heads (ssm.time_step_rank)")
    config |= {heads: count, head_dim: inner // count, groups: header.get("ssm.group_count", 1), "mamba_d_ssm": inner}


def _expansion(header: GGUFHeader) -> int:
    inner, hidden = _size(header, "ssm.inner_size"), _size(header, "embedding_length")
    if inner % hidden:
        raise ModelError(f"{header.path}: ssm.inner_size {inner} is no multiple of embedding_length {hidden}")
    return inner // hidden


def _size(header: GGUFHeader, key: str) -> int:
    return int(one_value(header, key, header.get(key)))


def _attends(header: GGUFHeader, config: dict[str, Any]) -> list[bool]:
    """Each layer; the key heads of those that do are the config's."""
    found, count = header.get("attention.head_count_kv"), config["num_hidden_layers"]
    counts = {heads for heads in found if heads} if isinstance(found, list) else {found}
    if (isinstance(found, list) and len(found) != count) or len(counts) > 1 or not all(type(n) is int for n in counts):
        raise ModelError(
            f"{header.path}: {header.architecture}.attention.head_count_kv must be a list of {count} whole numbers, 0 where a "
            f"layer is recurrent and otherwise one and the same, got {found!r:.200}"
        )
    config["num_key_value_heads"] = next(iter(counts), config["num_attention_heads"])
    return [bool(heads) for heads in found] if isinstance(found, list) else [bool(found)] * count


def _period(header: GGUFHeader, which: list[bool], what: str) -> tuple[int, int]:
    """Every how many layers, and the first of them."""
    at = [index for index, yes in enumerate(which) if yes]
    period = at[1] - at[0] if len(at) > 1 else len(which)
    if not at or [index % period == at[0] for index in range(len(which))] != which:
        raise ModelError(f"{header.path}: layers {at} {what}, which is no regular distance")
    return period, at[0]


def _finish_lfm2(header: GGUFHeader, config: dict[str, Any]) -> None:
    config["layer_types"] = ["full_attention" if yes else "conv" for yes in _attends(header, config)]
    config |= {"conv_bias": has(header, "shortconv.conv.bias"), "block_auto_adjust_ff_dim": False}


_SHARED = "ffn_up_shexp.weight"
_POSITIONLESS = {**_SILU, "without": ("rope",)}
HYBRIDS: dict[str, Architecture] = {
    "granite": Architecture("GraniteForCausalLM", "granite", _SILU, finish=finish_granite),
    "granitemoe": Architecture("GraniteMoeForCausalLM", "granitemoe", _SILU, finish=_finish_granite_moe),
    "minicpm": Architecture("GraniteForCausalLM", "granite", _SILU, finish=finish_granite),
    "granitehybrid": Architecture(
        "GraniteMoeHybridForCausalLM", "granitemoehybrid", _SILU, _SOME_ATTEND | _SIZES, _finish_granite_hybrid, _REQUIRED
    ),
    "falcon-h1": Architecture(
        "FalconH1ForCausalLM", "falcon_h1", {**_SILU, "mamba_norm_before_gate": False}, FIELDS | _SIZES, _finish_falcon_h1,
        _REQUIRED,
    ),
    "jamba": Architecture("JambaForCausalLM", "jamba", _POSITIONLESS, _SOME_ATTEND | _SIZES, _finish_jamba, _REQUIRED),
    "lfm2": Architecture(
        "Lfm2ForCausalLM", "lfm2", _SILU,
        _SOME_ATTEND | {"attention.layer_norm_rms_epsilon": "norm_eps", "shortconv.l_cache": "conv_L_cache"}, _finish_lfm2,
    ),
    "mamba": Architecture("MambaForCausalLM", "mamba", _POSITIONLESS, _ALONE, _finish_mamba, _ALONE_REQUIRED),
    "mamba2": Architecture("Mamba2ForCausalLM", "mamba2", _POSITIONLESS, _ALONE, _finish_mamba2, _ALONE_REQUIRED),
}  # fmt: skip
