"""`quire simulate MODEL`: traffic on engines that are not there, faster than time passes. Loads no weights, needs no torch.

The engines' configuration, scheduler, page pool and balancer are those of `quire serve`; how long steps take is computed
(`--card`) or was measured (`--timing`).
"""

import argparse
import asyncio
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from quire.bench.arrivals import LoadShape
from quire.bench.bounds import MOST_REQUESTS
from quire.bench.datasets.options import TokenCounter
from quire.bench.workloads import WORKLOADS
from quire.cli.model_tag import add_model_tag, engine_args
from quire.cli.simulate_flags import add_flags
from quire.cli.simulate_report import Outcome, report
from quire.cli.simulate_setting import Setting, make_setting
from quire.config.args import add_cli_arguments, nearest
from quire.config.config import Config
from quire.progress import doing, shown
from quire.sim.fleet import Fleet, Run, Visit
from quire.sim.generated import Characters, Generated, sharegpt_trace, workload_trace
from quire.sim.objectives import Objectives, Search, Trial, fewest_replicas
from quire.sim.router import router_maker
from quire.sim.trace import Trace, format_of, read_trace
from quire.step_loop import little_garbage_collection
from quire.text.tokenizer import Tokenizer
from quire.text.tokenizer_files import open_tokenizer
from quire.types.errors import ConfigError, QuireError

MOST_REPLICAS = 4096
# what belongs to one kind of traffic, and is None where it was not given
GENERATED = ("input_len", "output_len", "range_ratio", "prefix_len", "num_prefixes", "turns", "think_time")


def add_parser(subparsers: Any) -> None:
    parser = subparsers.add_parser(
        "simulate",
        usage="%(prog)s [MODEL] [options]",
        help="what a model would do on other devices, under any load",
        description="Runs scheduler, cache and balancer against a model of a device and a trace, in virtual time. Needs a "
        "config.json, no weights and no device. Takes all engine options.",
    )
    add_model_tag(parser)
    add_flags(parser)
    add_cli_arguments(parser)
    parser.set_defaults(run=run)


def run(namespace: argparse.Namespace) -> int:
    args = engine_args(namespace)
    objectives = _objectives(namespace)
    if namespace.html is not None:
        _check_writable(namespace.html)
    with shown(), doing("reading the model's configuration"):
        setting = make_setting(args, namespace)
    with shown(), doing("reading the traffic"):
        trace = make_trace(namespace, setting.config)
    began = time.perf_counter()
    with little_garbage_collection(), shown(), doing(f"simulating {len(trace.arrivals):,} requests"):
        outcome, search = _simulate(namespace, setting, trace, objectives)
    seconds = time.perf_counter() - began
    report(namespace, Outcome(setting, trace, namespace.router, outcome, objectives, search, seconds))
    return 0 if any(not visit.refused for visit in outcome.visits) and (search is None or search.kept) else 1


def _objectives(namespace: argparse.Namespace) -> Objectives | None:
    for flag, value, most in (
        ("replicas", namespace.replicas, MOST_REPLICAS),
        ("max-replicas", namespace.max_replicas, MOST_REPLICAS),
        ("num-prompts", namespace.limit, MOST_REQUESTS),
    ):
        if value is not None and value < 1:
            raise ConfigError(f"--{flag} must be at least 1, got {value}")
        if value is not None and value > most:
            raise ConfigError(f"--{flag} must be at most {most}: each takes memory here; got {value}")
    for flag, most in (("api-ms", 60_000), ("api-request-ms", 60_000), ("api-token-us", 1_000_000)):
        value = getattr(namespace, flag.replace("-", "_"))
        if value is not None and not 0 <= value <= most:
            unit = "milliseconds" if flag.endswith("ms") else "microseconds"
            raise ConfigError(f"--{flag} must be {unit} from 0 to {most:,}, got {value:g}")
    if namespace.slo_ttft is None and namespace.slo_tpot is None:
        return None
    return Objectives(namespace.slo_ttft, namespace.slo_tpot, namespace.slo_percentile)


