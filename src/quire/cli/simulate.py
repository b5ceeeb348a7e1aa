"""`quire simulate MODEL`: simulate traffic on engines, faster than real time. Loads no weights, needs no torch.

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
from quire.bench.datasets import TokenCounter
from quire.bench.metrics import MAX_REQUESTS
from quire.bench.samples import WORKLOADS
from quire.cache.layout import SNAPSHOTS_PER_SLOT
from quire.cli.bench_serve import YES, Flags, N, X
from quire.cli.memory_plan import MemoryPlan, gib, plan_for, resolve_for
from quire.cli.parser import add_model_tag, engine_args
from quire.cli.plan import read_size
from quire.config.args import EngineArgs, add_cli_arguments, nearest
from quire.config.config import Config
from quire.config.facts import sizes_of
from quire.engine.layouts import host_records, make_scheduler, record_bytes, whole_layout
from quire.features.tiers.host import host_bytes, store_buffers
from quire.progress import doing, shown
from quire.sched.scheduler import GROWTH_PAGES, Scheduler
from quire.sim.analytic import CARDS, GPUModel, find_card, read_rate, windows_of
from quire.sim.figures import Figures, figures_of
from quire.sim.fleet import (
    NO_FRONT,
    ROUTERS,
    USUAL_FRONT,
    Fleet,
    FrontTime,
    Objectives,
    Run,
    Search,
    Trial,
    Visit,
    fewest_replicas,
    router_maker,
)
from quire.sim.links import DISK_BANDWIDTH, HOST_LINKS, LINKS, MEMORY_BANDWIDTH, NETWORKS, make_fabric
from quire.sim.measured import read_measured
from quire.sim.optimum import optimal_hit_rate
from quire.sim.page import latency_cells, lines, load_cells, page, rows_of, trial_cells
from quire.sim.parallel import Layout, ModelSizes, ParallelTiming
from quire.sim.replica import Replica, SimulatedDevice, SimulatedTiming
from quire.sim.shapes import SHAPES, shaped_trace
from quire.sim.tiers import SimulatedTiers, TierSizes
from quire.sim.trace import FORMATS, Characters, Generated, Trace, format_of, read_trace, sharegpt_trace, workload_trace
from quire.step_loop import little_garbage_collection
from quire.text.tokenizer import Tokenizer
from quire.text.tokenizer_files import open_tokenizer
from quire.types.errors import ConfigError, QuireError

FILE = {"metavar": "FILE", "type": Path}
TRAFFIC: Flags = (
    ("trace", "Azure's CSV, Mooncake's JSON lines, ShareGPT's JSON", FILE),
    ("trace-format", "(default: by the file's name)", {"choices": ("auto", *FORMATS), "default": "auto"}),
    ("speedup", "replay a trace X times as fast", X),
    ("workload", "chat, agent, mooncake, or of `quire bench throughput`", {"metavar": "NAME"}),
    ("request-rate", "requests per second, unless a trace has times", X | {"default": math.inf}),
    ("max-concurrency", "maximum of requests at once on all replicas", N),
)
GENERATED_FLAGS: Flags = (
    ("input-len", "tokens of prompts (default 1024)", N),
    ("output-len", "tokens of answers (default 128)", N),
    ("range-ratio", "lengths from (1 - X) to (1 + X) times these (default 0)", X),
    ("prefix-len", "tokens before each prompt, shared by many (default 0)", N),
    ("num-prefixes", "number of different prefixes (default 1)", N),
    ("turns", "of a conversation (default 1)", N),
    ("think-time", "seconds between turns (default 10)", X),
    ("burstiness", "of arrivals: 1 is Poisson, below 1 is burstier, above 1 is steadier (default 1)", X | {"default": 1.0}),
    ("chars-per-token", "of ShareGPT's texts, if there is no tokenizer", X),
)
DEVICE: Flags = (
    ("card", f"{', '.join(CARDS)}", {"metavar": "NAME"}),
    ("bandwidth", "of a card that is not in the list: 4.8TB/s", {"metavar": "RATE"}),
    ("flops", "of 16-bit floats, dense: 989T", {"metavar": "RATE"}),
    ("link", f"between GPUs of a node: {', '.join(LINKS)} (default: the card's)", {"metavar": "NAME"}),
    ("network", f"between nodes: {', '.join(NETWORKS)} (default: the card's)", {"metavar": "NAME"}),
    ("host-link", "to host memory: 52GB/s (default: the card's PCIe)", {"metavar": "RATE"}),
    ("disk-rate", "of kv_disk_path, both ways (default 3GB/s)", {"metavar": "RATE"}),
    ("timing", "a result of `quire bench steps`, instead of a card", FILE),
)
FLEET: Flags = (
    ("replicas", "engines (default: the fewest that suffice, or 1)", N),
    ("router", "policy that places requests (default balancer)", {"choices": ROUTERS, "default": "balancer"}),
    ("slo-ttft", "objective: milliseconds to the first token", X),
    ("slo-tpot", "objective: milliseconds for each token after it", X),
    ("slo-percentile", "of the requests that must meet both (default 99)", X | {"default": 99.0}),
    ("max-replicas", "maximum for the search (default 256)", N | {"default": 256}),
    ("api-ms", "of HTTP and text (default: the file's, or 2.5)", X),
    ("api-request-ms", "of it in the API process (default: the file's, or 1)", X),
    ("api-token-us", "of it per token (default: the file's, or 45)", X),
    ("offline", "simulate `LLM` instead of a server", YES),
)
REPORT: Flags = (
    ("optimum", "also the hit rate of an optimal eviction policy", YES),
    ("json", "print JSON", YES),
    ("html", "write a report with plots", FILE),
)


def add_flags(parser: argparse.ArgumentParser) -> None:
    traffic = parser.add_argument_group("traffic")
    traffic.add_argument(
        "--num-prompts", "--limit", dest="limit", type=int, metavar="N", default=None,
        help="the first of a trace (default all), or generated (1000)",
    )  # fmt: skip
    groups = {"generated traffic": GENERATED_FLAGS, "device": DEVICE, "fleet": FLEET, "report": REPORT}
    for group, flags in [(traffic, TRAFFIC), *((parser.add_argument_group(title), flags) for title, flags in groups.items())]:
        if flags is DEVICE:
            group.add_argument("--memory", type=read_size, metavar="SIZE", default=None, help="of the device: 80GiB")
        for name, text, options in flags:
            group.add_argument(f"--{name}", help=text, **options)


# engine arguments that the simulation does not support, with what to do instead
NOT_SIMULATED = {
    "data_parallel_size": "use --replicas",
    **dict.fromkeys(
        ("speculative_config", "spec_method", "spec_model", "spec_tokens"), "acceptance rates are unknown; drop it"
    ),
    "enable_lora": "simulated requests have no adapter; drop it",
}


@dataclasses.dataclass(frozen=True)
class Setting:
    """One replica and its device."""

    config: Config
    plan: MemoryPlan
    timing: SimulatedTiming
    description: str  # of the device
    front: FrontTime = NO_FRONT  # of the API process
    tiers: TierSizes | None = None  # host memory and disk; None: none

    def scheduler(self, pages: int) -> Scheduler:
        """Return an engine's scheduler with at most `pages` pages."""
        config, plan = self.config, self.plan
        snapshots = SNAPSHOTS_PER_SLOT * config.max_seqs if config.facts.states else None
        return make_scheduler(
            config,
            whole_layout(config),
            min(plan.pages, pages),
            plan.max_model_len,
            config.facts.parameters,
            snapshots=snapshots,
        )

    def replica(self, pages: int) -> Replica:
        """Return a replica whose scheduler has at most `pages` pages."""
        device = SimulatedDevice(self.config.max_seqs, self.timing, windows_of(self.config.facts.layers))
        scheduler = self.scheduler(pages)
        if self.tiers is not None and self.tiers.disk_bytes and scheduler.arrivals is not None:
            scheduler.arrivals.open_disk([(b"", [])])  # it is empty
        return Replica(
            scheduler,
            self.plan.page_size,
            device,
            self.timing.host,
            self.config.depth,
            self.plan.pages,
            None if self.tiers is None else SimulatedTiers(self.tiers),
        )

    @property
    def cached_pages(self) -> int:
        """Return how many pages device, host memory and disk hold together."""
        tiers, records = self.tiers, host_records(self.config, whole_layout(self.config))
        return self.plan.pages + records + (tiers.disk_bytes // tiers.page if tiers is not None else 0)

    def pages_for(self, trace: Trace) -> int:
        """Return a number of pages above which a scheduler decides the same: twice what all requests can use together,
        plus what the scheduler counts as ample.
        """
        size, longest = self.plan.page_size, self.plan.max_model_len
        used = sum(min(arrival.length + arrival.output, longest) // size + 1 + GROWTH_PAGES for arrival in trace.arrivals)
        return 2 * used * len(whole_layout(self.config).groups) + 4 * GROWTH_PAGES * self.config.max_seqs


def make_setting(args: EngineArgs, namespace: argparse.Namespace) -> Setting:
    for field in dataclasses.fields(args):
        if field.name in NOT_SIMULATED and getattr(args, field.name) not in (field.default, {}):
            raise ConfigError(f"{field.name} is not simulated: {NOT_SIMULATED[field.name]}")
    if args.distributed_executor_backend == "fake":
        raise ConfigError("distributed_executor_backend='fake' also replaces the device; drop it")
    if namespace.timing is not None:
        if namespace.card or namespace.bandwidth or namespace.flops:
            raise ConfigError("--timing has the step times; drop --card, --bandwidth and --flops, or drop --timing")
        return _measured(args, namespace)
    card = _card(namespace)
    if args.device not in ("auto", "cuda"):
        raise ConfigError(f"--card is a GPU, and --device is {args.device}; measure others with `quire bench steps`")
    layout = Layout(args.tensor_parallel_size, args.pipeline_parallel_size)
    fabric = make_fabric(layout.ranks, namespace.link or card.link, namespace.network or card.network, card.name)
    config, total = resolve_for(dataclasses.replace(args, device="cuda"), card.memory, serving=not namespace.offline)
    plan = _fitting(plan_for(config, total, fabric.link.name))
    sizes = ModelSizes.of(config, plan.weights_loaded)
    timing = ParallelTiming(card, fabric, layout, sizes, args.pipeline_layer_partition)
    several = "" if layout.ranks == 1 else f", {layout.ranks} of them with {layout.flags} over {fabric.name}"
    description = (
        f"{card.name}: {gib(card.memory)}, {card.bandwidth / 1e12:g} TB/s, {card.flops / 1e12:g} TFLOP/s{several}; step times "
        "computed"
    )
    front = front_time(namespace, USUAL_FRONT)
    return Setting(config, plan, timing, description, front, tier_sizes(config, namespace, HOST_LINKS[card.host]))


def _card(namespace: argparse.Namespace) -> GPUModel:
    """Return the card of the flags: a known one, with rates and memory that flags override."""
    rates = {name: read_rate(name, text) for name in ("bandwidth", "flops") if (text := getattr(namespace, name)) is not None}
    if namespace.card is not None:
        known = find_card(namespace.card)
        memory = known.memory if namespace.memory is None else namespace.memory
        bandwidth, flops = rates.get("bandwidth", known.bandwidth), rates.get("flops", known.flops)
        return dataclasses.replace(known, memory=memory, bandwidth=bandwidth, flops=flops)
    missing = [name for name in ("bandwidth", "flops") if name not in rates]
    if namespace.memory is None or missing:
        raise ConfigError(
            "a device is required: --card h100, --timing FILE of `quire bench steps`, or all of --memory, --bandwidth and "
            "--flops"
        )
    return GPUModel("a card", namespace.memory, rates["bandwidth"], rates["flops"])


def _measured(args: EngineArgs, namespace: argparse.Namespace) -> Setting:
    """Return the setting of a measurement: its device and cache, unless flags override them."""
    found = read_measured(namespace.timing)
    if args.device not in ("auto", found.device):
        raise ConfigError(f"--timing {namespace.timing} was measured on {found.device!r}, not on {args.device!r}")
    args = dataclasses.replace(args, device=found.device, block_size=args.block_size or found.page_size)
    if args.num_gpu_blocks_override is None and args.kv_cache_memory_bytes is None and namespace.memory is None:
        args = dataclasses.replace(args, num_gpu_blocks_override=found.pages * found.page_size // (args.block_size or 1))
    if args.tensor_parallel_size * args.pipeline_parallel_size > 1:
        raise ConfigError("--timing has the step times of one device; simulate several ranks with --card")
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
    description = f"{found.device}, {found.machine}; step times measured with {found.model}"
    front = front_time(namespace, found.front or USUAL_FRONT)
    link = MEMORY_BANDWIDTH if config.device_facts.one_memory else HOST_LINKS["pcie4"]
    tiers = tier_sizes(config, namespace, link)
    return Setting(config, _fitting(plan_for(config, total)), found.timing, description, front, tiers)


def front_time(namespace: argparse.Namespace, usual: FrontTime) -> FrontTime:
    """Return the API process's times: `usual`, unless flags override them; none with --offline."""
    if namespace.offline:
        return NO_FRONT
    given = {
        field: value / scale
        for flag, field, scale in (("api_ms", "way", 1e3), ("api_request_ms", "request", 1e3), ("api_token_us", "token", 1e6))
        if (value := getattr(namespace, flag)) is not None
    }
    return dataclasses.replace(usual, **given)


def tier_sizes(config: Config, namespace: argparse.Namespace, link: float) -> TierSizes | None:
    """Return the speeds and sizes of host memory and disk; None: the engine has none. link: bytes per second, unless given."""
    page, disk = record_bytes(config, whole_layout(config)), config.args.kv_disk_path is not None
    on = {"host_link": bool(host_bytes(config) and page), "disk_rate": disk}
    missing = {"host_link": "kv-offloading-size", "disk_rate": "kv-disk-path"}
    for name, is_on in on.items():
        if getattr(namespace, name) is not None and not is_on:
            raise ConfigError(f"--{name.replace('_', '-')} requires --{missing[name]}. Add it, or drop both")
    if not on["host_link"]:
        return None
    rates = {"host_link": link, "disk_rate": DISK_BANDWIDTH}
    for name in rates:
        if (text := getattr(namespace, name)) is not None:
            rates[name] = read_rate(name.replace("_", "-"), text)
            if not rates[name]:
                raise ConfigError(f"--{name.replace('_', '-')} must be above 0, got {text}")
    size = int(config.args.kv_disk_size * 2**30) // config.world if disk else 0
    one_memory, buffers = config.device_facts.one_memory, store_buffers(config)
    return TierSizes(page, rates["host_link"], config.world, rates["disk_rate"], size, buffers, one_memory)


def _fitting(plan: MemoryPlan) -> MemoryPlan:
    if not plan.fits:
        raise ConfigError(f"{plan.model} does not fit: {'; '.join(plan.advice)}")
    return plan


MAX_LISTED_REPLICAS = 16  # on a terminal
Facts = list[tuple[str, str]]


@dataclasses.dataclass(frozen=True)
class Outcome:
    setting: Setting
    trace: Trace
    router: str
    run: Run
    objectives: Objectives | None
    search: Search | None
    seconds: float  # of real time
    optimum: float | None = None  # hit rate of the prefix cache with an optimal policy

    @property
    def within(self) -> float | None:
        """Return the share of requests within the objectives."""
        if self.objectives is None:
            return None
        return sum(map(self.objectives.met_by, self.run.visits)) / len(self.run.visits)

    @property
    def facts(self) -> Facts:
        plan, replicas = self.setting.plan, len(self.run.replicas)
        cache = f"{plan.pages:,} pages of {plan.page_size} tokens"
        facts = [
            ("Model", f"{plan.model} in {plan.weights_as}, {plan.max_model_len:,} tokens of context, {cache}"),
            ("Device", self.setting.description),
            ("Traffic", f"{self.trace.name}: {len(self.trace.arrivals):,} requests"),
            ("Replicas", f"{replicas}, requests placed by {self.router}" if replicas > 1 else "1"),
        ]
        if self.within is not None:
            facts.append(("Objective", f"{self.objectives}: {self.within:.2%} are within"))
        if self.optimum is not None:
            policy = self.setting.config.args.cache_policy
            facts.append(("Eviction", f"{policy}; an optimal policy would find {self.optimum:.1%} of the prompt tokens"))
        if self.search is not None:
            enough = f"{replicas} replicas" if self.search.kept else f"more than {replicas} replicas, which miss the objective"
            facts.append(("Needed", enough))
        return facts

    def as_dict(self, figures: Figures) -> dict[str, Any]:
        texts = {name.lower(): text for name, text in self.facts if name in ("Model", "Device", "Traffic")}
        result: dict[str, Any] = {
            "kind": "simulation", **texts, "replicas": len(self.run.replicas), "router": self.router,
            "seconds_simulating": self.seconds, **figures.as_dict(), "refusals": dict(figures.refused),
            "per_replica": [dataclasses.asdict(load) for load in figures.replicas],
        }  # fmt: skip
        if self.optimum is not None:
            result["prefix_cache_hit_rate_optimum"] = self.optimum
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
        print("\n" + "\n".join(lines(load_cells(figures.replicas[:MAX_LISTED_REPLICAS]))))
        if replicas > MAX_LISTED_REPLICAS:
            print(f"... and {replicas - MAX_LISTED_REPLICAS} more (--json has all)")
    print(f"\nsimulated in {outcome.seconds:.1f} s", file=sys.stderr)
    if namespace.html is not None:
        print(f"report: {namespace.html}", file=sys.stderr)


MAX_REPLICAS = 4096
# flags of generated traffic; None if not given
GENERATED = ("input_len", "output_len", "range_ratio", "prefix_len", "num_prefixes", "turns", "think_time")


def add_parser(subparsers: Any) -> None:
    parser = subparsers.add_parser(
        "simulate",
        usage="%(prog)s [MODEL] [options]",
        help="simulate a model on other devices, under any load",
        description="Runs scheduler, cache and balancer with a model of a device and a trace, in virtual time. Needs a "
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
    optimum = None
    if namespace.optimum and setting.config.prefix_caching:
        optimum = optimal_hit_rate(trace, outcome, setting.plan.page_size, setting.cached_pages)
    report(namespace, Outcome(setting, trace, namespace.router, outcome, objectives, search, seconds, optimum))
    return 0 if any(not visit.refused for visit in outcome.visits) and (search is None or search.kept) else 1


def _objectives(namespace: argparse.Namespace) -> Objectives | None:
    for flag, value, most in (
        ("replicas", namespace.replicas, MAX_REPLICAS),
        ("max-replicas", namespace.max_replicas, MAX_REPLICAS),
        ("num-prompts", namespace.limit, MAX_REQUESTS),
    ):
        if value is not None and value < 1:
            raise ConfigError(f"--{flag} must be at least 1, got {value}")
        if value is not None and value > most:
            raise ConfigError(f"--{flag} must be at most {most}, since each takes memory; got {value}")
    for flag, most in (("api-ms", 60_000), ("api-request-ms", 60_000), ("api-token-us", 1_000_000)):
        value = getattr(namespace, flag.replace("-", "_"))
        if value is not None and not 0 <= value <= most:
            unit = "milliseconds" if flag.endswith("ms") else "microseconds"
            raise ConfigError(f"--{flag} must be {unit} from 0 to {most:,}, got {value:g}")
    if namespace.slo_ttft is None and namespace.slo_tpot is None:
        return None
    return Objectives(namespace.slo_ttft, namespace.slo_tpot, namespace.slo_percentile)


def _check_writable(path: Path) -> None:
    """Raise ConfigError if the report cannot be written, before a long simulation."""
    try:
        path.open("a").close()
    except OSError as error:
        raise ConfigError(f"cannot write --html {path}: {error}") from None


def make_trace(namespace: argparse.Namespace, config: Config) -> Trace:
    path: Path | None = namespace.trace
    load = LoadShape(namespace.request_rate, namespace.burstiness, namespace.max_concurrency)
    if namespace.workload in SHAPES:
        if path is not None or load.timed:
            raise ConfigError(
                f"--workload {namespace.workload} has arrival times; drop --trace and --request-rate, or --workload"
            )
        _refuse_others(namespace, ("speedup",), f"--workload {namespace.workload}")
        trace = shaped_trace(namespace.workload, namespace.limit, config.seed)
        return trace if namespace.speedup is None else trace.faster(namespace.speedup)
    if namespace.workload is not None:
        if namespace.workload not in WORKLOADS:
            names = [*SHAPES, *WORKLOADS]
            known = nearest(namespace.workload, names) or f"; there are {', '.join(names)}"
            raise ConfigError(f"--workload {namespace.workload!r} is unknown{known}")
        if path is not None or load.timed:
            raise ConfigError(
                f"--workload {namespace.workload} comes all at once; drop --trace and --request-rate, or --workload"
            )
        _refuse_others(namespace, (), "--workload")
        return workload_trace(namespace.workload, config.facts.vocab_size, namespace.limit)
    if path is None:
        _refuse_others(namespace, GENERATED, "generated traffic")
        given = {name: value for name in GENERATED if (value := getattr(namespace, name)) is not None}
        requests = {} if namespace.limit is None else {"requests": namespace.limit}
        return Generated(**given, **requests, seed=config.seed).trace(load)
    kind = format_of(path, namespace.trace_format)
    if kind == "sharegpt":
        _refuse_others(namespace, ("chars_per_token",), "a trace of ShareGPT")
        counter = _counter(namespace.chars_per_token, config)
        return asyncio.run(sharegpt_trace(path, namespace.limit, load, config.seed, counter))
    _refuse_others(namespace, ("speedup",), f"a trace of {kind.title()}")
    if load.timed:
        raise ConfigError(f"{path} has arrival times; drop --request-rate, or scale them with --speedup")
    trace = read_trace(path, kind, namespace.limit)
    return trace if namespace.speedup is None else trace.faster(namespace.speedup)


def _refuse_others(namespace: argparse.Namespace, own: tuple[str, ...], what: str) -> None:
    """Refuse flags of other kinds of traffic."""
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
        raise ConfigError(f"ShareGPT has texts, which require a tokenizer ({error}); use --chars-per-token 4") from None
    if tokenizer is None:
        raise ConfigError("ShareGPT has texts; drop --skip-tokenizer-init, or use --chars-per-token 4")
    return TokenizerCounter(tokenizer)


def _simulate(
    namespace: argparse.Namespace, setting: Setting, trace: Trace, objectives: Objectives | None
) -> tuple[Run, Search | None]:
    plan, config = setting.plan, setting.config
    make_router = router_maker(namespace.router, plan.pages, plan.page_size, config.max_seqs, config.prefix_caching)
    pages = setting.pages_for(trace)

    def simulate(replicas: int, acceptable: Callable[[Visit], bool] = lambda _: True) -> Run:
        engines = [setting.replica(pages) for _ in range(replicas)]
        fleet = Fleet(engines, make_router(replicas), namespace.max_concurrency, setting.front)
        return fleet.run(trace, acceptable)

    def print_trial(trial: Trial) -> None:
        share = "too many are late" if trial.share is None else f"{trial.share:.2%} are within"
        print(f"{trial.replicas} replica{'s' if trial.replicas > 1 else ''}: {share}", file=sys.stderr)

    if objectives is None or namespace.replicas is not None:
        return simulate(namespace.replicas or 1), None
    search = fewest_replicas(simulate, objectives, len(trace.arrivals), namespace.max_replicas, print_trial)
    return search.run, search
