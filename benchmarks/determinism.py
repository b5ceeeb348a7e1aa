"""Show on a GPU what `--deterministic` promises and what it costs, in parts that can run one after the other.

    python benchmarks/determinism.py --list
    python benchmarks/determinism.py --results FILE [PART ...] [--seconds 40] [--gguf FILE]

bits SHAPE     random short requests with dummy weights through two engines with random settings and alone (`same_bits.py`)
table FORMAT   96 requests of 160 tokens: alone again with prefix hits, in batches of 8, all at once, in chunks of 256 tokens
kill           the engine is killed under 64 streams of 400 tokens, three times
cost FORMAT    single and mixed of Llama-3.1-8B, without and with the flag

Each part has a process of its own and appends its rows to FILE; parts that are in FILE already are not run again. At the end
all rows of FILE are printed as one table. --tiny replaces the shapes by small ones, for a run on a CPU. Exit code 1: a part
failed, or bits differed.
"""

import argparse
import asyncio
import json
import os
import random
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import same_bits

from quire import LLM, AsyncLLM, SamplingParams
from quire.config.args import EngineArgs
from quire.types.sampling import RequestOutputKind

HERE = Path(__file__).parent
Row = dict[str, Any]
COMMON = {"torch_dtype": "bfloat16", "hidden_act": "silu", "bos_token_id": 1, "eos_token_id": 2, "rms_norm_eps": 1e-6,
          "tie_word_embeddings": False}  # fmt: skip
SHAPES: dict[str, dict[str, Any]] = {
    "0.6B": COMMON | {
        "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "hidden_size": 1024, "intermediate_size": 3072,
        "num_hidden_layers": 28, "num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 151936,
        "max_position_embeddings": 40960, "rope_theta": 1e6, "tie_word_embeddings": True,
    },
    "8B": COMMON | {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 4096, "intermediate_size": 14336,
        "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8, "vocab_size": 128256,
        "max_position_embeddings": 131072, "rope_theta": 5e5,
    },
    "30B-A3B": COMMON | {
        "architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "hidden_size": 2048, "intermediate_size": 6144,
        "moe_intermediate_size": 768, "num_hidden_layers": 48, "num_attention_heads": 32, "num_key_value_heads": 4,
        "head_dim": 128, "num_experts": 128, "num_experts_per_tok": 8, "decoder_sparse_step": 1, "mlp_only_layers": [],
        "norm_topk_prob": True, "vocab_size": 151936, "max_position_embeddings": 40960, "rope_theta": 1e6,
    },
    "MLA": COMMON | {
        "architectures": ["DeepseekV2ForCausalLM"], "model_type": "deepseek_v2", "hidden_size": 2048, "num_hidden_layers": 27,
        "num_attention_heads": 16, "num_key_value_heads": 16, "kv_lora_rank": 512, "q_lora_rank": None,
        "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128, "n_routed_experts": 64, "n_shared_experts": 2,
        "num_experts_per_tok": 6, "moe_intermediate_size": 1408, "intermediate_size": 10944, "first_k_dense_replace": 1,
        "moe_layer_freq": 1, "topk_method": "greedy", "n_group": 1, "topk_group": 1, "scoring_func": "softmax",
        "norm_topk_prob": False, "routed_scaling_factor": 1.0, "vocab_size": 102400, "max_position_embeddings": 4096,
    },
    "hybrid": COMMON | {
        "architectures": ["BambaForCausalLM"], "model_type": "bamba", "hidden_size": 4096, "num_hidden_layers": 32,
        "attn_layer_indices": [9, 18, 27], "attn_rotary_emb": 64, "num_attention_heads": 32, "num_key_value_heads": 8,
        "intermediate_size": 14336, "mamba_n_heads": 128, "mamba_d_head": 64, "mamba_d_state": 128, "mamba_d_conv": 4,
        "mamba_expand": 2, "mamba_n_groups": 1, "mamba_chunk_size": 256, "vocab_size": 128256,
        "max_position_embeddings": 262144,
    },
}  # fmt: skip
# sizes of a dry run, of those that a shape has
TINY = {
    "hidden_size": 128, "intermediate_size": 256, "moe_intermediate_size": 128, "num_hidden_layers": 2, "head_dim": 32,
    "num_attention_heads": 4, "num_key_value_heads": 2, "num_experts": 8, "num_experts_per_tok": 2, "vocab_size": 512,
    "max_position_embeddings": 32768,
}  # fmt: skip
REQUESTS = {"0.6B": 50_000, "8B": 20_000, "30B-A3B": 14_000, "MLA": 10_000, "hybrid": 6_000}  # 10^5 together
AWQ = {"quant_method": "awq", "bits": 4, "group_size": 128, "version": "gemm", "zero_point": True}
FORMATS = ("bf16", "fp8", "awq", "gguf")
COSTS = ("bf16", "fp8", "awq", "lora")
BATCHES = {"alone again, with prefix hits": 1, "batches of 8": 8, "all at once": 96}
STREAMS, STREAM_TOKENS, ROUNDS = 64, 400, 3