def _check_writable(path: Path) -> None:
    """Before hours are simulated for it."""
    try:
        path.open("a").close()
    except OSError as error:
        raise ConfigError(f"cannot write --html {path}: {error}") from None


def make_trace(namespace: argparse.Namespace, config: Config) -> Trace:
    path: Path | None = namespace.trace
    load = LoadShape(namespace.request_rate, namespace.burstiness, namespace.max_concurrency)
    if namespace.workload is not None:
        if path is not None or load.timed:
            raise ConfigError(f"--workload {namespace.workload} comes all at once; drop --trace and --request-rate, or drop it")
        if namespace.workload not in WORKLOADS:
            known = nearest(namespace.workload, list(WORKLOADS)) or f"; there are {', '.join(WORKLOADS)}"
            raise ConfigError(f"--workload {namespace.workload!r} is not known{known}")
        _refuse_others(namespace, (), "--workload")
        return workload_trace(namespace.workload, config.facts.vocab_size, namespace.limit)
    if path is None:
        _refuse_others(namespace, GENERATED, "generated traffic")
        told = {name: value for name in GENERATED if (value := getattr(namespace, name)) is not None}
        requests = {} if namespace.limit is None else {"requests": namespace.limit}
        return Generated(**told, **requests, seed=config.seed).trace(load)
    kind = format_of(path, namespace.trace_format)
    if kind == "sharegpt":
        _refuse_others(namespace, ("chars_per_token",), "a trace of ShareGPT")
        counter = _counter(namespace.chars_per_token, config)
        return asyncio.run(sharegpt_trace(path, namespace.limit, load, config.seed, counter))
    _refuse_others(namespace, ("speedup",), f"a trace of {kind.title()}")
    if load.timed:
        raise ConfigError(f"{path} says when its requests come; drop --request-rate, or change the pace with --speedup")
    trace = read_trace(path, kind, namespace.limit)
    return trace if namespace.speedup is None else trace.faster(namespace.speedup)


def _refuse_others(namespace: argparse.Namespace, own: tuple[str, ...], what: str) -> None:
    """Flags of another kind of traffic."""
    for name in (*GENERATED, "chars_per_token", "speedup"):
        if name not in own and getattr(namespace, name) is not None:
            raise ConfigError(f"--{name.replace('_', '-')} does not apply to {what}; drop it")


class TokenizerCounter:
    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer

    async def count(self, text: str) -> int:
        return len(self._tokenizer.encode(text))


def _counter(chars_per_token: float | None, config: Config) -> TokenCounter:
    if chars_per_token is not None:
        return Characters(chars_per_token)
    try:
        tokenizer = open_tokenizer(config)
    except QuireError as error:
        raise ConfigError(f"ShareGPT has texts, and there is no tokenizer ({error}); say --chars-per-token 4") from None
    if tokenizer is None:
        raise ConfigError("ShareGPT has texts; drop --skip-tokenizer-init, or say --chars-per-token 4")
    return TokenizerCounter(tokenizer)


def _simulate(
    namespace: argparse.Namespace, setting: Setting, trace: Trace, objectives: Objectives | None
) -> tuple[Run, Search | None]:
    plan, config = setting.plan, setting.config
    make_router = router_maker(namespace.router, plan.pages, plan.page_size, config.max_seqs, config.prefix_caching)
    pages = setting.pages_for(trace)

    def simulate(replicas: int, wanted: Callable[[Visit], bool] = lambda _: True) -> Run:
        engines = [setting.replica(pages) for _ in range(replicas)]
        fleet = Fleet(engines, make_router(replicas), namespace.max_concurrency, setting.front)
        return fleet.run(trace, wanted)

    def tell(trial: Trial) -> None:
        share = "too many are late" if trial.share is None else f"{trial.share:.2%} are within"
        print(f"{trial.replicas} replica{'s' if trial.replicas > 1 else ''}: {share}", file=sys.stderr)

    if objectives is None or namespace.replicas is not None:
        return simulate(namespace.replicas or 1), None
    search = fewest_replicas(simulate, objectives, len(trace.arrivals), namespace.max_replicas, tell)
    return search.run, search
