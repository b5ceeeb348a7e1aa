from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch

from gguf_files import LLAMA, llama_tensors, tiny_llama, write_gguf
from quire.config.facts import read_facts
from quire.config.families import gguf_rows
from quire.config.families.card import GGUF
from quire.files.gguf import GGML_TYPES, READABLE_TYPES
from quire.files.resolve import resolve_model
from quire.load.gguf import GGUFSource, split_pairs
from quire.load.source import TensorSlice, cut, read_whole
from quire.ops.blocks import DEQUANTIZE, dequantize
from quire.types.errors import ModelError


def read_all(path: Path) -> dict[str, torch.Tensor]:
    source = GGUFSource(read_facts(resolve_model(str(path))))
    found = read_whole(source)
    assert {name: tuple(tensor.shape) for name, tensor in found.items()} == source.shapes
    return found


def pair_up(rows: np.ndarray, heads: int) -> np.ndarray:
    """What the conversion to GGUF does to q and k: the halves of each head's rows are shuffled together."""
    halves = rows.reshape(heads, 2, rows.shape[0] // heads // 2, *rows.shape[1:])
    return halves.swapaxes(1, 2).reshape(rows.shape)


@pytest.mark.parametrize("name", [name for name in READABLE_TYPES if name not in ("F32", "F16", "BF16", "F64")])
def test_block_types_dequantize_as_the_reference_does(name: str) -> None:
    kind = gguf.GGMLQuantizationType[name]
    _, elements, nbytes = GGML_TYPES[int(kind)]
    blocks = np.random.default_rng(1).integers(0, 256, (6, 3 * nbytes), dtype=np.uint8)
    with np.errstate(all="ignore"):  # random scales may be infinite
        expected = gguf.quants.dequantize(blocks, kind).astype(np.float32)
        found = dequantize(torch.from_numpy(blocks.reshape(-1).copy()), int(kind), (6, 3 * elements)).numpy()
    assert found.shape == expected.shape
    assert np.array_equal(found.view(np.uint32)[~np.isnan(expected)], expected.view(np.uint32)[~np.isnan(expected)])
    assert np.array_equal(np.isnan(found), np.isnan(expected))


def test_long_tensors_are_dequantized_in_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("quire.ops.blocks.CHUNK_ELEMENTS", 64)
    blocks = np.random.default_rng(1).integers(0, 128, (5, 34), dtype=np.uint8)
    expected = gguf.quants.dequantize(blocks, gguf.GGMLQuantizationType.Q8_0)
    assert np.array_equal(dequantize(torch.from_numpy(blocks.reshape(-1)), 8, (5, 32)).numpy(), expected)


def test_plain_types_keep_their_type() -> None:
    for name, kind in (("F32", torch.float32), ("F16", torch.float16), ("BF16", torch.bfloat16)):
        values = torch.arange(6).to(kind)
        found = dequantize(values.view(torch.uint8), int(gguf.GGMLQuantizationType[name]), (2, 3))
        assert found.dtype == kind
        assert torch.equal(found, values.view(2, 3))


def test_unreadable_type() -> None:
    with pytest.raises(ModelError, match="Q8_1 are not supported"):
        dequantize(torch.zeros(36, dtype=torch.uint8), int(gguf.GGMLQuantizationType.Q8_1), (1, 32))


def test_common_types_do_not_need_the_package() -> None:
    assert {"Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q4_K", "Q5_K", "Q6_K"} <= set(DEQUANTIZE)


def test_llama_names_and_rotary_order(tmp_path: Path) -> None:
    tensors = llama_tensors(LLAMA)
    original = tensors["blk.1.attn_q.weight"], tensors["blk.1.attn_k.weight"]
    stored = {"blk.1.attn_q.weight": pair_up(original[0], 4), "blk.1.attn_k.weight": pair_up(original[1], 2)}
    stored["rope_freqs.weight"] = np.ones(4, np.float32)
    found = read_all(tiny_llama(tmp_path / "m.gguf", tensors={**tensors, **stored}))
    assert np.array_equal(found["model.layers.1.self_attn.q_proj.weight"], original[0])
    assert np.array_equal(found["model.layers.1.self_attn.k_proj.weight"], original[1])
    assert np.array_equal(found["model.layers.0.mlp.down_proj.weight"], tensors["blk.0.ffn_down.weight"])
    assert np.array_equal(found["model.embed_tokens.weight"], tensors["token_embd.weight"])
    assert len(found) == 2 + 2 * 9


def test_split_pairs_works_on_biases() -> None:
    bias = np.arange(16, dtype=np.float32)
    assert np.array_equal(split_pairs(torch.from_numpy(pair_up(bias, 2)), 2).numpy(), bias)


def test_gemma_norms_lose_the_added_one(tmp_path: Path) -> None:
    fields = {**LLAMA, "attention.key_length": 8, "attention.sliding_window": 16}
    norms = {
        f"blk.{i}.{n}.weight": np.full(32, i + 1.5, np.float32)
        for i in (0, 1)
        for n in ("post_attention_norm", "post_ffw_norm")
    }
    norms |= {f"blk.{i}.attn_{n}_norm.weight": np.full(8, 1.25, np.float32) for i in (0, 1) for n in "qk"}
    path = write_gguf(tmp_path / "m.gguf", architecture="gemma3", fields=fields, tensors={**llama_tensors(fields), **norms})
    found = read_all(path)
    assert torch.equal(found["model.layers.1.post_feedforward_layernorm.weight"], torch.full((32,), 1.5))
    assert torch.equal(found["model.layers.0.self_attn.q_norm.weight"], torch.full((8,), 0.25))
    tensors = llama_tensors(fields)
    for ours, theirs in (("model.norm", "output_norm"), ("model.layers.0.pre_feedforward_layernorm", "blk.0.ffn_norm")):
        assert torch.equal(found[f"{ours}.weight"], torch.from_numpy(tensors[f"{theirs}.weight"]) - 1)
    assert np.array_equal(found["model.layers.0.self_attn.q_proj.weight"], tensors["blk.0.attn_q.weight"])


def _experts(merged: bool) -> dict[str, Any]:
    random = np.random.default_rng(0)
    fields: dict[str, Any] = {**LLAMA, "expert_count": 3, "expert_used_count": 2}
    tensors = {name: value for name, value in llama_tensors(fields).items() if "ffn_" not in name or "norm" in name}
    for layer in (0, 1):
        tensors[f"blk.{layer}.ffn_gate_inp.weight"] = random.standard_normal((3, 32)).astype(np.float32)
        for part, shape in (("gate", (3, 64, 32)), ("up", (3, 64, 32)), ("down", (3, 32, 64))):
            stack = random.standard_normal(shape).astype(np.float32)
            if merged:
                tensors[f"blk.{layer}.ffn_{part}_exps.weight"] = stack
            else:
                tensors |= {f"blk.{layer}.ffn_{part}.{expert}.weight": stack[expert] for expert in range(3)}
    return {"fields": fields, "tensors": tensors}


def test_experts_are_told_one_by_one(tmp_path: Path) -> None:
    merged = _experts(merged=True)
    found = read_all(write_gguf(tmp_path / "new.gguf", **merged))
    older = read_all(write_gguf(tmp_path / "old.gguf", **_experts(merged=False)))
    stack = merged["tensors"]["blk.1.ffn_down_exps.weight"]
    assert np.array_equal(found["model.layers.1.block_sparse_moe.experts.2.w2.weight"], stack[2])
    assert found["model.layers.0.block_sparse_moe.gate.weight"].shape == (3, 32)
    assert found.keys() == older.keys()
    assert all(torch.equal(found[name], older[name]) for name in found)


def test_quantized_experts_are_cut_between_blocks(tmp_path: Path) -> None:
    stack = np.random.default_rng(0).standard_normal((4, 8, 32)).astype(np.float32)
    packed = gguf.quants.quantize(stack, gguf.GGMLQuantizationType.Q8_0)
    fields = {**LLAMA, "block_count": 1, "expert_count": 4, "expert_used_count": 2, "expert_feed_forward_length": 8}
    base = {"token_embd.weight": np.zeros((48, 32), np.float32)}
    tensors = {**base, "blk.0.ffn_up_exps.weight": (packed, gguf.GGMLQuantizationType.Q8_0)}
    found = read_all(write_gguf(tmp_path / "m.gguf", architecture="qwen3moe", fields=fields, tensors=tensors))
    expected = gguf.quants.dequantize(packed, gguf.GGMLQuantizationType.Q8_0)
    for expert in range(4):
        assert np.array_equal(found[f"model.layers.0.mlp.experts.{expert}.up_proj.weight"], expected[expert])


def test_gpt2_matrices_are_transposed_and_biases_are_not(tmp_path: Path) -> None:
    fields = {"block_count": 1, "context_length": 16, "embedding_length": 8, "attention.head_count": 2}
    tensors = {
        "token_embd.weight": np.zeros((48, 8), np.float32),
        "blk.0.attn_qkv.weight": np.arange(24 * 8, dtype=np.float32).reshape(24, 8),
        "blk.0.attn_qkv.bias": np.arange(24, dtype=np.float32),
    }
    found = read_all(write_gguf(tmp_path / "m.gguf", architecture="gpt2", fields=fields, tensors=tensors))
    assert np.array_equal(found["transformer.h.0.attn.c_attn.weight"], tensors["blk.0.attn_qkv.weight"].T)
    assert np.array_equal(found["transformer.h.0.attn.c_attn.bias"], tensors["blk.0.attn_qkv.bias"])


def test_unknown_tensors_are_an_error(tmp_path: Path) -> None:
    path = tiny_llama(tmp_path / "m.gguf", tensors={"blk.0.attn_surprise.weight": np.ones(4, np.float32)})
    with pytest.raises(ModelError, match=r"blk\.0\.attn_surprise\.weight.*is not known"):
        read_all(path)


def test_only_what_is_asked_for_is_read(tmp_path: Path) -> None:
    source = GGUFSource(read_facts(resolve_model(str(tiny_llama(tmp_path / "m.gguf")))))
    assert [part.name for part, _ in source.read([TensorSlice("model.norm.weight")])] == ["model.norm.weight"]


@pytest.mark.parametrize("kind", ["Q4_1", "Q8_0", "F16"])
def test_of_a_slice_only_its_blocks_are_dequantized(tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    type_ = gguf.GGMLQuantizationType[kind]
    tensors: dict[str, Any] = dict(llama_tensors({**LLAMA, "embedding_length": 128}))
    for name in ("blk.0.attn_q.weight", "blk.0.ffn_down.weight"):
        tensors[name] = (gguf.quants.quantize(tensors[name], type_), type_)
    path = tiny_llama(tmp_path / "m.gguf", fields={"embedding_length": 128, "rope.dimension_count": 32}, tensors=tensors)
    source = GGUFSource(read_facts(resolve_model(str(path))))
    whole, seen = read_whole(source), []

    def watched(raw: torch.Tensor, type_: int, shape: tuple[int, ...]) -> torch.Tensor:
        seen.append(shape)
        return dequantize(raw, type_, shape)

    monkeypatch.setattr("quire.load.gguf.dequantize", watched)
    heads = TensorSlice("model.layers.0.self_attn.q_proj.weight", ((32, 96), (0, 128)))  # rows in another order in the file
    columns = TensorSlice("model.layers.0.mlp.down_proj.weight", ((5, 20), (33, 60)))
    for part, tensor in source.read([heads, columns]):
        assert torch.equal(tensor, cut(whole[part.name], part.ranges))
    assert sorted(seen) == [(15, 27 if kind == "F16" else 32), (64, 128)]


def test_shards_are_one_model(tmp_path: Path) -> None:
    tensors = llama_tensors(LLAMA)
    names = sorted(tensors)
    for number, part in enumerate((names[:5], names[5:]), 1):
        write_gguf(
            tmp_path / f"m-0000{number}-of-00002.gguf",
            fields=LLAMA if number == 1 else {},
            tensors={n: tensors[n] for n in part},
        )
    found = read_all(tmp_path / "m-00001-of-00002.gguf")
    assert len(found) == len(tensors)
    assert np.array_equal(found["model.layers.1.mlp.up_proj.weight"], tensors["blk.1.ffn_up.weight"])


@pytest.mark.parametrize(("row"), [row for _, row in gguf_rows()], ids=lambda row: row.name)
def test_names_on_a_card_are_known_to_the_converter(row: GGUF) -> None:
    """A card names Hugging Face modules only to choose among those that the `gguf` package has for one tensor."""
    kind = next(kind for kind, name in gguf.MODEL_ARCH_NAMES.items() if name == row.name)
    known = gguf.get_tensor_name_map(kind, 1).mapping
    roots = (f"{row.layers}.0.", f"{row.layers.partition('.')[0]}." if row.root is None else row.root)
    assert not [name for name in row.names if not any(root + name in known for root in roots)]
