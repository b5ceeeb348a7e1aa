"""docs/models.md: which models run, from which files, on which device. `python -m quire.models.reference` writes it."""

import json
from collections.abc import Mapping
from pathlib import Path
from textwrap import fill, shorten
from typing import Any

from quire.config.gguf_families import ARCHITECTURES
from quire.config.quantization import quantization_table
from quire.files.gguf import GGML_TYPES, READABLE_TYPES
from quire.models.composite import COMPOSITES, TEXT_MODELS
from quire.models.model_names import MODEL_NAMES, architectures_of
from quire.models.registry import FAMILIES
from quire.models.ways import ways

_HEAD = """# Models and quantization

Made from the registry (`src/quire/models/registry.py`) and the tables of file types; `quire models` prints the same for a
terminal. A model is named by a directory, a `.gguf` file, a hub id (`org/repo`, `org/repo:Q4_K_M`, `org/repo/FILE.gguf`) or
the alias `smollm2`.

## Models

SmolLM2 and many others have Llama's architecture: what counts is `architectures` in `config.json`. MoE: mixture of experts.
MLA: latent attention, whose KV cache holds one small row per token. Recurrent models keep a state instead of keys and values;
hybrid ones have layers of both kinds.

| model | kind | architectures |
|---|---|---|
NAMES
## Families

The architecture is what `config.json` says under `architectures`, or what transformers takes for its `model_type` where that
field is missing; in a GGUF file it is `general.architecture`.

| architecture | code | in a GGUF file | text model of composites |
|---|---|---|---|
"""
_COMPOSITES = """
**Models that also see or hear** run as text models where their text half is one of these families, and refuse media:
"""
_OTHERS = """
**Other decoders of `transformers`** run through the fallback (`pip install 'quire[transformers]'`, or
`model_impl="transformers"` by choice), with Quire's cache and attention. They are traced before their cache is planned, and
probed before they are trusted: heads of other sizes in every layer, several attentions in one and rotations for long texts are
what the model says they are. A model whose layers do not fit that cache (a recurrent state, a bias or a mask of its own,
positions that it counts itself) is run without keys and values: its cache holds tokens, every step computes the whole of its
sequences, and the log says so at the start. Its tokens are right and slow. What looks ahead, or is no causal language model of
transformers, is refused with the reason. `python scripts/sweep.py` tries all types that transformers has, each with a tiny
random checkpoint against transformers' own log-probabilities.
SWEPT

Code from a model's repository is never run: `AquilaForCausalLM`, `BaichuanForCausalLM`, `BailingMoeForCausalLM` (Ling),
`BailingMoeV2ForCausalLM`, `ChatGLMModel`, `DeciLMForCausalLM`, `DeepseekForCausalLM`, `ExaoneForCausalLM`,
`InternLMForCausalLM`, `InternLM2ForCausalLM`, `InternLM3ForCausalLM`, `IQuestCoderForCausalLM`, `MiMoForCausalLM`,
`MiniCPMForCausalLM`, `OrionForCausalLM`, `PanguEmbeddedForCausalLM`, `QWenLMHeadModel`, `RWForCausalLM`, `SolarForCausalLM`,
`StableLMEpochForCausalLM` and `XverseForCausalLM` are families of ours; their tokenizers may be code, too, and are then not to
be had (`--skip-tokenizer-init`). They were compared with their equals in transformers under other names, not with their own
code. `QWenLMHeadModel` is served up to the length it was trained with (`seq_length`). Encoders, encoder-decoders and pooling
are not served.

## Ways to run them

`tests/e2e/test_matrix.py` has a tiny random checkpoint of every family above, in most of its forms, and some of decoders that
transformers runs, with and without a cache of keys and values. Each is run in all of these ways on a CPU in float32; a cell is
an equality of tokens, or a refusal at the start that names the model and the argument. Where transformers' cache changes its
own answer (of Zamba 2 it leaves out `time_step_min` after the prompt), its forward pass over the whole text is what ours is
compared with. `make matrix` runs all of it, `make test` a part that changes with every commit. Run so far, on an ARM CPU: every
row in chunks of 1, 7 and 16, with prefix hits, preemption, n > 1, seeds, a grammar, int4, LoRA and on two ranks; of the other
ways (alone, batched, speculation, engine restart) a part.

WAYS

## Weights

| weights | a CPU | a CUDA GPU |
|---|---|---|
| safetensors in float32, bfloat16, float16 | float32, or `dtype` | bfloat16, or the checkpoint's float16, or `dtype` |
| GGUF, floating point (F32, F16, BF16, F64) | as above | as above |
| GGUF, quantized | stays quantized; with an explicit `dtype` dequantized when loaded | stays quantized, but for embeddings |
| consolidated*.safetensors and params.json (Mistral, Mixtral) | float32, or `dtype` | bfloat16, or `dtype` |
| safetensors with a `quantization_config` | as below | stays quantized |
| safetensors of floats with `quantization="fp8"` | rounded to 8 bits, held as floats | 8 bits |
| `load_format="dummy"` | random | random |

Quantized weights stay quantized where Quire's kernels were compiled (ARM, x86 with AVX-512 VNNI), and on x86 Linux with the
extra `cpu`; elsewhere they are dequantized when loaded, and the log says so. On a GPU Q4_0, Q4_1, Q4_K and MXFP4 stay in 4
bits, Q5_x and Q6_K are held in 6 (of experts in 8) and Q8_0 in 8; other types of GGUF files are dequantized. Experts of
mixtures stay quantized on a GPU, unless `enable_lora` asks for adapters, which go between their matrices; on a CPU they are
dequantized.

**Copies.** Quantized matrices whose scheme rounds no rows (4 bits, 8 bits of weights alone, GGUF's) have a copy in the model's
type beside them on a GPU, if all copies together take at most an eighth of the memory that the engine may use, and leave as
much again, at least a sixteenth of that memory, beside the cache of the longest request. Few rows read the few bits, many are
multiplied by the copy. An 8B in 4 bits has them on an H200 (13 GiB), not on a card of 80 GiB. The log and `quire plan` say what
was decided; `dequantized_copies=False` has none, and `True` gives them any share of the memory, or refuses to start where they
leave too little. The copy and the packed matrix sum in different orders: the last bits of a product depend on which is used.
Experts have none, nor do ranks that share a GPU, several engines with `kv_cache_memory_bytes`, and drafters.

**Which scheme when**, on an H200 (figures in [performance.md](performance.md)): `quantization="fp8"`, or a checkpoint in fp8 by
channel, is the one to begin with: half the memory, and faster than bfloat16 in all that was measured. 4 bits (awq, gptq,
compressed-tensors) take a quarter of the memory and are the fastest for one request and up to two dozen or so; beyond 64 at a
time they are as fast as bfloat16 where they have copies, and slower without: take them where memory is what is short, or
requests are few. Blocks of 128 x 128 in
fp8 gain in all matrices but the smallest, which are as fast at 64 requests and more. Experts gain from 8 and from 4 bits while
few tokens are on their way, and lose a fifth to a quarter in long prompts.

## The cache

Rotary positions are the same for every request, because keys are cached rotated. transformers changes two kinds of rope with
the length of the text; Quire follows vLLM:

- `dynamic`: the base is always that of a text of `max_position_embeddings` * `factor` tokens, whatever `max_model_len` is.
  transformers uses the unscaled base up to `max_position_embeddings` tokens, and another one for every length beyond.
- `longrope`: `long_factor` if `max_model_len` is larger than `original_max_position_embeddings`, else `short_factor`, for all
  texts. transformers uses `short_factor` for every text up to the original length; to get the same, set `max_model_len` to at
  most that length.

Latent attention (DeepSeek V2 and V3, and who took it over) keeps one row for each token, `kv_lora_rank` + `qk_rope_head_dim`
numbers for all heads together, in the model's own type; the keys and values of all heads are made of it. Prompts of many
tokens make them; few tokens take their queries to the rows instead (`attn/latent.py`). Ranks of tensor parallelism share the
heads, and each has the whole row. LoRA adapters may change all of its matrices. A cache of 8 bits is
refused, and so are sparse indexers (`index_topk`: DeepSeek V3.2, GLM 5).

Elsewhere keys and values have the model's own type, or 8 bits with `kv_cache_dtype` fp8 (fp8_e4m3) or fp8_e5m2: half of
bfloat16's memory and a scale for every token, head and of both, so a cache holds about 1.9 times the tokens for heads of 128
numbers (`quire plan` counts it). Every token's key and value is rounded once, by its own largest number, when it is written,
with or without a window; so tokens do not depend on how a prompt was cut, on a prefix hit or on a preemption.

- Scales that a checkpoint has for its cache are used instead (`k_scale` and `v_scale` of an attention layer, `k_proj.k_scale`,
  `k_proj.output_scale`, `k_cache.scale`, `kv_scale`; one number, or one for each head). One without the other, one that is no
  positive number and zero points are refused by name. With `kv_cache_dtype` auto they have no use. Queries are not rounded.
- On a CPU torch attends over such a cache, a copy of whose keys it makes in floats: it saves memory, not time. On a GPU the
  kernels read 8 bits; they were tested on an H200, where no whole engine with such a cache was measured yet.

## Quantized safetensors

`quantization_config` in config.json (or `compression_config`, `hf_quant_config.json`, `quantize_config.json`) names the
method. Matrices become one of a few forms as they are loaded (`ops/forms.py`): whole numbers of 4 and 8 bits in groups
(int4, int8), 8 bits with 8-bit activations (w8a8), floats of 8 bits (fp8: by tensor, output or block) and of 4 bits (fp4:
nvfp4, mxfp4, nf4). Which of them a device multiplies by as they are:

| method | other names | a CPU | a CUDA GPU |
|---|---|---|---|
{}
On a CPU, ranks of `tensor_parallel_size` give the tokens and logprobs of one process with them ([limits](parallel.md)).

What a device does not keep becomes floats of the model's type, with the same values; on a CPU so do experts. There
that is so for everything if there is an explicit `dtype`, and for act-order and groups that are no multiple of 32;
what stays is multiplied by rows of 8 bits, as with GGUF files. On a GPU `dtype` is the activations' type. mxfp4
is gpt-oss's: of its experts.

- awq: the gemm layout. gptq: 4 and 8 bits, formats gptq and gptq_v2, act-order, `dynamic`. compressed-tensors: packed int4
  and int8, int8, fp8, nvfp4 and mxfp4, symmetric or not, by tensor, output, group or block, several schemes in one model,
  `ignore`; neither sparse nor transformed ones. modelopt: FP8, NVFP4 and MXFP8, of nvfp4 the weights only. bitsandbytes:
  nf4, fp4, int8.
- Modules that the files have in floats are taken as floats, whatever the lists say. A merged matrix (q, k, v) whose parts
  are stored differently becomes floats.
- What is wrong in a detail is an error that names the tensor: groups that do not divide, a missing scale, one of 0 or NaN,
  one below 0 (but of whole numbers, where some tools write such), a table of nf4 or fp4 that is another, a NaN among numbers
  of 8 bits, a wrong shape or type, act-order that is divided among devices. Scales of activations that have no use here are
  looked at, too (compressed-tensors: not those of experts, which calibration may not have reached). A field of
  `quantization_config` of a wrong kind is an error that names it; so is a pattern that is no regular expression, or that
  takes more than 20 s for the names of the model.
- gptq: an order that the files have (`g_idx`) is followed whatever `desc_act` says. compressed-tensors: a target is a
  module's whole name, `re:` and a pattern, or `Linear`.
- Scales for a cache of 8 bits: see above.
- `quantization=` may repeat the method, by any of its names. On a checkpoint of floats `quantization="fp8"` rounds all
  matrices but embedding, head and routers as they are loaded: by output, on a GPU with activations by token
  (on a CPU those are not rounded).

## GGUF types

Bits per weight are the file's. On a CPU numbers are multiplied as 4 or 8 bits with a scale (and an offset) for every 32.
Q8_0, Q4_0, Q4_1, Q5_0, Q5_1 and Q4_K keep their values exactly; the other quantized types are rounded to 8 bits.

| type | bits per weight |
|---|---|
"""
_UNREADABLE = """
Not read, and refused by name: {}.
"""


