"""Measures host memory for KV cache pages on a GPU, and checks tokens, in one run of less than 6 minutes.

    python benchmarks/tier_gpu.py          Llama-3.1-8B's shape, dummy weights: needs 40 GB on the GPU and 20 GB of host memory
    python benchmarks/tier_gpu.py --tiny   a small model, also on a CPU: shows that the script runs

    link      pinned host memory to the GPU and back, without Quire
    restore   pages from host memory to the KV cache, with checksums, as plans do it
    TTFT      of a prompt whose pages are in host memory, and of one that is computed
    0 % hits  tokens per second of prompts that are all different, while every step evicts pages, with and without host memory
    decode    time of a step, alone and next to copies at most of the link's speed
    tokens    conversations whose pages leave and come back, for each kind of cache, against an engine without host memory

Exit code 1: tokens differ, or pages did not come back.
"""

import argparse
import gc
import json
import random
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch
from tier_faults import KINDS, Kind, make_model

from adapters import CONFIG as LLAMA_8B
from quire import LLM, SamplingParams

TINY = LLAMA_8B | {
    "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
    "head_dim": 16, "vocab_size": 2000, "torch_dtype": "float32", "bos_token_id": 0, "eos_token_id": 1,
}  # fmt: skip
HYBRID = Kind(
    "Bamba",
    {"attn_layer_indices": [1], "mamba_n_heads": 8, "mamba_d_head": 16, "mamba_n_groups": 1, "mamba_d_state": 16,
     "mamba_expand": 2, "mamba_d_conv": 4},
)  # fmt: skip
CHECKED = {**{name: KINDS[name] for name in ("grouped", "window", "latent", "fp8_e4m3")}, "hybrid": HYBRID}
PAGE = 16  # tokens
LINK_SHARE = 0.8  # of the link's speed, next to which decode steps are measured


@dataclass(frozen=True)
class Sizes:
    config: dict[str, Any]
    dtype: str
    prefix: int  # tokens of the prompt that comes back
    host_gib: float
    link_bytes: int
    prompts: tuple[int, int, int]  # count, tokens of each, tokens of each answer
    decoding: tuple[int, int, int]  # requests, tokens of each prompt, measured steps


LARGE = Sizes(LLAMA_8B, "bfloat16", 32_768, 12.0, 1 << 30, (48, 2048, 32), (32, 512, 100))
SMALL = Sizes(TINY, "float32", 512, 0.02, 1 << 24, (6, 128, 8), (4, 32, 10))


class Table:
    def __init__(self) -> None:
        self.wrong = False

    def row(self, what: str, value: str, beside: str = "") -> None:
        print(f"| {what} | {value} | {beside} |", flush=True)

    def check(self, what: str, right: bool, value: str) -> None:
        self.wrong |= not right
        self.row(what, value, "" if right else "WRONG")


def synchronize() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def seconds(run: Callable[[], object]) -> float:
    synchronize()
    began = time.perf_counter()
    run()
    synchronize()
    return time.perf_counter() - began


def rate(size: int, run: Callable[[], object]) -> float:
    """Return bytes per second, the median of 5 after 1."""
    run()
    return size / median(seconds(run) for _ in range(5))


def measure_link(table: Table, sizes: Sizes, device: str) -> float:
    """Return bytes per second from host memory to the device."""
    host = torch.empty(sizes.link_bytes, dtype=torch.uint8, pin_memory=device == "cuda").zero_()
    there = torch.empty(sizes.link_bytes, dtype=torch.uint8, device=device)
    up = rate(sizes.link_bytes, lambda: there.copy_(host, non_blocking=True))
    down = rate(sizes.link_bytes, lambda: host.copy_(there, non_blocking=True))
    table.row("link, to the device", f"{up / 1e9:.1f} GB/s")
    table.row("link, to host memory", f"{down / 1e9:.1f} GB/s")
    return up


def start(model: str, sizes: Sizes, device: str, pages: int, seqs: int, host: bool, **more: Any) -> LLM:
    tier = {"kv_offloading_size": sizes.host_gib} if host else {}
    return LLM(
        model, device=device, dtype=sizes.dtype, load_format="dummy", skip_tokenizer_init=True, block_size=PAGE,
        max_model_len=sizes.prefix + 64, max_num_seqs=seqs, num_gpu_blocks_override=pages, **tier, **more,
    )  # fmt: skip


