"""SmolLM2 in every scheme: what rounding its matrices costs, as perplexity on a text that every Python brings.

    python benchmarks/perplexity.py [--schemes float32,bfloat16,fp8,...] [--tokens 8192] [--length 512] [--device auto]

The model comes as a GGUF file, whose values are taken as the original: they are written as safetensors, in floats and, by the
writers of the tests, rounded to nearest, in the other schemes (no calibration: awq and gptq are the formats, not the methods).
The text is Python's language reference (`pydoc_data.topics`), cut into pieces of `--length` tokens, each read by itself.
"""

import argparse
import json
import math
import pydoc_data.topics
import sys
import tempfile
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))

import torch
from safetensors.torch import save_file

from quantized_checkpoints import SCHEMES
from quire import LLM, SamplingParams
from quire.config.facts import read_facts
from quire.files.resolve import resolve_model
from quire.load.gguf import GGUFSource
from quire.load.source import TensorSlice

FLOATS = ("float32", "bfloat16")
ALL = (*FLOATS, "gguf", "fp8", "ct-fp8-channel", "fp8-block", "ct-w8a8", "ct-int8", "gptq-8", "awq", "gptq", "ct-int4",
       "ct-mxfp4", "ct-nvfp4", "bnb-nf4", "kv-fp8")  # fmt: skip
MODEL = "smollm2"


def read_floats() -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    facts = read_facts(resolve_model(MODEL))
    source = GGUFSource(facts)
    tensors = {part.name: values.float() for part, values in source.read([TensorSlice(name) for name in source.tensors])}
    config = {**facts.hf, "architectures": [facts.architecture], "model_type": "llama", "tie_word_embeddings": True}
    return {name: value for name, value in config.items() if not isinstance(value, bytes)}, tensors


def write(place: Path, scheme: str, config: dict[str, Any], floats: dict[str, torch.Tensor]) -> None:
    tensors, extra = dict[str, torch.Tensor](), dict[str, Any]()
    quantization, writer_for = SCHEMES.get(scheme, (None, lambda _: None))
    if quantization is not None:
        extra["quantization_config"] = quantization
    for name, values in floats.items():
        path = name.removesuffix(".weight")
        writer = writer_for(path) if "_proj" in name else None
        if writer is None:
            tensors[name] = values if scheme == "float32" else values.bfloat16()
        else:
            tensors |= {f"{path}.{suffix}": tensor for suffix, tensor in writer(path, values)[0].items()}
    place.mkdir()
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, place / "model.safetensors")
    (place / "config.json").write_text(json.dumps({**config, **extra}))


def pieces_of(ids: list[int], total: int, length: int) -> list[list[int]]:
    return [ids[start : start + length] for start in range(0, min(total, len(ids)) - length + 1, length)]


def perplexity(llm: LLM, pieces: list[list[int]]) -> float:
    params = SamplingParams(max_tokens=1, prompt_logprobs=0)
    outputs = llm.generate([{"prompt_token_ids": piece} for piece in pieces], params, use_tqdm=False)
    found = [
        given[token].logprob
        for piece, output in zip(pieces, outputs, strict=True)
        for token, given in zip(piece[1:], output.prompt_logprobs[1:], strict=True)
    ]
    return math.exp(-sum(found) / len(found))


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--schemes", default=",".join(ALL))
    options.add_argument("--tokens", type=int, default=8192)
    options.add_argument("--length", type=int, default=512)
    options.add_argument("--device", default="auto")
    options.add_argument("--dtype", default="auto", help="of quantized models: float32 dequantizes them on a CPU")
    args = options.parse_args()
    config, floats = read_floats()
    tokenizer = LLM(MODEL, device="cpu", max_model_len=64).get_tokenizer()
    text = "\n\n".join(pydoc_data.topics.topics[name] for name in sorted(pydoc_data.topics.topics))
    pieces = pieces_of(tokenizer.encode(text[: 8 * args.tokens]), args.tokens, args.length)
    print(f"{len(pieces)} pieces of {args.length} tokens")
    base = None
    with tempfile.TemporaryDirectory() as folder:
        for scheme in args.schemes.split(","):
            online = {"fp8": {"quantization": "fp8"}, "kv-fp8": {"kv_cache_dtype": "fp8"}}.get(scheme, {})
            place = MODEL
            if scheme != "gguf":
                place = str(Path(folder) / scheme)
                write(Path(place), scheme, config, floats)
            dtype = scheme if scheme in FLOATS else args.dtype
            llm = LLM(
                place, dtype=dtype, device=args.device, skip_tokenizer_init=scheme != "gguf", max_num_seqs=4,
                max_model_len=args.length + 8, enable_prefix_caching=False, **online,
            )  # fmt: skip
            found = perplexity(llm, pieces)
            base = base or found
            print(f"{scheme:16} {found:8.3f}  {found / base:.4f}", flush=True)
            del llm


if __name__ == "__main__":
    main()