def _sweep() -> dict[str, Any]:
    found: dict[str, Any] = json.loads((Path(__file__).parent / "served.json").read_text())
    return found


def swept() -> str:
    """What `scripts/sweep.py` found, which keeps it in served.json."""
    found = _sweep()
    by: dict[str, list[str]] = {}
    for kind, entry in found["types"].items():
        verdict = entry["verdict"]
        why = f": {shorten(entry['why'], LONGEST_REASON)}" if "why" in entry and verdict not in _SERVED else ""
        by.setdefault(verdict, []).append(f"`{kind}`{why}")
    count = sum(len(by.get(verdict, ())) for verdict in _SERVED)
    lines = [f"\nOf the {len(found['types'])} causal types of transformers {found['transformers']}, {count} are served:\n"]
    for verdict, title in (_SERVED | _NOT_SERVED).items():
        if not (names := by.get(verdict)):
            continue
        if verdict in _SERVED:
            text = f"- {title} ({len(names)}): {', '.join(names)}."
            lines.append(fill(text, WIDTH, subsequent_indent="  ", break_on_hyphens=False))
        else:
            lines += [f"- {title} ({len(names)}):", *(f"    - {name}" for name in names)]
    return "\n".join(lines) + "\n"


WIDTH, LONGEST_REASON = 128, 220
_SERVED = {"native": "families of our own", "fallback": "over our cache", "recomputed": "without keys and values"}
_NOT_SERVED = {"refused": "refused", "not built": "not tried, no tiny checkpoint of it was made"}


