"""What adapters cost on one GPU: Llama-8B's shape with random weights, and random adapters on all linear layers.

    python benchmarks/adapters.py [--rank 16] [--adapters 0 1 8 64] [--requests 256] [--rows single mixed cold]

single: one request, 128 in, 512 out, ms a token. mixed: so many requests, 100 to 1,024 in and out, of the adapters in turn, s.
0 adapters = enabled, and nobody asks for one; "off" = not enabled. cold: time to the first token beside eight streams of a
server's engine, with a0, which is there from the second time on, and with others that are read from their files, ms; and the
time between two tokens of a stream meanwhile.
"""

import argparse
import asyncio
import gc
import json
import random
import tempfile
import time
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from quire import LLM, AsyncLLM, LoRARequest, SamplingParams
from quire.config.args import EngineArgs

CONFIG = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 4096, "intermediate_size": 14336,
    "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 128256,
    "max_position_embeddings": 131072, "rms_norm_eps": 1e-5, "rope_theta": 500000.0, "hidden_act": "silu",
    "torch_dtype": "bfloat16", "tie_word_embeddings": False, "bos_token_id": 128000, "eos_token_id": 128001,
}  # fmt: skip
SHAPES = {
    "self_attn.q_proj": (4096, 4096), "self_attn.k_proj": (1024, 4096), "self_attn.v_proj": (1024, 4096),
    "self_attn.o_proj": (4096, 4096), "mlp.gate_proj": (14336, 4096), "mlp.up_proj": (14336, 4096),
    "mlp.down_proj": (4096, 14336),
}  # fmt: skip


def make_tensors(rank: int, layers: int) -> dict[str, torch.Tensor]:
    """Numbers as small as those of a trained one."""
    tensors = {}
    for layer in range(layers):
        for name, (outputs, inputs) in SHAPES.items():
            path = f"base_model.model.model.layers.{layer}.{name}"
            tensors[f"{path}.lora_A.weight"] = torch.empty(rank, inputs, dtype=torch.bfloat16).normal_(0, 0.01)
            tensors[f"{path}.lora_B.weight"] = torch.empty(outputs, rank, dtype=torch.bfloat16).normal_(0, 0.01)
    return tensors


def write_adapters(folder: Path, tensors: dict[str, torch.Tensor], rank: int, count: int) -> list[str]:
    """Different ones, though only by their scale: one file of numbers is written, and all of them are links to it."""
    folder.mkdir()
    save_file(tensors, folder / "numbers")
    for number in range(count):
        directory = folder / f"a{number}"
        directory.mkdir()
        (directory / "adapter_model.safetensors").hardlink_to(folder / "numbers")
        config = {"peft_type": "LORA", "r": rank, "lora_alpha": rank * (1 + number / 100)}
        (directory / "adapter_config.json").write_text(json.dumps(config))
    return [str(folder / f"a{number}") for number in range(count)]


def prompts(kind: str, count: int, vocabulary: int) -> tuple[list[dict[str, list[int]]], list[SamplingParams]]:
    dice = random.Random(kind)
    shapes = [(128, 512)] if kind == "single" else [(dice.randint(100, 1024), dice.randint(100, 1024)) for _ in range(count)]
    ids = [{"prompt_token_ids": [dice.randrange(10, vocabulary - 10) for _ in range(inputs)]} for inputs, _ in shapes]
    params = [SamplingParams(temperature=0, ignore_eos=True, max_tokens=out, detokenize=False) for _, out in shapes]
    return ids, params


def timed(llm: LLM, kind: str, count: int, loras: Sequence[LoRARequest | None], vocabulary: int, runs: int) -> float:
    """Seconds, of the best run, behind a few tokens of everybody."""
    ids, params = prompts(kind, count, vocabulary)
    used, best = [loras[i % len(loras)] for i in range(len(ids))], float("inf")
    few = SamplingParams(temperature=0, ignore_eos=True, max_tokens=4, detokenize=False)
    llm.generate([{"prompt_token_ids": each["prompt_token_ids"][:50]} for each in ids], few, use_tqdm=False, lora_request=used)
    for _ in range(runs):
        llm.reset_prefix_cache()
        began = time.perf_counter()
        llm.generate(ids, params, use_tqdm=False, lora_request=used)
        best = min(best, time.perf_counter() - began)
    return best


