"""Offline workloads with random weights: every engine that runs them does exactly the same work.

    python benchmarks/offline.py MODEL [WORKLOAD ...] [--runs 2] [--eager]

MODEL is a directory with a config.json. Prompts are random token ids with fixed seeds, outputs are greedy and ignore the end of
text. One JSON line per run; the prefix cache is emptied between runs.
"""

import argparse
import json
import random
import time

from quire import LLM, SamplingParams

Work = list[tuple[list[int], int]]  # prompt, tokens to generate


def build(name: str, vocabulary: int) -> Work:
    dice = random.Random(f"wl-{name}")

    def ids(count: int) -> list[int]:
        return [dice.randrange(10, vocabulary - 10) for _ in range(count)]

    match name:
        case "single":  # one user: latency
            return [(ids(128), 512)]
        case "mixed":  # many users, all lengths
            return [(ids(dice.randint(100, 1024)), dice.randint(100, 1024)) for _ in range(256)]
        case "batch":  # an offline batch
            return [(ids(512), 256) for _ in range(1024)]
        case "prefill":  # long prompts, one token each
            return [(ids(4096), 1) for _ in range(64)]
        case "longctx":  # long contexts
            return [(ids(16384), 256) for _ in range(32)]
        case "shared":  # one long prefix for all
            head = ids(2048)
            return [(head + ids(64), 64) for _ in range(512)]
    raise SystemExit(f"unknown workload {name!r}: single, mixed, batch, prefill, longctx or shared")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("workloads", nargs="*", default=["single", "mixed"])
    parser.add_argument("--runs", type=int, default=2)
    parser.add_argument("--eager", action="store_true", help="without CUDA graphs")
    parser.add_argument("--max-model-len", type=int, default=20480)
    options = parser.parse_args()
    started = time.perf_counter()
    llm = LLM(
        options.model,
        load_format="dummy",
        skip_tokenizer_init=True,
        max_model_len=options.max_model_len,
        enforce_eager=options.eager,
    )
    print(json.dumps({"model": options.model, "start_seconds": round(time.perf_counter() - started, 1)}), flush=True)
    for name in options.workloads:
        work = build(name, llm.llm_engine.config.facts.vocab_size)
        params = [SamplingParams(temperature=0.0, max_tokens=count, ignore_eos=True) for _, count in work]
        for _ in range(options.runs):
            llm.reset_prefix_cache()
            began = time.perf_counter()
            llm.generate([prompt for prompt, _ in work], params, use_tqdm=False)
            seconds = time.perf_counter() - began
            out = sum(count for _, count in work)
            row = {"workload": name, "seconds": round(seconds, 3), "output_tokens_per_second": round(out / seconds, 1)}
            if len(work) == 1:
                row["ms_per_token"] = round(1000 * seconds / out, 3)
            print(json.dumps(row), flush=True)


if __name__ == "__main__":
    main()