def table() -> str:
    by_class: dict[str, list[str]] = {}
    for name, found in ARCHITECTURES.items():
        by_class.setdefault(found.hf_class, []).append(f"`{name.partition(' ')[0]}`")
    text_of: dict[str, list[str]] = {}
    for model_type, architecture in TEXT_MODELS.items():
        text_of.setdefault(architecture, []).append(f"`{model_type}`")
    lines = [
        f"| `{name}` | `{_file(FAMILIES[name])}` | {_listed(by_class.get(name))} | {_listed(text_of.get(name))} |"
        for name in sorted(FAMILIES)
    ]
    families = "\n".join(lines) + "\n" + _COMPOSITES + "\n" + "\n".join(f"- `{name}`" for name in sorted(COMPOSITES)) + "\n"
    sizes = {name: 8 * nbytes / elements for name, elements, nbytes in GGML_TYPES.values()}
    types = "".join(f"| `{name}` | {sizes[name]:g} |\n" for name in READABLE_TYPES)
    unreadable = ", ".join(f"`{name}`" for name in sizes if name not in READABLE_TYPES)
    methods = "".join(
        f"| {name} | {_listed([f'`{other}`' for other in entry['names']])} | {_kept(entry, 'cpu')} | {_kept(entry, 'cuda')} |\n"
        for name, entry in quantization_table().items()
    )
    others = _OTHERS.replace("SWEPT\n", swept()).replace("WAYS\n", ways(_sweep()["types"])).format(methods)
    named = "".join(
        f"| {models} | {kind} | {', '.join(f'`{name}`' for name in architectures_of(short))} |\n"
        for models, kind, short in MODEL_NAMES
    )
    return _HEAD.replace("NAMES\n", named + "\n") + families + others + types + _UNREADABLE.format(unreadable)


def _kept(entry: Mapping[str, Any], device: str) -> str:
    return ", ".join(entry["kept"][device]) or "floats"


def _file(target: str) -> str:
    return target.partition(":")[0].removeprefix("quire.").replace(".", "/") + ".py"


def _listed(names: list[str] | None) -> str:
    return ", ".join(names or ["–"])


if __name__ == "__main__":
    print(table(), end="")
