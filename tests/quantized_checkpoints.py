"""Tiny checkpoints in every scheme that is read, written bit by bit as the formats say, with the values that they stand for.

The writers share no code with the readers, which were checked against checkpoints that other tools had written (those of
ModelOpt were not).
"""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file
from torch import Tensor

SIZES = {"hidden_size": 128, "intermediate_size": 192, "num_hidden_layers": 2, "num_attention_heads": 4,
         "num_key_value_heads": 2, "vocab_size": 320, "max_position_embeddings": 256}  # fmt: skip
LLAMA = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_act": "silu", "rms_norm_eps": 1e-5,
         "tie_word_embeddings": False, "dtype": "bfloat16", "rope_theta": 1e4,
         "bos_token_id": 0, "eos_token_id": 1}  # fmt: skip
MOE = LLAMA | {"architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "num_experts": 4, "num_experts_per_tok": 2,
               "moe_intermediate_size": 64, "norm_topk_prob": True, "head_dim": 32, "decoder_sparse_step": 1}  # fmt: skip
Stored = dict[str, Tensor]
Writer = Callable[[str, Tensor], tuple[Stored, Tensor]]  # name and weight [N, K] -> tensors by suffix, and their values


def shapes(moe: bool, inner: int = 192) -> dict[str, tuple[int, int]]:
    """Of the matrices in blocks."""
    hidden, found = 128, {}
    for layer in range(1 if moe else 2):
        at = f"model.layers.{layer}"
        for name, outputs in (("q", 128), ("k", 64), ("v", 64), ("o", 128)):
            found[f"{at}.self_attn.{name}_proj"] = (outputs, hidden)
        places = [f"{at}.mlp.experts.{expert}" for expert in range(4)] if moe else [f"{at}.mlp"]
        inner = 64 if moe else inner
        for place in places:
            found |= {f"{place}.gate_proj": (inner, hidden), f"{place}.up_proj": (inner, hidden)}
            found[f"{place}.down_proj"] = (hidden, inner)
    return found


def write(scheme: str, directory: Path, inner: int = 192) -> Path:
    """directory/quantized and directory/floats, which has the values in float32. -> the first. inner: between the matrices of a
    feed-forward layer without experts."""
    config, writers = SCHEMES[scheme]
    moe = scheme.endswith("-moe")
    generator = torch.Generator().manual_seed(7)
    others = {
        "model.embed_tokens.weight": _normal((320, 128), generator, 1.0),
        "lm_head.weight": _normal((320, 128), generator),
    }
    others["model.norm.weight"] = torch.ones(128)
    for layer in range(1 if moe else 2):
        at = f"model.layers.{layer}"
        others |= {f"{at}.{name}.weight": torch.ones(128) for name in ("input_layernorm", "post_attention_layernorm")}
        if moe:
            others[f"{at}.mlp.gate.weight"] = _normal((4, 128), generator, 0.5)
            others |= {f"{at}.self_attn.{name}_norm.weight": torch.ones(32) for name in ("q", "k")}
    stored, values = dict(others), dict(others)
    matrices = {name: _normal(shape, generator) for name, shape in shapes(moe, inner).items()}
    if scheme.endswith("-head"):
        matrices["lm_head"] = stored.pop("lm_head.weight")
    for name, weight in matrices.items():
        writer = writers(name)
        if writer is None:
            stored[f"{name}.weight"] = values[f"{name}.weight"] = weight
            continue
        tensors, value = writer(name, weight)
        stored |= {f"{name}.{suffix}": tensor for suffix, tensor in tensors.items()}
        values[f"{name}.weight"] = value
    base = (MOE if moe else LLAMA) | SIZES | {"intermediate_size": inner} | ({"num_hidden_layers": 1} if moe else {})
    for kind, tensors, extra in (
        ("quantized", stored, {"quantization_config": config}),
        ("floats", values, {"dtype": "float32"}),
    ):
        place = directory / kind
        place.mkdir(parents=True, exist_ok=True)
        save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, place / "model.safetensors")
        (place / "config.json").write_text(json.dumps(base | extra))
    return directory / "quantized"


def _normal(shape: tuple[int, ...], generator: torch.Generator, spread: float = 0.12) -> Tensor:
    return (torch.randn(shape, generator=generator) * spread).bfloat16().float()


# ---- whole numbers ----------------------------------------------------------------------------------------------------------


