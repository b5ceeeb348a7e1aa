"""Results as printed tables, and as files."""

import json
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from quire.bench.metrics import Record, RunSummary
from quire.bench.offline import Latency, Run, StartupTimes, best
from quire.types.errors import ConfigError
from quire.types.json_text import read_json


def heading(title: str, facts: Mapping[str, Any]) -> str:
    lines = [f" {title} ".center(WIDTH, "=")]
    lines += [f"{name + ':':<16} {value}" for name, value in facts.items() if value is not None]
    return "\n".join(lines)


def throughput_lines(name: str, runs: Sequence[Run]) -> list[str]:
    """Return a line for each run; the best one is marked."""
    top = best(runs)
    lines = [
        f"{name}: {top.num_requests:,} requests, {top.input_tokens:,} tokens in, {top.output_tokens:,} out",
        f"{'run':>6}{'seconds':>11}{'requests/s':>13}{'output tok/s':>15}{'total tok/s':>14}"
        f"{'first, in/s':>13}{'then, out/s':>13}{'ms/token':>11}",
    ]
    for number, run in enumerate(runs, 1):
        figures, each = run.figures(), run.ms_per_token
        phases = ("-", "-") if run.phases is None else tuple(f"{rate:,.1f}" for rate in run.phases)
        lines.append(
            f"{number:>5}{'*' if run is top and len(runs) > 1 else ' '}"
            f"{run.elapsed_time:>11,.3f}{figures['requests_per_second']:>13,.2f}"
            f"{figures['output_tokens_per_second']:>15,.1f}{figures['tokens_per_second']:>14,.1f}"
            f"{phases[0]:>13}{phases[1]:>13}{'-' if each is None else f'{each:.3f}':>11}"
        )
    return lines


def latency_lines(latency: Latency) -> list[str]:
    return [
        f"{'mean latency (s)':<34}{latency.avg_latency:>12.4f}",
        *(f"{f'P{cut} latency (s)':<34}{value:>12.4f}" for cut, value in latency.percentiles.items()),
        f"{'mean time to first token (ms)':<34}{latency.mean_ttft_ms:>12.3f}",
        f"{'mean time per output token (ms)':<34}{'-' if latency.mean_tpot_ms is None else f'{latency.mean_tpot_ms:.3f}':>12}",
    ]


def startup_lines(starts: Sequence[StartupTimes]) -> list[str]:
    """Return a line for each start with its parts."""
    lines = [f"{'start':<12}{'ready (s)':>11}{'first token (s)':>17}   parts"]
    for number, start in enumerate(starts, 1):
        parts = " + ".join(f"{name} {seconds:.2f}" for name, seconds in start.parts)
        kind = "cold" if start.cold else "warm"
        lines.append(f"{f'{number} ({kind})':<12}{start.ready:>11.2f}{start.first_token:>17.2f}   {parts}")
    return lines


WIDTH = 72
SHOWN_ERRORS = 5
COUNTS = (
    ("Successful requests:", "completed", ",d"),
    ("Failed requests:", "failed", ",d"),
    ("Benchmark duration (s):", "duration", ",.2f"),
    ("Total input tokens:", "total_input_tokens", ",d"),
    ("Cached input tokens:", "total_cached_tokens", ",d"),
    ("Total generated tokens:", "total_output_tokens", ",d"),
    ("Request throughput (req/s):", "request_throughput", ",.2f"),
    ("Request goodput (req/s):", "request_goodput", ",.2f"),
    ("Output token throughput (tok/s):", "output_throughput", ",.2f"),
    ("Peak output token throughput (tok/s):", "max_output_tokens_per_s", ",.2f"),
    ("Total token throughput (tok/s):", "total_token_throughput", ",.2f"),
    ("Peak concurrent requests:", "max_concurrent_requests", ",d"),
    ("Tokens per chunk:", "tokens_per_chunk", ",.2f"),
)
ONLY_IF_SET = ("total_cached_tokens", "request_goodput")
OF_OUTPUT = ("total_output_tokens", "output_throughput", "max_output_tokens_per_s", "tokens_per_chunk")
IRRELEVANT = (  # flags that do not change the load
    *("base_url", "host", "port", "ready_check_timeout_sec", "request_id_prefix", "disable_tqdm"),
    *("save_result", "result_dir", "result_filename", "save_detailed", "metadata", "label", "compare", "output_json"),
)
COMPARED = tuple(key for _, key, _ in COUNTS if key not in ("completed", "failed", "total_cached_tokens"))


def table(summary: RunSummary, title: str, facts: Mapping[str, str]) -> str:
    lines = [f" {title} ".center(WIDTH, "=")]
    lines += [f"{name + ':':<40} {value}" for name, value in facts.items()]
    hidden = (*ONLY_IF_SET, *OF_OUTPUT) if summary.completed and not summary.total_output_tokens else ONLY_IF_SET
    for label, key, style in COUNTS:
        value = getattr(summary, key)
        if value or key not in hidden:
            lines.append(f"{label:<40} {value:{style}}")
    if summary.spreads:
        lines.append("-" * WIDTH)
        lines += _distributions(summary)
    lines.append("=" * WIDTH)
    return "\n".join(lines)