def stop(llm: LLM) -> None:
    llm.llm_engine.shutdown()
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def arena_of(llm: LLM) -> Any:
    parts = llm.llm_engine.core.executor._runner._parts  # type: ignore[attr-defined]
    return next(part for part in parts if part.name == "tiers")._arena


def prompt(rng: random.Random, length: int, sizes: Sizes) -> dict[str, Any]:
    return {"prompt_token_ids": [rng.randrange(5, sizes.config["vocab_size"] - 5) for _ in range(length)]}


def ask(llm: LLM, prompts: list[Any], tokens: int) -> tuple[float, list[Any]]:
    params = SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True)
    began = time.perf_counter()
    outputs = llm.generate(prompts, params, use_tqdm=False)
    return time.perf_counter() - began, outputs


class Moves:
    """Copies between records and pages that no request uses."""

    def __init__(self, llm: LLM, count: int) -> None:
        self._pool, self._arena = llm.llm_engine.core.scheduler.pool, arena_of(llm)  # type: ignore[attr-defined]
        self.count = min(count, len(self._arena.memory), self._pool.free // 2)
        self._taken = self._pool.take(self.count)
        self._pages = np.array(self._taken, np.int32)
        self._records, self._tags = np.arange(self.count, dtype=np.int32), np.arange(self.count, dtype=np.int64)
        self.bytes = self._arena.memory.shape[1]
        with torch.inference_mode():
            self._arena.store(self._pages, self._records, self._tags)

    def fetch(self, count: int) -> list[Any]:
        part = slice(0, min(count, self.count))
        with torch.inference_mode():
            found: list[Any] = self._arena.fetch(self._records[part], self._pages[part], self._tags[part])
        return found

    def end(self) -> None:
        self._pool.drop(self._taken)


def measure_restore(table: Table, sizes: Sizes, model: str, device: str, link: float) -> None:
    llm = start(model, sizes, device, 3 * sizes.prefix // PAGE // 2 + 64, 4, True)
    moves, right = Moves(llm, 512), list[bool]()

    def fetch() -> None:
        moved = moves.fetch(moves.count)
        moved[-1].end.wait()
        right.extend(bool(each.right.all()) for each in moved)

    speed = rate(moves.count * moves.bytes, fetch)
    table.row(
        f"restore, {moves.count} pages of {moves.bytes:,} bytes", f"{speed / 1e9:.1f} GB/s", f"{speed / link:.0%} of the link"
    )
    table.check("restored pages", all(right), f"{sum(right)} of {len(right)} copies right")
    moves.end()
    rng = random.Random(1)
    first, computed, fetched = prompt(rng, sizes.prefix, sizes), [], []
    ask(llm, [first], 1)
    for _ in range(3):
        computed.append(ask(llm, [prompt(rng, sizes.prefix, sizes)], 1)[0])  # evicts `first`
        took, [output] = ask(llm, [first], 1)
        fetched.append((took, output.num_cached_tokens))
    table.row(f"TTFT of {sizes.prefix:,} tokens, computed", f"{1000 * median(computed):.1f} ms")
    table.row(
        "TTFT from host memory", f"{1000 * median(took for took, _ in fetched):.1f} ms", f"{fetched[-1][1]:,} tokens found"
    )
    lost = llm.llm_engine.core.stats.tier.lost  # type: ignore[attr-defined]
    table.check("pages that were wrong", not lost, str(lost))
    stop(llm)


def measure_no_hits(table: Table, sizes: Sizes, model: str, device: str) -> None:
    count, length, answer = sizes.prompts
    pages, speeds = 16 * (length + answer) // PAGE + 64, dict[bool, list[float]]()
    for host in (False, True, True, False):
        llm, rng = start(model, sizes, device, pages, 16, host), random.Random(2)
        ask(llm, [prompt(rng, length, sizes) for _ in range(16)], answer)  # fills the cache, and records graphs
        took, outputs = ask(llm, [prompt(rng, length, sizes) for _ in range(count)], answer)
        assert not any(output.num_cached_tokens for output in outputs)
        speeds.setdefault(host, []).append(count * (length + answer) / took)
        stop(llm)
    without, with_host = max(speeds[False]), max(speeds[True])
    table.row("0 % hits, without host memory", f"{without:,.0f} tokens/s")
    table.row("0 % hits, with host memory", f"{with_host:,.0f} tokens/s", f"{with_host / without - 1:+.1%}")


def measure_decode(table: Table, sizes: Sizes, model: str, device: str, link: float) -> None:
    requests, length, steps = sizes.decoding
    llm, rng = start(model, sizes, device, 3 * requests * (length + 6 * steps) // PAGE + 1024, requests, True), random.Random(3)
    moves, engine = Moves(llm, 1024), llm.llm_engine
    params = SamplingParams(temperature=0.0, max_tokens=6 * steps + 64, ignore_eos=True)
    for number in range(requests):
        engine.add_request(str(number), prompt(rng, length, sizes), params)
    for _ in range(length * requests // 1024 + 64):
        engine.step()
    times: dict[bool, list[float]] = {False: [], True: []}
    copied, alone = 1, 0.0
    for copies in (False, True, False, True):
        began = time.perf_counter()
        for _ in range(steps):
            if copies:
                moves.fetch(copied)
            engine.step()
        synchronize()
        times[copies].append((time.perf_counter() - began) / steps)
        if not alone:
            alone = times[False][0]
            copied = max(1, min(moves.count, int(LINK_SHARE * link * alone / moves.bytes)))
    alone, beside = min(times[False]), min(times[True])
    table.row(f"decode step of {requests} requests, alone", f"{1000 * alone:.2f} ms")
    table.row(f"next to {copied} pages fetched per step", f"{1000 * beside:.2f} ms", f"{beside / alone - 1:+.1%}")
    moves.end()
    stop(llm)


def check_tokens(table: Table, folder: Path, device: str) -> None:
    texts = [[(i * 7 + j * 3) % 250 + 3 for j in range(40 + i)] for i in range(8)]
    for name, kind in CHECKED.items():
        directory = folder / name.replace(" ", "-")
        model = make_model(kind, directory, 0)
        answers, fetched = [], 0
        for host in (False, True):
            tier = {"kv_offloading_size": 0.05} if host else {}
            llm = LLM(
                model, device=device, dtype="float32", skip_tokenizer_init=True, max_model_len=128, max_num_seqs=4,
                block_size=kind.page, num_gpu_blocks_override=kind.pages, **kind.args, **tier,
            )  # fmt: skip
            growing, found = [list(text) for text in texts], []
            for _ in range(3):
                for text in growing:
                    _, [output] = ask(llm, [{"prompt_token_ids": text}], 6)
                    found.append(list(output.outputs[0].token_ids))
                    text += [*found[-1], 5, 9]
            answers.append(found)
            fetched = llm.llm_engine.core.stats.tier.fetched  # type: ignore[attr-defined]
            stop(llm)
        same = sum(a == b for a, b in zip(*answers, strict=True))
        table.check(f"tokens, {name}", same == len(answers[0]) and fetched > 0, f"{same} of {len(answers[0])} answers equal")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tiny", action="store_true", help="a small model")
    sizes = SMALL if parser.parse_args().tiny else LARGE
    device = "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cpu" and sizes is LARGE:
        parser.error("there is no GPU; only --tiny runs on a CPU")
    table, began = Table(), time.perf_counter()
    name = torch.cuda.get_device_name() if device == "cuda" else "CPU"
    print(f"| {name} | measured | |\n|---|---|---|", flush=True)
    with tempfile.TemporaryDirectory() as folder:
        model = Path(folder) / "model"
        model.mkdir()
        (model / "config.json").write_text(json.dumps(sizes.config))
        link = measure_link(table, sizes, device)
        measure_restore(table, sizes, str(model), device, link)
        measure_no_hits(table, sizes, str(model), device)
        measure_decode(table, sizes, str(model), device, link)
        check_tokens(table, Path(folder), device)
    table.row("all", f"{time.perf_counter() - began:.0f} s")
    return int(table.wrong)


if __name__ == "__main__":
    sys.exit(main())
