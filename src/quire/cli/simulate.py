"""`quire simulate MODEL`: traffic on engines that are not there, faster than time passes. Loads no weights, needs no torch.

The engines' configuration, scheduler, page pool and balancer are those of `quire serve`; how long steps take is computed
(`--card`) or was measured (`--timing`).
"""

import argparse
import asyncio
import dataclasses
import json
import math
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from quire.bench.arrivals import LoadShape
from quire.bench.datasets.options import TokenCounter
from quire.bench.record import MOST_REQUESTS
from quire.bench.samples import WORKLOADS
from quire.cache.layout import MOST_SNAPSHOTS, make_layout
from quire.cli.bench_serve import YES, Flags, N, X
from quire.cli.parser import add_model_tag, engine_args
from quire.cli.plan import MemoryPlan, gib, plan_for, read_size, resolve_for
from quire.config.args import EngineArgs, add_cli_arguments, nearest
from quire.config.config import Config
from quire.config.facts import sizes_of
from quire.config.memory import parameter_parts
from quire.engine.layouts import make_scheduler
from quire.progress import doing, shown
from quire.sched.scheduler import AHEAD, Scheduler
from quire.sim.analytic import AnalyticTiming, windows_of
from quire.sim.cards import CARDS, Card, find_card, read_rate
from quire.sim.figures import Figures, figures_of
from quire.sim.fleet import NO_FRONT, ROUTERS, USUAL_FRONT, Fleet, FrontTime, Run, Visit, router_maker
from quire.sim.measured import read_measured
from quire.sim.objectives import Objectives, Search, Trial, fewest_replicas
from quire.sim.page import latency_cells, lines, load_cells, page, rows_of, trial_cells
from quire.sim.replica import Device, Replica, Timing
from quire.sim.trace import FORMATS, Characters, Generated, Trace, format_of, read_trace, sharegpt_trace, workload_trace
from quire.step_loop import little_garbage_collection
from quire.text.tokenizer import Tokenizer
from quire.text.tokenizer_files import open_tokenizer
from quire.types.cache import CacheLayout
from quire.types.errors import ConfigError, QuireError

FILE = {"metavar": "FILE", "type": Path}
TRAFFIC: Flags = (
    ("trace", "Azure's CSV, Mooncake's JSON lines, ShareGPT's JSON", FILE),
    ("trace-format", "(default: by the file's name)", {"choices": ("auto", *FORMATS), "default": "auto"}),
    ("speedup", "requests of a trace come so many times as fast", X),
    ("workload", "one of `quire bench throughput`, all at once", {"metavar": "NAME"}),
    ("request-rate", "requests a second, where no trace has them", X | {"default": math.inf}),
    ("max-concurrency", "most requests at once, all replicas together", N),
)
GENERATED_FLAGS: Flags = (
    ("input-len", "tokens of prompts (default 1024)", N),
    ("output-len", "tokens of answers (default 128)", N),
    ("range-ratio", "lengths from (1 - X) to (1 + X) times that (default 0)", X),
    ("prefix-len", "tokens before each prompt, shared by many (default 0)", N),
    ("num-prefixes", "different ones of these (default 1)", N),
    ("turns", "of a conversation: a prompt is all that was said before, and more (default 1)", N),
    ("think-time", "seconds between turns (default 10)", X),
    ("burstiness", "of arrivals: 1 is Poisson, below comes in bursts, above is steadier (default 1)", X | {"default": 1.0}),
    ("chars-per-token", "of ShareGPT's texts, where there is no tokenizer", X),
)
DEVICE: Flags = (
    ("card", f"{', '.join(CARDS)}", {"metavar": "NAME"}),
    ("bandwidth", "of a card that is not in the list: 4.8TB/s", {"metavar": "RATE"}),
    ("flops", "of 16-bit floats, dense: 989T", {"metavar": "RATE"}),
    ("timing", "instead of a card: a file of `quire bench steps`", FILE),
)
FLEET: Flags = (
    ("replicas", "engines (default: as few as keep the objective, or 1)", N),
    ("router", "who gets a request (default balancer)", {"choices": ROUTERS, "default": "balancer"}),
    ("slo-ttft", "objective: milliseconds to the first token", X),
    ("slo-tpot", "objective: milliseconds for each token after it", X),
    ("slo-percentile", "of the requests that keep both (default 99)", X | {"default": 99.0}),
    ("max-replicas", "tried at most (default 256)", N | {"default": 256}),
    ("api-ms", "of a request before the engine has it: HTTP, text, messages (default: the file's, or 2.5; 0 --offline)", X),
    ("api-request-ms", "of these, which the API process has for one request at a time (default: the file's, or 1)", X),
    ("api-token-us", "of the API process for each token on its way out (default: the file's, or 45)", X),
    ("offline", "as `LLM` runs, not as a server", YES),
)
REPORT: Flags = (
    ("json", "print JSON", YES),
    ("html", "write a report with plots", FILE),
)


