"""`quire bench startup`: from the start of a process to its first token, several times. Flags have vLLM's names."""

import argparse
import dataclasses
import json
import sys
import time
from typing import Any

from quire.cli.bench_offline import OfflineReport, add_group, add_report_and_engine_flags, at_least, engine_args
from quire.cli.bench_serve import Flags, N

DESCRIPTION = """\
Starts the engine in new processes, one after the other, and measures the time from the start of the process until the engine is
ready and until the first token is there, with the parts that the engine tells. Cold starts find an empty cache of compiled
kernels, warm starts the one that is there; weights may be in the page cache of the system for both."""
STARTS: Flags = (
    ("num-iters-cold", "cold starts (default 1)", N | {"default": 1}),
    ("num-iters-warm", "warm starts (default 3)", N | {"default": 3}),
    ("num-iters-warmup", "warm starts that are not counted (default 0)", N | {"default": 0}),
    ("input-len", "tokens of the prompt (default 32)", N | {"default": 32}),
)
CHILD = "quire.cli.bench_startup"


def add_parser(subparsers: Any) -> None:
    parser = subparsers.add_parser(
        "startup",
        usage="%(prog)s [options]",
        help="how long an engine takes from the start of its process to the first token",
        description=DESCRIPTION,
    )
    add_group(parser, "starts", STARTS)
    add_report_and_engine_flags(parser)
    parser.set_defaults(run=run)


def run(namespace: argparse.Namespace) -> int:
    from quire.bench.machine import machine
    from quire.bench.report import startup_lines
    from quire.bench.startup import start_once, startup_figures
    from quire.types.errors import ConfigError

    report = OfflineReport("startup", namespace)
    for flag, _, _ in STARTS:
        at_least(flag, getattr(namespace, flag.replace("-", "_")), 1 if flag == "input-len" else 0)
    if not namespace.num_iters_cold + namespace.num_iters_warm:
        raise ConfigError("there is nothing to measure: --num-iters-cold or --num-iters-warm must be above 0")
    args = engine_args(namespace, tokens_only=False)
    command = [sys.executable, "-m", CHILD]
    question = {"engine": dataclasses.asdict(args), "input_len": namespace.input_len}
    device = device_of(args.device)
    for _ in range(namespace.num_iters_warmup):
        start_once(command, question, cold=False)
    starts = [start_once(command, question, cold=True) for _ in range(namespace.num_iters_cold)]
    starts += [start_once(command, question, cold=False) for _ in range(namespace.num_iters_warm)]
    facts = machine(device)
    report.print_heading("Start-up", args.model, {}, facts)
    print("\n".join(startup_lines(starts)))
    report.close(args.model, {}, facts, startup_figures(starts), {"starts": [start.as_dict() for start in starts]})
    return 0


def device_of(asked: str) -> str:
    """Without asking torch, which would take the device: a GPU where the system shows one."""
    from quire.bench.machine import gpu

    return asked if asked != "auto" else "cuda" if gpu() else "cpu"


def main() -> None:
    asked = json.load(sys.stdin)
    from quire.config.args import EngineArgs
    from quire.llm import LLM
    from quire.types.sampling import SamplingParams

    llm = LLM.from_engine_args(EngineArgs(**asked["engine"]))
    ready = time.monotonic()
    vocab_size = llm.llm_engine.config.facts.vocab_size
    prompt = [1 + i % (vocab_size - 1) for i in range(asked["input_len"])]
    llm.generate([prompt], SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True), use_tqdm=False)
    first_token = time.monotonic()
    timeline = getattr(llm.llm_engine, "timeline", None)
    parts = [] if timeline is None else timeline.parts
    print(json.dumps({"ready": ready, "first_token": first_token, "parts": parts}), flush=True)


if __name__ == "__main__":
    main()
