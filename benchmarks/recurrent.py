"""A hybrid model on one GPU: Bamba-9B's shape with random weights, through `LLM`.

    python benchmarks/recurrent.py [--requests 256]

ready: from the call to an engine, s. single: one request, 128 in, 512 out, ms a token. mixed: so many requests, 100 to 1,024 in
and out, s. shared: time to the first token of 4,096 tokens that others had and 64 of its own, ms: cold, the second time (its
pages are there, the state is made where it branches off) and from then on.
"""

import argparse
import json
import random
import statistics
import tempfile
import time
from pathlib import Path

from quire import LLM, SamplingParams

CONFIG = {
    "architectures": ["BambaForCausalLM"], "model_type": "bamba", "hidden_size": 4096, "intermediate_size": 14336,
    "num_hidden_layers": 32, "attn_layer_indices": [9, 18, 27], "num_attention_heads": 32, "num_key_value_heads": 8,
    "vocab_size": 128256, "max_position_embeddings": 16384, "rms_norm_eps": 1e-5, "rope_theta": 10000.0, "hidden_act": "silu",
    "mamba_n_heads": 128, "mamba_d_head": 64, "mamba_n_groups": 1, "mamba_d_state": 128, "mamba_d_conv": 4, "mamba_expand": 2,
    "torch_dtype": "bfloat16", "tie_word_embeddings": False, "bos_token_id": 128000, "eos_token_id": 128001,
}  # fmt: skip
SHARED, OWN = 4096, 64


def ask(llm: LLM, shapes: list[tuple[int, int]], dice: random.Random, before: list[int] | None = None) -> float:
    """Seconds that requests of such lengths take, all at once."""
    before = before or []
    prompts = [{"prompt_token_ids": before + [dice.randrange(10, 120000) for _ in range(n)]} for n, _ in shapes]
    params = [SamplingParams(temperature=0.0, max_tokens=out, ignore_eos=True) for _, out in shapes]
    begun = time.perf_counter()
    llm.generate(prompts, params, use_tqdm=False)
    return time.perf_counter() - begun


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=256)
    parser.add_argument("--eager", action="store_true", help="without CUDA graphs")
    args = parser.parse_args()
    dice = random.Random(0)
    with tempfile.TemporaryDirectory() as directory:
        (Path(directory) / "config.json").write_text(json.dumps(CONFIG))
        begun = time.perf_counter()
        llm = LLM(directory, load_format="dummy", skip_tokenizer_init=True, enforce_eager=args.eager)
        print(f"ready    {time.perf_counter() - begun:8.2f} s", flush=True)
        ask(llm, [(128, 64)], dice)
        few, many = ask(llm, [(128, 1)], dice), ask(llm, [(128, 513)], dice)
        print(f"single   {(many - few) / 512 * 1000:8.2f} ms a token", flush=True)
        ask(llm, [(SHARED + OWN, 1)], dice)
        cold = [ask(llm, [(SHARED + OWN, 1)], dice) for _ in range(3)]
        shared = [dice.randrange(10, 120000) for _ in range(SHARED)]
        first, second, *warm = (ask(llm, [(OWN, 1)], dice, shared) for _ in range(6))
        print(f"shared   cold {statistics.median(cold) * 1000:.1f} ms, first {first * 1000:.1f}, second {second * 1000:.1f}, ",
              f"warm {statistics.median(warm) * 1000:.1f}", flush=True)  # fmt: skip
        shapes = [(dice.randint(100, 1024), dice.randint(100, 1024)) for _ in range(args.requests)]
        took = ask(llm, shapes, dice)
        print(f"mixed    {took:8.2f} s, {sum(out for _, out in shapes) / took:,.0f} tokens/s", flush=True)


if __name__ == "__main__":
    main()