def add_flags(parser: argparse.ArgumentParser) -> None:
    traffic = parser.add_argument_group("traffic")
    traffic.add_argument(
        "--num-prompts", "--limit", dest="limit", type=int, metavar="N", default=None,
        help="requests: a trace's first ones (default all), or generated (1000)",
    )  # fmt: skip
    groups = {"generated traffic": GENERATED_FLAGS, "device": DEVICE, "fleet": FLEET, "report": REPORT}
    for group, flags in [(traffic, TRAFFIC), *((parser.add_argument_group(title), flags) for title, flags in groups.items())]:
        if flags is DEVICE:
            group.add_argument("--memory", type=read_size, metavar="SIZE", default=None, help="of the device: 80GiB")
        for name, text, options in flags:
            group.add_argument(f"--{name}", help=text, **options)


# engine arguments that would change what is simulated, and are not, with what to do instead
NOT_SIMULATED = {
    "data_parallel_size": "say --replicas instead",
    "tensor_parallel_size": "a replica is one device here",
    "pipeline_parallel_size": "a replica is one device here",
    **dict.fromkeys(("speculative_config", "spec_method", "spec_model", "spec_tokens"), "a draft's luck is not known; drop it"),
    "enable_lora": "no request has an adapter; drop it",
}


@dataclasses.dataclass(frozen=True)
class Setting:
    """One replica, and what it runs on."""

    config: Config
    plan: MemoryPlan
    timing: Timing
    told: str  # about the device
    front: FrontTime = NO_FRONT  # what is between clients and engines

    def scheduler(self, pages: int) -> Scheduler:
        """Return an engine's scheduler with at most `pages` pages."""
        config, plan = self.config, self.plan
        snapshots = MOST_SNAPSHOTS * config.max_seqs if config.facts.states else None
        return make_scheduler(
            config, layout_of(config), min(plan.pages, pages), plan.max_model_len, config.facts.parameters, snapshots=snapshots
        )

    def replica(self, pages: int) -> Replica:
        """`pages` are enough for everybody at once."""
        device = Device(self.config.max_seqs, self.timing, windows_of(self.config.facts.layers))
        return Replica(
            self.scheduler(pages),
            self.plan.page_size,
            device,
            self.timing.host,
            self.config.depth,
            self.plan.pages,
        )

    def pages_for(self, trace: Trace) -> int:
        """Twice of what all its requests together can ever use, and what a scheduler counts as plenty: with more it would
        decide the same."""
        size, most = self.plan.page_size, self.plan.max_model_len
        used = sum(min(arrival.length + arrival.output, most) // size + 1 + AHEAD for arrival in trace.arrivals)
        return 2 * used * len(layout_of(self.config).groups) + 4 * AHEAD * self.config.max_seqs


def layout_of(config: Config) -> CacheLayout:
    return make_layout(config.facts.layers, config.page_size, config.cache_bytes, bool(config.facts.states))


def make_setting(args: EngineArgs, namespace: argparse.Namespace) -> Setting:
    for field in dataclasses.fields(args):
        if field.name in NOT_SIMULATED and getattr(args, field.name) not in (field.default, {}):
            raise ConfigError(f"{field.name} is not simulated: {NOT_SIMULATED[field.name]}")
    if args.distributed_executor_backend == "fake":
        raise ConfigError("distributed_executor_backend='fake' is another stand-in for a device; drop it")
    if namespace.timing is not None:
        if namespace.card or namespace.bandwidth or namespace.flops:
            raise ConfigError("--timing says how long steps take; drop --card, --bandwidth and --flops, or drop it")
        return _measured(args, namespace)
    card = _card(namespace)
    if args.device not in ("auto", "cuda"):
        raise ConfigError(f"--card is a GPU, and --device is {args.device}; measure others with `quire bench steps`")
    config, total = resolve_for(dataclasses.replace(args, device="cuda"), card.memory, serving=not namespace.offline)
    plan = _fitting(plan_for(config, total))
    timing = AnalyticTiming(
        card,
        parameter_parts(config.facts.hf),
        layers=len(config.facts.layers),
        weight_bytes=plan.weights_loaded / plan.parameters,
        kv_bytes=sum(plan.bytes_per_token.values()),
    )
    told = (
        f"{card.name}: {gib(card.memory)}, {card.bandwidth / 1e12:g} TB/s, {card.flops / 1e12:g} TFLOP/s; step times computed"
    )
    return Setting(config, plan, timing, told, front_time(namespace, USUAL_FRONT))


def _card(namespace: argparse.Namespace) -> Card:
    """A known one, but for what is said otherwise."""
    rates = {name: read_rate(name, text) for name in ("bandwidth", "flops") if (text := getattr(namespace, name)) is not None}
    if namespace.card is not None:
        known = find_card(namespace.card)
        memory = known.memory if namespace.memory is None else namespace.memory
        return Card(known.name, memory, rates.get("bandwidth", known.bandwidth), rates.get("flops", known.flops))
    missing = [name for name in ("bandwidth", "flops") if name not in rates]
    if namespace.memory is None or missing:
        raise ConfigError(
            "which device? --card h100 (or another), --timing FILE of `quire bench steps`, or all of --memory, --bandwidth and "
            "--flops"
        )
    return Card("a card", namespace.memory, rates["bandwidth"], rates["flops"])


def _measured(args: EngineArgs, namespace: argparse.Namespace) -> Setting:
    """Device and cache are as they were where it was measured, unless it is said otherwise."""
    found = read_measured(namespace.timing)
    if args.device not in ("auto", found.device):
        raise ConfigError(f"--timing {namespace.timing} was measured on {found.device!r}, not on {args.device!r}")
    args = dataclasses.replace(args, device=found.device, block_size=args.block_size or found.page_size)
    if args.num_gpu_blocks_override is None and args.kv_cache_memory_bytes is None and namespace.memory is None:
        args = dataclasses.replace(args, num_gpu_blocks_override=found.pages * found.page_size // (args.block_size or 1))
    config, total = resolve_for(args, namespace.memory or found.memory or None, serving=not namespace.offline)
    other = [
        f"{name} {found.sizes[name]}, not {own}"
        for name, own in sizes_of(config.facts).items()
        if found.sizes.get(name, own) != own
    ]
    if other:
        raise ConfigError(
            f"--timing {namespace.timing} was measured with another model, {found.model}: its {', its '.join(other)}; measure "
            f"{args.model} with `quire bench steps`"
        )
    told = f"{found.device}, {found.machine}; step times measured with {found.model}"
    front = front_time(namespace, found.front or USUAL_FRONT)
    return Setting(config, _fitting(plan_for(config, total)), found.timing, told, front)


def front_time(namespace: argparse.Namespace, usual: FrontTime) -> FrontTime:
    """Of a server, unless it is said otherwise."""
    if namespace.offline:
        return NO_FRONT
    told = {
        field: value / scale
        for flag, field, scale in (("api_ms", "way", 1e3), ("api_request_ms", "request", 1e3), ("api_token_us", "token", 1e6))
        if (value := getattr(namespace, flag)) is not None
    }
    return dataclasses.replace(usual, **told)


def _fitting(plan: MemoryPlan) -> MemoryPlan:
    if not plan.fits:
        raise ConfigError(f"{plan.model} does not fit: {'; '.join(plan.advice)}")
    return plan


MOST_LINES = 16  # replicas that are listed on a terminal
Facts = list[tuple[str, str]]


@dataclasses.dataclass(frozen=True)
class Outcome:
    setting: Setting
    trace: Trace
    router: str
    run: Run
    objectives: Objectives | None
    search: Search | None
    seconds: float  # that it took

    @property
    def within(self) -> float | None:
        """The share of requests that got what was promised."""
        if self.objectives is None:
            return None
        return sum(map(self.objectives.kept, self.run.visits)) / len(self.run.visits)

    @property
    def facts(self) -> Facts:
        plan, replicas = self.setting.plan, len(self.run.replicas)
        cache = f"{plan.pages:,} pages of {plan.page_size} tokens"
        facts = [
            ("Model", f"{plan.model} in {plan.weights_as}, {plan.max_model_len:,} tokens of context, {cache}"),
            ("Device", self.setting.told),
            ("Traffic", f"{self.trace.name}: {len(self.trace.arrivals):,} requests"),
            ("Replicas", f"{replicas}, requests placed by {self.router}" if replicas > 1 else "1"),
        ]
        if self.within is not None:
            facts.append(("Objective", f"{self.objectives}: {self.within:.2%} are within"))
        if self.search is not None:
            enough = f"{replicas} replicas" if self.search.kept else f"more than {replicas} replicas: so many do not keep it"
            facts.append(("Needed", enough))
        return facts

    def as_dict(self, figures: Figures) -> dict[str, Any]:
        told = {name.lower(): text for name, text in self.facts if name in ("Model", "Device", "Traffic")}
        result: dict[str, Any] = {
            "kind": "simulation", **told, "replicas": len(self.run.replicas), "router": self.router,
            "seconds_simulating": self.seconds, **figures.as_dict(), "refusals": dict(figures.refused),
            "per_replica": [dataclasses.asdict(load) for load in figures.replicas],
        }  # fmt: skip
        if self.objectives is not None:
            search = self.search
            result["slo"] = {
                **dataclasses.asdict(self.objectives),
                "within": self.within,
                "replicas_needed": search.replicas if search is not None and search.kept else None,
                "trials": [] if search is None else [dataclasses.asdict(trial) for trial in search.trials],
            }
        return result


def report(namespace: argparse.Namespace, outcome: Outcome) -> None:
    figures, replicas = figures_of(outcome.run), len(outcome.run.replicas)
    if namespace.html is not None:
        title = f"{outcome.setting.plan.model}: a simulation"
        text = page(title, outcome.facts, outcome.run, figures, outcome.search, outcome.objectives)
        namespace.html.write_text(text, encoding="utf-8")
    if namespace.json:
        print(json.dumps(outcome.as_dict(figures), indent=2))
        return
    print("\n".join(f"{name:<14} {text}" for name, text in [*outcome.facts, *rows_of(figures)]))
    print("\n" + "\n".join(lines(latency_cells(figures))))
    if outcome.search is not None:
        print("\n" + "\n".join(lines(trial_cells(outcome.search.trials))))
    if replicas > 1:
        print("\n" + "\n".join(lines(load_cells(figures.replicas[:MOST_LINES]))))
        if replicas > MOST_LINES:
            print(f"... and {replicas - MOST_LINES} more (--json has all)")
    print(f"\nsimulated in {outcome.seconds:.1f} s", file=sys.stderr)
    if namespace.html is not None:
        print(f"report: {namespace.html}", file=sys.stderr)


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
