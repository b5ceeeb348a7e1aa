"""The columns of the family matrix (tests/e2e/test_matrix.py), as docs/models.md lists them."""

from collections.abc import Sequence
from dataclasses import dataclass

_REFERENCE, _SAME = "transformers' greedy tokens", "the same tokens, seed by seed"


@dataclass(frozen=True)
class Column:
    name: str
    holds: str
    argument: str = ""  # the argument that asks for it, where some kinds of models are refused


COLUMNS: Sequence[Column] = (
    Column("alone", _REFERENCE),
    Column("batched", f"{_REFERENCE}, prompts of four lengths together in steps of 16 tokens"),
    *(Column(f"chunks of {n}", _REFERENCE) for n in (1, 7, 16)),
    Column("prefix hit", f"{_REFERENCE}, and all full pages of the prompt come from the cache"),
    Column("preemption", f"{_REFERENCE}, with pages for one request and a little more"),
    Column("n > 1", f"{_REFERENCE}, for each of the three"),
    Column("seeded sampling", f"{_SAME}, alone and batched"),
    Column("grammar", "transformers' likeliest tokens of those a regular expression allows, beside a request without one"),
    Column("int4", "the tokens of the dequantized weights; kernels that multiply by 4-bit weights are close to them",
           "quantization"),
    Column("LoRA", "the tokens of weights merged with the adapter, batched with requests without one", "enable_lora"),
    Column("tp 2", f"{_REFERENCE}, divided among two processes", "tensor_parallel_size"),
    Column("speculation", f"{_REFERENCE}, with n-gram drafts", "speculative_config"),
    Column("engine restart", f"{_REFERENCE}, the engine's process killed while it answers"),
    Column("pooling", "transformers' normalized final hidden states, of the last token and of all", "runner"),
)  # fmt: skip
