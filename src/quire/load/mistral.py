"""Read Mistral's consolidated*.safetensors under Hugging Face's names.

Their q and k rows have the two components of a rotary pair next to each other, unlike Hugging Face's.
"""

import re
from collections.abc import Collection, Iterator, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING

from torch import Tensor

from quire.load.gguf import split_pairs
from quire.load.safetensors import SafetensorsSource
from quire.load.source import TensorSlice, cut
from quire.ops.blocks import QuantizedMatrix
from quire.types.errors import ModelError

if TYPE_CHECKING:
    from quire.config.facts import ModelFacts

_NAMES = (
    (r"^tok_embeddings\.", "model.embed_tokens."),
    (r"^norm\.", "model.norm."),
    (r"^output\.", "lm_head."),
    (r"^layers\.", "model.layers."),
    (r"\.attention\.w([qkvo])\.", r".self_attn.\1_proj."),
    (r"\.attention_norm\.", ".input_layernorm."),
    (r"\.ffn_norm\.", ".post_attention_layernorm."),
    (r"\.feed_forward\.w1\.", ".mlp.gate_proj."),
    (r"\.feed_forward\.w2\.", ".mlp.down_proj."),
    (r"\.feed_forward\.w3\.", ".mlp.up_proj."),
    (r"\.(?:block_sparse_moe|feed_forward)\.gate\.", ".block_sparse_moe.gate."),
    (r"\.(?:block_sparse_moe|feed_forward)\.experts\.", ".block_sparse_moe.experts."),
)


def hf_name(name: str) -> str:
    for pattern, new in _NAMES:
        name = re.sub(pattern, new, name)
    return name


class MistralSource:
    def __init__(self, facts: "ModelFacts") -> None:
        self._source = SafetensorsSource(facts.files.path, facts.files.weights, indexed=False)
        self._stored = {hf_name(name): name for name in self._source.shapes}
        heads = int(facts.hf["num_attention_heads"])
        self._heads = {".q_proj.weight": heads, ".k_proj.weight": int(facts.hf.get("num_key_value_heads") or heads)}

    @property
    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        return {ours: self._source.shapes[stored] for ours, stored in self._stored.items()}

    def read(self, slices: Collection[TensorSlice]) -> Iterator[tuple[TensorSlice, Tensor]]:
        plain = {replace(part, name=self._stored[part.name]): part for part in slices if not self._heads_of(part.name)}
        for stored, tensor in self._source.read(plain):
            yield plain[stored], tensor
        for part in slices:
            if heads := self._heads_of(part.name):
                [(_, tensor)] = self._source.read([TensorSlice(self._stored[part.name])])
                yield part, cut(_split_pairs(part.name, tensor, heads), part.ranges)

    def find_rows(self, name: str) -> QuantizedMatrix | None:
        return None if self._heads_of(name) else self._source.find_rows(self._stored[name])

    def _heads_of(self, name: str) -> int:
        """Return the heads of a matrix whose rows are rotated; 0 for all others."""
        return next((heads for end, heads in self._heads.items() if name.endswith(end)), 0)


def _split_pairs(name: str, tensor: Tensor, heads: int) -> Tensor:
    """Return the rows of tensor [heads * head_dim, inputs] in Hugging Face's rotary order."""
    if tensor.ndim != 2 or tensor.shape[0] % (2 * heads):
        raise ModelError(f"tensor {name!r} must have rows for {heads} heads of even size; got {list(tensor.shape)}")
    return split_pairs(tensor, heads)
