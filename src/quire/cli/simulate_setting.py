"""What is simulated: one engine as `quire serve` would configure it, on a card or with measured step times."""

import argparse
import dataclasses

from quire.cache.capacity import MOST_SNAPSHOTS
from quire.cache.layout import make_layout
from quire.cli.plan import gib, plan_for, resolve_for
from quire.cli.plan_text import MemoryPlan
from quire.config.args import EngineArgs
from quire.config.config import Config
from quire.config.facts import sizes_of
from quire.config.memory import parameter_parts
from quire.engine.scheduling import make_scheduler
from quire.sched.scheduler import AHEAD, Scheduler
from quire.sim.analytic import AnalyticTiming
from quire.sim.cards import Card, find_card, read_rate
from quire.sim.front import NO_FRONT, USUAL_FRONT, FrontTime
from quire.sim.measured import read_measured
from quire.sim.replica import Device, Replica, Timing
from quire.sim.shapes import windows_of
from quire.sim.trace import Trace
from quire.types.cache import CacheLayout
from quire.types.errors import ConfigError

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
        """An engine's, with at most so many pages."""
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
