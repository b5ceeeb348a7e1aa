"""The memory of a model, computed from its config, for `quire plan` and the runner.

The runner measures what it can; these formulas apply before anything is loaded.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from quire.files.gguf import FLOAT4_TYPES, GGML_TYPES, INTEGER_TYPES, SIX_BIT_TYPES, GGUFTensor
from quire.types.cache import DTYPE_BYTES

if TYPE_CHECKING:
    from quire.config.config import Config

FLOAT32_BYTES = 4
CUDA_CONTEXT_BYTES = 512 * 2**20  # of the driver and its libraries: a typical value, not measured
MAX_GRAPH_ROWS = 512  # requests in a step with a CUDA graph
GRAPH_ACTIVATION_BYTES = 512 * 2**20
MAX_HOST_CACHE_BYTES = 4 * 2**30
HOST_CACHE_SHARE = 0.4
_CPU_LAYOUTS = {
    "Q4_0": (4, False),
    "Q4_1": (4, True),
    "Q4_K": (4, True),
    "Q5_1": (8, True),
}  # (bits, has offset); all others: (8, False)


def graph_bytes(rows: int, vocabulary: int, kinds: int = 1) -> int:
    """Return the bytes that all CUDA graphs together may take: activations, and logits of `rows` requests in several sizes.

    kinds: combinations of features, such as with and without LoRA adapters, that have graphs of their own.
    """
    return kinds * GRAPH_ACTIVATION_BYTES + 3 * FLOAT32_BYTES * min(rows, MAX_GRAPH_ROWS) * vocabulary


def host_cache_bytes(available: int) -> int:
    """Return the cache's part of the host memory that is available after loading: a cautious share, at most 4 GiB."""
    return max(0, min(MAX_HOST_CACHE_BYTES, int(HOST_CACHE_SHARE * available)))


def cpu_weight_bytes(tensors: Iterable[GGUFTensor]) -> int:
    """Return the bytes of a GGUF file's tensors on a CPU that multiplies by blocks (`ops/nbits.py`).

    Weights have 4 or 8 bits; each 32 have a scale, the operator's sum, and an offset if the type has one. The embedding stays
    as stored.
    """
    total, embedding, tied = 0, 0, True
    for tensor in tensors:
        kind, block, _ = GGML_TYPES[tensor.type]
        bits, offset = _CPU_LAYOUTS.get(kind, (8, False))
        multiplied = tensor.elements // 32 * (4 * bits + FLOAT32_BYTES * (3 if offset else 2))
        if block == 1 or len(tensor.shape) != 2:
            total += tensor.elements * FLOAT32_BYTES
        elif tensor.name == "token_embd.weight":
            total += tensor.nbytes
            embedding = multiplied
        else:
            total += multiplied
            tied = tied and tensor.name != "output.weight"
    return total + (embedding if tied else 0)


def packed_weight_bytes(tensors: Iterable[GGUFTensor], element: int, experts: bool) -> int:
    """Return the bytes of a GGUF file's tensors in quantized layouts (`ops/blocks.py`), with scales in half precision.

    Types of up to 6 bits are packed to 6 bits (`ops/kernels/packed_6bit.py`), except in experts. The embedding, types without a
    layout, and experts if they are dequantized take `element` bytes per weight.
    """
    total = 0
    for tensor in tensors:
        kind = GGML_TYPES[tensor.type][0]
        bits, group, offset = (INTEGER_TYPES | FLOAT4_TYPES).get(kind, (8 * element, 0, False))
        if bits == 8 and kind in SIX_BIT_TYPES and len(tensor.shape) == 2:
            bits, group = 6, 16
        if tensor.name == "token_embd.weight" or len(tensor.shape) not in ((2, 3) if experts else (2,)):
            bits, group = 8 * element, 0
        total += tensor.elements * bits // 8 + (tensor.elements // group * (4 if offset else 2) if group else 0)
    return total


@dataclass(frozen=True)
class ParameterParts:
    """Parameters by the tokens that are multiplied by them. Biases and norms are left out (well under one percent)."""

    dense: int  # of all layers, multiplied by every token
    expert: int  # of one expert in every layer, multiplied by the tokens routed to it
    experts: int  # of a layer
    experts_per_token: int
    head: int  # multiplied by tokens that are sampled from
    embedding: int  # not multiplied; 0 where the head's matrix is also used for it
    query_width: int  # of all heads of a layer

    @property
    def total(self) -> int:
        return self.dense + self.expert * self.experts + self.head + self.embedding


