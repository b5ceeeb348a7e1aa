"""`quire bench latency`: one batch of equal requests, again and again. Flags and defaults are those of vLLM's command."""

import argparse
import sys
from typing import Any

from quire.cli.bench_offline import OfflineReport, add_group, add_report_and_engine_flags, at_least, engine_args, engine_facts
from quire.cli.bench_serve import YES, Flags, N, X

DESCRIPTION = """\
Runs one batch of requests of equal length many times and reports how long the whole batch takes, the time to the first token
(mean over all requests) and the time for each token after it. The prefix cache is emptied before every iteration."""
BATCH: Flags = (
    ("batch-size", "requests in the batch (default 8)", N | {"default": 8}),
    ("input-len", "tokens of each prompt (default 32)", N | {"default": 32}),
    ("output-len", "tokens to generate for each (default 128)", N | {"default": 128}),
    ("num-iters-warmup", "iterations that are not counted (default 10)", N | {"default": 10}),
    ("num-iters", "iterations (default 30)", N | {"default": 30}),
    ("temperature", "(default 0: greedy)", X | {"default": 0.0}),
    ("disable-detokenize", "token ids only, even with --no-skip-tokenizer-init", YES),
)


def add_parser(subparsers: Any) -> None:
    parser = subparsers.add_parser(
        "latency",
        usage="%(prog)s [options]",
        help="how long a model takes for one batch",
        description=DESCRIPTION,
    )
    add_group(parser, "batch", BATCH)
    add_report_and_engine_flags(parser)
    parser.set_defaults(run=run)


def run(namespace: argparse.Namespace) -> int:
    import numpy as np

    from quire.bench.machine import machine
    from quire.bench.offline import OfflineWork, latency_of, measure
    from quire.bench.report import latency_lines
    from quire.bench.samples import RandomPrompts
    from quire.types.sampling import SamplingParams

    report = OfflineReport("latency", namespace)
    for flag, _, _ in BATCH[:5]:
        at_least(flag, getattr(namespace, flag.replace("-", "_")), 0 if flag == "num-iters-warmup" else 1)
    args = engine_args(namespace, tokens_only=True)
    from quire.llm import LLM

    llm = LLM.from_engine_args(args)
    engine = engine_facts(llm)
    rng, alphabet = np.random.default_rng(args.seed), RandomPrompts(llm.llm_engine.config.facts.vocab_size)
    params = SamplingParams(
        temperature=namespace.temperature,
        max_tokens=namespace.output_len,
        ignore_eos=True,
        detokenize=not namespace.disable_detokenize,
    )
    prompts = [alphabet.draw(rng, namespace.input_len).tolist() for _ in range(namespace.batch_size)]
    work = OfflineWork("latency", prompts, [params] * namespace.batch_size)
    report.print_heading("Latency", args.model, engine, machine(engine["device"]))
    print(f"{namespace.num_iters_warmup} iterations to warm up, {namespace.num_iters} measured", file=sys.stderr)
    latency = latency_of(measure(llm, work, warmups=namespace.num_iters_warmup, runs=namespace.num_iters))
    print("\n".join(latency_lines(latency)))
    report.close(args.model, engine, machine(engine["device"]), latency.figures(), latency.as_dict())
    return 0