class Bench:
    """The parts, and what they share."""

    def __init__(self, options: argparse.Namespace, folder: Path) -> None:
        self.options, self._folder = options, folder
        self.tiny: bool = options.tiny

    def model(self, shape: str, **more: Any) -> str:
        """Write a configuration and return its directory."""
        config = SHAPES[shape] | more
        if self.tiny:
            config |= {name: size for name, size in TINY.items() if name in config}
        (self._folder / "config.json").write_text(json.dumps(config))
        return str(self._folder)

    def engine(self, form: str, shape: str = "0.6B") -> Row:
        """Return the engine's arguments for a format of weights."""
        if form == "gguf":
            return {"model": self.options.gguf, "dtype": "float32" if self.tiny else "bfloat16", "skip_tokenizer_init": True}
        more = {"quantization_config": AWQ} if form == "awq" else {}
        args = {"model": self.model(shape, **more), "load_format": "dummy", "skip_tokenizer_init": True}
        return args | ({"quantization": "fp8"} if form == "fp8" else {}) | ({"dtype": "float32"} if self.tiny else {})

    def bits(self, shape: str) -> list[Row]:
        count = 40 if self.tiny else REQUESTS[shape]
        ran = subprocess.run(
            [sys.executable, HERE / "same_bits.py", self.model(shape), "--requests", str(count), "--engines", "2",
             "--alone", "5" if self.tiny else "40", "--longest", "64", "--seconds", str(self.options.seconds),
             "--deterministic", "--load-format", "dummy", *(["--no-drafts"] if shape == "hybrid" else []),
             *(["--engine-args", '{"dtype": "float32", "block_size": 16}'] if self.tiny else [])],
            stdout=subprocess.PIPE, text=True, check=False,
        )  # fmt: skip
        found = [json.loads(line) for line in ran.stdout.splitlines() if line.startswith("{")]
        if len(found) != 3:
            raise RuntimeError(f"same_bits.py ended with code {ran.returncode} after {len(found)} of 3 engines")
        names = "first engine", "second engine", "alone on an empty cache"
        return [
            {"what": name, "requests": row["requests"], "other tokens": row["other_tokens"], "other bits": row["other_bits"],
             "seconds": row["seconds"]}
            for name, row in zip(names, found, strict=True)
        ]  # fmt: skip

    def table(self, form: str) -> list[Row]:
        rng, tokens = random.Random(0), 12 if self.tiny else 160
        args = self.engine(form) | {"deterministic": True, "max_model_len": 1024}
        llm = LLM(**args)
        vocab = llm.llm_engine.model_config.get_vocab_size()
        common = {"max_tokens": tokens, "ignore_eos": True, "logprobs": same_bits.LOGPROBS}
        requests = [
            ([rng.randrange(10, vocab) for _ in range(rng.randint(4, 400))], common | {"temperature": 0.9 * (k % 2), "seed": k})
            for k in range(12 if self.tiny else 96)
        ]
        order = list(range(len(requests)))
        expected = same_bits.run(llm, requests, order, 1, reset=True)
        rows = []
        for name, group in BATCHES.items():
            rng.shuffle(order)
            rows.append(difference(name, same_bits.run(llm, requests, order, group, reset=False), expected))
        llm.llm_engine.shutdown()
        llm = LLM(**args, max_num_batched_tokens=256, enable_prefix_caching=False)
        found = same_bits.run(llm, requests, order, len(order), reset=False)
        return [*rows, difference("all at once in chunks of 256 tokens, no prefix cache", found, expected)]

    def kill(self) -> list[Row]:
        return asyncio.run(kill(self.engine("bf16"), 8 if self.tiny else STREAMS, 40 if self.tiny else STREAM_TOKENS))

    def cost(self, form: str) -> list[Row]:
        measure = self._adapters if form == "lora" else self._throughput
        before, after = (measure(form, flag) for flag in (False, True))
        return [
            {"what": name, "usual": usual, "deterministic": after[name], "cost, %": round(100 * (after[name] / usual - 1), 1)}
            for name, usual in before.items()
        ]

    def _throughput(self, form: str, flag: bool) -> dict[str, float]:
        """Return the figures of `quire bench throughput`."""
        given = self.engine(form, "8B")
        file = self._folder / "result.json"
        work = ["--workload", "cpu1"] if self.tiny else ["--workload", "single", "mixed"]
        subprocess.run(
            [sys.executable, "-m", "quire.cli.main", "bench", "throughput", "--model", given["model"], "--load-format", "dummy",
             "--max-model-len", "20480", "--runs", "2", *work, "--output-json", str(file),
             *(["--quantization", "fp8"] if form == "fp8" else []), *(["--dtype", "float32"] if self.tiny else []),
             *(["--deterministic"] if flag else [])],
            check=True, stdout=subprocess.DEVNULL,
        )  # fmt: skip
        figures: dict[str, float] = json.loads(file.read_text())["figures"]
        return figures

    def _adapters(self, form: str, flag: bool) -> dict[str, float]:  # noqa: ARG002
        """Return the lines of `adapters.py` with one adapter on all linear layers."""
        ran = subprocess.run(
            [sys.executable, HERE / "adapters.py", "--adapters", "1", "--rows", "single", "mixed", "--runs", "2"],
            check=True, stdout=subprocess.PIPE, text=True, env=os.environ | {"VLLM_BATCH_INVARIANT": str(int(flag))},
        )  # fmt: skip
        return {name: float(value) for name, value in re.findall(r"1 adapters +(single|mixed) +([\d.]+)", ran.stdout)}

    def parts(self) -> dict[str, Callable[[], list[Row]]]:
        found: dict[str, Callable[[], list[Row]]] = {f"bits {shape}": partial(self.bits, shape) for shape in SHAPES}
        found |= {f"table {form}": partial(self.table, form) for form in FORMATS if form != "gguf" or self.options.gguf}
        return found | {"kill": self.kill} | {f"cost {form}": partial(self.cost, form) for form in COSTS}