def parameter_parts(hf: Mapping[str, Any]) -> ParameterParts:
    """Return the parameters of a decoder with these shapes."""
    shape = _Shape(hf)
    matrices = 3 if shape.gated else 2
    expert = matrices * shape.hidden * shape.expert_width if shape.experts else 0
    sparse = shape.hidden * shape.experts + shape.shared_experts * expert  # the router and the shared experts
    mlps = shape.sparse_layers * sparse + (shape.layers - shape.sparse_layers) * matrices * shape.hidden * shape.width
    table = shape.vocabulary * shape.hidden
    return ParameterParts(
        dense=shape.layers * shape.attention + mlps,
        expert=shape.sparse_layers * expert,
        experts=shape.experts,
        experts_per_token=shape.experts_per_token,
        head=table,
        embedding=0 if hf.get("tie_word_embeddings") else table,
        query_width=shape.query,
    )


def count_sums(hf: Mapping[str, Any]) -> tuple[int, int]:
    """Return the all-reduces of hidden states in all layers together under tensor parallelism, and how many of them are after
    experts. The others are after attention, after the MLP, and after shared experts.
    """
    shape = _Shape(hf)
    shared = bool(shape.shared_experts or hf.get("shared_expert_intermediate_size"))
    return 2 * shape.layers + shape.sparse_layers * shared, shape.sparse_layers


def estimate_parameters(hf: Mapping[str, Any]) -> int:
    return parameter_parts(hf).total


def activation_bytes(hf: Mapping[str, Any], *, element_bytes: int, tokens: int, rows: int) -> int:
    """Peak bytes of one step's intermediate values, for `tokens` tokens of which `rows` need logits.

    Buffers of a layer are reused by the next, so the peak is one layer's or the head's, whichever is larger:

        residual and normed hidden states    2 x tokens x hidden
        attention                            queries, keys, values and the output:  tokens x (2 x query + 2 x kv)
          of MLA                             the same and absorbed queries:         tokens x heads x (rank + head)
        or the MLP                           gate, up and their product:            tokens x 3 x width (per chosen expert)
        or the head, in float32              logits and their log-probabilities:    rows x 2 x vocabulary
    """
    shape = _Shape(hf)
    residual = 2 * tokens * shape.hidden * element_bytes
    attention = tokens * (2 * shape.query + 2 * shape.kv + shape.absorbed) * element_bytes
    width = shape.expert_width * shape.experts_per_token if shape.experts else shape.width
    mlp = tokens * (3 if shape.gated else 2) * width * element_bytes
    head = rows * 2 * shape.vocabulary * FLOAT32_BYTES
    return residual + max(attention, mlp, head)


def largest_step(config: "Config") -> int:
    """Return the estimated bytes of a step's activations. Draft tokens have logits too."""
    tokens, drafts = config.max_batched_tokens, 0 if config.speculation is None else config.speculation.num_speculative_tokens
    rows = min(tokens, config.max_seqs * (1 + drafts))
    return activation_bytes(config.facts.hf, element_bytes=DTYPE_BYTES[config.dtype], tokens=tokens, rows=rows)


class _Shape:
    """The sizes in a config, under any of their names."""

    def __init__(self, hf: Mapping[str, Any]) -> None:
        def number(*names: str, default: int = 0) -> int:
            found = next((hf[name] for name in names if isinstance(hf.get(name), int)), None)
            return default if found is None else int(found)

        self.hidden = number("hidden_size", "n_embd", "d_model")
        self.layers = number("num_hidden_layers", "n_layer", "n_layers", "num_layers")
        self.vocabulary = number("vocab_size")
        heads = number("num_attention_heads", "n_head", "n_heads", default=1)
        head_dim = number("head_dim", default=self.hidden // heads)
        self.query = heads * head_dim
        self.kv = number("num_key_value_heads", "num_kv_heads", "n_head_kv", default=heads) * head_dim
        self.attention = self.hidden * (self.query + 2 * self.kv) + self.query * self.hidden  # parameters of a layer
        self.absorbed = 0
        if rank := number("kv_lora_rank"):
            nope, rotary = number("qk_nope_head_dim"), number("qk_rope_head_dim")
            values, query_rank = number("v_head_dim", default=self.hidden // heads), number("q_lora_rank")
            self.query, self.kv = heads * (nope + rotary), rank + rotary
            self.absorbed = 2 * heads * (rank + rotary)
            queries = query_rank * (self.hidden + self.query) if query_rank else self.hidden * self.query
            self.attention = queries + self.hidden * (self.kv + heads * values) + rank * heads * (nope + values)
        self.width = number("intermediate_size", "ffn_dim", "n_inner", default=4 * self.hidden)
        self.gated = hf.get("model_type") not in ("gpt2", "opt")
        self.experts = number("num_local_experts", "num_experts", "n_routed_experts")
        self.shared_experts = number("n_shared_experts")
        self.sparse_layers = max(0, self.layers - number("first_k_dense_replace")) if self.experts else 0
        self.experts_per_token = number("num_experts_per_tok", default=1)
        self.expert_width = number("moe_intermediate_size", default=self.width)
