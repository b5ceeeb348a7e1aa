"""A part of docs/models.md: the ways to run a family that tests/e2e/test_matrix.py goes through, and who is refused which."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from textwrap import fill
from typing import Any

from quire.config.conflicts import CONFLICTS
from quire.config.recurrent import READERS

WIDTH = 128
_BY_TRANSFORMERS = "models that `transformers` runs"
_THEIRS, _SAME = "transformers' greedy tokens", "the same tokens, seed by seed"


@dataclass(frozen=True)
class Way:
    name: str
    holds: str
    argument: str = ""  # that asks for it, where some kinds of models are refused it


WAYS: Sequence[Way] = (
    Way("alone", _THEIRS),
    Way("batched", f"{_THEIRS}, prompts of four lengths together in steps of 16 tokens"),
    *(Way(f"chunks of {n}", _THEIRS) for n in (1, 7, 16)),
    Way("prefix hit", f"{_THEIRS}, and all full pages of the prompt come from the cache"),
    Way("preemption", f"{_THEIRS}, with pages for one request and a little more"),
    Way("n > 1", f"{_THEIRS}, for each of the three"),
    Way("seeded sampling", f"{_SAME}, alone and batched"),
    Way("grammar", "transformers' likeliest tokens of those a regular expression allows, beside a request without one"),
    Way("int4", "the tokens of the floats that the 4 bits stand for; kernels that multiply by 4 bits are near them",
        "quantization"),
    Way("LoRA", "the tokens of matrices with the adapter in them, beside requests without one", "enable_lora"),
    Way("tp 2", f"{_THEIRS}, divided among two processes", "tensor_parallel_size"),
    Way("speculation", f"{_THEIRS}, with drafts of n-grams", "speculative_config"),
    Way("engine restart", f"{_THEIRS}, the engine's process killed while it answers"),
)  # fmt: skip


def ways(served: Mapping[str, Mapping[str, Any]]) -> str:
    """served: of each type of transformers, what became of it (served.json)."""
    found = {entry.get("architecture") for kind, entry in served.items() if kind in READERS and entry["verdict"] == "native"}
    recurrent = ", ".join(f"`{name}`" for name in sorted(filter(None, found)))
    kinds = {
        "without attention": "recurrent families without attention (Mamba)",
        "shared blocks": "`Zamba2ForCausalLM`",
        "by transformers": _BY_TRANSFORMERS,
    }
    lines = ["| | what holds | refused |", "|---|---|---|"]
    for way in WAYS:
        refused = [kinds[row.of] for row in CONFLICTS if row.of and row.what == way.argument]
        told = f"`{way.argument}`: {', '.join(refused)}" if refused else "–"
        lines.append(f"| {way.name} | {way.holds} | {told} |")
    return "\n".join([*lines, "", fill(f"Recurrent families: {recurrent}.", WIDTH, break_on_hyphens=False)]) + "\n"