def difference(name: str, found: dict[int, same_bits.Answer], expected: dict[int, same_bits.Answer]) -> Row:
    tokens = sum(found[k][0] != expected[k][0] for k in found)
    return {
        "what": name,
        "requests": len(found),
        "other tokens": tokens,
        "other bits": sum(found[k] != expected[k] for k in found),
    }


async def kill(args: Row, streams: int, count: int) -> list[Row]:
    options = {"deterministic": True, "max_model_len": 2048, "max_engine_restarts": ROUNDS + 1, "warm_restart": True}
    llm = AsyncLLM.from_engine_args(EngineArgs(**args, **options))
    latest = [0] * streams
    arrived = [0.0]

    async def stream(i: int, name: str) -> list[tuple[int, float]]:
        params = SamplingParams(
            max_tokens=count,
            temperature=0.9 * (i % 2),
            seed=i,
            ignore_eos=True,
            logprobs=0,
            output_kind=RequestOutputKind.DELTA,
        )
        found = []
        async for output in llm.generate({"prompt_token_ids": list(range(5 + i, 45 + i))}, params, f"{name}-{i}"):
            one = output.outputs[0]
            found += [(token, step[token].logprob) for token, step in zip(one.token_ids, one.logprobs or (), strict=True)]
            latest[i], arrived[0] = len(found), time.monotonic()
        return found

    try:
        await llm.wait_ready()
        expected = await asyncio.gather(*(stream(i, "first") for i in range(streams)))
        rows = []
        for number in range(ROUNDS):
            latest[:] = [0] * streams
            running = [asyncio.create_task(stream(i, str(number))) for i in range(streams)]
            while min(latest) < count // 8:
                await asyncio.sleep(0.002)
            held, at = sum(length < count for length in latest), time.monotonic()
            os.kill(llm.engines[0].pid, signal.SIGKILL)
            restarts = llm.restarts
            while llm.restarts == restarts:
                await asyncio.sleep(0.002)
            noticed = time.monotonic()
            while arrived[0] < noticed:
                await asyncio.sleep(0.002)
            pause = arrived[0] - at
            found = await asyncio.gather(*running)
            wrong = sum(one != other for one, other in zip(found, expected, strict=True))
            rows.append({"what": f"round {number + 1}", "open streams": held, "other bits": wrong, "pause, s": round(pause, 2)})
        return rows
    finally:
        llm.shutdown()