async def first_tokens(llm: AsyncLLM, loras: Sequence[LoRARequest], streams: int) -> None:
    """As a server does it: to the first token of a request with each, one after the other, beside `streams` that go on, and the
    longest time between two tokens of theirs meanwhile."""
    long = SamplingParams(temperature=0, ignore_eos=True, max_tokens=3000, detokenize=False)
    times: list[list[float]] = [[] for _ in range(streams)]

    async def stream(number: int) -> None:
        async for _ in llm.generate({"prompt_token_ids": [number + 5] * 64}, long, f"stream {number}"):
            times[number].append(time.perf_counter())

    running = [asyncio.create_task(stream(number)) for number in range(streams)]
    while min(map(len, times)) < 50:
        await asyncio.sleep(0.01)
    for turn, lora in enumerate(loras):
        began = time.perf_counter()
        prompt = {"prompt_token_ids": [100 + turn, *range(100, 227)]}
        async for _ in llm.generate(prompt, SamplingParams(max_tokens=1), f"asked {turn}", lora_request=lora):
            pass
        took = time.perf_counter() - began
        await asyncio.sleep(0.2)
        gaps = sorted(1000 * (b - a) for each in times for a, b in pairwise(each) if b > began)
        median, high = gaps[len(gaps) // 2], gaps[len(gaps) * 99 // 100]
        print(
            f"first token with {lora.lora_name}: {1000 * took:.1f} ms; between others' tokens {median:.1f} ms, p99 {high:.1f}, "
            f"at most {gaps[-1]:.1f}",
            flush=True,
        )
    for task in running:
        task.cancel()
    await asyncio.gather(*running, return_exceptions=True)


async def run_cold(args: dict[str, Any], loras: Sequence[LoRARequest], most: int, idle: float) -> None:
    llm = AsyncLLM.from_engine_args(EngineArgs.from_kwargs(**args))
    await llm.wait_ready()
    await asyncio.sleep(idle)
    await first_tokens(llm, [*[loras[0]] * 4, *loras[most:]], 8)
    llm.shutdown()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--adapters", type=int, nargs="*", default=[0, 1, 8, 64])
    parser.add_argument("--requests", type=int, default=256)
    parser.add_argument("--layers", type=int, default=CONFIG["num_hidden_layers"])
    parser.add_argument("--rows", nargs="*", default=["off", "single", "mixed", "cold"])
    parser.add_argument("--runs", type=int, default=2, help="of which the best one counts")
    parser.add_argument("--idle", type=float, default=0.0, help="seconds before `cold`, in which an engine records CUDA graphs")
    parser.add_argument("--max-model-len", type=int, default=4096)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        model = Path(folder) / "model"
        model.mkdir()
        (model / "config.json").write_text(json.dumps(CONFIG | {"num_hidden_layers": options.layers}))
        args = {
            "model": str(model), "load_format": "dummy", "skip_tokenizer_init": True, "dtype": "bfloat16",
            "max_model_len": options.max_model_len,
        }  # fmt: skip
        vocabulary = int(str(CONFIG["vocab_size"]))
        if "off" in options.rows:
            llm = LLM(**args)
            single = timed(llm, "single", 1, [None], vocabulary, options.runs)
            print(f"not enabled        single {1000 * single / 512:7.3f} ms", end="", flush=True)
            if "mixed" in options.rows:
                print(f"   mixed {timed(llm, 'mixed', options.requests, [None], vocabulary, options.runs):7.2f} s", end="")
            print(flush=True)
            llm.llm_engine.shutdown()
            del llm
            gc.collect()
            torch.cuda.empty_cache()
        most = max(1, *options.adapters)
        began = time.perf_counter()
        tensors = make_tensors(options.rank, options.layers)
        paths = write_adapters(Path(folder) / "adapters", tensors, options.rank, most + 3)
        print(f"wrote {len(paths)} adapters in {time.perf_counter() - began:.1f} s", flush=True)
        loras = [LoRARequest(f"a{i}", i + 1, path) for i, path in enumerate(paths)]
        adapted = {"enable_lora": True, "max_loras": most + 3, "max_lora_rank": options.rank}
        if "cold" in options.rows:  # first: its engine has a process of its own, and leaves nothing on the device
            asyncio.run(run_cold(args | adapted, loras, most, options.idle))
        if {"single", "mixed"} & {*options.rows}:
            llm = LLM(**args, **adapted)
            for count in options.adapters:
                used: list[LoRARequest | None] = list(loras[:count]) or [None]
                for lora in used:
                    if lora is not None:
                        llm.llm_engine.add_lora(lora)
                what = f"{count} adapters" if count else "enabled, unused"
                if "single" in options.rows and count <= 1:
                    took = timed(llm, "single", 1, used, vocabulary, options.runs)
                    print(f"{what:<18} single {1000 * took / 512:7.3f} ms", flush=True)
                if "mixed" in options.rows:
                    took = timed(llm, "mixed", options.requests, used, vocabulary, options.runs)
                    print(f"{what:<18} mixed  {took:7.2f} s", flush=True)
            llm.llm_engine.shutdown()
            del llm
            gc.collect()
            torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
