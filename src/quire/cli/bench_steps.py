"""`quire bench steps`: how long single steps take, over rows, tokens and contexts: what `quire simulate --timing` reads."""

import argparse
import json
import os
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from quire.bench.front_end import measure_front_end
from quire.bench.steps import StepPoint, Turn, admission_times, as_json, host_times, lines, summarize
from quire.cli.bench_offline import OfflineReport, add_group, add_report_and_engine_flags, at_least, engine_args, engine_facts
from quire.cli.bench_serve_flags import YES, Flags, N
from quire.types.errors import ConfigError

if TYPE_CHECKING:
    from quire.bench.samples import RandomPrompts
    from quire.config.args import EngineArgs
    from quire.engine.core import EngineCore
    from quire.sched.plan_builder import Scheduled
    from quire.sim.shapes import Window

DESCRIPTION = """\
Measures steps of the engine one by one: rows of one token after a short and after a long context, and prompts of many
lengths, alone and after a context. `quire simulate --timing FILE` takes the saved result as its device."""
SERVER = "quire.cli.bench_steps_server"
LISTED: dict[str, Any] = {"type": int, "metavar": "N", "nargs": "+"}
STEPS: Flags = (
    ("rows", "requests that generate together (default: 1, 2, 4, ... up to max_num_seqs)", LISTED),
    ("prompts", "tokens of a prompt in one step (default: 4, 16, ... up to max_num_batched_tokens)", LISTED),
    ("contexts", "tokens before those, a few and many (default 64 1024)", LISTED | {"default": [64, 1024]}),
    ("context-tokens", "rows times context at most (default 16384)", N | {"default": 16384}),
    ("front-end", "measure what is between a client and the engine, too: starts a server that needs no model", YES),
    ("repeats", "steps of each kind, of which the median is taken (default 16; prompts a quarter)", N | {"default": 16}),
)


def add_parser(subparsers: Any) -> None:
    parser = subparsers.add_parser(
        "steps", usage="%(prog)s [options]", help="how long single steps take, for `quire simulate`", description=DESCRIPTION
    )
    add_group(parser, "steps", STEPS)
    add_report_and_engine_flags(parser)
    parser.set_defaults(run=run)