def print_table(rows: list[Row]) -> None:
    columns = ["part", *dict.fromkeys(name for row in rows for name in row if name != "part")]
    print("| " + " | ".join(columns) + " |\n" + "|---" * len(columns) + "|")
    for row in rows:
        print("| " + " | ".join(str(row.get(name, "")) for name in columns) + " |")


def read_rows(file: Path) -> list[Row]:
    return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []


def run_part(part: str, options: argparse.Namespace) -> bool:
    """Run one part in a process of its own. Return whether it succeeded."""
    began = time.monotonic()
    flags = ["--seconds", str(options.seconds), *(["--tiny"] if options.tiny else [])]
    flags += ["--gguf", options.gguf] if options.gguf else []
    ran = subprocess.run([sys.executable, __file__, part, "--results", str(options.results), "--here", *flags], check=False)
    print(f"{part}: {'done' if ran.returncode == 0 else 'failed'} after {time.monotonic() - began:.0f} s", flush=True)
    return ran.returncode == 0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="*", help="default: all")
    parser.add_argument("--results", type=Path, default=Path("determinism.jsonl"), help="one JSON object per row")
    parser.add_argument("--seconds", type=float, default=40, help="of each engine of `bits`; then it begins no further batch")
    parser.add_argument("--gguf", default="", help="a GGUF file for `table gguf`")
    parser.add_argument("--tiny", action="store_true", help="small shapes in float32, for a CPU")
    parser.add_argument("--list", action="store_true", help="print the parts")
    parser.add_argument("--here", action="store_true", help="run the part in this process")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        parts = Bench(options, Path(folder)).parts()
        if unknown := set(options.parts) - set(parts):
            parser.error(f"parts must be of {', '.join(parts)}; got {', '.join(sorted(unknown))}")
        if options.list:
            print("\n".join(parts))
            return 0
        if options.here:
            rows = [{"part": options.parts[0], **row} for row in parts[options.parts[0]]()]
            with options.results.open("a") as file:
                file.writelines(json.dumps(row) + "\n" for row in rows)
            return 0
    done = {row["part"] for row in read_rows(options.results)}
    failed = [part for part in options.parts or parts if part not in done and not run_part(part, options)]
    rows = read_rows(options.results)
    print_table(rows)
    return int(bool(failed) or any(row.get("other bits") for row in rows))


if __name__ == "__main__":
    sys.exit(main())
