"""`quire plan MODEL --cards 8xh200`: how a model should be divided among GPUs.

Every division into tensor-parallel ranks, stages and engines that uses all GPUs is resolved as `quire serve` would, so what it
refuses is not recommended. Of those that fit, memory (`memory_plan.py`) and step times (`sim/parallel.py`) are estimated:

    one request    prefill of its prompt in chunks, then a token per step
    full load      as many requests as slots and cache hold, or as an objective allows: all prompts, then all answers

The two recommended divisions are then planned in full: each rank's share of the model is built without weights.
"""

import argparse
import dataclasses
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import ceil
from typing import Any

from quire.cli.bench_serve import Flags, N, X
from quire.cli.memory_plan import count_concurrent, fit_use, plan_for, read_plan_facts, use_of
from quire.config.args import EngineArgs
from quire.config.config import Config
from quire.config.facts import ModelFacts, count_experts
from quire.config.resolve import resolve
from quire.device.registry import open_device
from quire.engine.layouts import model_share, whole_layout
from quire.sim.analytic import GPUModel, StepShape, Window, find_card, windows_of
from quire.sim.links import LINKS, NETWORKS, Fabric, make_fabric
from quire.sim.parallel import Layout, ModelSizes, ParallelTiming
from quire.types.errors import ConfigError, ModelError

CARDS_FLAGS: Flags = (
    (
        "cards",
        "recommend how to divide the model among GPUs: 8xh200; -tp, -pp, -dp and -ep are kept if given",
        {"metavar": "NxNAME"},
    ),
    ("link", f"between GPUs of a node: {', '.join(LINKS)} (default: the card's)", {"metavar": "NAME"}),
    ("network", f"between nodes: {', '.join(NETWORKS)} (default: the card's)", {"metavar": "NAME"}),
    ("input-len", "tokens of a prompt (default 1024)", N | {"default": 1024}),
    ("output-len", "tokens of an answer (default 256)", N | {"default": 256}),
    ("slo-tpot", "objective: milliseconds for each token of an answer at full load", X),
)
MAX_CARDS = 1024
_CARDS = re.compile(r"^(?P<count>\d{1,4})\s*x\s*(?P<name>.+)$", re.IGNORECASE)


@dataclass(frozen=True)
class Estimate:
    """A division of a model, and what it would do."""

    layout: Layout
    flags: str  # of `quire serve`
    ttft_ms: float  # of one request
    token_ms: float  # of one request, per token
    exchange_ms: float  # of that, between GPUs
    requests: int  # at once, in all engines
    loaded_token_ms: float
    tokens_per_s: float  # of all engines
    cache_tokens: int  # of all engines
    host_ms: float  # of a step, if each sum goes through the hosts

    def as_dict(self) -> dict[str, Any]:
        return dataclasses.asdict(self)


@dataclass(frozen=True)
class Recommendation:
    """All divisions that fit, most tokens per second first."""

    model: str
    cards: str
    links: str
    input_len: int
    output_len: int
    estimates: tuple[Estimate, ...]
    refused: Mapping[str, str]  # flags -> why
    fastest: Estimate | None
    most_tokens: Estimate | None

    def as_dict(self) -> dict[str, Any]:
        plain = {name: getattr(self, name) for name in ("model", "cards", "links", "input_len", "output_len")}
        estimates = [estimate.as_dict() for estimate in self.estimates]
        return {**plain, **self.chosen, "estimates": estimates, "refused": dict(self.refused)}

    @property
    def chosen(self) -> dict[str, str | None]:
        """Return the flags of the recommended divisions."""
        both = {"fastest": self.fastest, "most_tokens": self.most_tokens}
        return {name: None if estimate is None else estimate.flags for name, estimate in both.items()}


def run_cards(args: EngineArgs, namespace: argparse.Namespace) -> int:
    if namespace.memory is not None or namespace.card is not None or args.device not in ("auto", "cuda"):
        raise ConfigError("--cards names the GPUs; drop --card, --memory and --device")
    found = recommend(args, namespace)
    print(json.dumps(found.as_dict(), indent=2) if namespace.json else render_cards(found))
    return 0 if found.estimates else 1


def recommend(args: EngineArgs, namespace: argparse.Namespace) -> Recommendation:
    count, card = read_cards(namespace.cards)
    fabric = make_fabric(count, namespace.link or card.link, namespace.network or card.network, card.name)
    args = dataclasses.replace(args, device="cuda")
    facts = read_plan_facts(args)
    if facts.encoder or not facts.layers:
        raise ConfigError(f"--cards is for models that generate from a KV cache; {facts.architecture} does not")
    planner = _Planner(args, facts, card, fabric, namespace)
    estimates, refused = list[Estimate](), dict[str, str]()
    for layout in layouts(count, count_experts(facts) > 0, vars(namespace)):
        try:
            estimates.append(planner.estimate(layout))
        except (ConfigError, ModelError) as error:
            refused[serve_flags(layout, fabric)] = str(error)
    estimates.sort(key=lambda estimate: (-estimate.tokens_per_s, estimate.token_ms))
    fastest = planner.first_valid(sorted(estimates, key=lambda estimate: (estimate.token_ms, -estimate.tokens_per_s)), refused)
    most_tokens = planner.first_valid(estimates, refused)
    left = tuple(estimate for estimate in estimates if estimate.flags not in refused)
    title = facts.files.name, f"{count} x {card.name}", fabric.name, namespace.input_len, namespace.output_len
    return Recommendation(*title, left, refused, fastest, most_tokens)


