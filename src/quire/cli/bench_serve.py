"""`quire bench serve`: loads an OpenAI server and measures it. The flags are those of vLLM's command of that name."""

import argparse
import asyncio
import datetime
import math
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from quire.cli.bench_serve_flags import add_flags
from quire.types.errors import ConfigError

if TYPE_CHECKING:
    from quire.bench.metrics import RunSummary
    from quire.bench.serve import Outcome, ServeSettings

NOTHING_SUCCEEDED, INTERRUPTED = 1, 130
DESCRIPTION = """\
Sends streaming requests to any OpenAI server, all at once, in a closed loop (--max-concurrency) or as random arrivals
(--request-rate), and reports throughput and the distribution of latencies. TTFT: from sending a request to its first token.
TPOT: time per token after the first. ITL: one value per token after the first, how long after its predecessor it was seen;
tokens that come in one chunk are seen together. E2EL: from sending a request to the end of its answer."""


def add_parser(subparsers: Any) -> None:
    parser = subparsers.add_parser(
        "serve",
        usage="%(prog)s [options]",
        help="load an OpenAI server and measure throughput and latencies",
        description=DESCRIPTION,
    )
    add_flags(parser)
    parser.set_defaults(run=run)


def run(namespace: argparse.Namespace) -> int:
    from quire.bench.metrics import read_goodput, read_metrics, read_percentiles, summarize
    from quire.bench.report import comparison, error_lines, read_result, save, table
    from quire.bench.serve import bench_serve
    from quire.cli.bench_serve_settings import pairs, settings_of

    settings = settings_of(namespace)
    metrics, cuts = read_metrics(namespace.percentile_metrics), read_percentiles(namespace.metric_percentiles)
    goodput = read_goodput(namespace.goodput)
    pairs(namespace.metadata, "--metadata")
    if namespace.save_result and namespace.result_filename:
        raise ConfigError("--save-result and --result-filename both name the file; drop one")
    then = read_result(namespace.compare, "serve") if namespace.compare else None
    where = f"{settings.origin.path(settings.endpoint)} of {settings.origin}"
    print(f"{settings.dataset.count:,} requests ({settings.dataset.name}), {settings.load_text}, to {where}", file=sys.stderr)

    outcome = asyncio.run(bench_serve(settings))
    summary = summarize(outcome.records, outcome.duration, metrics=metrics, percentiles=cuts, goodput=goodput)
    facts = {"Model": outcome.model, "Load": settings.load_text}
    print(table(summary, "Serving Benchmark Result", facts))
    for note in outcome.notes:
        print(f"note: {note}")
    for line in error_lines(outcome.records):
        print(f"failed: {line}")
    result = result_of(namespace, settings, outcome, summary)
    if then is not None:
        print(comparison(result, then, namespace.compare.name))
    path = result_path(namespace, outcome.model)
    if path is not None:
        save(result, path)
        print(f"saved: {path}")
    if outcome.interrupted:
        return INTERRUPTED
    return 0 if summary.completed else NOTHING_SUCCEEDED


def result_of(
    namespace: argparse.Namespace, settings: "ServeSettings", outcome: "Outcome", summary: "RunSummary"
) -> dict[str, Any]:
    """The saved form: what was measured under vLLM's names, and everything needed to measure it again."""
    from quire.bench.provenance import provenance
    from quire.bench.report import details, error_lines
    from quire.cli.bench_serve_settings import pairs

    backend = "openai-chat" if settings.chat else "openai"
    hidden = ("run", "command", "measurement", "api_key", "header")
    flags = {name: plain(value) for name, value in vars(namespace).items() if name not in hidden}
    result = {
        "kind": "serve",
        **provenance(sys.argv),
        "label": namespace.label or backend,
        "backend": backend,
        "model_id": outcome.model,
        "base_url": str(settings.origin),
        "endpoint": settings.endpoint,
        "server_version": outcome.server_version,
        "prompts": outcome.prompts,
        "num_prompts": settings.dataset.count,
        "request_rate": plain(settings.shape.request_rate),
        "burstiness": settings.shape.burstiness,
        "max_concurrency": settings.shape.max_concurrency,
        "interrupted": outcome.interrupted,
        "flags": flags,
        **pairs(namespace.metadata, "--metadata"),
        **summary.as_dict(),
        "first_errors": error_lines(outcome.records),
        "notes": list(outcome.notes),
    }
    if namespace.save_detailed:
        result |= details(outcome.records)
    return result


def plain(value: Any) -> Any:
    """A flag's value as JSON has it: no infinities, no paths."""
    if isinstance(value, float) and math.isinf(value):
        return "inf"
    return str(value) if isinstance(value, Path) else value


def result_path(namespace: argparse.Namespace, model: str) -> Path | None:
    """Where to save, if any flag asks for it."""
    given = namespace.save_result or namespace.result_filename
    if not given:
        if namespace.save_result is None and not namespace.result_dir and not namespace.save_detailed:
            return None
        rate = f"{namespace.request_rate:g}qps" + (
            f"-concurrency{namespace.max_concurrency}" if namespace.max_concurrency else ""
        )
        label = namespace.label or namespace.backend or "openai"
        given = f"{label}-{rate}-{Path(model).name}-{datetime.datetime.now():%Y%m%d-%H%M%S}.json"
    return Path(namespace.result_dir or ".", given)
