"""Run random requests through engines with random settings and compare tokens and logprob bits.

    python benchmarks/same_bits.py MODEL --requests 10000 --engines 4 --alone 200 --deterministic --load-format dummy

Every engine gets the same requests in another order, in groups of other sizes, with another number of requests and tokens per
step, page size, prefix cache, number of pages (few pages: preemption), CUDA graphs or eager execution, and n-gram drafts. The
last engine gets `--alone` of them one by one on an empty cache. With `--seconds`, an engine gets no further group after that
time, and the other engines get only requests that the first one answered. Exit code 1: a request differed.
"""

import argparse
import gc
import json
import math
import random
import time
from typing import Any

from quire import LLM, SamplingParams

LOGPROBS = 3
Answer = tuple[tuple[int, ...], tuple[tuple[int, float], ...]]


def make_requests(count: int, vocab: int, longest: int, rng: random.Random) -> list[tuple[list[int], dict[str, Any]]]:
    """Return prompts and sampling parameters. Half of the prompts begin with one of 16 shared prefixes."""
    prefixes = [[rng.randrange(10, vocab) for _ in range(rng.randint(8, longest))] for _ in range(16)]
    requests = []
    for k in range(count):
        prompt = list(rng.choice(prefixes)) if rng.random() < 0.5 else []
        size = int(2 ** rng.uniform(0, longest.bit_length()))
        prompt += [rng.randrange(10, vocab) for _ in range(size)] if rng.random() < 0.7 else [rng.randrange(10, 40)] * size
        params: dict[str, Any] = {"max_tokens": rng.randint(1, 24), "seed": k, "ignore_eos": True, "logprobs": LOGPROBS}
        params["temperature"] = rng.choice((0.0, 0.8, 1.3))
        if rng.random() < 0.2:
            params |= {"top_p": 0.9, "top_k": 50, "repetition_penalty": 1.1}
        requests.append((prompt, params))
    return requests


def random_settings(longest: int, drafts: bool, rng: random.Random) -> dict[str, Any]:
    settings: dict[str, Any] = {
        "max_num_seqs": rng.choice((5, 33, 128, 256)),
        "max_num_batched_tokens": rng.choice((256, 700, 2048, 8192)),
        "enable_prefix_caching": rng.random() < 0.7,
        "enforce_eager": rng.random() < 0.3,
        "block_size": rng.choice((16, 32)),
    }
    if rng.random() < 0.4:
        settings["num_gpu_blocks_override"] = 6 * longest // settings["block_size"]
    if rng.random() < 0.4 and drafts:
        settings["speculative_config"] = {"method": "ngram", "num_speculative_tokens": rng.randint(1, 5), "adaptive": False}
    return settings


def run(
    llm: LLM,
    requests: list[tuple[list[int], dict[str, Any]]],
    order: list[int],
    group: int,
    reset: bool,
    seconds: float = math.inf,
) -> dict[int, Answer]:
    answers: dict[int, Answer] = {}
    began = time.monotonic()
    for first in range(0, len(order), group):
        if time.monotonic() - began > seconds:
            break
        ids = order[first : first + group]
        if reset:
            llm.reset_prefix_cache()
        prompts = [{"prompt_token_ids": requests[k][0]} for k in ids]
        outputs = llm.generate(prompts, [SamplingParams(**requests[k][1]) for k in ids], use_tqdm=False)
        for k, output in zip(ids, outputs, strict=True):
            made = output.outputs[0]
            logprobs = [(token, value.logprob) for entry in made.logprobs or () for token, value in sorted(entry.items())]
            answers[k] = tuple(made.token_ids), tuple(logprobs)
    return answers


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("model")
    parser.add_argument("--requests", type=int, default=1000)
    parser.add_argument("--engines", type=int, default=3)
    parser.add_argument("--alone", type=int, default=50)
    parser.add_argument("--longest", type=int, default=512, help="prompt tokens, about half of the maximum")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--seconds", type=float, default=math.inf, help="of each engine")
    parser.add_argument("--deterministic", action="store_true")
    parser.add_argument("--no-drafts", action="store_true", help="for models that speculation is not supported with")
    parser.add_argument("--load-format", default="auto")
    parser.add_argument("--engine-args", type=json.loads, default={}, help="more arguments of every engine, as JSON")
    args = parser.parse_args()
    rng = random.Random(args.seed)
    requests: list[tuple[list[int], dict[str, Any]]] = []
    expected: dict[int, Answer] = {}
    wrong = 0
    for engine in range(args.engines + 1):
        alone = engine == args.engines
        settings = {"max_num_seqs": 1} if alone else random_settings(args.longest, not args.no_drafts, rng)
        llm = LLM(
            args.model, load_format=args.load_format, max_model_len=4 * args.longest, skip_tokenizer_init=True,
            deterministic=args.deterministic, **settings | args.engine_args,
        )  # fmt: skip
        if not requests:
            vocab = llm.llm_engine.model_config.get_vocab_size()
            requests = make_requests(args.requests, vocab, args.longest, rng)
        known = sorted(expected) or range(len(requests))
        order = rng.sample(known, min(args.alone, len(known)) if alone else len(known))
        began = time.monotonic()
        answers = run(llm, requests, order, 1 if alone else rng.randint(200, 2000), reset=alone, seconds=args.seconds)
        expected = expected or answers
        tokens = sum(answers[k][0] != expected[k][0] for k in answers)
        bits = sum(answers[k] != expected[k] for k in answers)
        wrong += bits
        row = {"engine": engine, **settings, "requests": len(answers), "other_tokens": tokens, "other_bits": bits}
        print(json.dumps(row | {"seconds": round(time.monotonic() - began, 1)}), flush=True)
        del llm
        gc.collect()
    raise SystemExit(1 if wrong else 0)


if __name__ == "__main__":
    main()