def read_cards(text: str) -> tuple[int, GPUModel]:
    match = _CARDS.match(text.strip())
    if match is None or not 0 < int(match["count"]) <= MAX_CARDS:
        raise ConfigError(f"--cards must be a number of GPUs up to {MAX_CARDS} and their name, such as 8xh200; got {text}")
    return int(match["count"]), find_card(match["name"])


def layouts(cards: int, experts: bool, given: Mapping[str, Any]) -> Iterator[Layout]:
    """Yield the divisions that use all GPUs and have the given sizes. experts: whether the model has some."""
    for tensor in _divisors(cards, given.get("tensor_parallel_size")):
        for pipeline in _divisors(cards // tensor, given.get("pipeline_parallel_size")):
            data = cards // (tensor * pipeline)
            if given.get("data_parallel_size", data) != data:
                continue
            for expert in (False, True) if experts and tensor * data > 1 else (False,):
                if given.get("enable_expert_parallel", expert) == expert:
                    yield Layout(tensor, pipeline, data, expert)


def _divisors(number: int, given: int | None) -> list[int]:
    return [size for size in range(1, number + 1) if number % size == 0 and given in (None, size)]


def serve_flags(layout: Layout, fabric: Fabric) -> str:
    """Return the arguments of `quire serve` on machine 0."""
    nodes = fabric.span(layout.cards).nodes
    if nodes > 1 and layout.data > 1:
        return f"{layout.flags} --data-parallel-size-local {layout.data // nodes}"
    return f"{layout.flags} --nnodes {nodes}" if nodes > 1 else layout.flags


class _Planner:
    def __init__(
        self, args: EngineArgs, facts: ModelFacts, card: GPUModel, fabric: Fabric, namespace: argparse.Namespace
    ) -> None:
        self._args, self._facts, self._card, self._fabric = args, facts, card, fabric
        self._input: int = namespace.input_len
        self._output: int = namespace.output_len
        self._limit: float | None = None if namespace.slo_tpot is None else namespace.slo_tpot / 1e3
        self._windows = windows_of(facts.layers)
        for flag, value in (("input-len", self._input), ("output-len", self._output)):
            if value < 1:
                raise ConfigError(f"--{flag} must be at least 1; got {value}")

    def first_valid(self, estimates: Sequence[Estimate], refused: dict[str, str]) -> Estimate | None:
        """Return the first one whose ranks can be built; note why others cannot."""
        for estimate in estimates:
            flags = estimate.flags
            if flags in refused:
                continue
            try:
                plan_for(self._resolve(estimate.layout), self._card.memory, self._fabric.link.name)
            except (ConfigError, ModelError) as error:
                refused[flags] = str(error)
            else:
                return estimate
        return None

    def estimate(self, layout: Layout) -> Estimate:
        """Raises ConfigError or ModelError if the division is not supported or does not fit."""
        config = self._resolve(layout)
        pages, length, weights = self._memory(config)
        if length < self._input + self._output:
            bound = f"max_model_len is {length:,}" if length == config.max_model_len else f"the cache holds {length:,} tokens"
            raise ConfigError(
                f"{bound}, and a request has {self._input + self._output:,} tokens: lower --input-len or --output-len"
            )
        cache_layout = whole_layout(config)
        sizes = ModelSizes.of(config, weights)
        timing = ParallelTiming(self._card, self._fabric, layout, sizes, self._args.pipeline_layer_partition)
        most = min(config.max_seqs, int(count_concurrent(cache_layout, pages, self._input + self._output, config)))
        requests = self._admitted(timing, layout, max(1, most))
        step, one = config.max_batched_tokens, decode_shape(1, self._context, self._windows)
        period = self._period(timing, layout, max(1, requests))
        seconds = requests * self._input / step * timing.seconds(self._prefill(step)) + self._output * period
        chunk = self._prefill(min(step, self._input))
        return Estimate(
            layout,
            serve_flags(layout, self._fabric),
            ttft_ms=1e3 * ((ceil(self._input / step) - 1) * timing.seconds(chunk) + timing.latency(chunk)),
            token_ms=1e3 * timing.latency(one),
            exchange_ms=1e3 * timing.exchange_seconds(one),
            requests=layout.data * requests,
            loaded_token_ms=1e3 * period,
            tokens_per_s=layout.data * requests * self._output / seconds,
            cache_tokens=layout.data * pages * config.page_size // max(1, len(cache_layout.groups)),
            host_ms=1e3 * timing.host_seconds(),
        )

    def _resolve(self, layout: Layout) -> Config:
        if layout.expert and layout.data > 1:
            raise ConfigError(
                f"the {layout.data} engines share the experts, whose tokens then go through host memory: its time is not known"
            )
        args = dataclasses.replace(
            self._args, tensor_parallel_size=layout.tensor, pipeline_parallel_size=layout.pipeline,
            data_parallel_size=layout.data, enable_expert_parallel=layout.expert,
            nnodes=self._fabric.span(layout.ranks).nodes,
        )  # fmt: skip
        return resolve(
            args, lambda: "cuda", lambda name: open_device(name).facts(memory=self._card.memory), self._facts, True, fetch=False
        )

    def _memory(self, config: Config) -> tuple[int, int, int]:
        """Return the pages of a rank, the context length, and the bytes of all weights."""
        layout, total = whole_layout(config), self._card.memory
        use = use_of(config, layout, total, build=False, link=self._fabric.link.name)
        cache = int((config.args.kv_cache_memory_bytes or use.cache) * model_share(config, layout))
        pages, _, length, problems = fit_use(config, layout, cache, use.usable / total)
        if problems:
            raise ConfigError(f"it does not fit: {problems[0]}")
        return pages, length, use.weights

    @property
    def _context(self) -> int:
        return self._input + self._output // 2

    def _period(self, timing: ParallelTiming, layout: Layout, requests: int) -> float:
        """Return the seconds between two tokens of a request. Each step has the requests of one pipeline stage."""
        shape = decode_shape(ceil(requests / layout.pipeline), self._context, self._windows)
        return max(layout.pipeline * timing.seconds(shape), timing.latency(shape))

    def _admitted(self, timing: ParallelTiming, layout: Layout, most: int) -> int:
        """Return the requests of an engine within the objective; 0: even one request is too slow."""
        if self._limit is None or self._period(timing, layout, most) <= self._limit:
            return most
        low, high = 0, most  # `low` is within the objective
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (middle, high) if self._period(timing, layout, middle) <= self._limit else (low, middle)
        return low

    def _prefill(self, tokens: int) -> StepShape:
        """Return a step of `tokens` prompt tokens."""
        rows = max(1, tokens // self._input)
        attended = attended_keys(self._input, self._windows)
        return StepShape(rows, 0, tokens, rows, 0.0, 0.0, rows * attended, tokens * attended / 2)


def attended_keys(context: int, windows: Sequence[Window]) -> float:
    """Return the keys that a token attends to, as a mean over the layers."""
    return sum(share * (context if window is None else min(context, window)) for window, share in windows)


def decode_shape(rows: int, context: int, windows: Sequence[Window]) -> StepShape:
    keys = rows * attended_keys(context, windows)
    return StepShape(rows, rows, rows, rows, keys, keys, 0.0, 0.0)


COLUMNS = ("", "TTFT ms", "ms/token", "of it GPU to GPU", "requests", "ms/token", "tokens/s", "KV cache tokens")
HOST_NOTE = (
    "the times are those of collectives in CUDA graphs, which have not run on several GPUs. Where sums go through the hosts, a "
    "step with -tp takes up to {:.0f} ms more"
)


def render_cards(found: Recommendation) -> str:
    where = f"{found.model} on {found.cards}, {found.links}"
    lines = [f"{where}; prompts of {found.input_len:,} tokens, answers of {found.output_len:,}", ""]
    if found.estimates:
        lines += [*_table(found.estimates), ""]
    titles = {"fastest": "Fastest", "most_tokens": "Most tokens"}
    notes = [(titles[name], f"quire serve {found.model} {flags}") for name, flags in found.chosen.items() if flags]
    host = max((estimate.host_ms for estimate in (found.fastest, found.most_tokens) if estimate), default=0.0)
    notes += [("Limit", HOST_NOTE.format(host))] if host else []
    notes += [("Not possible", f"{flags}: {why.partition('. ')[0]}") for flags, why in found.refused.items()]
    return "\n".join([*lines, *(f"{title:<13} {text}" for title, text in notes)])


def _table(estimates: Sequence[Estimate]) -> list[str]:
    rows = [COLUMNS, *map(_cells, estimates)]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    above = f"{'':<{widths[0]}}  {'one request':<{sum(widths[1:4]) + 4}}  full load"
    cells = [
        [f"{row[0]:<{widths[0]}}", *(f"{cell:>{width}}" for cell, width in zip(row[1:], widths[1:], strict=True))]
        for row in rows
    ]
    return [above, *("  ".join(row) for row in cells)]


def _cells(estimate: Estimate) -> tuple[str, ...]:
    return (
        estimate.flags,
        f"{estimate.ttft_ms:,.0f}",
        f"{estimate.token_ms:.2f}",
        f"{estimate.exchange_ms:.2f}",
        f"{estimate.requests:,}",
        f"{estimate.loaded_token_ms:.1f}",
        f"{estimate.tokens_per_s:,.0f}",
        f"{estimate.cache_tokens:,}",
    )
