"""Tiny GGUF files, written when a test wants one."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np

LLAMA = {
    "block_count": 2, "context_length": 64, "embedding_length": 32, "feed_forward_length": 64, "attention.head_count": 4,
    "attention.head_count_kv": 2, "attention.layer_norm_rms_epsilon": 1e-5, "rope.freq_base": 10000.0,
    "rope.dimension_count": 8,
}  # fmt: skip


def write_gguf(
    path: Path,
    *,
    architecture: str = "llama",
    fields: Mapping[str, Any] | None = None,
    metadata: Mapping[str, Any] | None = None,
    tensors: Mapping[str, np.ndarray | tuple[np.ndarray, gguf.GGMLQuantizationType]] | None = None,
) -> Path:
    """`fields` get the architecture's prefix, `metadata` none; a tensor may come as (bytes, ggml type)."""
    writer = gguf.GGUFWriter(str(path), architecture)
    for key, value in {
        **{f"{architecture}.{name}": value for name, value in (fields or {}).items()},
        **(metadata or {}),
    }.items():
        _add(writer, key, value)
    for name, tensor in (tensors or {}).items():
        if isinstance(tensor, tuple):
            writer.add_tensor(name, tensor[0], raw_dtype=tensor[1])
        else:
            writer.add_tensor(name, np.ascontiguousarray(tensor))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def tiny_llama(path: Path, **changes: Any) -> Path:
    """The shapes of a whole llama model with a vocabulary of 48."""
    fields = {**LLAMA, **changes.pop("fields", {})}
    metadata = {
        "tokenizer.ggml.tokens": [f"t{i}" for i in range(46)] + ["<|im_end|>", "<|im_start|>"],
        "tokenizer.ggml.token_type": [1] * 46 + [3, 3],
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        **changes.pop("metadata", {}),
    }
    tensors = {**llama_tensors(fields), **changes.pop("tensors", {})}
    return write_gguf(path, fields=fields, metadata=metadata, tensors=tensors, **changes)


def llama_tensors(fields: Mapping[str, Any], seed: int = 0) -> dict[str, np.ndarray]:
    random = np.random.default_rng(seed)
    hidden, width, heads, kv = (
        int(fields[key])
        for key in ("embedding_length", "feed_forward_length", "attention.head_count", "attention.head_count_kv")
    )
    kv_rows = hidden // heads * kv

    def some(*shape: int) -> np.ndarray:
        return random.standard_normal(shape).astype(np.float32)

    tensors = {"token_embd.weight": some(48, hidden), "output_norm.weight": some(hidden)}
    for layer in range(int(fields["block_count"])):
        tensors |= {
            f"blk.{layer}.attn_norm.weight": some(hidden),
            f"blk.{layer}.attn_q.weight": some(hidden, hidden),
            f"blk.{layer}.attn_k.weight": some(kv_rows, hidden),
            f"blk.{layer}.attn_v.weight": some(kv_rows, hidden),
            f"blk.{layer}.attn_output.weight": some(hidden, hidden),
            f"blk.{layer}.ffn_norm.weight": some(hidden),
            f"blk.{layer}.ffn_gate.weight": some(width, hidden),
            f"blk.{layer}.ffn_up.weight": some(width, hidden),
            f"blk.{layer}.ffn_down.weight": some(hidden, width),
        }
    return tensors


def _add(writer: gguf.GGUFWriter, key: str, value: Any) -> None:
    if isinstance(value, bool):
        writer.add_bool(key, value)
    elif isinstance(value, int):
        writer.add_uint32(key, value)
    elif isinstance(value, float):
        writer.add_float32(key, value)
    elif isinstance(value, str):
        writer.add_string(key, value)
    else:
        writer.add_array(key, value)
