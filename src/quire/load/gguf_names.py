"""GGUF's tensors told as Hugging Face's: names, and what the conversion to GGUF did to the values, undone.

    blk.0.attn_q.weight  ->  model.layers.0.self_attn.q_proj.weight, rows back in Hugging Face's rotary order

`gguf_tables.py` has a row for each architecture. This file knows no file and no block type, only names, shapes and reorderings.
"""

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from quire.load.gguf_tables import FAMILIES, MIXTRAL, Family
from quire.types.errors import ModelError

Undo = Callable[[Tensor], Tensor]
_LAYER = re.compile(r"^blk\.(?P<layer>\d+)\.(?P<rest>.+)$")
_PART = re.compile(r"^(?P<part>\w+?|shortconv\.\w+)(\.(?P<expert>\d+))?\.(?P<kind>weight|bias)$")
# told by the config instead: how rotary frequencies are stretched
IN_CONFIG = frozenset({"rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight"})


@dataclass(frozen=True)
class Name:
    """One Hugging Face tensor: which slice of a GGUF tensor it is, and what is left to do to the values."""

    hf: str
    expert: int | None = None
    undo: Undo | None = None  # of rows' order
    values: Undo | None = None  # of each number
    transposed: bool = False
    shape: tuple[int, ...] | None = None  # where the conversion took dimensions of one away, or added some


def hf_names(architecture: str, hf: Mapping[str, Any], gguf_name: str, shape: tuple[int, ...]) -> Iterator[Name]:
    """The Hugging Face tensors inside one GGUF tensor: one, or one per expert, or none when the config holds it."""
    if gguf_name in IN_CONFIG:
        return
    family = _family(architecture, hf)
    if whole := family.whole.get(gguf_name):
        yield Name(whole, values=_minus_one if family.norm_plus_one and "norm" in gguf_name else None)
        return
    layer = _LAYER.match(gguf_name)
    if layer is None:
        raise _unknown(architecture, gguf_name)
    if hf.get("num_nextn_predict_layers") and int(layer["layer"]) >= hf["num_hidden_layers"]:
        return  # for drafts
    prefix, rest = f"{family.layers}.{layer['layer']}", layer["rest"]
    if rest in family.bare:
        name = f"{prefix}.{family.bare[rest]}"
        yield Name(name, values=_log if name.endswith(".A_log") else None, shape=_shape(rest, shape))
        return
    match = _PART.match(rest)
    if match is None:
        raise _unknown(architecture, gguf_name)
    part, kind = match["part"], match["kind"]
    if (template := family.experts.get(part.removesuffix("_exps"))) and (match["expert"] or part.endswith("_exps")):
        if match["expert"]:  # the older way: one tensor per expert
            yield Name(f"{prefix}.{template.format(match['expert'])}.{kind}")
        else:
            for expert in range(shape[0]):
                yield Name(f"{prefix}.{template.format(expert)}.{kind}", expert)
    elif part in family.parts:
        yield Name(
            f"{prefix}.{family.parts[part]}.{kind}",
            undo=_undo(family, hf, part),
            values=_minus_one if family.norm_plus_one and part.endswith("norm") else None,
            transposed=part in family.transposed and kind == "weight",
            shape=_shape(rest, shape),
        )
    else:
        raise _unknown(architecture, gguf_name)


def _shape(rest: str, stored: tuple[int, ...]) -> tuple[int, ...] | None:
    """Hugging Face's, where it is another: a matrix of one row was made a vector, a vector a matrix of one column or of a row
    for each group, and of a convolution a dimension of one was taken away."""
    match rest:
        case "ffn_gate_inp_shexp.weight" if len(stored) == 1:
            return (1, *stored)
        case "ssm_conv1d.weight" | "shortconv.conv.weight" if len(stored) == 2:
            return (stored[0], 1, stored[1])
        case "ssm_norm.weight" if len(stored) == 2:
            return (stored[0] * stored[1],)
        case "ssm_a" | "ssm_d" if len(stored) == 2 and stored[1] == 1:
            return stored[:1]
    return None


def _undo(family: Family, hf: Mapping[str, Any], part: str) -> Undo | None:
    if family.rotary_pairs and part in ("attn_q", "attn_k"):
        heads = int(hf["num_attention_heads"] if part == "attn_q" else hf["num_key_value_heads"])
        return lambda rows: split_pairs(rows, heads)
    if family.by_key_head and part == "attn_qkv":
        heads, keys = int(hf["num_attention_heads"]), int(hf["num_kv_heads"] or 1)
        return lambda rows: join_heads(rows, heads, keys)
    return None


def join_heads(rows: Tensor, heads: int, keys: int) -> Tensor:
    """rows [(heads + 2 * keys) * head_dim, ...] of q, then k, then v: for each key head its queries, itself and its value."""
    size = rows.shape[0] // (heads + 2 * keys)
    parts = torch.split(rows, [heads * size, keys * size, keys * size])
    grouped = [part.reshape(keys, -1, *rows.shape[1:]) for part in parts]
    return torch.cat(grouped, dim=1).reshape(rows.shape)


def split_pairs(rows: Tensor, heads: int) -> Tensor:
    """rows [heads * head_dim, ...]: each head's rows a0 b0 a1 b1 ... become a0 a1 ... b0 b1 ..."""
    pairs = rows.reshape(heads, rows.shape[0] // heads // 2, 2, *rows.shape[1:])
    return pairs.transpose(1, 2).reshape(rows.shape)


def _minus_one(weight: Tensor) -> Tensor:
    return weight - 1


def _log(decay: Tensor) -> Tensor:
    """Files have -exp(A_log)."""
    return torch.log(-decay)


def _family(architecture: str, hf: Mapping[str, Any]) -> Family:
    if architecture == "llama" and hf.get("model_type") == "mixtral":
        return MIXTRAL
    if architecture == "falcon" and hf.get("new_decoder_architecture"):
        falcon = FAMILIES["falcon"]
        return replace(falcon, parts={**falcon.parts, "attn_norm": "ln_mlp", "attn_norm_2": "ln_attn"})
    if architecture not in FAMILIES:
        raise ModelError(f"GGUF architecture {architecture!r} is not supported; {', '.join(FAMILIES)} are")
    return FAMILIES[architecture]


def _unknown(architecture: str, gguf_name: str) -> ModelError:
    return ModelError(f"GGUF tensor {gguf_name!r} has no known place in a {architecture!r} model")
