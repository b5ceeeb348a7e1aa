"""`quire bench steps`: the duration of single steps by rows, tokens and contexts, for `quire simulate --timing`."""

import argparse
import json
import os
import sys
import time
from collections.abc import Collection, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from quire.bench.front_end import measure_front_end
from quire.bench.steps import StepPoint, TimedTurn, admission_times, as_json, host_times, lines, summarize
from quire.cli.bench_offline import OfflineReport, add_benchmark, at_least, engine_args, engine_facts
from quire.cli.bench_serve import YES, Flags, N, X
from quire.proc.spawn import WITH_THREAD, end_with_parent
from quire.types.errors import ConfigError
from quire.types.plan import TOKEN_BUCKETS

if TYPE_CHECKING:
    from quire.bench.samples import RandomPrompts
    from quire.config.args import EngineArgs
    from quire.config.config import Config
    from quire.engine.core import EngineCore
    from quire.sched.plan_builder import Scheduled
    from quire.sim.analytic import Window

DESCRIPTION = """\
Measures steps of the engine one by one: decode rows after a short and after a long context, prompts of many lengths,
alone and after a context, and mixed steps. `quire simulate --timing FILE` takes the saved result as its device."""
SERVER = "quire.cli.bench_steps"
MIXED_TOKENS_PER_ROW = 4  # tokens of a mixed step per decode row: few, so that the rows matter
DECODE_STEPS_BETWEEN = 4  # as under load: a GPU that runs only large GEMMs lowers its clock
STEPS_PER_PROMPT = 4 + DECODE_STEPS_BETWEEN  # at most
ADMITTED_REQUESTS, ADMITTED_TOKENS = (1, 16), 16  # few tokens, so that the step fits a CUDA graph
LONG_S = 1.0  # after this time for steps of one kind, a quarter of the repeats is enough
LISTED: dict[str, Any] = {"type": int, "metavar": "N", "nargs": "+"}
STEPS: Flags = (
    ("rows", "decode rows of a step (default: 1, 2, 4, ... up to max_num_seqs)", LISTED),
    (
        "prompts",
        "tokens of a step with a prompt (default: 4, 16, ... up to max_num_batched_tokens, and all sizes of CUDA graphs)",
        LISTED,
    ),
    ("contexts", "context lengths, a short and a long one (default 64 1024)", LISTED | {"default": [64, 1024]}),
    ("context-tokens", "maximum of rows times context (default 16384)", N | {"default": 16384}),
    ("front-end", "also measure the API process between client and engine: starts a server that needs no weights", YES),
    ("temperature", "of all rows (default 1, as for a request without one; 0 = greedy)", X | {"default": 1.0}),
    ("repeats", "steps of each kind; the median is reported (default 16; a quarter for long prompts)", N | {"default": 16}),
)


def add_parser(subparsers: Any) -> None:
    add_benchmark(subparsers, "steps", "measure single steps, for `quire simulate`", DESCRIPTION, [("steps", STEPS)], run)


def run(namespace: argparse.Namespace) -> int:
    from quire.bench.machine import machine
    from quire.bench.samples import RandomPrompts

    report = OfflineReport("steps", namespace)
    for flag in ("rows", "prompts", "contexts"):
        for value in getattr(namespace, flag) or ():
            at_least(flag, value, 1)
    at_least("temperature", namespace.temperature, 0)
    for flag in ("context-tokens", "repeats"):
        at_least(flag, getattr(namespace, flag.replace("-", "_")), 1)
    args = engine_args(namespace, tokens_only=True)
    if args.data_parallel_size > 1:
        raise ConfigError("quire bench steps measures one engine; leave data_parallel_size out")
    from quire.config.facts import sizes_of
    from quire.engine.core import EngineCore
    from quire.llm import LLM
    from quire.sim.analytic import HostTime, windows_of
    from quire.sim.measured import MeasuredTiming

    llm = LLM.from_engine_args(args)
    engine, config, core = llm.llm_engine, llm.llm_engine.config, llm.llm_engine.core
    assert isinstance(core, EngineCore)
    if (most := max(namespace.rows or (1,))) > config.max_seqs:
        raise ConfigError(f"--rows {most} is more than max_num_seqs {config.max_seqs}; use --max-num-seqs {most} or fewer rows")
    facts = engine_facts(llm) | {
        "num_pages": core.scheduler.pool.pages, "device_memory": config.device_facts.total_bytes,
    }  # fmt: skip
    report.print_heading("Steps", args.model, facts, machine(config.device))
    front = None
    if namespace.front_end:  # first: its errors are reported before hours of steps
        print("the front end", file=sys.stderr)
        secret = {"HF_TOKEN": args.hf_token} if isinstance(args.hf_token, str) else {}
        front = measure_front_end(_server(args, namespace), config.facts.max_position, config.facts.vocab_size, secret)
    while core.idle():  # record all CUDA graphs first, as a server does when idle
        pass
    meter = StepMeter(core, windows_of(config.facts.layers), config.page_size, RandomPrompts(config.facts.vocab_size))
    meter.temperature = namespace.temperature
    turns, singles = _measure(meter, namespace, _sizes(namespace, config, engine.max_model_len))
    points, host = summarize(turns), host_times(singles)
    admission = admission_times(meter.admissions, host)
    print("\n".join(lines(points, host, admission)))
    names = ("step", "row", "admission", "newcomer")
    details: dict[str, Any] = {
        "sizes": sizes_of(config.facts),
        "points": as_json(points),
        "host": dict(zip(names, (*host, *admission), strict=True)),
    }
    if front is not None:
        print(front.line())
        details["front"] = asdict(front)
    figures = {f"{p.rows} x {p.tokens} at {p.keys + p.pairs:.0f} ms": 1000 * p.seconds for p in points}
    report.close(args.model, facts, machine(config.device), figures, details)
    try:
        MeasuredTiming(points, HostTime())
    except ConfigError as error:
        print(f"quire bench steps: `quire simulate --timing` needs more than this: {error}", file=sys.stderr)
        return 1
    return 0