def run(namespace: argparse.Namespace) -> int:
    from quire.bench.machine import machine
    from quire.bench.samples import RandomPrompts

    report = OfflineReport("steps", namespace)
    for flag in ("rows", "prompts", "contexts"):
        for value in getattr(namespace, flag) or ():
            at_least(flag, value, 1)
    for flag in ("context-tokens", "repeats"):
        at_least(flag, getattr(namespace, flag.replace("-", "_")), 1)
    args = engine_args(namespace, tokens_only=True)
    if args.data_parallel_size > 1:
        raise ConfigError("steps are those of one engine: leave data_parallel_size out")
    from quire.engine.core import EngineCore
    from quire.llm import LLM
    from quire.sim.shapes import windows_of

    llm = LLM.from_engine_args(args)
    engine, config, core = llm.llm_engine, llm.llm_engine.config, llm.llm_engine.core
    assert isinstance(core, EngineCore)
    facts = engine_facts(llm) | {
        "num_pages": core.scheduler.pool.pages, "device_memory": config.device_facts.total_bytes,
    }  # fmt: skip
    report.print_heading("Steps", args.model, facts, machine(config.device))
    front = None
    if namespace.front_end:  # first: what is wrong with it is told before hours of steps
        print("the front end", file=sys.stderr)
        secret = {"HF_TOKEN": args.hf_token} if isinstance(args.hf_token, str) else {}
        front = measure_front_end(_server(args, namespace), config.facts.max_position, config.facts.vocab_size, secret)
    meter = StepMeter(core, windows_of(config.facts.layers), config.page_size, RandomPrompts(config.facts.vocab_size))
    longest, budget = engine.max_model_len, config.max_batched_tokens
    rows = namespace.rows or _powers(2, 1, config.max_seqs)
    prompts = namespace.prompts or _powers(4, 4, min(budget, longest - 2))
    turns: list[tuple[Any, Turn]] = []
    for context in namespace.contexts:
        for count in rows:
            most = context + namespace.repeats + 2
            if most <= longest and (count * context <= namespace.context_tokens or context == min(namespace.contexts)):
                print(f"{count} rows after {context} tokens", file=sys.stderr)
                turns += [(("rows", count, context), turn) for turn in meter.singles(count, context, namespace.repeats)]
    singles = [turn for _, turn in turns]
    for context in (0, max(namespace.contexts)):
        for length in prompts:
            if length + context + 2 <= longest and length <= budget:
                print(f"a prompt of {length} tokens after {context}", file=sys.stderr)
                found = meter.prompts(length, context, max(2, namespace.repeats // 4))
                turns += [(("prompt", length, turn.point.pairs), turn) for turn in found]
    points, host = summarize(turns), host_times(singles)
    admission = admission_times(meter.admissions, host)
    print("\n".join(lines(points, host, admission)))
    names = ("step", "row", "admission", "newcomer")
    details: dict[str, Any] = {"points": as_json(points), "host": dict(zip(names, (*host, *admission), strict=True))}
    if front is not None:
        print(front.line())
        details["front"] = asdict(front)
    figures = {f"{p.rows} x {p.tokens} at {p.keys + p.pairs:.0f} ms": 1000 * p.seconds for p in points}
    report.close(args.model, facts, machine(config.device), figures, details)
    return 0


def _server(args: "EngineArgs", namespace: argparse.Namespace) -> list[str]:
    """The command of a server with the same model, as far as one without weights knows it."""
    command = [sys.executable, "-m", SERVER, str(os.getpid()), args.model]
    for name in ("tokenizer", "revision", "tokenizer_revision", "download_dir"):
        if (value := getattr(args, name)) is not None:
            command += [f"--{name.replace('_', '-')}", value]
    if args.hf_overrides:
        command += ["--hf-overrides", json.dumps(args.hf_overrides)]
    if getattr(namespace, "skip_tokenizer_init", False):  # asked for, not only because steps need none
        command.append("--skip-tokenizer-init")
    return command


def _powers(base: int, first: int, most: int) -> list[int]:
    found = [first]
    while found[-1] * base < most:
        found.append(found[-1] * base)
    return [*found, most] if found[-1] < most else found


class StepMeter:
    """Runs requests of wanted shapes on a core, and keeps how long its steps took."""

    def __init__(self, core: "EngineCore", windows: "Sequence[Window]", page_size: int, alphabet: "RandomPrompts") -> None:
        import numpy as np

        self._core, self._windows, self._page_size, self._alphabet = core, windows, page_size, alphabet
        self._rng, self._count = np.random.default_rng(0), 0
        self._landed: list[tuple[Scheduled, float]] = []
        tell = core.scheduler.took

        def note(scheduled: "Scheduled", seconds: float, paused: float = 0.0, waited: bool = False) -> None:
            self._landed.append((scheduled, seconds))
            tell(scheduled, seconds, paused, waited)

        core.scheduler.took = note  # type: ignore[method-assign]
        self.admissions: list[tuple[int, float]] = []  # steps with so many newcomers took the processor so many seconds
        self._newcomers = 0  # of the latest
        schedule = core.scheduler.schedule

        def plan(now: float) -> "Scheduled | None":
            scheduled = schedule(now)
            self._newcomers = 0 if scheduled is None else len(scheduled.plan.admitted)
            return scheduled

        core.scheduler.schedule = plan  # type: ignore[method-assign]

    def singles(self, rows: int, context: int, repeats: int) -> list[Turn]:
        for _ in range(rows):
            self._add(self._tokens(context), repeats + 2)
        return [turn for turn in self._run() if turn.point.rows == turn.point.tokens == rows]

    def prompts(self, tokens: int, context: int, repeats: int) -> list[Turn]:
        """The context is found in the prefix cache, where there is one."""
        head, found = self._tokens(context // self._page_size * self._page_size), list[Turn]()
        if context:
            self._add(head, 1)
            self._run()
        for _ in range(repeats):
            self._add([*head, *self._tokens(tokens)], 1)
            found += [turn for turn in self._run() if (turn.point.rows, turn.point.tokens) == (1, tokens)]
        return found

    def _tokens(self, count: int) -> list[int]:
        ids: list[int] = self._alphabet.draw(self._rng, count).tolist()
        return ids

    def _add(self, prompt: list[int], output: int) -> None:
        from quire.types.request import EngineRequest
        from quire.types.sampling import SamplingParams

        params, nothing = SamplingParams(temperature=0.0, max_tokens=output, ignore_eos=True), frozenset[int]()
        self._core.add(EngineRequest(f"step-{self._count}", tuple(prompt), params, 0, nothing, nothing, arrival=0.0))
        self._count += 1

    def _run(self) -> list[Turn]:
        from quire.sim.shapes import shape_of

        turns = []
        while self._core.has_unfinished:
            self._landed.clear()
            began = time.perf_counter()
            self._core.step()
            whole = time.perf_counter() - began
            for scheduled, seconds in self._landed[:1]:
                shape = shape_of(scheduled.plan, self._windows, sys.maxsize)
                host = whole - (self._core.waited if self._core.depth else seconds)
                turns.append(Turn(StepPoint(shape.rows, shape.tokens, shape.single_keys, shape.pairs, seconds), host))
            if self._newcomers:
                busy = 0.0 if self._core.depth else sum(seconds for _, seconds in self._landed)
                self.admissions.append((self._newcomers, whole - busy))
        return turns