def _distributions(summary: RunSummary) -> list[str]:
    """Return a line for each metric. P50 is left out, since the median has a column."""
    cuts = [cut for cut in summary.percentiles if cut != 50]
    lines = [_row("", "mean", "median", "std", *(f"P{cut:g}" for cut in cuts))]
    for metric, spread in summary.spreads.items():
        figures = ["-"] * (3 + len(cuts))
        if spread is not None:
            values = (spread.mean, spread.median, spread.std, *(spread.percentiles[cut] for cut in cuts))
            figures = [f"{value:,.2f}" for value in values]
        lines.append(_row(f"{_heading(metric)} (ms)", *figures))
    return lines


def _heading(metric: str) -> str:
    return {"client_queue_time": "Client queue", "e2el_including_client_queue": "E2EL + queue"}.get(metric, metric.upper())


def _row(name: str, *figures: str) -> str:
    return f"{name:<17}" + "".join(f"{figure:>11}" for figure in figures)


def error_lines(records: Sequence[Record]) -> list[str]:
    """Return the most frequent errors with their counts."""
    counts = Counter(record.error for record in records if record.error is not None)
    lines = [f"{count:,} x {text}" for text, count in counts.most_common(SHOWN_ERRORS)]
    if len(counts) > SHOWN_ERRORS:
        lines.append(f"and {len(counts) - SHOWN_ERRORS} other kinds of errors")
    return lines


def details(records: Sequence[Record]) -> dict[str, list[Any]]:
    """Return lists over requests in the order of sending, under vLLM's names. Times in seconds; `start_times` of the run."""
    ordered = sorted(records, key=lambda record: record.sent)
    start = min((record.due for record in records), default=0.0)
    return {
        "input_lens": [record.prompt_tokens for record in ordered],
        "output_lens": [record.output_tokens if record.ok else 0 for record in ordered],
        "ttfts": [record.ttft if record.arrivals else 0.0 for record in ordered],
        "itls": [record.itls for record in ordered],
        "latencies": [record.latency for record in ordered],
        "start_times": [record.sent - start for record in ordered],
        "queue_times": [record.wait for record in ordered],
        "generated_texts": [record.text for record in ordered],
        "errors": [record.error or "" for record in ordered],
    }


def save(result: Mapping[str, Any], path: Path) -> None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(result, indent=1, allow_nan=False) + "\n", encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"cannot write the result to {path}: {error.strerror}") from None


def read_result(path: Path, kind: str) -> dict[str, Any]:
    """Read a saved result of a measurement; one of `serve` may come from vLLM, whose files do not have a kind."""
    try:
        result = read_json(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"cannot read the result {path}: {error}") from None
    if not isinstance(result, dict) or result.get("kind", "serve") != kind or not figures(result):
        raise ConfigError(f"{path} is not a result of `bench {kind}`")
    if not isinstance(result.get("flags", {}), dict):
        raise ConfigError(f"{path}: flags must be an object, got {str(result['flags'])[:60]}")
    for key, value in figures(result).items():
        if abs(value) > sys.float_info.max and isinstance(value, int):
            raise ConfigError(f"{path}: {key} has {len(str(abs(value)))} digits; no figure is that large")
    return result


def figures(result: Mapping[str, Any]) -> dict[str, float]:
    """Return the figures by which two results of one kind are compared."""
    flat = result.get("figures")
    if flat is None:
        timings = [key for key in result if key.endswith("_ms") and not key.startswith(("std_", "p50_"))]
        flat = {key: result.get(key) for key in (*COMPARED, *timings)}
    return {key: value for key, value in flat.items() if isinstance(value, int | float)} if isinstance(flat, dict) else {}


def comparison(now: Mapping[str, Any], then: Mapping[str, Any], name: str) -> str:
    """Return a table of the figures that both runs have, and the ratio of this run to the other."""
    lines = [f" this run / {name} ".center(WIDTH, "="), _compared("", "this run", "that run", "ratio")]
    before = figures(then)
    common = {key: (new, before[key]) for key, new in figures(now).items() if key in before}
    lines += [
        _compared(key, _figure(new), _figure(old), f"{new / old:.3f}" if old else "-") for key, (new, old) in common.items()
    ]
    if not common:
        lines.append("the results have no figure in common")
    lines += _differences(now, then)
    lines.append("=" * WIDTH)
    return "\n".join(lines)


def _differences(now: Mapping[str, Any], then: Mapping[str, Any]) -> list[str]:
    """Return where the loads differ. vLLM's files have no flags, only the main parameters."""
    if "flags" in then:
        now, then = {"model_id": now["model_id"], **now["flags"]}, {"model_id": then.get("model_id"), **then["flags"]}
        keys = [key for key in (*now, *(key for key in then if key not in now)) if key not in IRRELEVANT]
    else:
        keys = ["model_id", "num_prompts", "request_rate", "max_concurrency"]
    return [f"differs: {key} is {now.get(key)}, was {then.get(key)}" for key in keys if now.get(key) != then.get(key)]


def _figure(value: float) -> str:
    return f"{value:,d}" if isinstance(value, int) else f"{value:,.{4 if 0 < value < 1 else 2}f}"


def _compared(key: str, new: str, old: str, ratio: str) -> str:
    return f"{key:<34}{new:>14}{old:>14}{ratio:>10}"