@dataclass(frozen=True)
class Sizes:
    rows: list[int]
    prompts: list[int]  # tokens of a step with one
    longest: int  # context
    budget: int  # tokens of a step


def _sizes(namespace: argparse.Namespace, config: "Config", longest: int) -> Sizes:
    budget = config.max_batched_tokens
    recorded = TOKEN_BUCKETS if config.device == "cuda" and not config.args.enforce_eager else ()
    most = min(budget, longest - 2)
    prompts = namespace.prompts or sorted({*_powers(4, 4, most), *(size for size in recorded if size <= most)})
    return Sizes(namespace.rows or _powers(2, 1, config.max_seqs), prompts, longest, budget)


def _measure(
    meter: "StepMeter", namespace: argparse.Namespace, sizes: Sizes
) -> tuple[list[tuple[Any, TimedTurn]], list[TimedTurn]]:
    """Return all turns with labels, and those of pure decode steps."""
    turns: list[tuple[Any, TimedTurn]] = []
    repeats, contexts, longest = namespace.repeats, namespace.contexts, sizes.longest
    for context in contexts:
        for count in sizes.rows:
            most = context + repeats + 2
            if most > longest:
                print(f"skipped: {count} rows after {context} tokens, more than max_model_len {longest}", file=sys.stderr)
            elif count * context <= namespace.context_tokens or context == min(contexts):
                print(f"{count} rows after {context} tokens", file=sys.stderr)
                turns += [(("rows", count, context), turn) for turn in meter.singles(count, context, repeats)]
    singles = [turn for _, turn in turns]
    for context in (0, max(contexts)):
        for length in sizes.prompts:
            if length + context + 2 <= longest and length <= sizes.budget:
                print(f"a prompt of {length} tokens after {context}", file=sys.stderr)
                found = meter.prompts(length, context, repeats)
                turns += [(("prompt", length, turn.point.pairs), turn) for turn in found]
            elif namespace.prompts:
                most = f"max_num_batched_tokens {sizes.budget} or max_model_len {longest}"
                print(f"skipped: a prompt of {length} tokens after {context}, more than {most}", file=sys.stderr)
    for count in sizes.rows:
        length = next((size for size in sorted(sizes.prompts) if size >= MIXED_TOKENS_PER_ROW * count), sys.maxsize)
        context = min(contexts) if count * max(contexts) > namespace.context_tokens else max(contexts)
        if (
            1 < count < meter.max_seqs
            and length <= min(sizes.budget, longest - 2)
            and context + STEPS_PER_PROMPT * repeats <= longest
        ):
            print(f"a prompt with {count} decode rows, {length} tokens in total", file=sys.stderr)
            found = meter.prompts(length, 0, repeats, count, context)
            turns += [(("mixed", count, length), turn) for turn in found]
    for count in ADMITTED_REQUESTS:
        if count <= meter.max_seqs:
            print(f"{count} new requests", file=sys.stderr)
            meter.admit(count, repeats)
    return turns, singles


def _server(args: "EngineArgs", namespace: argparse.Namespace) -> list[str]:
    """Return the command of a server with the same model, without weights."""
    command = [sys.executable, "-m", SERVER, str(os.getpid()), args.model]
    for name in ("tokenizer", "revision", "tokenizer_revision", "download_dir"):
        if (value := getattr(args, name)) is not None:
            command += [f"--{name.replace('_', '-')}", value]
    if args.hf_overrides:
        command += ["--hf-overrides", json.dumps(args.hf_overrides)]
    if getattr(namespace, "skip_tokenizer_init", False):  # a flag of the user, not only because steps need no tokenizer
        command.append("--skip-tokenizer-init")
    return command


def _powers(base: int, first: int, most: int) -> list[int]:
    found = [first]
    while found[-1] * base < most:
        found.append(found[-1] * base)
    return [*found, most] if found[-1] < most else found