def in_words(numbers: np.ndarray, bits: int) -> np.ndarray:
    """[R, C] -> [R, C * bits / 32] int32: along each row, the first number in the lowest bits."""
    per = 32 // bits
    words = np.zeros((numbers.shape[0], numbers.shape[1] // per), np.uint64)
    for place in range(per):
        words |= numbers[:, place::per].astype(np.uint64) << np.uint64(bits * place)
    return words.astype(np.uint32).view(np.int32)


def round_ints(weight: Tensor, bits: int, group: int, symmetric: bool, kind: torch.dtype, groups: Tensor | None = None) -> Any:
    """-> numbers [N, K] of 0 ... 2 ** bits - 1, zeros and scales [N, K / group], values [N, K]. groups [K]: of each input."""
    outputs, inputs = weight.shape
    groups = torch.arange(inputs) // group if groups is None else groups
    numbers, values = torch.zeros(outputs, inputs, dtype=torch.int64), torch.zeros_like(weight)
    zeros, scales = torch.zeros(outputs, inputs // group, dtype=torch.int64), torch.zeros(outputs, inputs // group, dtype=kind)
    top = 2**bits - 1
    for index in range(inputs // group):
        mine = groups == index
        part = weight[:, mine]
        if symmetric:
            scale = (part.abs().amax(1) / (top // 2)).to(kind)
            zero = torch.full((outputs,), top // 2 + 1)
        else:
            low, high = part.amin(1).clamp(max=0), part.amax(1).clamp(min=0)
            scale = ((high - low) / top).to(kind)
            zero = (-low / scale.float()).round().long().clamp(1, top)
        some = ((part / scale.float()[:, None]).round().long() + zero[:, None]).clamp(0, top)
        numbers[:, mine], zeros[:, index], scales[:, index] = some, zero, scale
        values[:, mine] = (some - zero[:, None]).float() * scale.float()[:, None]
    return numbers.numpy(), zeros.numpy(), scales, values


def awq(group: int) -> Writer:
    def writer(name: str, weight: Tensor) -> tuple[Stored, Tensor]:
        size = weight.shape[1] if group == -1 else group
        numbers, zeros, scales, values = round_ints(weight, 4, size, False, torch.float16)
        order = [0, 2, 4, 6, 1, 3, 5, 7]  # place i of a word has output order[i] of 8

        def interleave(rows: np.ndarray) -> np.ndarray:
            return rows.reshape(len(rows), -1, 8)[:, :, order].reshape(rows.shape)

        return {
            "qweight": torch.from_numpy(in_words(interleave(numbers.T), 4)),
            "qzeros": torch.from_numpy(in_words(interleave(zeros.T), 4)),
            "scales": scales.t(),
        }, values

    return writer


def gptq(bits: int, group: int, symmetric: bool = True, shuffled: bool = False, less: int = 1) -> Writer:
    def writer(name: str, weight: Tensor) -> tuple[Stored, Tensor]:
        inputs = weight.shape[1]
        size = inputs if group == -1 else group
        groups = torch.arange(inputs) // size
        if shuffled:
            groups = groups[torch.randperm(inputs, generator=torch.Generator().manual_seed(inputs))]
        numbers, zeros, scales, values = round_ints(weight, bits, size, symmetric, torch.float16, groups)
        return {
            "qweight": torch.from_numpy(in_words(numbers, bits).T.copy()),
            "qzeros": torch.from_numpy(in_words((zeros - less).T, bits)),
            "scales": scales.t(),
            "g_idx": groups.int(),
        }, values

    return writer


def packed(bits: int, group: int, symmetric: bool = True, shuffled: bool = False) -> Writer:
    def writer(name: str, weight: Tensor) -> tuple[Stored, Tensor]:
        outputs, inputs = weight.shape
        size = inputs if group == -1 else group
        groups = torch.arange(inputs) // size
        if shuffled:
            groups = groups[torch.randperm(inputs, generator=torch.Generator().manual_seed(inputs))]
        numbers, zeros, scales, values = round_ints(weight, bits, size, symmetric, torch.bfloat16, groups)
        found = {
            "weight_packed": torch.from_numpy(in_words(numbers, bits)),
            "weight_scale": scales,
            "weight_shape": torch.tensor([outputs, inputs]),
        }
        if not symmetric:
            found["weight_zero_point"] = torch.from_numpy(in_words(zeros.T, bits).T.copy())
        if shuffled:
            found["weight_g_idx"] = groups.int()
        return found, values

    return writer


def int8(name: str, weight: Tensor) -> tuple[Stored, Tensor]:
    scale = (weight.abs().amax(1, keepdim=True) / 127).bfloat16()
    numbers = (weight / scale.float()).round().clamp(-127, 127).to(torch.int8)
    return {"weight": numbers, "weight_scale": scale}, numbers.float() * scale.float()


def bnb_int8(name: str, weight: Tensor) -> tuple[Stored, Tensor]:
    largest = weight.abs().amax(1)
    numbers = (weight / largest[:, None] * 127).round().to(torch.int8)
    stored = {"weight": numbers, "SCB": largest, "weight_format": torch.tensor(0, dtype=torch.uint8)}
    return stored, numbers.float() * largest[:, None] / 127


# ---- floats -----------------------------------------------------------------------------------------------------------------


def fp8(kind: str, scale_name: str = "weight_scale", static: bool = False, dtype: torch.dtype = torch.float32) -> Writer:
    """kind: scalar, tensor, channel, block."""

    def writer(name: str, weight: Tensor) -> tuple[Stored, Tensor]:
        outputs, inputs = weight.shape
        rows, columns = {"channel": (1, inputs), "block": (128, 128)}.get(kind, (outputs, inputs))
        scale = torch.zeros(-(-outputs // rows), -(-inputs // columns), dtype=dtype)
        each = torch.zeros_like(weight)
        for i in range(scale.shape[0]):
            for j in range(scale.shape[1]):
                at = slice(i * rows, (i + 1) * rows), slice(j * columns, (j + 1) * columns)
                scale[i, j] = weight[at].abs().amax() / 448
                each[at] = scale[i, j].float()
        numbers = (weight / each).clamp(-448, 448).to(torch.float8_e4m3fn)
        stored = {"weight": numbers, scale_name: scale.view({"scalar": (), "tensor": (1,)}.get(kind, scale.shape))}
        if static:
            stored["input_scale"] = torch.tensor(0.05) if kind == "scalar" else torch.tensor([0.05], dtype=dtype)
        return stored, numbers.float() * each

    return writer


E2M1 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6])


def round_e2m1(values: Tensor) -> tuple[Tensor, Tensor]:
    """[N, K] -> codes, and what they stand for."""
    codes = (values.abs()[..., None] - E2M1).abs().argmin(-1)
    found = E2M1[codes] * torch.where(values < 0, -1.0, 1.0)
    return codes + 8 * (values < 0), found


def low_first(codes: Tensor) -> Tensor:
    return (codes[:, 0::2] + 16 * codes[:, 1::2]).to(torch.uint8)


def nvfp4(divisor: bool) -> Writer:
    """As compressed-tensors has it, whose factor is a divisor, or as ModelOpt does."""

    def writer(name: str, weight: Tensor) -> tuple[Stored, Tensor]:
        factor = weight.abs().amax() / (6 * 448)
        groups = weight.view(len(weight), -1, 16)
        scale = (groups.abs().amax(-1) / 6 / factor).to(torch.float8_e4m3fn)
        wide = (scale.float() * factor).repeat_interleave(16, 1)
        codes, found = round_e2m1(weight / wide)
        if divisor:
            stored = {"weight_packed": low_first(codes), "weight_scale": scale, "weight_global_scale": (1 / factor).view(1)}
            factor = 1 / stored["weight_global_scale"]
            return stored | {"input_global_scale": torch.ones(1)}, found * scale.float().repeat_interleave(16, 1) * factor
        stored = {"weight": low_first(codes), "weight_scale": scale, "weight_scale_2": factor, "input_scale": torch.tensor(1.0)}
        return stored, found * wide

    return writer


def mxfp4(name: str, weight: Tensor) -> tuple[Stored, Tensor]:
    groups = weight.view(len(weight), -1, 32)
    exponent = (groups.abs().amax(-1) / 6).log2().ceil()
    wide = torch.exp2(exponent).repeat_interleave(32, 1)
    codes, found = round_e2m1(weight / wide)
    return {"weight_packed": low_first(codes), "weight_scale": (exponent + 127).to(torch.uint8)}, found * wide


def mxfp8(name: str, weight: Tensor) -> tuple[Stored, Tensor]:
    groups = weight.view(len(weight), -1, 32)
    exponent = (groups.abs().amax(-1) / 448).log2().ceil()
    wide = torch.exp2(exponent).repeat_interleave(32, 1)
    numbers = (weight / wide).to(torch.float8_e4m3fn)
    return {"weight": numbers, "weight_scale": (exponent + 127).to(torch.uint8)}, numbers.float() * wide


NF4 = torch.tensor([-1, -0.6961928, -0.52507305, -0.39491749, -0.28444138, -0.18477343, -0.09105004, 0, 0.0795803, 0.1609302,
                    0.2461123, 0.33791524, 0.44070983, 0.562617, 0.72295684, 1])  # fmt: skip


def nf4(nested: bool) -> Writer:
    def writer(name: str, weight: Tensor) -> tuple[Stored, Tensor]:
        blocks = weight.reshape(-1, 64)
        scale = blocks.abs().amax(1)
        state: dict[str, Any] = {"quant_type": "nf4", "blocksize": 64, "dtype": "bfloat16", "shape": list(weight.shape)}
        stored: Stored = {"weight.quant_map": NF4.clone()}
        if nested:
            offset, table = scale.mean().item(), torch.linspace(-1, 1, 256)
            padded = torch.nn.functional.pad(scale - offset, (0, -len(scale) % 256)).view(-1, 256)
            largest = padded.abs().amax(1)
            codes = (padded / largest[:, None])[..., None].sub(table).abs().argmin(-1).flatten()[: len(scale)]
            scale = table[codes] * largest.repeat_interleave(256)[: len(codes)] + offset
            state |= {"nested_blocksize": 256, "nested_dtype": "float32", "nested_offset": offset}
            stored |= {
                "weight.absmax": codes.to(torch.uint8),
                "weight.nested_absmax": largest,
                "weight.nested_quant_map": table,
            }
        else:
            stored["weight.absmax"] = scale
        codes = (blocks / scale[:, None])[..., None].sub(NF4).abs().argmin(-1)
        values = (NF4[codes] * scale[:, None]).view(weight.shape)
        flat = codes.flatten()
        stored["weight"] = (16 * flat[0::2] + flat[1::2]).to(torch.uint8).view(-1, 1)
        told = torch.tensor(list(json.dumps(state).encode()), dtype=torch.uint8)
        return stored | {"weight.quant_state.bitsandbytes__nf4": told}, values

    return writer


# ---- schemes ----------------------------------------------------------------------------------------------------------------


def always(writer: Writer) -> Callable[[str], Writer | None]:
    return lambda name: writer


def compressed(format_: str, weights: dict[str, Any], activations: dict[str, Any] | None = None, **more: Any) -> dict[str, Any]:
    group = {"targets": ["Linear"], "weights": weights, "input_activations": activations, "output_activations": None}
    return {"quant_method": "compressed-tensors", "format": format_, "config_groups": {"group_0": group},
            "ignore": ["lm_head", "re:.*mlp.gate$"], "kv_cache_scheme": None} | more  # fmt: skip


def ints(bits: int, group: int, symmetric: bool = True) -> dict[str, Any]:
    strategy = "channel" if group == -1 else "group"
    size = None if group == -1 else group
    return {"num_bits": bits, "type": "int", "symmetric": symmetric, "strategy": strategy, "group_size": size}


TOKEN8 = {"num_bits": 8, "type": "float", "dynamic": True, "strategy": "token", "symmetric": True}
FLOAT8 = {"num_bits": 8, "type": "float", "symmetric": True}
AWQ = {"quant_method": "awq", "bits": 4, "group_size": 32, "zero_point": True, "version": "gemm"}
GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 32, "sym": True, "desc_act": False}
BLOCKS = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [128, 128]}


def several(name: str) -> Writer | None:
    """Attention in fp8, the rest in int4, but for one matrix that is among others and one that is alone."""
    if name in SEVERAL_IGNORED:
        return None
    return fp8("channel", dtype=torch.bfloat16) if "self_attn" in name else packed(4, 32)


SEVERAL_IGNORED = ("model.layers.0.mlp.up_proj", "model.layers.1.mlp.down_proj")
SEVERAL = {
    "quant_method": "compressed-tensors", "format": "mixed-precision", "ignore": ["lm_head", *SEVERAL_IGNORED],
    "config_groups": {
        "group_0": {"targets": ["re:.*self_attn.*"], "weights": FLOAT8 | {"strategy": "channel"}, "input_activations": TOKEN8,
                    "format": "float-quantized"},
        "group_1": {"targets": ["Linear"], "weights": ints(4, 32), "input_activations": None, "format": "pack-quantized"},
    },
}  # fmt: skip

SCHEMES: dict[str, tuple[dict[str, Any], Any]] = {
    "awq": (AWQ, always(awq(32))),
    "awq-channel": (AWQ | {"group_size": -1}, always(awq(-1))),
    "gptq": (GPTQ, always(gptq(4, 32))),
    "gptq-asymmetric": (GPTQ | {"sym": False}, always(gptq(4, 32, symmetric=False))),
    "gptq-act-order": (GPTQ | {"desc_act": True}, always(gptq(4, 32, shuffled=True))),
    "gptq-v2": (GPTQ | {"checkpoint_format": "gptq_v2", "sym": False}, always(gptq(4, 32, symmetric=False, less=0))),
    "gptq-8": (GPTQ | {"bits": 8, "group_size": -1}, always(gptq(8, -1))),
    "ct-int4": (compressed("pack-quantized", ints(4, 64)), always(packed(4, 64))),
    "ct-int4-asymmetric": (compressed("pack-quantized", ints(4, 32, False)), always(packed(4, 32, symmetric=False))),
    "ct-int4-act-order": (compressed("pack-quantized", ints(4, 32)), always(packed(4, 32, shuffled=True))),
    "ct-int8": (compressed("pack-quantized", ints(8, -1)), always(packed(8, -1))),
    "ct-w8a8": (compressed("int-quantized", ints(8, -1), TOKEN8 | {"type": "int"}), always(int8)),
    "ct-fp8-channel": (compressed("float-quantized", FLOAT8 | {"strategy": "channel"}, TOKEN8),
                       always(fp8("channel", dtype=torch.bfloat16))),
    "ct-fp8-static": (compressed("float-quantized", FLOAT8 | {"strategy": "tensor"}, FLOAT8 | {"strategy": "tensor"}),
                      always(fp8("tensor", static=True, dtype=torch.bfloat16))),
    "ct-nvfp4": (compressed("nvfp4-pack-quantized", {"num_bits": 4, "type": "float", "strategy": "tensor_group",
                                                     "group_size": 16}), always(nvfp4(True))),
    "ct-mxfp4": (compressed("mxfp4-pack-quantized", {"num_bits": 4, "type": "float", "strategy": "group", "group_size": 32}),
                 always(mxfp4)),
    "ct-mxfp8": (compressed("mxfp8-quantized", FLOAT8 | {"strategy": "group", "group_size": 32}), always(mxfp8)),
    "ct-several": (SEVERAL, several),
    "fp8-tensor": ({"quant_method": "fp8", "activation_scheme": "static"}, always(fp8("scalar", static=True))),
    "fp8-block": (BLOCKS, always(fp8("block", "weight_scale_inv"))),
    "modelopt-fp8": ({"quant_method": "modelopt", "quant_algo": "FP8", "ignore": ["lm_head"]},
                     always(fp8("scalar", static=True))),
    "modelopt-nvfp4": ({"quant_method": "modelopt", "quant_algo": "NVFP4", "ignore": ["lm_head"]}, always(nvfp4(False))),
    "bnb-nf4": ({"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}, always(nf4(False))),
    "bnb-nf4-nested": ({"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "nf4",
                        "bnb_4bit_use_double_quant": True}, always(nf4(True))),
    "bnb-int8": ({"quant_method": "bitsandbytes", "load_in_8bit": True}, always(bnb_int8)),
    "gptq-head": (GPTQ | {"lm_head": True}, always(gptq(4, 32))),
    "ct-fp8-head": (compressed("float-quantized", FLOAT8 | {"strategy": "channel"}, TOKEN8, ignore=[]),
                    always(fp8("channel", dtype=torch.bfloat16))),
    "awq-moe": (AWQ, always(awq(32))),
    "ct-int4-moe": (compressed("pack-quantized", ints(4, 32)), always(packed(4, 32))),
    "fp8-block-moe": (BLOCKS, always(fp8("block", "weight_scale_inv"))),
    "modelopt-nvfp4-moe": ({"quant_method": "modelopt", "quant_algo": "NVFP4", "ignore": ["lm_head"]}, always(nvfp4(False))),
}  # fmt: skip