class StepMeter:
    """Runs requests of given shapes on an engine core and records the duration of its steps."""

    temperature = 1.0

    def __init__(self, core: "EngineCore", windows: "Sequence[Window]", page_size: int, alphabet: "RandomPrompts") -> None:
        import numpy as np

        self._core, self._windows, self._page_size, self._alphabet = core, windows, page_size, alphabet
        self._rng, self._count = np.random.default_rng(0), 0
        self._open: set[str] = set()
        self.max_seqs = core.scheduler.roster.max_seqs
        self._landed: list[tuple[Scheduled, float]] = []
        record = core.scheduler.record_step_time

        def note(scheduled: "Scheduled", seconds: float, idle_before: float = 0.0, synchronous: bool = False) -> None:
            self._landed.append((scheduled, seconds))
            record(scheduled, seconds, idle_before, synchronous)

        core.scheduler.record_step_time = note  # type: ignore[method-assign]
        self.admissions: list[tuple[int, float]] = []  # (new requests of a step, seconds of CPU time)

    def singles(self, rows: int, context: int, repeats: int) -> list[TimedTurn]:
        for _ in range(rows):
            self._add(self._tokens(context), repeats + 2)
        return [turn for turn in self._run() if turn.point.rows == turn.point.tokens == rows]

    def prompts(self, tokens: int, context: int, repeats: int, decodes: int = 0, before: int = 1) -> list[TimedTurn]:
        """Measure steps of `tokens` tokens: a prompt after a cached context, and decode rows.

        decodes: decode rows, each after a context of `before` tokens

        With async scheduling there is at least one decode row: the device is then never idle, and the time between the ends
        of two steps is the duration of the second.
        """
        decodes = max(decodes, 1 if self._core.depth and tokens > 2 and self.max_seqs > 1 else 0)
        head, found = self._tokens(context // self._page_size * self._page_size), list[TimedTurn]()
        if head:
            self._add(head, 1)
            self._run()
        rows = [self._add(self._tokens(before), STEPS_PER_PROMPT * repeats) for _ in range(decodes)]
        waiting = set(rows)
        while waiting:
            waiting.difference_update(self._step())
        began = time.perf_counter()
        for count in range(repeats):
            if count >= max(2, repeats // 4) and time.perf_counter() - began > LONG_S:
                break
            self._add([*head, *self._tokens(tokens - decodes)], 1)
            found += [turn for turn in self._run(but=rows) if (turn.point.rows, turn.point.tokens) == (1 + decodes, tokens)]
            for _ in range(DECODE_STEPS_BETWEEN if self._core.depth and self._open else 0):
                self._step()
        self._core.abort(rows)
        self._run()
        return found

    def admit(self, count: int, repeats: int) -> None:
        for _ in range(repeats):
            for _ in range(count):
                self._add(self._tokens(ADMITTED_TOKENS), 1)
            began = time.perf_counter()
            self._landed.clear()
            self._step()
            whole = time.perf_counter() - began
            busy = self._core.waited if self._core.depth else sum(seconds for _, seconds in self._landed)
            self.admissions.append((count, whole - busy))
            self._run()

    def _tokens(self, count: int) -> list[int]:
        ids: list[int] = self._alphabet.draw(self._rng, count).tolist()
        return ids

    def _add(self, prompt: list[int], output: int) -> str:
        from quire.types.request import EngineRequest
        from quire.types.sampling import SamplingParams

        params, nothing = SamplingParams(temperature=self.temperature, max_tokens=output, ignore_eos=True), frozenset[int]()
        name = f"step-{self._count}"
        self._core.add(EngineRequest(name, tuple(prompt), params, 0, nothing, nothing, arrival=0.0))
        self._open.add(name)
        self._count += 1
        return name

    def _step(self) -> set[str]:
        """Run a step; return the ids of the requests that got a delta."""
        deltas = self._core.step()
        self._open.difference_update(delta.request_id for delta in deltas if delta.finish_reason is not None)
        return {delta.request_id for delta in deltas}

    def _run(self, but: Collection[str] = ()) -> list[TimedTurn]:
        """Run steps until all requests but these have ended."""
        from quire.sim.analytic import shape_of

        turns: list[TimedTurn] = []
        while self._open.difference(but) if but else self._core.has_unfinished:
            self._landed.clear()
            began = time.perf_counter()
            self._step()
            whole = time.perf_counter() - began
            for scheduled, seconds in self._landed[:1]:
                shape = shape_of(scheduled.plan, self._windows, sys.maxsize)
                host = whole - (self._core.waited if self._core.depth else seconds)
                turns.append(TimedTurn(StepPoint(shape.rows, shape.tokens, shape.single_keys, shape.pairs, seconds), host))
        return turns


def serve_without_model(argv: Sequence[str] | None = None) -> int:
    """Run the server of `quire bench steps --front-end`: `python -m quire.cli.bench_steps PARENT FLAG ... [with-thread]`.

    API keys of the environment do not apply to it.
    """
    parent, *flags = sys.argv[1:] if argv is None else argv
    if WITH_THREAD in flags[-1:]:
        end_with_parent()
        flags.pop()
    if os.getppid() != int(parent):  # the parent has ended already
        return 1
    from quire.cli.main import main as quire

    return quire(["serve", *flags, "--no-auth"])


if __name__ == "__main__":
    sys.exit(serve_without_model())
